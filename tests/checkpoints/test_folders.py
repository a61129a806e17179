"""Checkpoints in folders: round trips, several tasks, the shipped ones, and saves that fail."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.parametrizations import spectral_norm

from mechicl import constructions
from mechicl.base.arguments import ArgumentError
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots, available, load, load_checkpoint, save
from mechicl.checkpoints.checkpoint import stack_models
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig, build
from mechicl.tasks import FixedTasks, LinearRegression, task_to_dict
from mechicl.training import TrainingConfig, train
from tests.checkpoints import CONFIGS, change_tensors, edit, refused, sign
from tests.strategies import random_model, random_prompts

PLAIN = CONFIGS["one linear layer"]


def seeds_of(cfg, n=3):
    return [random_model(cfg, seed=10 + i) for i in range(n)]


def tensors_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved checkpoint of two seeds with snapshots."""
    models = seeds_of(PLAIN, 2)
    stacked = {name: torch.stack([tensor, 2 * tensor]) for name, tensor in stack_models(models).items()}
    return save(tmp_path / "mine", models, {"seeds": [5, 9], "wall_time": 1.5}, Snapshots((0, 10), stacked))


# ---- round trips ----
@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_seed_comes_back_bit_for_bit_in_eval_mode(tmp_path, cfg):
    models, prompts = seeds_of(cfg), random_prompts(cfg)
    read = load_checkpoint(save(tmp_path / "mine", models)).models
    assert len(read) == 3
    for model, original in zip(read, models, strict=True):
        assert not model.training
        assert model.cfg == original.cfg
        before, after = tensors_of(original), tensors_of(model)
        assert {name: tensor.dtype for name, tensor in after.items()} == {n: t.dtype for n, t in before.items()}
        assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
        assert torch.equal(model.predict(prompts), original.predict(prompts))
    with torch.no_grad():
        differ = [not torch.equal(m.predict(prompts), read[0].predict(prompts)) for m in read[1:]]
    assert all(differ) or cfg.n_layers == 0


def test_the_shared_weights_of_a_recurrent_model_are_saved_once_and_stay_shared(tmp_path):
    folder = save(tmp_path / "mine", random_model(CONFIGS["recurrent"]))
    assert {name.split(".")[1] for name in load_file(folder / "weights.safetensors") if "." in name} == {"0"}
    model = load(folder)
    assert len({id(block.attn.W_Q) for block in model.blocks}) == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_record_and_snapshots_come_back_and_seeds_are_selected_by_the_record(folder):
    checkpoint = load_checkpoint(folder)
    assert checkpoint.record["wall_time"] == 1.5
    assert checkpoint.snapshots is not None
    assert checkpoint.snapshots.steps == (0, 10)
    first, second = checkpoint.models_at(0), checkpoint.models_at(1)
    for seed, model in enumerate(checkpoint.models):
        for name, weight in model.named_parameters():
            assert torch.equal(dict(first[seed].named_parameters())[name], weight)
            assert torch.equal(dict(second[seed].named_parameters())[name], 2 * weight)
    for seed, index in ((None, 0), (5, 0), (9, 1)):
        assert torch.equal(load(folder, seed=seed).W_Q, checkpoint.models[index].W_Q)
    with pytest.raises(CheckpointError, match=r"has no seed 0; it has \[5, 9\]"):
        load(folder, seed=0)
    with pytest.raises(IndexError, match=r"has the snapshots 0 to 1, got 10: give an index, not a step"):
        checkpoint.models_at(10)
    with pytest.raises(IndexError, match=r"has the models 0 to 1, got index 2"):
        checkpoint.select([0, 2])


def test_saving_over_a_checkpoint_replaces_all_of_it(folder):
    model = random_model(CONFIGS["float64"])
    save(folder, model)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "record.json", "weights.safetensors"]
    assert torch.equal(load(folder).W_Q, model.W_Q)


@pytest.mark.parametrize(("change", "named"), [
    (lambda weights: {name: weight[:, :1] for name, weight in weights.items()}, "is not a snapshot of a weight"),
    (lambda weights: {name: weight[..., :1] for name, weight in weights.items()}, "is not a snapshot of a weight"),
    (lambda weights: dict([*weights.items()][:1]), "layers|missing"),
])  # fmt: skip
def test_snapshots_of_other_models_do_not_replace_a_checkpoint(folder, change, named):
    checkpoint = load_checkpoint(folder)
    assert checkpoint.snapshots is not None
    other = Snapshots(checkpoint.snapshots.steps, change(checkpoint.snapshots.weights))
    with pytest.raises(ValueError, match=named):
        save(folder, checkpoint.models, {"seeds": [5, 9]}, other)
    assert load_checkpoint(folder).record["wall_time"] == 1.5


