"""Checkpoints in folders and on the hub: reading, writing, sending."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from mechicl.base.annotations import described
from mechicl.base.arguments import ArgumentError, checked, fits
from mechicl.base.files import MOST_BYTES, NEW, current_path, json_bytes, read_json, settle, write_together
from mechicl.base.shipped import available, shipped_folder
from mechicl.base.tensor_files import read_outline, read_tensors, tensor_bytes
from mechicl.checkpoints.checkpoint import (
    OF_EACH_MODEL,
    Checkpoint,
    CheckpointError,
    Snapshots,
    check_stack,
    models_from_stack,
    replaced,
    stack_models,
)
from mechicl.checkpoints.hub import FILES, PREFIX, Reference, download, model_card, upload
from mechicl.models import Model, ModelConfig, PromptedModel, config_from_dict
from mechicl.models.transformer.lens_config import RENAMED
from mechicl.models.wrapping.wrapped import refuse_wrapped

RECORD = "record.json"
"""The file of a checkpoint that is read first and written last; it has the digests of the others."""
_INTEGERS, _MAPPING = (Sequence[int], "a list of integers"), (Mapping[str, Any], "a mapping")
_LOSSES = (Sequence[Sequence[float | None]], "a list of the models' losses at each step")
_OF_RECORD = {"training": _MAPPING, "curve": _MAPPING, **dict.fromkeys(OF_EACH_MODEL, _INTEGERS)}
_OF_TRAINING = {"seeds": _INTEGERS, "more_tasks": (Sequence[Mapping[str, Any]], "a list of tasks")}
_OF_CURVE = {"step": _INTEGERS, "eval_step": _INTEGERS, "loss": _LOSSES, "eval_loss": _LOSSES}


@checked
def load(name: str | Path, seed: int | None = None) -> Model:
    """Load a trained model.

    Args:
        name: name of a checkpoint that comes with the package (see `available`), path of a checkpoint folder, or
            "hf://owner/name", a repository of the Hugging Face hub ("hf://owner/name@revision" for a branch, tag or
            commit other than main). Only the checkpoint's JSON and safetensors files are downloaded.
        seed: training seed of the model to load; by default the seed with the lowest held-out loss at the end of
            training. If several tasks were trained at once, the model is the one of the first task.

    Returns:
        The model in eval mode on the CPU. `predict(prompts)` returns its predictions for the queries; a model of token
        ids, called with ids `[batch pos]`, returns logits.

    Raises:
        CheckpointError: unknown name or seed; a file is missing, damaged, changed since it was saved, or too large; or
            the weights do not fit the config. Code in the files is never executed.

    Example:
        >>> load("lsa-1l").cfg.n_layers
        1
    """
    return load_checkpoint(name).model(seed)


@checked
def load_checkpoint(name: str | Path) -> Checkpoint:
    """Load everything in a checkpoint: the models of all seeds, the training record, the weights during training.

    Args:
        name: a checkpoint's name, folder, or "hf://owner/name", as for `load`.

    Raises:
        CheckpointError: no such checkpoint, or damaged files, as for `load`.

    Example:
        >>> len(load_checkpoint("lsa-1l").models)
        5
    """
    folder = _folder(name)
    record_path, config_path, weights_path, snapshots_path = (current_path(folder, each, RECORD) for each in FILES)
    with _checked(record_path):
        record = read_json(record_path)
    digests = record.get("sha256")
    if not isinstance(digests, dict) or not {"config.json", "weights.safetensors"} <= set(digests):
        raise CheckpointError(f"{record_path} lacks the digests (sha256) of config.json and the weights")
    with _checked(config_path):
        data = read_json(config_path)
        _check_digest(config_path, digests)
        if "device" in data:  # a file must not choose where the model is made; "meta" would even drop the weights
            raise ValueError("device is not a field of a saved config")
        cfg: ModelConfig = config_from_dict(data)
    # The header is read before the digest is compared ("this is a pickle" is more helpful than "this is another file"),
    # and compared with the config before memory of the claimed size is taken.
    with _checked(weights_path):
        outline, _ = read_outline(weights_path)
        n_models = check_stack(cfg, _in_full(cfg, outline))
    with _checked(record_path):
        _check_record(record, digests, n_models)
    with _checked(weights_path):
        _check_digest(weights_path, digests)
        models = models_from_stack(cfg, _in_full(cfg, read_tensors(weights_path)[0]))
    snapshots = None
    if "snapshots.safetensors" in digests:
        with _checked(snapshots_path):
            _check_snapshots(*read_outline(snapshots_path), outline)
            _check_digest(snapshots_path, digests)
            weights, metadata = read_tensors(snapshots_path)
            snapshots = _snapshots(_in_full(cfg, weights), metadata)
    title = Reference.parse(str(name)).repository if _is_on_hub(name) else folder.name
    return replaced(Checkpoint(title, models, record, snapshots))


@checked
def save(
    folder: str | Path,
    models: Model | Sequence[Model],
    record: dict[str, Any] | None = None,
    snapshots: Snapshots | None = None,
) -> Path:
    """Write a checkpoint folder and return its path, by which `load` reads it; `push` sends it to the hub.

    An existing checkpoint is replaced as a whole: if this call fails or is killed at any moment, the folder loads as
    the old checkpoint or as the new one.

    Args:
        folder: folder to write; it is made if it does not exist.
        models: a model, or several with the same config (the seeds of one training).
        record: plain JSON data about the training, such as `TrainingResult.record`; empty by default.
        snapshots: weights at some steps of training; by default none are saved.

    Raises:
        ArgumentError: a value in the record is not plain JSON data, such as a set or NaN.
        ValueError: a repository of the hub as folder, no models, different configs, hooks, weights that are not those
            of the config (tied, parametrized), snapshots that are not those of the models, a record's `seeds` that are
            not different integers, a number of them or of the curve's losses that differs from the number of models, or
            a record that is too long to be read.
    """
    if str(folder).startswith("hf:"):
        raise ValueError(f"save() writes to a folder, then push(folder, {str(folder)[3:].lstrip('/')!r}) sends it")
    refuse_wrapped(models, "checkpoints are")
    models = [models] if isinstance(models, PromptedModel) else list(models)
    if not models or any(model.cfg.to_dict() != models[0].cfg.to_dict() for model in models):
        raise ValueError("save() needs one or more models with the same config")
    if any(model.has_hooks() for model in models):
        raise ValueError("save() writes weights only: remove the hooks first, reset_hooks(), or the replaced parts")
    weights = stack_models(models)
    check_stack(models[0].cfg, weights)  # as `load` does
    record = record or {}
    _check_plain("record", record)
    _check_models(record, len(models))
    files = {"config.json": json_bytes(models[0].cfg.to_dict()), "weights.safetensors": tensor_bytes(weights)}
    if snapshots is not None:
        steps = ",".join(map(str, snapshots.steps))
        _check_snapshots(snapshots.weights, {"steps": steps}, weights)
        first = {name: weight[0] for name, weight in snapshots.weights.items()}
        check_stack(models[0].cfg, _in_full(models[0].cfg, first))
        files["snapshots.safetensors"] = tensor_bytes(snapshots.weights, {"steps": steps})
    digests = {name: hashlib.sha256(contents).hexdigest() for name, contents in files.items()}
    digests[RECORD] = _record_digest(record)
    files[RECORD] = json_bytes({**record, "sha256": digests})
    if len(files[RECORD]) > MOST_BYTES:
        raise ValueError(f"the record has {len(files[RECORD]):,} bytes; {MOST_BYTES:,} are read: thin its curve")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_together(folder, files, last=RECORD)
    if snapshots is None:
        (folder / "snapshots.safetensors").unlink(missing_ok=True)
    return folder


@checked
def push(checkpoint: str | Path, repository: str, *, private: bool = False) -> str:
    """Send a checkpoint to a repository of the Hugging Face hub, with a README made from its record.

    The checkpoint is loaded first, so that nothing damaged is sent. The repository is made if it does not exist; its
    checkpoint and README are replaced in one commit. Log in first: `hf auth login`, or the variable HF_TOKEN.

    Args:
        checkpoint: path of a checkpoint folder (see `save`), or name of one that comes with the package.
        repository: "owner/name" of the repository.
        private: make the repository private, if it is new.

    Returns:
        The name for `load`: "hf://owner/name@commit".

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
    repository = Reference.parse(repository).repository
    card = model_card(repository, record, loaded.models[0].cfg.to_dict(), len(loaded.models))
    return upload(folder, repository, card, private=private)


