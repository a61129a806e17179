import inspect
import json
import math
import os
import platform
import random
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

import mechicl
from mechicl import cli
from mechicl.base import shipped
from mechicl.checkpoints import available, load, load_checkpoint, save
from mechicl.cli.train import named_presets
from mechicl.tasks import DecisionTrees, FixedTasks, LinearRegression, SineRegression
from mechicl.tasks.registry import TASK_KINDS
from mechicl.training import PRESETS, Curriculum, Ramp, TrainingConfig, presets
from mechicl.training.state import STATE_FILE

QUICK = ["--steps", "4", "--batch-size", "8", "--eval-prompts", "16", "--eval-every", "2", "--cpu", "--quiet"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Commands run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> None:
    cli.main(["train", "lsa-1l", *QUICK, *words])


def record(folder: Path) -> dict:
    return json.loads((folder / "record.json").read_text())


def trained_config(folder: Path) -> TrainingConfig:
    return TrainingConfig.from_dict(record(folder)["training"])


def failure(capsys, *words: str) -> str:
    """The one line that a failing command ends with."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mechicl: ")
    assert printed.err.count("\n") == 1
    return printed.err


def help_of(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*words, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_env_prints_what_is_installed(capsys):
    cli.main(["env"])
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["torch"] == version("torch")
    assert printed["Python"] == platform.python_version()
    assert printed["mechicl"] == version("mechicl")


# ---- help ----
@pytest.mark.parametrize(
    "words",
    [(), ("list",), ("train",), ("report",), ("join",), *(("train", n) for n in ("lsa-1l", "lstm-4l"))],
)
def test_help_of_every_command_is_free_of_code_comments(capsys, words):
    text = help_of(capsys, *words)
    assert f"usage: mechicl {' '.join(words)}".strip() in text
    for leak in ("type: ignore", "pyright", "noqa", "Annotated", "dummy"):
        assert leak not in text


def test_help_of_train_has_a_line_on_each_preset(capsys):
    text = "".join(help_of(capsys, "train").replace("│", " ").split())  # lines are wrapped at any width
    entries = yaml.safe_load(Path(presets.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for name in PRESETS:
        assert "".join(f"• {name} {entries[name]['help']}".split()) in text


def test_help_of_a_preset_shows_every_field_and_its_value(capsys):
    text = " ".join(help_of(capsys, "train", "lsa-1l-gaussian").replace("│", " ").split())
    for flag in ("--steps", "--seeds", "--task.noise-std", "--model.n-layers", "--curriculum.points", "--restart"):
        assert flag in text
    assert "--task.n-context INT number of context points, without the query. (default: 20)" in text
    assert "(default: gaussian)" in text


# ---- list ----
def test_list_prints_a_line_for_each_shipped_checkpoint(capsys):
    cli.main(["list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == available()
    (line,) = (line for line in lines if line.startswith("table-classification "))
    assert "held-out cross entropy (nats) 0." in line
    (line,) = (line for line in lines if line.startswith("lsa-1l "))
    losses = load_checkpoint("lsa-1l").record["curve"]["eval_loss"][-1]
    assert "1 layer, 1 linear head, width 11, 5 seeds" in line
    assert line.endswith(f"held-out MSE {sum(losses) / len(losses):.4f}")


def test_list_and_train_print_cross_entropy_for_tokens(here, capsys, monkeypatch):
    cli.main(["train", "induction-2l", *QUICK, "--seeds", "0", "1", "--out", "shipped/mine"])
    losses = record(here / "shipped" / "mine")["curve"]["eval_loss"][-1]
    reached = f"held-out cross entropy (nats) {losses[0]:.5f}, {losses[1]:.5f} (seeds [0, 1])"
    assert capsys.readouterr().out == f"shipped/mine: {reached}\n"
    assert abs(losses[0] - math.log(64)) < 0.2  # of uniform predictions
    monkeypatch.setattr(shipped, "CHECKPOINTS", here / "shipped")
    cli.main(["list"])
    words = "mine 2 layers, 2 softmax heads, width 64, 2 seeds, held-out cross entropy (nats)"
    assert " ".join(capsys.readouterr().out.split()) == f"{words} {sum(losses) / 2:.4f}"
    written = record(here / "shipped" / "mine")
    written["curve"]["eval_loss"][-1][0] = None  # a seed that diverged
    (here / "shipped" / "mine" / "record.json").write_text(json.dumps(written))
    cli.main(["list"])
    assert " ".join(capsys.readouterr().out.split()) == f"{words} {losses[1]:.4f} (1 diverged)"


def test_list_ends_quietly_when_its_reader_stops():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        command = [sys.executable, "-u", "-m", "mechicl.cli", "list"]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


# ---- train ----
def test_train_writes_a_checkpoint_with_its_record_and_prints_the_loss(here, capsys):
    run("--seeds", "3", "1", "--out", "my models/first")
    folder = here / "my models" / "first"
    checkpoint = load_checkpoint(folder)
    assert len(checkpoint.models) == 2
    prompts = PRESETS["lsa-1l"].task.sample(16, seed=PRESETS["lsa-1l"].eval_seed)
    with torch.no_grad():
        losses = [(load(folder, seed=s).predict(prompts) - prompts.query.ys).square().mean().item() for s in (3, 1)]
    printed = capsys.readouterr().out
    assert printed == f"my models/first: held-out MSE {losses[0]:.5f}, {losses[1]:.5f} (seeds [3, 1])\n"
    assert (here / "runs" / "lsa-1l" / STATE_FILE).is_file()
    assert checkpoint.snapshots is not None
    assert checkpoint.snapshots.steps == (0, 1, 2, 3, 4)
    written = record(folder)
    assert (written["name"], written["seeds"]) == ("lsa-1l", [3, 1])
    assert written["command"] == f"mechicl train lsa-1l {' '.join(QUICK)} --seeds 3 1 --out 'my models/first'"
    assert written["versions"]["mechicl"] == mechicl.__version__
    assert written["versions"]["python"] == platform.python_version()
    assert written["versions"]["torch"] == torch.__version__
    assert "transformer-lens" in written["versions"]
    assert written["curve"]["eval_step"] == [0, 2, 4]
    assert all(len(line) == 2 for line in written["curve"]["eval_loss"])
    assert written["wall_time_s"] >= 0
    assert "CPU" in written["hardware"]
    assert "device" not in written["training"]["model"]
    assert set(written["sha256"]) == {"record.json", "config.json", "weights.safetensors", "snapshots.safetensors"}


def test_every_kind_of_field_can_be_overridden(here):
    run("--seeds", "0", "4", "--learning-rate", "0.02", "--gradient-clip", "None", "--schedule", "constant",
        "--task.n-context", "6", "--task.inputs", "gaussian", "--task.condition-number", "3",
        "--model.n-layers", "2", "--model.attention", "softmax", "--model.keys", "full", "--n-snapshots", "0",
        "--curriculum.points", "3", "7", "2", "1")  # fmt: skip
    config = trained_config(here / "runs" / "lsa-1l" / "checkpoint")
    assert (config.seeds, config.learning_rate, config.gradient_clip) == ((0, 4), 0.02, None)
    assert config.task == LinearRegression(x_dim=10, n_context=6, inputs="gaussian", condition_number=3.0)
    assert (config.model.n_layers, config.model.attention, config.model.keys) == (2, "softmax", "full")
    assert config.curriculum == Curriculum(points=Ramp(3, 7, 2, 1))
    assert load(here / "runs" / "lsa-1l" / "checkpoint").cfg == config.model


@pytest.mark.parametrize(("words", "task"), [
    (["--task", "SineRegression", "--task.n-context", "5", "--model.x-dim", "1"], SineRegression(n_context=5)),
    (["--task", "FixedTasks", "--task.n-tasks", "3"], FixedTasks(PRESETS["lsa-1l"].eval_tasks[0], 3)),  # type: ignore
    (["--task.task.n-context", "4", "--task", "FixedTasks"], FixedTasks(LinearRegression(n_context=4), 2048)),
    (["--task", "LinearRegression", "--task.noise-std", "0.5"], LinearRegression(noise_std=0.5)),
    (["--task", "DecisionTrees", "--d", "10", "--task.depth", "2"], DecisionTrees(x_dim=10, depth=2)),
])  # fmt: skip
def test_the_kind_of_task_can_be_changed(here, words, task):
    run("--seeds", "0", *words)
    assert trained_config(here / "runs" / "lsa-1l" / "checkpoint").task == task


def test_every_kind_of_task_is_offered(capsys):
    for kind in TASK_KINDS:
        config = named_presets(["--task", kind.__name__], ["lsa-1l"])["lsa-1l"].config
        assert type(config.task) is kind
    with pytest.raises(SystemExit):
        cli.main(["train", "lsa-1l", "--task", "Parity"])
    refused = "".join(capsys.readouterr().err.replace("│", " ").split())
    assert all(kind.__name__ in refused for kind in TASK_KINDS)


def test_a_ramp_takes_two_to_four_words_or_none(here, capsys):
    run("--seeds", "0", "--curriculum.dims", "10", "10", "--curriculum.points", "None")
    assert trained_config(here / "runs" / "lsa-1l" / "checkpoint").curriculum == Curriculum(dims=Ramp(10, 10))
    with pytest.raises(SystemExit) as stopped:
        run("--curriculum.dims", "2")
    assert stopped.value.code == 2
    assert "a start and an end" in capsys.readouterr().err


def trained(here: Path, preset: str, *words: str) -> TrainingConfig:
    """The config that a short run of a small model of a preset was trained with."""
    size = ["--model.n-layers", "1", "--model.n-heads", "1", "--model.d-model", "8"] if "gpt2" in preset else []
    cli.main(["train", preset, *QUICK, "--seeds", "0", *size, *words, "--restart", "--run", "sized"])
    return trained_config(here / "sized" / "checkpoint")


@pytest.mark.parametrize("words", [["--d", "4", "--n", "12"], ["--n=12", "--d=4"]])
def test_the_size_of_the_task_is_set_once_and_model_and_curriculum_follow(here, words):
    config = trained(here, "gpt2-8l", *words, "--steps", "4_0")  # an integer as Python writes it
    assert config.task == PRESETS["gpt2-8l"].task.replace(x_dim=4, n_context=12)
    assert (config.model.x_dim, config.model.n_context) == (4, 12)
    assert config.curriculum == PRESETS["gpt2-8l"].resized(x_dim=4, n_context=12, steps=40).curriculum
    assert load(here / "sized" / "checkpoint").cfg == config.model


def test_a_run_without_its_presets_curriculum(here):
    assert trained(here, "gpt2-8l", "--curriculum", "none").curriculum is None
    ramp = trained(here, "gpt2-8l", "--curriculum=None", "--curriculum.dims", "2", "5", "3", "1").curriculum
    assert ramp == Curriculum(dims=Ramp(2, 5, 3, 1))


def test_a_curriculum_that_is_not_the_presets_is_printed(here, capsys):
    words = [word for word in QUICK if word != "--quiet"]
    cli.main(["train", "gpt2-8l", *words, "--model.n-layers", "1", "--d", "3", "--steps", "40"])
    assert capsys.readouterr().out.splitlines()[0] == "curriculum: dims 1 to 3 by step 6, points 9 to 21 by step 6"


# ---- errors ----
@pytest.mark.parametrize(("words", "message"), [
    (["train", "lsa-1l", "--steps", "-1"], "steps must be"),
    (["train", "lsa-1l", "--task", "SineRegression"], "x_dim=1"),
    (["train", "sine-lsa", "--d", "2"], "SineRegression has no x_dim"),
    (["train", "lsa-1l", "--d", "4", "--task.x-dim", "5"], "x_dim=5, the model x_dim=4"),
    (["train", "lsa-1l", "--d", "4", "--task.x-dim", "5", "--model.x-dim", "5"], "--d 4 and the task's x_dim=5"),
    (["train", "gpt2-8l", "--task.x-dim", "4", "--model.x-dim", "4"], "curriculum.dims ends at 5"),
    (["train", "gpt2-8l", "--curriculum.points", "5", "21", "--steps", "900"], "curriculum.points ends at step"),
    (["train", "lsa-1l", "--tracker", "paperboard", *QUICK], "paperboard"),
    (["train", "lsa-1l", "--model.device", "meta", *QUICK], "model.device='meta' has no numbers to train"),
    (["report", "nothing-like-it", "--out", "report"], "nothing-like-it"),
    (["sweep", "lsa-99l"], "no preset or sweep 'lsa-99l'"),
    (["sweep", "lsa-1l", "--over", "model.n_layers"], "field=value"),
    (["sweep", "lsa-1l", "--over", "model.layers=1,2"], "no field 'layers'"),
    (["sweep", "lsa-1l", "--set", "steps=1,2"], "make them axes, --over"),
    (["sweep", "lsa-1l", "--measure", "nonsense"], "no measure 'nonsense'"),
    (["sweep", "lsa-1l", "runs/x"], "--out runs/x"),
    (["sweep", "status"], "mechicl sweep status DIR"),
    (["sweep", "status", "nowhere"], "nowhere contains no sweep"),
])  # fmt: skip
def test_a_users_error_is_one_line_and_exit_code_1(here, capsys, words, message):
    assert message in failure(capsys, *words)


@pytest.mark.parametrize("words", [["train", "lsa-1l", *QUICK, "--out"], ["report", "lsa-1l", "--out"]])
def test_an_unwritable_folder_is_an_error_before_anything_is_done(here, capsys, words):
    (here / "file").touch()
    assert "nothing can be written there" in failure(capsys, *words, "file/out")
    assert sorted(path.name for path in here.iterdir()) == ["file"]


def test_pythons_random_numbers_are_the_callers(here):
    main = inspect.unwrap(cli.main)  # types are checked in tests, by which numbers are drawn
    random.seed(3)
    before = random.getstate()
    for words in (["list"], ["train", "lsa-1l", *QUICK], ["fly"]):
        with suppress(SystemExit):
            main(words)
        assert random.getstate() == before


def test_a_sweep_is_run_resumed_listed_and_drawn(here, capsys):
    words = ["sweep", "lsa-1l", "--over", "learning_rate=1e-3,1e30", "seed=0:2", "--out", "s", "--workers", "1",
             "--set", "steps=4", "batch_size=8", "eval_prompts=16", "n_snapshots=0", "--quiet"]  # fmt: skip
    for _ in range(2):
        cli.main(words)
        assert capsys.readouterr().out == "s/results.csv: 4 models in 2 cells, 2 of them diverged\n"
    cli.main(["sweep", "status", "s"])
    assert capsys.readouterr().out == "s: 2 done, 0 running, 0 waiting, 0 failed\n"
    cli.main(["sweep", "report", "s"])
    assert capsys.readouterr().out == "s/report/sweep.html\n"
    assert "4 models over learning_rate, seed" in (here / "s" / "report" / "sweep.html").read_text()
    cli.main(["sweep", "list"])
    assert capsys.readouterr().out.startswith("sweeps:\n")


@pytest.mark.parametrize("words", [["fly"], ["train", "lsa-99l"], ["train", "lsa-1l", "--stepz", "3"],
                                   ["train", "lsa-1l", "--steps", "many"], ["report", "lsa-1l"]])  # fmt: skip
def test_words_that_cannot_be_parsed_are_explained_with_exit_code_2(here, capsys, words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert words[-1] in printed.err or "--out" in printed.err or "lsa-1l" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("first", "before", "after"), [("", None, "passive"), ("", "active", "active"), ("import torch;", None, "None")]
)
def test_threads_wait_passively_unless_the_user_or_torch_has_chosen(first, before, after):
    code = f"{first}import os, mechicl; print(os.environ.get('OMP_WAIT_POLICY'))"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": before} if before else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == after, done.stderr


# ---- start-up ----
HEAVY = {"torch", "numpy", "pandas", "scipy", "plotly", "transformers", "transformer_lens", "accelerate", "IPython"}


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh Python has loaded when it has run some code to its end or its exit."""
    code = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.rpartition("LOADED")[2].split()}