def test_a_curve_has_a_loss_of_each_model(folder):
    with pytest.raises(ValueError, match=r"the curve has 1 losses \(eval_loss\) of 2 models"):
        save(folder, load_checkpoint(folder).models, {"curve": {"eval_loss": [[1.0, 2.0], [3.0]]}})


def test_lstms_come_back_as_lstms_bit_for_bit(tmp_path):
    cfg = LSTMConfig(x_dim=3, n_context=4, y_dim=2, n_layers=2, d_model=5)
    models = [HookedLSTM(cfg, seed=seed) for seed in (4, 2)]
    stacked = {name: tensor[None] for name, tensor in stack_models(models).items()}
    folder = save(tmp_path / "mine", models, {"seeds": [4, 2]}, Snapshots((7,), stacked))
    assert json.loads((folder / "config.json").read_text())["architecture"] == "lstm"
    checkpoint = load_checkpoint(folder)
    prompts = LinearRegression(x_dim=3, n_context=4, y_dim=2).sample(5, seed=0)
    for model, read, snapshot in zip(models, checkpoint.models, checkpoint.models_at(0), strict=True):
        assert isinstance(read, HookedLSTM)
        assert isinstance(snapshot, HookedLSTM)
        assert (read.cfg, read.training) == (cfg, False)
        assert torch.equal(read.predict(prompts), model.predict(prompts))
        assert torch.equal(snapshot.predict(prompts), model.predict(prompts))
    assert torch.equal(load(folder, seed=2).predict(prompts), models[1].predict(prompts))


@pytest.mark.parametrize("models", [slice(1, 3), torch.tensor([2, 0]), torch.tensor([False, False, True])])
def test_snapshots_of_some_models_have_their_weights_at_every_step(models):
    kept = Snapshots((0, 7), {"w": torch.arange(30.0).view(2, 3, 5), "scale": torch.arange(6.0).view(2, 3)})
    part = kept.select(models)
    assert (part.steps, list(part.weights)) == ((0, 7), ["w", "scale"])
    for name, step in itertools.product(part.weights, range(2)):
        expected = torch.stack([kept.weights[name][step, i] for i in torch.arange(3)[models]])
        assert torch.equal(part.weights[name][step], expected)


def test_a_record_with_keys_that_json_writes_alike_loads(tmp_path):
    model = constructions.gradient_descent(x_dim=2, n_context=3, step_size=0.1)
    save(tmp_path / "made", model, {"by_step": {1: "first", "1": "last"}})
    assert load_checkpoint(tmp_path / "made").record["by_step"] == {"1": "last"}


# ---- several tasks ----
TASK = LinearRegression(x_dim=3, n_context=4)
SEVERAL = TrainingConfig(
    task=TASK, more_tasks=(TASK.replace(inputs="gaussian"), FixedTasks(TASK, 16, seed=1)), seeds=(5, 9, 2),
    model=TransformerConfig(x_dim=3, n_context=4, initializer_range=0.3, dtype="float64"), steps=6, batch_size=8,
    learning_rate=0.05, eval_every=2, eval_prompts=16, log_every=2, n_snapshots=3, cpu=True,
)  # fmt: skip