def _is_on_hub(name: str | Path) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def _folder(name: str | Path) -> Path:
    if _is_on_hub(name):
        folder = download(str(name))
    else:
        folder = (shipped_folder(name) if isinstance(name, str) and name in available() else None) or Path(name)
        if not folder.is_dir():
            raise CheckpointError(
                f"no checkpoint {str(name)!r}: it is neither a folder nor one of the shipped ones, {available()}"
            )
    if not current_path(folder, RECORD, RECORD).is_file():
        raise CheckpointError(f"{name} has no record.json: it is not a checkpoint, or it was not saved completely")
    return folder


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _check_digest(path: Path, digests: Mapping[str, Any]) -> None:
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digests[path.name]:
            raise CheckpointError(f"{path} was changed after the checkpoint was saved (its SHA-256 differs)")


def _check_plain(name: str, value: Any, depth: int = 0) -> None:
    if isinstance(value, list | tuple | Mapping) and depth < 200:
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            if not isinstance(key, str | int | float | bool | None):
                raise ArgumentError(f"the keys of {name} must be text, got {key!r}")
            _check_plain(f"{name}[{key!r}]", part, depth + 1)
    elif not isinstance(value, str | int | float | bool | None):
        raise ArgumentError(f"{name} must be plain JSON (numbers, text, lists, mappings), got {type(value).__name__}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"{name} must be finite, got {value}")


def _record_digest(record: dict[str, Any]) -> str:
    """Digest of a record without its digests, after a round trip: if JSON writes two keys alike, the last stays."""
    record = {name: value for name, value in record.items() if name != "sha256"}
    return hashlib.sha256((json.dumps(json.loads(json_bytes(record)), indent=1) + "\n").encode()).hexdigest()


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, tuple[Any, str]]) -> None:
    for name, (hint, kind) in kinds.items():
        if name in values and not fits(values[name], hint):
            raise ValueError(f"{name} must be {kind}, got {described(values[name])}")


