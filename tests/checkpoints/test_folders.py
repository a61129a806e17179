import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mechicl import constructions
from mechicl.base.arguments import ArgumentError
from mechicl.checkpoints import (
    Checkpoint,
    CheckpointError,
    Snapshots,
    available,
    load,
    load_checkpoint,
    save,
    stack_models,
)
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.tasks import FixedTasks, LinearRegression, task_to_dict
from mechicl.training import TrainingConfig, train

from ..strategies import random_model, random_prompts

CONFIGS = {
    "one linear layer": TransformerConfig(x_dim=3, n_context=4),
    "float64": TransformerConfig(x_dim=3, n_context=4, y_dim=2, n_layers=2, dtype="float64"),
    "bfloat16": TransformerConfig(x_dim=3, n_context=4, dtype="bfloat16"),
    "recurrent": TransformerConfig(x_dim=3, n_context=4, n_layers=4, recurrent=True, d_mlp=5, damping=0.7),
    "mixed attention": TransformerConfig(
        x_dim=3, n_context=4, n_layers=3, attention="relu,softmax,linear", sink="learned", normalize_by_context=True
    ),
    "gradient descent": TransformerConfig(
        x_dim=3, n_context=4, y_dim=2, n_layers=2, d_model=8, d_mlp=5, mlp_location="input", read_in="linear",
        read_out="identity", attention_weights="gradient_descent",
    ),
    "everything learned": TransformerConfig(
        x_dim=3, n_context=4, y_dim=2, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_mlp=6,
        attention="softmax", sink="learned", normalization_type="LN", positional_embedding_type="standard",
        read_in="linear", read_out="linear", read_bias=True, attn_bias=True, act_fn="gelu_new", token_clip=9.5,
    ),
}  # fmt: skip


def seeds_of(cfg, n=3):
    return [random_model(cfg, seed=10 + i) for i in range(n)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved checkpoint of two seeds with snapshots."""
    models = seeds_of(CONFIGS["one linear layer"], 2)
    stacked = {name: torch.stack([tensor, 2 * tensor]) for name, tensor in stack_models(models).items()}
    record = {"seeds": [5, 9], "wall_time": 1.5}
    return save(tmp_path / "mine", models, record, Snapshots((0, 10), stacked))


def edit(path, change):
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def sign(folder):
    """Make the digests those of the files as they are, as someone would who changes a checkpoint on purpose."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("[!r]*.*")}
    edit(folder / "record.json", lambda record: record.update(sha256=digests))


def change_weights(folder, change, name="weights.safetensors"):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"steps": "0,10"})
    sign(folder)


def refused(folder, message):
    """Loading fails with this message, whichever way it is asked for."""
    for attempt in (lambda: load(folder), lambda: load(str(folder), seed=9), lambda: load_checkpoint(folder)):
        with pytest.raises(CheckpointError, match=message) as caught:
            attempt()
        assert str(folder) in str(caught.value)


# ---- round trips ----


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_seed_comes_back_bit_for_bit_in_eval_mode(tmp_path, cfg):
    models = seeds_of(cfg)
    before = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    read = load_checkpoint(save(tmp_path / "mine", models)).models
    assert len(read) == 3
    for model, original, tensors in zip(read, models, before, strict=True):
        assert not model.training
        assert model.cfg == original.cfg
        read_tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert set(read_tensors) == set(tensors)
        for name, tensor in read_tensors.items():
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name])
        prompts = random_prompts(cfg)
        assert torch.equal(model.predict(prompts), original.predict(prompts))
    with torch.no_grad():
        differ = [not torch.equal(m.predict(prompts), read[0].predict(prompts)) for m in read[1:]]
    assert all(differ) or cfg.n_layers == 0


def test_the_shared_weights_of_a_recurrent_model_are_saved_once_and_stay_shared(tmp_path):
    folder = save(tmp_path / "mine", random_model(CONFIGS["recurrent"]))
    assert {name.split(".")[1] for name in load_file(folder / "weights.safetensors") if "." in name} == {"0"}
    model = load(folder)
    assert len({id(block.attn.W_Q) for block in model.blocks}) == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_record_and_snapshots_come_back(folder):
    checkpoint = load_checkpoint(folder)
    assert checkpoint.record["wall_time"] == 1.5
    assert checkpoint.snapshots is not None
    assert checkpoint.snapshots.steps == (0, 10)
    first, second = checkpoint.models_at(0), checkpoint.models_at(1)
    for seed, model in enumerate(checkpoint.models):
        for name, weight in model.named_parameters():
            assert torch.equal(dict(first[seed].named_parameters())[name], weight)
            assert torch.equal(dict(second[seed].named_parameters())[name], 2 * weight)


