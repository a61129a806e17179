"""Checkpoint folders that ask for more than they hold: a named error, at once, in little memory."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mechicl.checkpoints import CheckpointError, Snapshots, load, load_checkpoint, save, stack_models
from mechicl.checkpoints.stacks import check_stack, models_from_stack
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.models.architectures import outline
from tests.bounds import bounded, make_no_file
from tests.checkpoints.test_folders import CONFIGS

PLAIN = TransformerConfig(x_dim=3, n_context=4, n_layers=2)
STEP_SIZES = CONFIGS["gradient descent"]
FILES = ("record.json", "config.json", "weights.safetensors", "snapshots.safetensors")


def written(folder: Path, cfg, **changes) -> Path:
    """A checkpoint with snapshots whose config was changed afterwards, with the right digests."""
    model = (HookedLSTM if isinstance(cfg, LSTMConfig) else HookedTransformer)(cfg, seed=0)
    stacked = stack_models([model])
    save(folder, model, {"seeds": [3]}, Snapshots((0,), {name: t[None] for name, t in stacked.items()}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    sign(folder)
    return folder


def sign(folder: Path, **changes) -> None:
    record = json.loads((folder / "record.json").read_text())
    record["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES[1:]}
    (folder / "record.json").write_text(json.dumps(record | changes))


@pytest.mark.parametrize(
    ("cfg", "changes", "message"),
    [
        (PLAIN, {"n_layers": 10**6}, "those of 2 layers, n_layers=1000000"),
        (PLAIN, {"n_layers": 10**6, "attention": ",".join(["relu", "linear"] * 5 * 10**4)}, r"layers|attention"),
        (PLAIN, {"n_layers": 1}, "those of 2 layers, n_layers=1"),
        (PLAIN, {"recurrent": True, "n_layers": 10**6}, "those of 2 layers"),
        (CONFIGS["recurrent"], {"n_layers": 10**6}, "1 models of n_layers=1,000,000 are more than the 10,000 layers"),
        (PLAIN, {"d_model": 20_000, "d_head": 20_000}, r"must be \[seed, 1, 20000, 20000\]"),
        (PLAIN, {"x_dim": 10**9, "d_model": 10**9 + 1, "d_head": 10**9 + 1}, r"must be \[seed"),
        (CONFIGS["everything learned"], {"d_mlp": 10**12}, r"must be \[seed, .*1000000000000"),
        (
            CONFIGS["everything learned"],
            {"n_context": 10**9, "n_ctx": 2 * 10**9 + 1},
            r"W_pos must be \[seed, 2000000001, 8\]",
        ),
        (CONFIGS["everything learned"], {"n_heads": 10**9, "d_head": 4}, r"must be \[seed, 1000000000"),
        (STEP_SIZES, {"d_model": 20_000, "d_head": 20_000}, r"must be \[seed"),
        (LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=5), {"n_layers": 10**6}, "those of 2 layers"),
        (LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=5), {"d_model": 20_000}, r"must be \[seed"),
        (PLAIN, {"d_model": 10**15, "d_head": 10**15}, "no model has the sizes"),
        (PLAIN, {"x_dim": 10**400}, "config.json"),
        (PLAIN, {"act_fn": "x" * 2**21}, "config.json has 2,09.,... bytes; a file of its kind is read up to 1,048,576"),
    ],
)
def test_a_config_that_claims_more_than_the_weights_is_refused_before_anything_is_made(tmp_path, cfg, changes, message):
    folder = written(tmp_path / "mine", cfg, **changes)
    with bounded(), pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_a_model_of_step_sizes_takes_no_memory_for_the_matrices_that_it_does_not_have(tmp_path):
    """Four matrices of 20,000² numbers would take 6 GB."""
    cfg = STEP_SIZES.replace(d_model=20_000, d_head=20_000, mlp_location="blocks", d_mlp=None, attn_only=True)
    with bounded():
        assert load(written(tmp_path / "mine", cfg)).cfg.d_model == 20_000


@pytest.mark.parametrize("n_models", [10_001, 10**6])
def test_a_million_models_of_a_number_each_are_refused(n_models):
    cfg = TransformerConfig(x_dim=1, n_context=1, n_layers=0)
    with bounded(), pytest.raises(ValueError, match=f"{n_models:,} models of n_layers=0 are more"):
        models_from_stack(cfg, {"initial_weights": torch.zeros(n_models, 1, 1)})


def test_former_biases_of_embeddings_add_up_to_nothing_larger_than_both():
    cfg = TransformerConfig(d_vocab=3, n_ctx=4, n_layers=0, d_model=4, n_heads=1)
    model = HookedTransformer(cfg)
    stacked = stack_models([model, model])
    with pytest.raises(ValueError, match=r"embed\.b_E does not fit embed\.W_E"):
        check_stack(cfg, {**stacked, "embed.b_E": torch.zeros(2, 10**6, 4, device="meta")})
    added = models_from_stack(cfg, {**stacked, "embed.b_E": torch.ones(2, 4)})
    torch.testing.assert_close(added[1].embed.W_E, model.embed.W_E + 1)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_what_is_no_file_of_a_reasonable_size_is_refused_at_once(tmp_path, name, kind):
    folder = written(tmp_path / "mine", PLAIN)
    make_no_file(folder / name, kind)
    with bounded(), pytest.raises(CheckpointError, match=r"pipe, a device|read up to|not a readable|no record\.json"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "change",
    [lambda w: w.update(extra=torch.zeros(1, 1, 2)), lambda w: w.update({"blocks.0.attn.W_Q": torch.zeros(1, 1, 5)})],
)
def test_snapshots_of_other_weights_are_refused_before_they_are_read(tmp_path, change):
    folder = written(tmp_path / "mine", PLAIN)
    tensors = load_file(folder / "snapshots.safetensors")
    change(tensors)
    save_file(tensors, folder / "snapshots.safetensors", metadata={"steps": "0"})
    sign(folder)
    with pytest.raises(CheckpointError, match=r"snapshots\.safetensors: .* is no snapshot of a weight"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curve": 3}, "curve must be an object"),
        ({"curve": {"eval_loss": 3}}, r"curve\.eval_loss must be a list of lists of 1"),
        ({"curve": {"eval_loss": [[1.0, 2.0]]}}, r"curve\.eval_loss must be a list of lists of 1"),
        ({"curve": {"eval_loss": [["low"]]}}, r"curve\.eval_loss holds something that is neither"),
        ({"training": []}, "training must be an object"),
        ({"training": {"more_tasks": 3}}, r"training\.more_tasks must be a list"),
        ({"seeds": 3}, "1 models for the seeds 3"),
    ],
)
def test_a_record_of_other_things_than_a_training_writes_is_refused(tmp_path, changes, message):
    folder = written(tmp_path / "mine", PLAIN)
    sign(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_record_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    model = HookedTransformer(PLAIN)
    monkeypatch.setattr("mechicl.base.files.MOST_VALUES", 1000)
    with pytest.raises(ValueError, match=r"record.json has more than 1,000 values"):
        save(tmp_path / "mine", model, {"curve": {"step": [0] * 1001}})
    with pytest.raises(ValueError, match="67,108,864 are read"):
        save(tmp_path / "mine", model, {"words": "x" * 2**26})
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_an_outline_is_the_model_without_its_numbers(cfg):
    drawn, model = outline(cfg), HookedTransformer(cfg)
    there, here = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (drawn, model))
    assert {n: (t.shape, t.dtype) for n, t in there.items()} == {n: (t.shape, t.dtype) for n, t in here.items()}
    assert {tensor.device.type for tensor in there.values()} == {"meta"}


def test_links_to_files_are_read_as_in_the_hubs_cache(tmp_path):
    folder = written(tmp_path / "mine", PLAIN)
    (tmp_path / "linked").mkdir()
    for name in FILES:
        os.symlink(folder / name, tmp_path / "linked" / name)
    assert load_checkpoint(tmp_path / "linked").record["seeds"] == [3]
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "linked")
