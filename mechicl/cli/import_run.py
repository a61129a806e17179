"""`mechicl import`."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tyro

from mechicl.base.version import __version__


@dataclass(frozen=True)
class Import:
    """Import a model trained by the in-context-learning code of Garg et al. 2022 (state.pt, config.yaml)."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run, with state.pt and config.yaml. Nothing in them is executed."""
    out: Path
    """Folder of the checkpoint."""
    step: int | None = None
    """Of a snapshot, model_{step}.pt; by default the end of training, state.pt."""

    def execute(self, command: str) -> None:
        """Write the checkpoint."""
        # here, because it takes seconds: help must not wait for it
        from mechicl.checkpoints import save
        from mechicl.interop import load_garg
        from mechicl.tasks import task_to_dict

        model, task = load_garg(self.folder, step=self.step)
        versions = {"mechicl": __version__, "torch": version("torch")}
        record = {"name": self.out.name, "command": command, "imported": "in-context-learning", "versions": versions}
        if task is not None:  # what reports and scripts draw their prompts from
            record["training"] = {"task": task_to_dict(task)}
        print(f"{save(self.out, model, record)}: {model.cfg.n_layers} layers, x_dim {model.cfg.x_dim}")