def test_the_parts_of_several_tasks_are_the_checkpoints_of_each_alone(tmp_path):
    result = train(SEVERAL, tmp_path / "run", progress=False)
    snapshots = Snapshots(result.snapshot_steps, result.snapshots)
    parts = load_checkpoint(save(tmp_path / "mine", result.models, result.record, snapshots)).by_task()
    assert [part.task for part in parts] == list(SEVERAL.tasks)
    assert len({part.name for part in parts}) == 3
    for i, part in enumerate(parts):
        config = SEVERAL.replace(task=SEVERAL.tasks[i], more_tasks=())
        alone = train(config, tmp_path / str(i), progress=False)
        assert TrainingConfig.from_dict(part.record["training"]) == config
        assert part.record["seeds"] == [5, 9, 2]
        for name in ("stopped_at", "steps_done"):
            assert part.record[name] == alone.record[name]
        for name, line in alone.record["curve"].items():
            torch.testing.assert_close(torch.tensor(part.record["curve"][name]), torch.tensor(line))
        assert part.snapshots is not None
        assert part.snapshots.steps == alone.snapshot_steps
        alike: list[tuple[HookedTransformer, dict[str, torch.Tensor]]] = []
        alike += zip(part.models, ({n: w.detach() for n, w in m.named_parameters()} for m in alone.models), strict=True)
        for at in range(3):
            weights_alone = [{name: kept[at, seed] for name, kept in alone.snapshots.items()} for seed in range(3)]
            alike += zip(part.models_at(at), weights_alone, strict=True)
        assert len(alike) == 12
        for model, weights in alike:
            for name, weight in model.named_parameters():
                torch.testing.assert_close(weight.detach(), weights[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n_models", "record", "message"), [
    (5, {"training": {"task": task_to_dict(TASK), "more_tasks": [task_to_dict(TASK)]}}, "5 models for 2 tasks"),
    (
        6,
        {"training": {"task": task_to_dict(TASK), "more_tasks": [task_to_dict(TASK)], "seeds": [0, 1]}},
        "6 models",
    ),
    (1, {}, "mine: no usable task in its record"),
    (1, {"training": {}}, "mine: no usable task in its record"),
    (1, {"training": {"task": {"type": "Chess"}}}, "mine: no usable task in its record"),
])  # fmt: skip
def test_records_without_tasks_or_with_too_few_models_have_no_parts(n_models, record, message):
    with pytest.raises(CheckpointError, match=message):
        Checkpoint("mine", seeds_of(PLAIN, n_models), record).by_task()


# ---- the shipped ones ----
def test_snapshots_in_half_precision_load_in_the_dtype_of_the_models(tmp_path):
    models = [random_model(CONFIGS["recurrent"])]
    halves = {name: torch.stack([each, 2 * each]).half() for name, each in stack_models(models).items()}
    loaded = load_checkpoint(save(tmp_path / "mine", models, {}, Snapshots((0, 7), halves)))
    (then,) = loaded.models_at(1)
    for name, tensor in tensors_of(then).items():
        torch.testing.assert_close(tensor, halves[name][1, 0].to(tensor), rtol=0, atol=0)


def test_weights_in_bfloat16_load_in_the_float32_of_the_config(folder):
    before = [tensors_of(model) for model in load_checkpoint(folder).models]
    change_tensors(folder, lambda all_: all_.update({name: each.bfloat16() for name, each in all_.items()}))
    for model, old in zip(load_checkpoint(folder).models, before, strict=True):
        for name, tensor in tensors_of(model).items():
            assert tensor.dtype == torch.float32
            torch.testing.assert_close(tensor, old[name], rtol=2**-8, atol=0)
    edit(folder / "config.json", lambda config: config.update(dtype="float64"))
    sign(folder)
    refused(folder, "must be torch.float64 as in the config, got torch.bfloat16")


@pytest.mark.parametrize("name", available())
def test_every_shipped_checkpoint_is_whole_and_has_a_part_for_each_task(name):
    checkpoint = load_checkpoint(name)
    config = TrainingConfig.from_dict(checkpoint.record["training"])
    parts = checkpoint.by_task()
    assert [part.task for part in parts] == list(config.tasks)
    assert [model for part in parts for model in part.models] == checkpoint.models
    assert all(part.record["seeds"] == list(config.seeds) for part in parts)
    n = len(config.seeds)
    chosen = checkpoint.select(range(len(checkpoint.models) - n, len(checkpoint.models)))
    assert (chosen.task, chosen.best, chosen.stuck) == (parts[-1].task, parts[-1].best, parts[-1].stuck)
    assert [part.task for part in checkpoint.select(range(0, len(checkpoint.models), n)).by_task()] == list(
        config.tasks
    )
    if len(parts) > 1 and n > 1:
        with pytest.raises(CheckpointError, match="no usable task"):
            checkpoint.select([0, n + 1]).task  # noqa: B018
    assert [checkpoint.model(seed) for seed in config.seeds] == parts[0].models
    assert checkpoint.snapshots is None or checkpoint.models_at(-1)
    if name in ("copy-2l", "copy-2l-one-hot", "induction-2l"):
        assert checkpoint.snapshots is not None
        dropped, kept = checkpoint.record["dropped_snapshots"], checkpoint.snapshots.steps
        assert not set(dropped) & set(kept)
        assert len(dropped) + len(kept) == checkpoint.record["training"]["n_snapshots"]
        assert (kept[0], kept[-1]) == (0, checkpoint.record["steps_done"])


@pytest.mark.parametrize("name", ["no-such-model", "", "../lsa-1l", "config.json", "a\0b"])
def test_the_error_for_an_unknown_name_lists_the_known_ones(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"lsa-1l|no record\.json|must be .*path.*, got 'a\\x00b'"):
        load(name)