WITHOUT_TORCH = [["--help"], ["list"], ["--version"], ["report", "--help"], ["train", "--help"], ["train", "lsa-2"],
                 ["sweep", "--help"], ["join"]]  # fmt: skip


@pytest.mark.parametrize("words", WITHOUT_TORCH)
def test_help_list_and_mistakes_do_not_load_torch(words):
    loaded = modules_after(f"import mechicl.cli; mechicl.cli.main({words})")
    assert "tyro" in loaded
    assert not loaded & HEAVY


LATE = {
    "transformer_lens.model_bridge": "opens every architecture of transformers; only bridges need it",
    "scipy.optimize": "for fits",
    "scipy.special": "for intervals",
    "scipy.stats": "for ranks and binomial intervals",
    "networkx": "for circuits as graphs",
    "sklearn": "for learners of scikit-learn",
    "jax": "jaxtyping loads it, where it is installed, at the first call that compares the axes of two tensors",
    "plotly": "for figures",
    "circuitsvis": "for pictures of attention",
    "IPython": "for notebooks",
    "anywidget": "for widgets",
    "loky": "for sweeps in several processes",
}
"""Slow to load, and needed by few calls: loaded when first used."""


@pytest.mark.slow
def test_analyses_and_sweeps_start_without_what_only_some_calls_need():
    code = "import mechicl.analysis, mechicl.interop, sys; print('mechicl.training.presets' in sys.modules); "
    code += f"import mechicl.sweeps; print({set(LATE)} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "set()"], done.stderr