def _check_models(record: dict[str, Any], n_models: int) -> None:
    """Refuse entries about the models of another kind, or of another number of models."""
    _check_kinds(record, _OF_RECORD)
    training, curve = record.get("training", {}), record.get("curve", {})
    _check_kinds(training, _OF_TRAINING)
    _check_kinds(curve, _OF_CURVE)
    for name in OF_EACH_MODEL:
        if len(record.get(name, range(n_models))) != n_models:
            raise ValueError(f"{n_models} models for the {name} {record[name]!r}")
    n_seeds = n_models // (1 + len(training.get("more_tasks", ())))
    seeds = record.get("seeds", ())[:n_seeds]
    # models selected from several tasks have no task, and may share their seeds
    if len(set(seeds)) < len(seeds) and ("task" in training or not training):
        raise ValueError(f"seeds must differ, got {seeds}")
    for name in ("loss", "eval_loss"):
        if wrong := [len(line) for line in curve.get(name, ()) if len(line) != n_models]:
            raise ValueError(f"the curve has {wrong[0]} losses ({name}) of {n_models} models")


def _check_record(record: dict[str, Any], digests: dict[str, Any], n_models: int) -> None:
    """Refuse a record that was changed since it was saved, or that `save` would not write."""
    _check_models(record, n_models)
    if unknown := sorted(set(digests) - set(FILES)):
        raise ValueError(f"it has digests (sha256) of {unknown}, which are not files of a checkpoint")
    own = _record_digest(record)
    if digests.get(RECORD, own) != own:  # records of earlier versions have no digest
        raise ValueError(
            f"it was changed since it was saved (its SHA-256 differs). If that was on purpose, take {RECORD!r} out of "
            f"its sha256"
        )


def _in_full(cfg: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights that a file has at half the size to the config's dtype."""
    dtype = cfg.torch_dtype

    def is_half(weight: Tensor) -> bool:
        return weight.is_floating_point() and 2 * weight.itemsize == dtype.itemsize

    return {name: weight.to(dtype) if is_half(weight) else weight for name, weight in weights.items()}


def _check_snapshots(outline: dict[str, Tensor], metadata: dict[str, str], weights: dict[str, Tensor]) -> None:
    _snapshots(outline, metadata)
    shapes = {RENAMED.get(name, name): weight.shape for name, weight in weights.items()}
    for name, tensor in outline.items():
        if shapes.get(RENAMED.get(name, name)) != tensor.shape[1:]:
            raise ValueError(f"{name} of shape {list(tensor.shape)} is not a snapshot of a weight of these models")


def _snapshots(weights: dict[str, Tensor], metadata: dict[str, str]) -> Snapshots:
    return Snapshots(tuple(int(step) for step in metadata.get("steps", "").split(",") if step), weights)
