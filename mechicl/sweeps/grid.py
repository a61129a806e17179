"""A grid of trainings: every combination of the axes' values, in cells of models that are trained together."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mechicl.base.arguments import Count, check_fields
from mechicl.statistics.grids import SEED
from mechicl.training import PRESETS, TrainingConfig
from mechicl.training.config import change

Axis = Mapping[str | int | float | bool | None, Mapping[str, Any]]
"""The config fields that each value changes, by their path; keys are the values' labels."""


def read_axes(over: Mapping[str, Any]) -> dict[str, Axis]:
    """The axes of a grid, each as labels and the fields that they change (see `Sweep` for `over`)."""
    axes: dict[str, Axis] = {}
    for name, values in over.items():
        if name in ("loss", "diverged_at"):
            raise ValueError(f"an axis cannot be called {name!r}: the table has a column of that name")
        if name in ("seeds", "more_tasks"):
            raise ValueError(f"{name!r} cannot be an axis: write {'seed' if name == 'seeds' else 'an axis of tasks'}")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"{name} needs a sequence of values, got {values!r}: write ({values!r},) for one")
        pairs = list(values.items()) if isinstance(values, Mapping) else [(value, value) for value in values]
        pairs = [[x.item() if isinstance(x, np.generic) else x for x in pair] for pair in pairs]
        labels = ["none" if x is None else x if isinstance(x, str | int | float) else str(x) for x, _ in pairs]
        if not labels:
            raise ValueError(f"{name} has no values")
        if len(set(labels)) != len(labels):  # 1, 1.0 and True are equal
            raise ValueError(f"{name} has a value twice: {labels}")
        changes = [dict(value) if isinstance(value, Mapping) else {name: value} for _, value in pairs]
        axes[name] = dict(zip(labels, changes, strict=True))
    return axes


def combinations(axes: Mapping[str, Axis]) -> list[dict[str, Any]]:
    """All combinations of the axes' labels, the last axis running fastest."""
    return [dict(zip(axes, labels, strict=True)) for labels in itertools.product(*axes.values())]


def parse_axes(words: Iterable[str]) -> dict[str, list[Any]]:
    """Parse axes of a command line: `model.n_layers=1:8`, `task.n_tasks=8,64`, `model.attention=linear,softmax`.

    `a:b` are the integers from a to b - 1, as in Python's `range`, `a:b:c` every c-th of them.

    Example:
        >>> parse_axes(["model.n_layers=1:4", "learning_rate=1e-3,1e-2"])
        {'model.n_layers': [1, 2, 3], 'learning_rate': [0.001, 0.01]}
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name or not text:
            raise ValueError(f"{word!r} must be an axis: field=value,value, or field=1:8 for 1 to 7")
        if name in axes:
            raise ValueError(f"{name} is given twice: write all its values with commas between them")
        axes[name] = []
        for part in text.split(","):
            values = _parse(part) if part.strip() else []
            if not values:
                raise ValueError(f"{word!r} must have a value in each part between commas, got none in {part!r}")
            axes[name] += values
    return axes


def _parse(text: str) -> list[Any]:
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return [named[text.lower()]]
    for read in (lambda: [int(text)], lambda: [float(text)], lambda: list(range(*map(int, text.split(":"))))):
        try:
            return read()
        except (TypeError, ValueError):
            continue
    return [text]


# ---- the grid ----

GridPlace = dict[str, Any]
"""A point of the grid: a label for each axis."""


@dataclass(frozen=True, eq=False)
class SweepCell:
    """Models of a grid that differ in seed or task only, trained together as one ensemble.

    Its folder is named by its first point and its config's digest; `places` follow `config.members`.
    """

    name: str
    config: TrainingConfig
    places: tuple[GridPlace, ...]

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
        if seeds and (other := sorted({name for changes in seeds.values() for name in changes} - {SEED})):
            raise ValueError(f"the axis of seeds can change nothing else, got {other}: make another axis of them")
        if labelled := {label: each[SEED] for label, each in (seeds or {}).items() if each[SEED] != label}:
            raise ValueError(f"the axis of seeds takes no labels, got {labelled}: give a sequence of seeds")
        return axes | {SEED: seeds or {seed: {SEED: seed} for seed in self.base.seeds}}

    @property
    def seeds(self) -> tuple[Any, ...]:
        """Training seeds of every combination."""
        return tuple(self.axes[SEED])

    @cached_property
    def places(self) -> list[GridPlace]:
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

    def _groups(self) -> list[list[tuple[GridPlace, TrainingConfig]]]:
        """Trainings that can train together, in order: their configs differ in the task only."""
        groups: list[list[tuple[GridPlace, TrainingConfig]]] = []
        open_groups: dict[str, list[tuple[GridPlace, TrainingConfig]]] = {}
        seen: dict[str, GridPlace] = {}
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

    def _trainings(self) -> list[tuple[GridPlace, TrainingConfig]]:
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


def place_text(place: GridPlace) -> str:
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