def test_seeds_are_picked_by_their_number_in_the_record(folder):
    models = load_checkpoint(folder).models
    for seed, index in ((None, 0), (5, 0), (9, 1)):
        assert torch.equal(load(folder, seed=seed).W_Q, models[index].W_Q)
    with pytest.raises(CheckpointError, match=r"has no seed 0; it has \[5, 9\]"):
        load(folder, seed=0)


def test_saving_over_a_checkpoint_replaces_all_of_it(folder):
    model = random_model(CONFIGS["float64"])
    save(folder, model)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "record.json", "weights.safetensors"]
    assert torch.equal(load(folder).W_Q, model.W_Q)


# ---- LSTMs ----

LSTM = LSTMConfig(x_dim=3, n_context=4, y_dim=2, n_layers=2, d_model=5)


def test_lstms_come_back_as_lstms_bit_for_bit(tmp_path):
    models = [HookedLSTM(LSTM, seed=seed) for seed in (4, 2)]
    stacked = {name: tensor[None] for name, tensor in stack_models(models).items()}
    folder = save(tmp_path / "mine", models, {"seeds": [4, 2]}, Snapshots((7,), stacked))
    assert json.loads((folder / "config.json").read_text())["architecture"] == "lstm"
    checkpoint = load_checkpoint(folder)
    prompts = LinearRegression(x_dim=3, n_context=4, y_dim=2).sample(5, seed=0)
    for model, read, snapshot in zip(models, checkpoint.models, checkpoint.models_at(0), strict=True):
        assert isinstance(read, HookedLSTM)
        assert isinstance(snapshot, HookedLSTM)
        assert read.cfg == LSTM
        assert not read.training
        assert torch.equal(read.predict(prompts), model.predict(prompts))
        assert torch.equal(snapshot.predict(prompts), model.predict(prompts))
    assert torch.equal(load(folder, seed=2).predict(prompts), models[1].predict(prompts))


# ---- several tasks ----

