"""Clamps in a training: the models that they copy from, and checks that both fit together."""

import dataclasses
import hashlib
from pathlib import Path

from torch import Tensor

from mechicl.base.tensor_files import read_tensors
from mechicl.checkpoints import load_checkpoint
from mechicl.models import Model, build
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits
from mechicl.training.clamp import Clamp
from mechicl.training.config import TrainingConfig
from mechicl.training.ensemble import Ensemble
from mechicl.training.results import snapshot_path


class Clamping:
    """The clamps of a run, and the models that they copy from.

    Attributes:
        digests: SHA-256 of the weights of each source, by the name of its clamp.
    """

    def __init__(self, config: TrainingConfig, folder: Path, model: Model, tokens: Tensor):
        self.config, self.folder, self.device = config, folder, tokens.device
        self.digests: dict[str, str] = {}
        self._sources: list[Ensemble | None] = []
        for i, clamp in enumerate(config.interventions):
            try:
                source = self._load_source(clamp)
                _check(clamp, ModelAdapter(model.eval()), tokens, source)
            except (TypeError, ValueError) as error:
                raise ValueError(f"interventions[{i}]: {error}") from error
            if source is not None:
                weights = source.flat.numpy(force=True).tobytes()
                self.digests[f"interventions[{i}]"] = hashlib.sha256(weights).hexdigest()
            self._sources.append(source)

    def at(self, step: int) -> list[tuple[Clamp, Ensemble | None]]:
        """The clamps of a training step, each with the models that it copies from, if any."""
        active = [i for i, clamp in enumerate(self.config.interventions) if clamp.is_active(step)]
        for i in active:
            if self.config.interventions[i].method == "freeze" and self._sources[i] is None:
                self._sources[i] = self._frozen(self.config.interventions[i].snapshot or 0)
        return [(self.config.interventions[i], self._sources[i]) for i in active]

    def _frozen(self, step: int) -> Ensemble:
        """The models of this run at a step: of the first from their seeds, of later ones from the snapshot."""
        source = Ensemble([build(self.config.model, seed) for _, seed in self.config.members])
        if step > 0:
            source.load(read_tensors(snapshot_path(self.folder, step))[0])
        return source.to(self.device)

    def _load_source(self, clamp: Clamp) -> Ensemble | None:
        """The models that are copied from, one for each trained model."""
        if clamp.source is None:
            return None
        checkpoint = load_checkpoint(clamp.source)
        if clamp.snapshot is not None:
            steps = checkpoint.snapshots.steps if checkpoint.snapshots else ()
            if clamp.snapshot not in steps:
                raise ValueError(f"{clamp.source!r} has snapshots of the steps {list(steps)}, not of {clamp.snapshot}")
            models = checkpoint.models_at(steps.index(clamp.snapshot))
            checkpoint = dataclasses.replace(checkpoint, models=models)
        seeds = [seed if clamp.source_seed == "own" else clamp.source_seed for _, seed in self.config.members]
        models = [checkpoint.model(seed).to(dtype=self.config.model.torch_dtype) for seed in seeds]
        return Ensemble(models).to(self.device)


def _check(clamp: Clamp, adapter: ModelAdapter, tokens: Tensor, source: Ensemble | None) -> None:
    """Refuse (ValueError) hooks and places that the model does not have, and sources with other shapes."""
    check_edits(adapter, tokens, [clamp.hook_name])
    shape = list(adapter.record(tokens, [clamp.hook_name], 1)[clamp.hook_name].shape[1:])
    for axis, size in zip(clamp.axes, shape, strict=False):
        if outside := [place for place in clamp.places(axis) or () if place >= size]:
            raise ValueError(f"{axis} must be 0 to {size - 1}, got {outside}")
    if source is None:
        return
    name = clamp.source_hook_name
    try:
        copied = list(ModelAdapter(source.template).record(tokens, [name], 1)[name].shape[1:])
    except (IndexError, RuntimeError, ValueError) as error:
        raise ValueError(f"{clamp.source!r} cannot run on the prompts of this training: {error}") from error
    if clamp.source_head is not None:
        head = clamp.axes.index("head")
        if clamp.source_head >= copied[head]:
            raise ValueError(f"source_head must be 0 to {copied[head] - 1}, got {clamp.source_head}")
        copied[head] = shape[head]
    if copied != shape:
        raise ValueError(f"{clamp.source!r} has an activation {copied} at {name!r}, the model {shape}")
