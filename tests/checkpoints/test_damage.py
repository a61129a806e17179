"""Damaged and hostile checkpoint folders: an error that names the file, at once, in little memory."""

from pathlib import Path

import pytest
import torch

from mechicl.checkpoints import CheckpointError, Snapshots, load_checkpoint, save
from mechicl.checkpoints.checkpoint import check_stack, models_from_stack, stack_models
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from tests.bounds import bounded, make_no_file
from tests.checkpoints import CONFIGS, change_tensors, edit, refused, sign
from tests.strategies import random_model

PLAIN = TransformerConfig(x_dim=3, n_context=4, n_layers=2)
LEARNED, LSTM = CONFIGS["everything learned"], LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=5)
FILES = ("record.json", "config.json", "weights.safetensors", "snapshots.safetensors")
W_Q = "blocks.0.attn.W_Q"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved checkpoint of two seeds with snapshots."""
    models = [random_model(CONFIGS["one linear layer"], seed=10 + i) for i in range(2)]
    stacked = {name: torch.stack([tensor, 2 * tensor]) for name, tensor in stack_models(models).items()}
    return save(tmp_path / "mine", models, {"seeds": [5, 9]}, Snapshots((0, 10), stacked))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [None, 0.0, 0.1, 1.0])
def test_missing_and_truncated_files_are_named_with_or_without_their_digests(folder, name, share):
    path = folder / name
    whole = path.read_bytes()
    path.unlink()
    if share is not None:
        path.write_bytes(whole[: min(int(share * len(whole)), len(whole) - 3)])
    refused(folder, name)
    if share is not None and name != "record.json":
        sign(folder)
        refused(folder, name)


@pytest.mark.parametrize("name", ["weights.safetensors", "snapshots.safetensors"])
def test_one_flipped_bit_in_the_weights_is_noticed(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-7] ^= 1
    (folder / name).write_bytes(data)
    refused(folder, rf"{name} was changed after the checkpoint was saved")


@pytest.mark.parametrize(("change", "message"), [
    ({"n_wheels": 4}, r"no field \['n_wheels'\]"),
    ({"x_dim": "3"}, "x_dim must be an int"),
    ({"damping": float("nan")}, r"damping('\])? must be a finite number"),
    ({"act_fn": "__import__('os')"}, "act_fn="),
    ({"attention": ["linear"]}, "attention must be"),
    ({"device": "meta"}, "device is not a field"),
])  # fmt: skip
def test_a_config_that_makes_no_model_is_refused_even_with_its_digest(folder, change, message):
    edit(folder / "config.json", lambda config: config.update(change))
    refused(folder, r"config\.json")
    sign(folder)
    refused(folder, rf"config\.json: .*({message}|wrong type)")


def cut(n):
    """Keep the first seeds of all weights."""
    return lambda weights: weights.update({name: tensor[:n].clone() for name, tensor in weights.items()})


@pytest.mark.parametrize(("change", "message"), [
    (lambda w: w.update({W_Q: torch.zeros(2, 1, 4, 5)}), r"W_Q must be \[seed, 1, 4, 4\], got \[2, 1, 4, 5\]"),
    (lambda w: w.update({W_Q: torch.tensor(0.0)}), r"W_Q must be \[seed, 1, 4, 4\], got \[\]"),
    (lambda w: w.update({W_Q: torch.zeros(3, 1, 4, 4)}), r"the seeds; theirs have sizes \[2, 3\]"),
    (lambda w: w.update({W_Q: w[W_Q].double()}), r"W_Q must be torch\.float32.*got torch\.float64"),
    (lambda w: w.pop(W_Q), r"missing \['blocks\.0\.attn\.W_Q'\]"),
    (lambda w: w.update(extra=torch.zeros(2)), r"not expected \['extra'\]"),
    (cut(0), r"the seeds; theirs have sizes \[0\]"),
    (cut(1), r"1 models for the seeds \[5, 9\]"),
])  # fmt: skip
def test_weights_that_do_not_fit_the_config_are_refused_even_with_their_digest(folder, change, message):
    change_tensors(folder, change)
    refused(folder, message)


@pytest.mark.parametrize("digests", [None, {}, [], "abc", {"config.json": "0"}])
def test_a_record_without_digests_is_refused(folder, digests):
    edit(folder / "record.json", lambda record: record.update(sha256=digests))
    refused(folder, "lacks the digests")


@pytest.mark.parametrize(("entries", "message"), [
    *(({"curve": curve}, "curve must be a mapping, got") for curve in (None, [], "x", 3)),
    *(({"curve": {"eval_loss": losses}}, "eval_loss must be a list") for losses in (3, "x", None, [1.0], [["a", 1]])),
    ({"curve": {"eval_step": "x", "eval_loss": [[1.0, None]]}}, "eval_step must be a list of integers, got 'x'"),
    *(({"training": training}, "training must be a mapping, got") for training in (None, [])),
    ({"training": {"more_tasks": None}}, "more_tasks must be a list of tasks, got None"),
    ({"training": {"seeds": 3}}, "seeds must be a list of integers, got 3"),
    *(({name: [1]}, f"2 models for the {name}") for name in ("seeds", "stopped_at", "diverged_at")),
    *(({"seeds": seeds}, "seeds must be a list of integers") for seeds in (None, [1.5, "a"], [True, False], "ab")),
    ({"seeds": [1, 1]}, r"seeds must differ, got \[1, 1\]"),
])  # fmt: skip
def test_a_record_with_entries_of_another_kind_is_refused_without_its_digest(folder, entries, message):
    edit(folder / "record.json", lambda record: record.update(entries))
    edit(folder / "record.json", lambda record: record["sha256"].pop("record.json"))
    refused(folder, rf"record\.json: {message}")


@pytest.mark.parametrize(("change", "steps", "message"), [
    *((lambda w: None, steps, r"snapshots\.safetensors: ") for steps in ("0,10,20", "0", "", "0,ten")),
    (lambda w: w.update(extra=torch.zeros(2, 2, 2)), "0,10", "not a snapshot of a weight"),
    (lambda w: w.update({W_Q: torch.zeros(2, 1, 5)}), "0,10", "not a snapshot of a weight"),
])  # fmt: skip
def test_snapshots_that_do_not_fit_are_refused(folder, change, steps, message):
    change_tensors(folder, change, "snapshots", steps)
    refused(folder, message)


# ---- files that claim more than they contain ----
def written(folder: Path, cfg, **changes) -> Path:
    """A checkpoint with snapshots and a config that was changed afterwards, with the right digests."""
    model = (HookedLSTM if isinstance(cfg, LSTMConfig) else HookedTransformer)(cfg, seed=0)
    stacked = stack_models([model])
    save(folder, model, {"seeds": [3]}, Snapshots((0,), {name: t[None] for name, t in stacked.items()}))
    edit(folder / "config.json", lambda config: config.update(changes))
    sign(folder)
    return folder


@pytest.mark.parametrize(("cfg", "changes", "message"), [
    (PLAIN, {"n_layers": 10**6}, "those of 2 layers, n_layers=1000000"),
    (PLAIN, {"n_layers": 1}, "those of 2 layers, n_layers=1"),
    (PLAIN, {"d_model": 20_000, "d_head": 20_000}, r"must be \[seed, 1, 20000, 20000\]"),
    (LEARNED, {"n_context": 10**9, "n_ctx": 2 * 10**9 + 1}, r"W_pos must be \[seed, 2000000001, 8\]"),
    (LSTM, {"n_layers": 10**6}, "those of 2 layers"),
    (PLAIN, {"d_model": 10**15, "d_head": 10**15}, "no model has the sizes"),
    (PLAIN, {"x_dim": 10**400}, "config.json"),
])  # fmt: skip
def test_a_config_that_claims_more_than_the_weights_is_refused_before_anything_is_made(tmp_path, cfg, changes, message):
    folder = written(tmp_path / "mine", cfg, **changes)
    with bounded(), pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_former_biases_of_embeddings_add_up_to_nothing_larger_than_both():
    cfg = TransformerConfig(d_vocab=3, n_ctx=4, n_layers=0, d_model=4, n_heads=1)
    model = HookedTransformer(cfg)
    stacked = stack_models([model, model])
    with pytest.raises(ValueError, match=r"embed\.b_E does not fit embed\.W_E"):
        check_stack(cfg, {**stacked, "embed.b_E": torch.zeros(2, 10**6, 4, device="meta")})
    added = models_from_stack(cfg, {**stacked, "embed.b_E": torch.ones(2, 4)})
    torch.testing.assert_close(added[1].embed.W_E, model.embed.W_E + 1)


@pytest.mark.parametrize("name", FILES)
def test_pipes_are_refused_at_once(folder, name):
    make_no_file(folder / name, "pipe")
    with bounded(), pytest.raises(CheckpointError, match=r"pipe, a device|no record\.json"):
        load_checkpoint(folder)