# ---- saves that fail ----
@pytest.mark.slow
@pytest.mark.parametrize("with_snapshots", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_save_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    folder, tmp_path, replaces, with_snapshots
):
    """Every call of the operating system that changes files is the last one of a process once."""
    model = random_model(CONFIGS["float64"])
    stacked = {name: tensor[None] for name, tensor in stack_models([model]).items()}
    snapshots = Snapshots((3,), stacked) if with_snapshots else None
    outcomes = []
    for moment in itertools.count():
        target = tmp_path / f"copy-{moment}"
        if replaces:
            shutil.copytree(folder, target)
        if not killed_at(moment, lambda target=target: save(target, model, {}, snapshots)):
            break
        if not replaces and not (target / ".new" / "record.json").is_file() and not (target / "record.json").is_file():
            refused(target, "neither a folder nor" if not target.exists() else r"no record\.json: it is not a check")
            outcomes.append("none")
            continue
        checkpoint = load_checkpoint(target)
        outcomes.append(str(checkpoint.models[0].cfg.dtype))
        whole = checkpoint.snapshots is not None if outcomes[-1] == "torch.float32" else with_snapshots
        assert (checkpoint.snapshots is not None) == whole
        # the next save replaces any leftovers
        assert load(save(target, model, {}, snapshots)).cfg.dtype == torch.float64
        assert not list(target.glob(".*"))
    old = outcomes[0]
    assert old == ("torch.float32" if replaces else "none")
    turn = outcomes.index("torch.float64")
    assert outcomes == [old] * turn + ["torch.float64"] * (len(outcomes) - turn)
    assert turn >= 6
    assert len(outcomes) - turn >= 3


def killed_at(moment, run) -> bool:
    """True if a process ended at its call number `moment` that changes files, as by SIGKILL, without cleaning up."""
    process = os.fork()
    if process == 0:
        calls = itertools.count()

        def last_call(change):
            def call(*arguments, **options):
                if next(calls) == moment:
                    os._exit(9)
                return change(*arguments, **options)

            return call

        for name in ("replace", "fsync", "mkdir", "unlink", "rmdir"):
            setattr(os, name, last_call(getattr(os, name)))
        run()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9


DIFFERENT = [random_model(CONFIGS["float64"]), random_model(CONFIGS["recurrent"])]


@pytest.mark.parametrize(("models", "record", "error", "words"), [
    (None, {"curve": [1.0, float("nan")]}, ArgumentError, "curve"),
    (None, {"task": object()}, ArgumentError, "task"),
    (None, {"x": {1, 2}}, ArgumentError, r"record\['x'\] must be plain JSON .*, got set"),
    (None, {"x": [{"y": {(1, 2): 3}}]}, ArgumentError, r"the keys of record\['x'\]\[0\]\['y'\] must be text"),
    (None, {"seeds": [1]}, ValueError, "2 models for the seeds"),
    (None, {"seeds": [1, 2, 3]}, ValueError, "2 models for the seeds"),
    (None, {"words": "x" * 2**26}, ValueError, "67,108,864 are read"),
    ([], {}, ValueError, "models with the same config"),
    (DIFFERENT, {}, ValueError, "models with the same config"),
])  # fmt: skip
def test_a_save_that_is_refused_leaves_the_old_checkpoint(folder, models, record, error, words):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error, match=words):
        save(folder, seeds_of(CONFIGS["float64"], 2) if models is None else models, record)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert load(folder).cfg.dtype == torch.float32


def _doubled(activation, hook):
    return 2 * activation


def _tied(model):
    model.blocks[1].attn.W_Q = model.blocks[0].attn.W_Q


REFUSED = {
    "spectral norm": (lambda model: spectral_norm(model.blocks[0].attn, "W_Q"), "do not fit the config|replaced parts"),
    "tied": (_tied, "do not fit the config: missing"),
    "another dtype": (lambda model: model.blocks[0].attn.half(), "must be torch.float32|do not fit"),
    "a hook": (lambda model: model.add_hook("blocks.0.hook_resid_post", _doubled), "remove the hooks first"),
    "a buffer": (lambda model: model.register_buffer("mine", torch.ones(2)), "not expected"),
    "a forward": (lambda model: setattr(model.blocks[0], "forward", lambda x, *_: x), "replaced parts"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_save_refuses_what_load_would_not_restore(change, tmp_path):
    model = build(TransformerConfig(x_dim=2, n_context=3, n_layers=2, n_heads=2, d_model=8, d_head=4), 0)
    edit, message = REFUSED[change]
    edit(model)
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "refused", model)
    assert not (tmp_path / "refused").exists()
