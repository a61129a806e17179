"""Checkpoints in folders and on the hub: reading, writing, sending."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mechicl.base.files import (
    MOST_BYTES,
    NEW,
    check_values,
    current_path,
    json_bytes,
    read_json,
    settle,
    write_together,
)
from mechicl.base.shipped import available, shipped_folder
from mechicl.base.tensor_files import read_outline, read_tensors, tensor_bytes
from mechicl.checkpoints.checkpoint import Checkpoint, CheckpointError, Snapshots
from mechicl.checkpoints.hub import FILES, PREFIX, HubError, Reference, download, model_card, upload
from mechicl.checkpoints.random_weights import replaced
from mechicl.checkpoints.stacks import check_stack, models_from_stack, stack_models
from mechicl.models import Model, ModelConfig, PromptedModel, config_from_dict
from mechicl.models.transformer.state_names import RENAMED
from mechicl.models.wrapping.wrapped import refuse_wrapped

RECORD = "record.json"
"""The file of a checkpoint that is read first and written last: it says what the others must be."""
MOST_CONFIG = 2**20
"""Bytes of a config.json that are read; a long one has two thousand."""


def load(name: str | Path, seed: int | None = None) -> Model:
    """A trained model in eval mode.

    Args:
        name: of a shipped checkpoint (see `available`), the path of a checkpoint folder, or "hf://owner/name", a
            repository of the Hugging Face hub, with "@revision" for another than its main branch. Of that only the
            checkpoint's JSON and safetensors files are fetched.
        seed: which of its training seeds; by default the one with the least held-out loss (`Checkpoint.best`). Of
            several tasks trained at once it is the first (see `Checkpoint.by_task`).

    Raises:
        CheckpointError: unknown name or seed; a file is missing, damaged, changed since it was saved, no regular file,
            larger than is read of its kind, or no safetensors; or the weights do not fit the config. Nothing in the
            files is ever executed, and nothing is made of a size that only the config claims.

    Example:
        >>> load("lsa-1l").cfg.n_layers
        1
    """
    return load_checkpoint(name).model(seed)


def load_checkpoint(name: str | Path) -> Checkpoint:
    """All seeds of a checkpoint, its record and its snapshots; arguments and errors as for `load`."""
    folder = _folder(name)
    record_path, config_path, weights_path, snapshots_path = (current_path(folder, each, RECORD) for each in FILES)
    record = _read(read_json, record_path)
    digests = record.get("sha256")
    if not isinstance(digests, dict) or not {"config.json", "weights.safetensors"} <= set(digests):
        raise CheckpointError(f"{record_path} lacks the digests (sha256) of config.json and the weights")
    data = _read(partial(read_json, most=MOST_CONFIG), config_path)
    _check_digest(config_path, digests["config.json"])
    cfg = _as_checkpoint_error(config_path, _config, data)
    # A file is compared with its digest after its header has been read ("this is a pickle" says more than "this is
    # another file"), and its header with the config before anything is made of the size that either of them claims.
    outline, _ = _read(read_outline, weights_path)
    n_models = _as_checkpoint_error(weights_path, check_stack, cfg, outline)
    _as_checkpoint_error(record_path, _check_record, record, n_models)
    _as_checkpoint_error(record_path, _check_own_digest, record, digests)
    _check_digest(weights_path, digests["weights.safetensors"])
    models = _as_checkpoint_error(weights_path, models_from_stack, cfg, _read(read_tensors, weights_path)[0])
    snapshots = None
    if "snapshots.safetensors" in digests:
        kept, metadata = _read(read_outline, snapshots_path)
        _as_checkpoint_error(snapshots_path, _check_snapshots, kept, metadata.get("steps", ""), outline)
        _check_digest(snapshots_path, digests["snapshots.safetensors"])
        stacked, metadata = _read(read_tensors, snapshots_path)
        snapshots = _as_checkpoint_error(snapshots_path, _snapshots, stacked, metadata.get("steps", ""))
    title = Reference.parse(str(name)).repository if _is_on_hub(name) else folder.name
    return replaced(Checkpoint(title, models, record, snapshots))


def save(
    folder: str | Path,
    models: Model | Sequence[Model],
    record: dict[str, Any] | None = None,
    snapshots: Snapshots | None = None,
) -> Path:
    """Write a checkpoint folder; `load` with its path reads it back.

    The record holds the digests of the other files, and of itself without them. A checkpoint that is there already is
    replaced whole or not at all: if this call fails or is killed at any moment, the folder loads as what it was, or as
    what it shall be.

    Args:
        folder: where; it is made if need be, and its checkpoint replaced if there is one. `push` sends it to the hub.
        models: one, or several with the same config (seeds of one training).
        record: plain JSON data about the training.
        snapshots: weights during training.

    Raises:
        TypeError: something in the record that JSON has no form for.
        ValueError: a repository of the hub for a folder, no models, different configs, a number in the record that is
            not finite, another number of `seeds` in it than of models, or a longer record than could be read. Nothing
            has been written then.
    """
    if str(folder).startswith("hf:"):
        raise ValueError(f"save() writes to a folder, then push(folder, {str(folder)[3:].lstrip('/')!r}) sends it")
    refuse_wrapped(models, "checkpoints are")
    models = [models] if isinstance(models, PromptedModel) else list(models)
    if not models or any(model.cfg.to_dict() != models[0].cfg.to_dict() for model in models):
        raise ValueError("save() needs one or more models with the same config")
    record = record or {}
    if not _one_model_a_seed(record, len(models)):
        raise ValueError(f"{len(models)} models for the seeds {record['seeds']!r}")
    files = {
        "config.json": json_bytes(models[0].cfg.to_dict()),
        "weights.safetensors": tensor_bytes(stack_models(models)),
    }
    if snapshots is not None:
        steps = ",".join(map(str, snapshots.steps))
        files["snapshots.safetensors"] = tensor_bytes(snapshots.weights, {"steps": steps})
    digests = {name: hashlib.sha256(contents).hexdigest() for name, contents in files.items()}
    rest = {name: value for name, value in record.items() if name != "sha256"}  # of a checkpoint that was loaded
    digests[RECORD] = _own_digest(rest)
    files[RECORD] = json_bytes({**rest, "sha256": digests})
    if len(files[RECORD]) > MOST_BYTES:
        raise ValueError(f"the record has {len(files[RECORD]):,} bytes; {MOST_BYTES:,} are read: thin its curve")
    check_values(Path(folder) / RECORD, files[RECORD])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_together(folder, files, last=RECORD)
    if snapshots is None:
        (folder / "snapshots.safetensors").unlink(missing_ok=True)
    return folder


def push(
    checkpoint: str | Path, repository: str, *, private: bool = False, message: str = "Checkpoint of mechicl"
) -> str:
    """Send a checkpoint to a repository of the Hugging Face hub, with a README that says what its record says.

    It is read first, so that nothing damaged is sent. The repository is made if it does not exist; its checkpoint and
    README are replaced in one commit, and other files stay. Log in first: `hf auth login`, or the variable HF_TOKEN.

    Args:
        checkpoint: the path of a checkpoint folder (see `save`), or the name of a shipped one.
        repository: "owner/name".
        private: make a new repository private.
        message: of the commit.

    Returns:
        What to load it by, ever the same: "hf://owner/name@commit".

    Raises:
        CheckpointError: a checkpoint that cannot be loaded, or a repository that cannot be written to.

    Example:
        >>> push(save("runs/mine", result.models, result.record), "me/sparse-4l")
        'hf://me/sparse-4l@8f3a...'
    """
    folder, loaded = _folder(checkpoint), load_checkpoint(checkpoint)
    if (folder / NEW).is_dir():  # a save was killed before it had moved its files into place
        settle(folder, RECORD)
    record = {name: value for name, value in loaded.record.items() if name != "sha256"}
    try:
        repository = Reference.parse(repository).repository
        card = model_card(repository, record, loaded.models[0].cfg.to_dict(), len(loaded.models))
        return upload(folder, repository, card, private=private, message=message)
    except HubError as error:
        raise CheckpointError(str(error)) from error


def _is_on_hub(name: str | Path) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def _folder(name: str | Path) -> Path:
    if _is_on_hub(name):
        return _from_hub(str(name))
    shipped = shipped_folder(name) if isinstance(name, str) and name in available() else None
    folder = shipped or Path(name)
    if not folder.is_dir():
        raise CheckpointError(
            f"no checkpoint {str(name)!r}: it is neither a folder nor one of the shipped ones, {available()}"
        )
    if not current_path(folder, RECORD, RECORD).is_file():
        raise CheckpointError(f"{folder} has no record.json: it is no checkpoint, or its saving was cut short")
    return folder


def _from_hub(text: str) -> Path:
    try:
        folder = download(text)
    except HubError as error:
        raise CheckpointError(str(error)) from error
    if not (folder / "record.json").is_file():
        raise CheckpointError(f"{text} has no record.json: it is no checkpoint of mechicl")
    return folder


def _read(reader: Callable[[Path], Any], path: Path) -> Any:
    try:
        return reader(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def _check_digest(path: Path, expected: Any) -> None:
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if digest != expected:
        raise CheckpointError(f"{path} was changed after the checkpoint was saved (its SHA-256 differs)")


def _as_checkpoint_error(path: Path, make: Callable[..., Any], *parts: Any) -> Any:
    try:
        return make(*parts)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _config(data: dict[str, Any]) -> ModelConfig:
    if "device" in data:  # a file does not choose where the model is made; "meta" would even drop the weights
        raise ValueError("device is not a field of a saved config")
    return config_from_dict(data)


def _own_digest(record: dict[str, Any]) -> str:
    """Of a record as it is read again, without the digests: of two keys that JSON writes alike, the last stays."""
    return hashlib.sha256(json_bytes(json.loads(json_bytes(record)))).hexdigest()


def _check_own_digest(record: dict[str, Any], digests: dict[str, Any]) -> None:
    """Refuse a record that was changed since it was saved. Those of earlier versions have no digest of their own."""
    if unknown := sorted(set(digests) - set(FILES)):
        raise ValueError(f"it has digests (sha256) of {unknown}, which are no files of a checkpoint")
    own = _own_digest({name: value for name, value in record.items() if name != "sha256"})
    if digests.get(RECORD, own) != own:
        raise ValueError(
            f"it is not what was saved: its digest (sha256) is another one. If you changed it on purpose, take "
            f"{RECORD!r} out of its sha256"
        )


def _check_record(record: dict[str, Any], n_models: int) -> None:
    """Refuse a record whose parts that are read of every checkpoint are not what `save` writes."""
    if not _one_model_a_seed(record, n_models):
        raise ValueError(f"{n_models} models for the seeds {record['seeds']!r}")
    for name in ("training", "curve"):
        if not isinstance(record.get(name, {}), dict):
            raise ValueError(f"{name} must be an object, got {type(record[name]).__name__}")
    if not isinstance(record.get("training", {}).get("more_tasks", []), list):
        raise ValueError("training.more_tasks must be a list")
    for name in ("loss", "eval_loss"):
        lines = record.get("curve", {}).get(name) or []
        if not isinstance(lines, list) or not all(isinstance(line, list) and len(line) == n_models for line in lines):
            raise ValueError(f"curve.{name} must be a list of lists of {n_models} losses, one a model")
        if not all(loss is None or isinstance(loss, int | float) for line in lines for loss in line):
            raise ValueError(f"curve.{name} holds something that is neither a number nor null")


def _check_snapshots(kept: dict[str, Tensor], steps: str, weights: dict[str, Tensor]) -> None:
    """Refuse snapshots of other weights than the models', before they are read."""
    _snapshots(kept, steps)
    shapes = {RENAMED.get(name, name): weight.shape for name, weight in weights.items()}
    for name, tensor in kept.items():
        if shapes.get(RENAMED.get(name, name)) != tensor.shape[1:]:
            raise ValueError(f"{name} of shape {list(tensor.shape)} is no snapshot of a weight of these models")


def _snapshots(weights: dict[str, Tensor], steps: str) -> Snapshots:
    return Snapshots(tuple(int(step) for step in steps.split(",") if step), weights)


def _one_model_a_seed(record: dict[str, Any], n_models: int) -> bool:
    seeds = record.get("seeds", range(n_models))
    return isinstance(seeds, (list, tuple, range)) and len(seeds) == n_models
