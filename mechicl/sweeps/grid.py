"""A grid of trainings: every combination of the axes' values, in cells of models that are trained together."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mechicl.base.arguments import Count, check_fields
from mechicl.sweeps.axes import SEED, Axis, change, combinations, read_axes
from mechicl.training import PRESETS, TrainingConfig

Place = dict[str, Any]
"""A point of the grid: a label for each axis."""


@dataclass(frozen=True, eq=False)
class SweepCell:
    """Models of a grid that differ in seed or task only, trained together as one ensemble.

    Its folder is named by its first point and its config's digest; `places` follow `config.members`.
    """

    name: str
    config: TrainingConfig
    places: tuple[Place, ...]

    @property
    def cost(self) -> float:
        """Estimate of its cost, in arbitrary units: the most expensive cells start first."""
        model, config = self.config.model, self.config
        length = getattr(model, "n_ctx", None) or getattr(model, "n_context", None) or 1
        layers = model.n_layers * (12 * model.d_model**2 + 2 * length * model.d_model)
        return float(config.steps * config.batch_size * len(config.members) * length * layers) or 1.0


@dataclass(frozen=True, eq=False)
class Grid:
    """Every combination of the values of some axes (see `Sweep`, which runs them)."""

    config: TrainingConfig | str
    over: Mapping[str, Any]
    together: Count = 8
    threads: Count = 1

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.config, str):
            if self.config not in PRESETS:
                raise ValueError(f"no preset {self.config!r}: there are {sorted(PRESETS)}")
            object.__setattr__(self, "config", PRESETS[self.config])
        if self.base.more_tasks:
            raise ValueError("a sweep's config has one task: leave out more_tasks, and make an axis of tasks")
        self.cells  # noqa: B018 - refuses what does not fit before anything is trained

    @property
    def base(self) -> TrainingConfig:
        """The config that all cells share."""
        assert isinstance(self.config, TrainingConfig)
        return self.config

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """The axes by name, "seed" last."""
        axes = read_axes(self.over)
        seeds = axes.pop(SEED, None)
        return axes | {SEED: seeds or {seed: {SEED: seed} for seed in self.base.seeds}}

    @property
    def seeds(self) -> tuple[Any, ...]:
        """Training seeds of every combination."""
        return tuple(self.axes[SEED])

    @cached_property
    def places(self) -> list[Place]:
        """All points of the grid, the last axis running fastest."""
        return combinations(self.axes)

    @cached_property
    def cells(self) -> list[SweepCell]:
        """The trainings, in the grid's order."""
        cells = []
        for group in self._groups():
            (place, config), *others = group
            config = config.replace(more_tasks=tuple(other.task for _, other in others))
            text = re.sub(r"[^A-Za-z0-9=._,-]+", "_", place_text(place).replace(", ", ",")).strip(",._")[:80]
            n_seeds = max(1, self.together // len(group))
            for i in range(0, len(self.seeds), n_seeds):
                part = config.replace(seeds=self.seeds[i : i + n_seeds])
                places = tuple({**place, SEED: seed} for place, _ in group for seed in part.seeds)
                cells.append(SweepCell("-".join(filter(None, [text, _digest(part.to_dict())])), part, places))
        return cells

    def _groups(self) -> list[list[tuple[Place, TrainingConfig]]]:
        """Trainings that can train together, in order: their configs differ in the task only."""
        groups: list[list[tuple[Place, TrainingConfig]]] = []
        open_groups: dict[str, list[tuple[Place, TrainingConfig]]] = {}
        seen: dict[str, Place] = {}
        for place, config in self._trainings():
            data = config.to_dict()
            whole = _digest(data)
            if whole in seen:
                raise ValueError(f"{place_text(seen[whole])} and {place_text(place)} are the same training: drop one")
            seen[whole] = place
            key = _digest({name: value for name, value in data.items() if name != "task"})
            group = open_groups.get(key)
            full = group is not None and (len(group) + 1) * len(self.seeds) > self.together
            if group is None or full or not _fit_together([*(c for _, c in group), config]):
                group = open_groups[key] = []
                groups.append(group)
            group.append((place, config))
        return groups

    def _trainings(self) -> list[tuple[Place, TrainingConfig]]:
        trainings = []
        others = {name: axis for name, axis in self.axes.items() if name != SEED}
        for place in combinations(others):
            changes: dict[str, Any] = {}
            for name, label in place.items():
                if twice := sorted(changes.keys() & others[name][label].keys()):
                    raise ValueError(f"two axes change {twice}: drop one of them")
                changes |= others[name][label]
            try:
                trainings.append((place, change(self.base.replace(seeds=self.seeds), changes)))
            except ValueError as error:
                raise ValueError(f"{place_text(place) or 'the config'}: {error}") from error
        return trainings

    def __len__(self) -> int:
        """Number of models."""
        return len(self.places)


def place_text(place: Place) -> str:
    """A point of the grid as text."""
    return ", ".join(f"{name}={label}" for name, label in place.items())


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def _fit_together(configs: Sequence[TrainingConfig]) -> bool:
    """True if the tasks have prompts of one shape, so that they can be trained on together."""
    try:
        configs[0].replace(more_tasks=tuple(config.task for config in configs[1:]))
    except ValueError:
        return False
    return True
