"""The kinds of device that a cell was trained on: results are the same, byte for byte, on one kind only."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from mechicl.base.files import read_json, write_json
from mechicl.base.warning import warn

DEVICES = "devices.json"


def device_kind(cpu: bool) -> str:
    """The kind of GPU that trains here, or the CPU's instruction set; `cpu` if GPUs are not to be used."""
    if not cpu and torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator()).split(":")[0]
        return f"cuda, {torch.cuda.get_device_name()}" if kind == "cuda" else kind
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}"


def note_device(cell: Path, kind: str) -> None:
    """Write into a cell's folder that it is trained on this kind of device."""
    if kind not in (kinds := read_devices(cell)):
        write_json(cell / DEVICES, {"devices": [*kinds, kind]})


def read_devices(cell: Path) -> list[str]:
    """The kinds of device that a cell was trained on, in order; empty if that is not known."""
    try:
        kinds = read_json(cell / DEVICES).get("devices")
    except (FileNotFoundError, ValueError):
        return []
    return [str(kind) for kind in kinds] if isinstance(kinds, list) else []


def warn_of_several(cells: Iterable[Path], here: str | None = None) -> bool:
    """Warn if cells were trained on several kinds of device, `here` included; return whether they were."""
    counted = Counter(kind for cell in cells for kind in read_devices(cell))
    if not counted or len({*counted, here} - {None}) < 2:
        return False
    text = "; ".join(f"{n} on {kind}" for kind, n in counted.items()) + (f"; this is {here}" if here else "")
    warn(
        f"cells of this sweep are from different kinds of device ({text}): their numbers may differ in the last digits"
    )
    return True
