"""`mechicl env` and `mechicl --version`: what a report of an error should state."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from mechicl.base.version import __version__

PACKAGES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "plotly", "nnsight", "pyvene", "sae-lens")


@dataclass(frozen=True)
class Env:
    """Print the versions, the processor, the threads and the devices that a report of an error needs."""

    def execute(self, command: str) -> None:
        """Print a line for each."""
        import torch  # here, so that help does not wait for it

        from mechicl.base.threads import n_cores
        from mechicl.training.results import hardware_name

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts = {
            "mechicl": __version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
            "processor": f"{hardware_name(torch.device('cpu'))}; {n_cores()} cores for this process",
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "devices": ", ".join(["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]),
        }
        facts |= {name: _version(name) for name in PACKAGES}
        for name, fact in facts.items():
            print(f"{name:18} {fact}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
