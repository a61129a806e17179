"""Checkpoints on the Hugging Face hub, played by a server on this machine."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from mechicl.checkpoints import CheckpointError, load, load_checkpoint, push, save
from mechicl.checkpoints.hub import FILES, Reference, model_card
from mechicl.models import HookedTransformer, TransformerConfig
from tests.hub_server import Hub, serve

CFG = TransformerConfig(x_dim=2, n_context=3, n_layers=1)
RECORD = {
    "command": "mechicl train mine | tee log",
    "seeds": [3, 4],
    "training": {"task": {"type": "LinearRegression", "x_dim": 2, "n_context": 3}, "steps": 70, "seeds": [3, 4]},
    "curve": {"step": [0, 70], "eval_loss": [[1.0, 1.0], [0.25, 0.125]]},
    "versions": {"torch": "2.x"},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with serve() as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "mine", [HookedTransformer(CFG, seed=seed) for seed in (3, 4)], RECORD)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (name, weight), other in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(weight, other), name


def sent_to(hub: Hub) -> dict[str, bytes]:
    """The files of the repository's main branch."""
    resolved = hub.resolve("me/mine", "main")
    assert not isinstance(resolved, str), resolved
    return resolved[1]


def test_a_checkpoint_goes_there_and_back(hub: Hub, folder: Path):
    pinned = push(folder, "me/mine", private=True)
    assert pinned == f"hf://me/mine@{hub.repositories['me/mine']['branches']['main']}"
    assert hub.repositories["me/mine"]["private"]
    sent = sent_to(hub)
    assert {name: sent[name] for name in files(folder)} == files(folder)
    assert set(sent) == {*files(folder), "README.md"}
    for name in ("hf://me/mine", "hf://me/mine@main", pinned):
        fetched = load_checkpoint(name)
        assert fetched.name == "me/mine"
        assert fetched.record == load_checkpoint(folder).record
        assert_same(fetched.model(4), load_checkpoint(folder).model(4))
    assert_same(load("hf://me/mine", seed=4), load(folder, seed=4))


def test_the_card_has_the_entries_of_the_record(hub: Hub, folder: Path):
    push(folder, "me/mine")
    card = sent_to(hub)["README.md"].decode()
    assert card.startswith("---\nlibrary_name: mechicl\n")
    assert 'load("hf://me/mine")' in card
    for row in ("models | 2, seeds 3, 4", "task: type | LinearRegression", "model: n_context | 3", "steps | 70",
                "held-out loss at the end, by seed | 0.25, 0.125", "version: torch | 2.x"):  # fmt: skip
        assert f"| {row} |\n" in card, row
    assert "mechicl train mine | tee log" in card
    assert "sha256" not in card
    assert "by seed" not in model_card("me/bare", {}, CFG.to_dict(), 1)


def test_a_revision_stays_what_it_was(hub: Hub, folder: Path, tmp_path: Path):
    first = push(folder, "me/mine")
    other = save(tmp_path / "other", HookedTransformer(CFG, seed=9), {"seeds": [9]})
    second = push(other, "me/mine")
    assert first != second
    assert load_checkpoint(first).record["seeds"] == [3, 4]
    assert load_checkpoint(second).record["seeds"] == load_checkpoint("hf://me/mine").record["seeds"] == [9]


def test_only_the_checkpoints_own_files_are_fetched(hub: Hub, folder: Path, tmp_path: Path):
    bad = {"pytorch_model.bin": pickle.dumps({}), "modeling.py": b"raise SystemExit", "a/config.json": b"",
           "optimizer.safetensors": b"x" * 100, "README.md": b"mine"}  # fmt: skip
    hub.commit("you/more", files(folder) | bad)
    load_checkpoint("hf://you/more")
    assert hub.fetched() == set(files(folder)) <= set(FILES)
    on_disk = {path.name for path in (tmp_path / "cache").rglob("*") if "snapshots" in path.parts and not path.is_dir()}
    assert on_disk == set(files(folder))


def test_downloaded_files_are_not_trusted(hub: Hub, folder: Path):
    whole = files(folder)
    weights = bytearray(whole["weights.safetensors"])
    weights[-1] ^= 1
    record = json.loads(whole["record.json"])
    record["training"]["task"] = {"type": "antigravity:Task"}
    del record["sha256"]["record.json"]  # an attacker would make one that fits
    hub.commit("you/changed", whole | {"weights.safetensors": bytes(weights)})
    hub.commit("you/pickled", whole | {"weights.safetensors": pickle.dumps({"a": 1})})
    hub.commit("you/torn", {name: data for name, data in whole.items() if name != "weights.safetensors"})
    hub.commit("you/empty", {"README.md": b"nothing"})
    hub.commit("you/task", whole | {"record.json": json.dumps(record).encode()})
    for name, message in {
        "changed": "was changed after the checkpoint was saved", "pickled": "safetensors", "torn": "is missing",
        "empty": "has no record.json: it is not a checkpoint",
    }.items():  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(f"hf://you/{name}")
    with pytest.raises(CheckpointError, match="loading imports nothing that a file names"):
        _ = load_checkpoint("hf://you/task").task


@pytest.mark.parametrize(("call", "message"), [
    (lambda folder: load("hf://me/none"), "no repository 'me/none' on the hub"),
    (lambda folder: load("hf://me/some@v9"), "me/some has no revision 'v9'"),
    (lambda folder: load("hf://some"), "'hf://some' is not a repository of the hub: write hf://owner/name"),
    (lambda folder: push(folder, "me/mine"), "me/mine cannot be written to"),
    (lambda folder: push(folder, "mine"), "'mine' is not a repository"),
    (lambda folder: push("nothing", "me/mine"), "no checkpoint 'nothing'"),
    (lambda folder: save("hf://me/mine", HookedTransformer(CFG)), r"then push\(folder, 'me/mine'\)"),
])  # fmt: skip
def test_missing_and_unwritable_repositories(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, call, message):
    hub.commit("me/some", files(folder))
    if "written" in message:
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match=message):
        call(folder)
    assert "me/mine" not in hub.repositories


def test_without_a_connection_the_cache_serves(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch):
    push(folder, "me/mine")
    load("hf://me/mine")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between attempts
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        monkeypatch.setattr(constants, name, getattr(constants, name).replace(hub.url, "http://127.0.0.1:9"))
    assert_same(load("hf://me/mine"), load(folder))
    with pytest.raises(CheckpointError, match="could not be read from the hub"):
        load("hf://me/other")


def test_references():
    for text in ("owner/name", "hf://owner/name"):
        assert Reference.parse(text) == Reference("owner/name", None)
        assert Reference.parse(f"{text}@v1.0") == Reference("owner/name", "v1.0")
    for text in ("", "hf://", "name", "a/b/c", "../x", "hf://a/b@", "https://huggingface.co/a/b", "a/b c"):
        with pytest.raises(CheckpointError, match="is not a repository of the hub"):
            Reference.parse(text)
