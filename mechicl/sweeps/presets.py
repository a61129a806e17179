"""Ready-made sweeps, read from presets.yaml: `mechicl sweep NAME`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mechicl.sweeps.sweep import Sweep
from mechicl.training import PRESETS, TrainingConfig
from mechicl.training.presets import read_training


@dataclass(frozen=True, eq=False)
class SweepPreset:
    """A ready-made sweep: a line of help, the arguments of `Sweep`, and the measure."""

    summary: str
    config: TrainingConfig | str
    over: Mapping[str, Any]
    measure: Any = None
    together: int = 8

    def sweep(self) -> Sweep:
        """The sweep itself."""
        return Sweep(self.config, self.over, together=self.together)


def _read_sweeps() -> dict[str, SweepPreset]:
    sweeps = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8"))
    for fields in sweeps.values():
        fields["config"] = read_training(fields["config"], PRESETS)
    return {name: SweepPreset(fields.pop("help"), **fields) for name, fields in sweeps.items()}


SWEEPS: dict[str, SweepPreset] = _read_sweeps()
"""Ready-made sweeps by name, each a `SweepPreset`: `SWEEPS[name].sweep().run(folder, SWEEPS[name].measure)`."""