TASK = LinearRegression(x_dim=3, n_context=4)
SEVERAL = TrainingConfig(
    task=TASK, more_tasks=(TASK.replace(inputs="gaussian"), FixedTasks(TASK, 16, seed=1)), seeds=(5, 9, 2),
    model=TransformerConfig(x_dim=3, n_context=4, initializer_range=0.3, dtype="float64"), steps=6, batch_size=8,
    learning_rate=0.05, eval_every=2, eval_prompts=16, log_every=2, n_snapshots=3, cpu=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def several(tmp_path_factory) -> Checkpoint:
    """A trained checkpoint of three tasks and three seeds, as it comes from the disk."""
    folder = tmp_path_factory.mktemp("several")
    result = train(SEVERAL, folder / "run", progress=False)
    snapshots = Snapshots(result.snapshot_steps, result.snapshots)
    return load_checkpoint(save(folder / "mine", result.models, result.record, snapshots))


def test_the_parts_of_several_tasks_are_the_checkpoints_of_each_alone(several, tmp_path):
    parts = several.by_task()
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


@pytest.mark.parametrize(
    ("n_models", "seeds", "message"),
    [
        (5, [0, 1], "mine: 5 models for 2 tasks"),
        (6, [0, 1], r"mine: 6 models for 2 tasks and the seeds \[0, 1\]"),
    ],
)
def test_models_that_are_not_one_a_task_and_seed_have_no_parts(n_models, seeds, message):
    training = {"task": task_to_dict(TASK), "more_tasks": [task_to_dict(TASK)]}
    training |= {"seeds": seeds} if seeds else {}
    with pytest.raises(CheckpointError, match=message):
        Checkpoint("mine", seeds_of(CONFIGS["one linear layer"], n_models), {"training": training}).by_task()


@pytest.mark.parametrize("record", [{}, {"training": {}}, {"training": {"task": {"type": "Chess"}}}])
def test_a_record_without_a_task_has_no_parts(record):
    with pytest.raises(CheckpointError, match="mine: no usable task in its record"):
        Checkpoint("mine", seeds_of(CONFIGS["one linear layer"], 1), record).by_task()


# ---- the ones that come with the package ----


def test_the_shipped_one_layer_model_loads_in_eval_mode_and_has_learned():
    assert "lsa-1l" in available()
    model = load("lsa-1l")
    assert not model.training
    assert (model.cfg.n_layers, model.cfg.attention, model.cfg.x_dim) == (1, "linear", 10)
    prompts = LinearRegression().sample(2000, seed=0)
    errors = (model.predict(prompts) - prompts.query.ys).square().mean()
    assert errors < 0.6 * prompts.query.ys.square().mean()


@pytest.mark.parametrize("name", available())
def test_every_shipped_checkpoint_is_whole_and_has_a_part_for_each_task(name):
    checkpoint = load_checkpoint(name)
    config = TrainingConfig.from_dict(checkpoint.record["training"])
    parts = checkpoint.by_task()
    assert [part.task for part in parts] == list(config.tasks)
    assert [model for part in parts for model in part.models] == checkpoint.models
    assert all(part.record["seeds"] == list(config.seeds) for part in parts)
    assert [checkpoint.model(seed) for seed in config.seeds] == parts[0].models
    assert checkpoint.snapshots is None or checkpoint.models_at(-1)


@pytest.mark.parametrize("name", ["no-such-model", "", "../lsa-1l", "config.json", "a\0b"])
def test_an_unknown_name_is_refused_with_the_known_ones(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"lsa-1l|no record\.json|must be a valid path, got 'a\\x00b'"):
        load(name)


# ---- damage ----


@pytest.mark.parametrize("name", ["weights.safetensors", "config.json", "record.json", "snapshots.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    refused(folder, name)


@pytest.mark.parametrize("name", ["weights.safetensors", "config.json", "record.json", "snapshots.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_a_truncated_file_is_refused_at_any_length_with_or_without_its_digest(folder, name, share):
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: min(int(share * len(whole)), len(whole) - 3)])
    refused(folder, name)
    if name != "record.json":
        sign(folder)
        refused(folder, name)


@pytest.mark.parametrize("name", ["weights.safetensors", "snapshots.safetensors"])
def test_one_flipped_bit_in_the_weights_is_noticed(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-7] ^= 1
    (folder / name).write_bytes(data)
    refused(folder, rf"{name} was changed after the checkpoint was saved")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_wheels": 4}, r"no field \['n_wheels'\]"),
        ({"x_dim": "3"}, "x_dim must be an int"),
        ({"damping": float("nan")}, r"damping('\])? must be a finite number"),
        ({"act_fn": "__import__('os')"}, "act_fn="),
        ({"attention": ["linear"]}, "attention must be"),
        ({"device": "meta"}, "device is not a field"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_even_with_its_digest(folder, change, message):
    edit(folder / "config.json", lambda config: config.update(change))
    refused(folder, r"config\.json")
    sign(folder)
    refused(folder, rf"config\.json: .*({message}|wrong type)")


W_Q = "blocks.0.attn.W_Q"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update({W_Q: torch.zeros(2, 1, 4, 5)}), r"W_Q must be \[seed, 1, 4, 4\], got \[2, 1, 4, 5\]"),
        (lambda w: w.update({W_Q: torch.tensor(0.0)}), r"W_Q must be \[seed, 1, 4, 4\], got \[\]"),
        (lambda w: w.update({W_Q: torch.zeros(3, 1, 4, 4)}), r"the seeds; theirs have sizes \[2, 3\]"),
        (lambda w: w.update({W_Q: w[W_Q].double()}), r"W_Q must be torch\.float32.*got torch\.float64"),
        (lambda w: w.pop(W_Q), r"missing \['blocks\.0\.attn\.W_Q'\]"),
        (lambda w: w.update(extra=torch.zeros(2)), r"not expected \['extra'\]"),
        (
            lambda w: w.update({name: tensor[:0].clone() for name, tensor in w.items()}),
            r"the seeds; theirs have sizes \[0\]",
        ),
        (
            lambda w: w.update({name: tensor[:1].clone() for name, tensor in w.items()}),
            r"1 models for the seeds \[5, 9\]",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_even_with_their_digest(folder, change, message):
    change_weights(folder, change)
    refused(folder, message)


@pytest.mark.parametrize("digests", [None, {}, [], "abc", {"config.json": "0"}])
def test_a_record_without_digests_vouches_for_nothing(folder, digests):
    edit(folder / "record.json", lambda record: record.update(sha256=digests))
    refused(folder, "lacks the digests")


@pytest.mark.parametrize("steps", ["0,10,20", "0", "", "0,ten"])
def test_snapshots_that_are_not_one_a_step_are_refused(folder, steps):
    save_file(load_file(folder / "snapshots.safetensors"), folder / "snapshots.safetensors", metadata={"steps": steps})
    sign(folder)
    refused(folder, r"snapshots\.safetensors: ")


# ---- saves that fail ----


class Crash(Exception):
    """What stands for the loss of power."""


@pytest.mark.slow
@pytest.mark.parametrize("with_snapshots", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_save_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(folder, tmp_path, there, with_snapshots):
    """Every call of the operating system that changes files is the last one of a process once."""
    model = random_model(CONFIGS["float64"])
    stacked = {name: tensor[None] for name, tensor in stack_models([model]).items()}
    snapshots = Snapshots((3,), stacked) if with_snapshots else None
    outcomes = []
    for moment in itertools.count():
        target = tmp_path / f"copy-{moment}"
        if there:
            shutil.copytree(folder, target)
        if not killed_at(moment, lambda target=target: save(target, model, {}, snapshots)):
            break
        if not there and not (target / ".new" / "record.json").is_file() and not (target / "record.json").is_file():
            refused(target, "neither a folder nor" if not target.exists() else r"no record\.json: it is no checkpoint")
            outcomes.append("none")
            continue
        checkpoint = load_checkpoint(target)
        outcomes.append(str(checkpoint.models[0].cfg.dtype))
        whole = checkpoint.snapshots is not None if outcomes[-1] == "torch.float32" else with_snapshots
        assert (checkpoint.snapshots is not None) == whole
        # whatever is there, the next save replaces it, and nothing is left over
        assert load(save(target, model, {}, snapshots)).cfg.dtype == torch.float64
        assert not list(target.glob(".*"))
    old = outcomes[0]
    assert old == ("torch.float32" if there else "none")
    turn = outcomes.index("torch.float64")
    assert outcomes == [old] * turn + ["torch.float64"] * (len(outcomes) - turn)
    assert turn >= 6
    assert len(outcomes) - turn >= 3


def killed_at(moment, run) -> bool:
    """Whether a process ended at its call number `moment` that changes files, as by SIGKILL: nothing is cleaned up."""
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


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"curve": [1.0, float("nan")]}, ValueError),
        ({"task": object()}, TypeError),
        ({"x": {1, 2}}, r"record\['x'\] must be plain JSON data .*, got set"),
        ({"x": [{"y": {(1, 2): 3}}]}, r"the keys of record\['x'\]\[0\]\['y'\] must be text, got \(1, 2\)"),
        ({"seeds": [1]}, ValueError),
        ({"seeds": [1, 2, 3]}, ValueError),
    ],
)
def test_a_record_that_cannot_be_saved_leaves_the_old_checkpoint_as_it_was(folder, record, error):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    kind, words = (ArgumentError, error) if isinstance(error, str) else (error, None)
    with pytest.raises(kind, match=words):
        save(folder, seeds_of(CONFIGS["float64"], 2), record)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert load(folder).cfg.dtype == torch.float32


def test_no_models_or_models_of_different_configs_are_not_saved(tmp_path):
    different = [random_model(CONFIGS["float64"]), random_model(CONFIGS["recurrent"])]
    for models in ([], different):
        with pytest.raises(ValueError, match="models with the same config"):
            save(tmp_path / "mine", models)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("models", [slice(1, 3), torch.tensor([2, 0]), torch.tensor([False, False, True])])
def test_snapshots_of_some_models_hold_their_weights_at_every_step(models):
    kept = Snapshots((0, 7), {"w": torch.arange(30.0).view(2, 3, 5), "scale": torch.arange(6.0).view(2, 3)})
    part = kept.select(models)
    assert part.steps == (0, 7)
    assert list(part.weights) == ["w", "scale"]
    for name, weights in part.weights.items():
        for step in range(2):
            assert torch.equal(
                weights[step], torch.stack([kept.weights[name][step, i] for i in torch.arange(3)[models]])
            )


def test_a_record_with_keys_that_json_writes_alike_loads(tmp_path):
    model = constructions.gradient_descent(x_dim=2, n_context=3, step_size=0.1)
    save(tmp_path / "made", model, {"by_step": {1: "first", "1": "last"}})
    assert load_checkpoint(tmp_path / "made").record["by_step"] == {"1": "last"}


def test_the_shipped_ones_say_which_snapshots_are_left_out():
    for name in ("copy-2l", "copy-2l-one-hot", "induction-2l"):
        checkpoint = load_checkpoint(name)
        assert checkpoint.snapshots is not None
        dropped, kept = checkpoint.record["dropped_snapshots"], checkpoint.snapshots.steps
        assert not set(dropped) & set(kept)
        assert len(dropped) + len(kept) == checkpoint.record["training"]["n_snapshots"]
        assert kept[0] == 0
        assert kept[-1] == checkpoint.record["steps_done"]
