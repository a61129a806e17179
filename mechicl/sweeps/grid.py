"""A grid of trainings: every combination of the axes' values, as cells of models that are trained together."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mechicl.base.checks import check_whole
from mechicl.sweeps.axes import SEED, Axis, change, combinations, read_axes
from mechicl.training import PRESETS, TrainingConfig

Place = dict[str, Any]
"""A point of the grid: each axis' label."""


@dataclass(frozen=True, eq=False)
class Cell:
    """Models of a grid that are trained together, as one ensemble: they differ in seed or task only.

    Attributes:
        name: of its folder: its place in words, and the digest of its config.
        config: of the training.
        places: on the grid, of each model, in the order of `config.members`.
    """

    name: str
    config: TrainingConfig
    places: tuple[Place, ...]

    @property
    def cost(self) -> float:
        """About what it costs, in arbitrary units: what takes longest is begun first."""
        model, config = self.config.model, self.config
        length = getattr(model, "n_ctx", None) or getattr(model, "n_context", None) or 1
        layers = model.n_layers * (12 * model.d_model**2 + 2 * length * model.d_model)
        return float(config.steps * config.batch_size * len(config.members) * length * layers) or 1.0


@dataclass(frozen=True, eq=False)
class Grid:
    """Every combination of the values of some axes (see `Sweep`, which runs them)."""

    config: TrainingConfig | str
    over: Mapping[str, Sequence[Any] | Mapping[Any, Any]]
    together: int = 8
    threads: int = 1
    axes: dict[str, Axis] = field(init=False)

    def __post_init__(self):
        check_whole(1, together=self.together, threads=self.threads)
        if isinstance(self.config, str):
            if self.config not in PRESETS:
                raise ValueError(f"no preset {self.config!r}: there are {sorted(PRESETS)}")
            object.__setattr__(self, "config", PRESETS[self.config])
        axes = read_axes(self.over)
        seeds = axes.pop(SEED, None)
        object.__setattr__(self, "axes", axes | {SEED: seeds or {s: {SEED: s} for s in self.base.seeds}})
        if self.base.more_tasks:
            raise ValueError("a sweep's config has one task: leave out more_tasks, and make an axis of tasks")
        self.cells  # noqa: B018 - what does not fit is refused before anything is trained

    @property
    def base(self) -> TrainingConfig:
        """The config that all cells share."""
        assert isinstance(self.config, TrainingConfig)
        return self.config

    @property
    def seeds(self) -> tuple[Any, ...]:
        """Training seeds of every combination; the training config checks them."""
        return tuple(self.axes[SEED])

    @cached_property
    def places(self) -> list[Place]:
        """All points of the grid, the last axis running fastest."""
        return combinations(self.axes)

    @cached_property
    def cells(self) -> list[Cell]:
        """What is trained, in the grid's order."""
        trainings: list[tuple[Place, TrainingConfig]] = []
        others = {name: axis for name, axis in self.axes.items() if name != SEED}
        for place in combinations(others):
            changes: dict[str, Any] = {}
            for name, label in place.items():
                twice = sorted(changes.keys() & others[name][label].keys())
                if twice:
                    raise ValueError(f"two axes change {twice}: let one of them go")
                changes |= others[name][label]
            try:
                trainings.append((place, change(self.base.replace(seeds=self.seeds), changes)))
            except ValueError as error:
                raise ValueError(f"{in_words(place) or 'the config'}: {error}") from error
        return [self._cell(group, seeds) for group in self._groups(trainings) for seeds in self._chunks(len(group))]

    def _groups(self, trainings: list[tuple[Place, TrainingConfig]]) -> list[list[tuple[Place, TrainingConfig]]]:
        """Trainings that differ in the task only, as many as may train together, in order."""
        groups: list[list[tuple[Place, TrainingConfig]]] = []
        open_groups: dict[str, list[tuple[Place, TrainingConfig]]] = {}
        seen: dict[str, Place] = {}
        for place, config in trainings:
            data = config.to_dict()
            whole = _digest(data)
            if whole in seen:
                raise ValueError(f"{in_words(seen[whole])} and {in_words(place)} are the same training: drop one")
            seen[whole] = place
            key = _digest({name: value for name, value in data.items() if name != "task"})
            group = open_groups.get(key)
            full = group is not None and (len(group) + 1) * len(self.seeds) > self.together
            if group is None or full or not _fit_together([*(c for _, c in group), config]):
                group = open_groups[key] = []
                groups.append(group)
            group.append((place, config))
        return groups

    def _chunks(self, n_tasks: int) -> list[tuple[Any, ...]]:
        """The seeds in portions of which as many train together as may."""
        size = max(1, self.together // n_tasks)
        return [self.seeds[i : i + size] for i in range(0, len(self.seeds), size)]

    def _cell(self, group: list[tuple[Place, TrainingConfig]], seeds: tuple[int, ...]) -> Cell:
        config = _joined([config for _, config in group]).replace(seeds=seeds)
        places = tuple({**place, SEED: seed} for place, _ in group for seed in seeds)
        words = re.sub(r"[^A-Za-z0-9=._,-]+", "_", in_words(group[0][0]).replace(", ", ",")).strip(",._")[:80]
        return Cell("-".join(filter(None, [words, _digest(config.to_dict())])), config, places)

    def __len__(self) -> int:
        """Number of models."""
        return len(self.places)


def in_words(place: Place) -> str:
    """A point of the grid as words."""
    return ", ".join(f"{name}={label}" for name, label in place.items())


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def _joined(configs: Sequence[TrainingConfig]) -> TrainingConfig:
    """One training of all the tasks."""
    return configs[0].replace(more_tasks=tuple(config.task for config in configs[1:]))


def _fit_together(configs: Sequence[TrainingConfig]) -> bool:
    """Whether the tasks have prompts of one shape, so that they can be trained on together."""
    try:
        _joined(configs)
    except ValueError:
        return False
    return True