@pytest.mark.parametrize(("code", "absent"), [
    ("import mechicl", HEAVY | {"tyro"}),
    ("import mechicl.cli; mechicl.cli.main(['train', 'lsa-1l', '--help'])",
     {"plotly", "circuitsvis", "anywidget", "ipywidgets"}),
    pytest.param("import mechicl.text", {"datasets", "networkx"}, marks=pytest.mark.slow),
    pytest.param("import mechicl.viz, mechicl.reports, mechicl.sweeps", {"IPython", "anywidget", "loky", "networkx"},
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_only_what_is_used_is_loaded(code, absent):
    assert not modules_after(code) & absent


def test_checkpoints_of_one_name_are_compared_under_their_paths(tmp_path, monkeypatch):
    seen: dict[str, object] = {}
    monkeypatch.setattr("mechicl.reports.report", lambda *_, compare, **others: seen.update(compare) or tmp_path)
    runs = [str(save(tmp_path / run / "checkpoint", load("lsa-1l"))) for run in "ab"]
    cli.main(["report", "lsa-1l", "--out", str(tmp_path), "--compare", *runs, "lsa-2l-looped"])
    assert [*seen] == [*runs, "lsa-2l-looped"]


@pytest.mark.slow
def test_a_missing_extra_is_named_in_the_error():
    code = "sys.modules['anywidget'] = None; import mechicl.viz; mechicl.viz.PatchingExplorer"
    done = subprocess.run([sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True)
    assert "pip install 'mechicl[widgets]'" in done.stderr.splitlines()[-1]
