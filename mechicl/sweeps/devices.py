"""Which kinds of device a cell was trained on: bytes are the same on one kind only."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from mechicl.base.files import read_json, write_json
from mechicl.base.warning import warn

DEVICES = "devices.json"


def device_kind(cpu: bool) -> str:
    """What trains here, as far as the last digits depend on it: a kind of GPU, or of the CPU's instructions.

    Args:
        cpu: whether the training is on the CPU in any case.
    """
    if not cpu and torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator()).split(":")[0]
        return f"cuda, {torch.cuda.get_device_name()}" if kind == "cuda" else kind
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}"


def note_device(cell: Path, kind: str) -> None:
    """Keep, in a cell's folder, that it is trained here."""
    kinds = read_devices(cell)
    if kind not in kinds:
        write_json(cell / DEVICES, {"devices": [*kinds, kind]})


def read_devices(cell: Path) -> list[str]:
    """The kinds of device that a cell was trained on, the first first; none where nobody kept them."""
    try:
        kinds = read_json(cell / DEVICES).get("devices")
    except (FileNotFoundError, ValueError):
        return []
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []


def warn_of_several(cells: Iterable[Path], here: str | None = None) -> bool:
    """Say so if cells were trained on different kinds of device, or on another one than what trains here now.

    Returns:
        Whether it was said.
    """
    counted = Counter(kind for cell in cells for kind in read_devices(cell))
    if not counted.keys() - {here} or len(counted.keys() | ({here} if here else set())) < 2:
        return False
    words = "; ".join(f"{n} on {kind}" for kind, n in counted.items()) + (f"; this is {here}" if here else "")
    warn(
        f"cells of this sweep are from different kinds of device ({words}): their numbers may differ in the last "
        f"digits from those of one device"
    )
    return True
