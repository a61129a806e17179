"""Ready-made training runs, read from presets.yaml; every field can be overridden on the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mechicl.models import LSTMConfig, TableConfig, TransformerConfig
from mechicl.tasks import task_from_dict
from mechicl.training.config import TrainingConfig, change
from mechicl.training.curriculum import Curriculum, Ramp

_ARCHITECTURES: dict[str, Any] = {"transformer": TransformerConfig, "lstm": LSTMConfig, "table": TableConfig}


def read_training(fields: Mapping[str, Any], known: Mapping[str, TrainingConfig]) -> TrainingConfig:
    """Make the config of fields as in presets.yaml, whose `base` is one of the known configs, or the default config."""
    changes: dict[str, Any] = {name: value for name, value in fields.items() if name not in ("help", "base")}
    if "type" in changes.get("task", ()):
        changes["task"] = task_from_dict(changes["task"])
    if "architecture" in changes.get("model", ()):
        model = dict(changes["model"])
        changes["model"] = _ARCHITECTURES[model.pop("architecture")](**model)
    if "more_tasks" in changes:
        changes["more_tasks"] = tuple(map(task_from_dict, changes["more_tasks"]))
    if "curriculum" in changes:
        changes["curriculum"] = Curriculum(**{name: Ramp(*ramp) for name, ramp in changes["curriculum"].items()})
    return change(known[fields["base"]] if "base" in fields else TrainingConfig(), changes)


def _read_presets() -> dict[str, TrainingConfig]:
    presets: dict[str, TrainingConfig] = {}
    for name, fields in yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8")).items():
        presets[name] = read_training(fields, presets)
    return {name: config for name, config in presets.items() if not name.startswith("_")}


PRESETS: dict[str, TrainingConfig] = _read_presets()
"""Ready-made `TrainingConfig`s by name. `mechicl train NAME` trains one."""
