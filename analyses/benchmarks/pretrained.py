"""SmolLM2 as a `HookedTransformer`: time and memory next to the bridge of TransformerLens 4 and the class of 3.9."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from benchmarks.apart import Apart, peers
from benchmarks.language import CACHE
from benchmarks.opened import BRIDGE, CLASS, N_HEADS, N_SAMPLED, OURS
from benchmarks.rows import Row, Settings, alternate, ratios, row

LENS_3 = "TRANSFORMER_LENS_3"
"""Environment variable: a folder of `pip install --no-deps --target FOLDER transformer_lens==3.9`."""
CALLS = {"forward": ">= 1.0", "run_with_cache": ">= 1.5", "run_with_hooks": ">= 1.0", "backward": "shown"}
"""Calls on 4 texts of 32 tokens, and the bars of the bridge's time over ours; of the class's: 1."""
SWEEPS = {"ablate": ">= 2.5", "patch": ">= 2.5"}
"""All 270 heads, on 4 texts of 12 tokens: the bridge in the same call, TransformerLens 3.9 by hooks in a loop."""


PEAK = """
import json, sys
from pathlib import Path

import transformers, transformer_lens.model_bridge, mechicl.models
from benchmarks.opened import Opened


def peak():  # getrusage would give the peak of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


before = peak()
Opened(sys.argv[1], sys.argv[2]).logits()  # files are read when their weights are
print(json.dumps(1024 * (peak() - before)))
"""


def peak(library: str, folder: str) -> int:
    """Return the peak memory of a process that opens the model and runs it, less that of imports, in bytes (Linux)."""
    command = [sys.executable, "-c", PEAK, library, folder]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | paths).stdout
    )


def measure(settings: Settings) -> list[Row]:
    """Time calls on SmolLM2 (`make lm`), float32, one core; with TransformerLens 3.9 if `LENS_3` names its folder."""
    if not (CACHE / "model.safetensors").is_file():
        raise ImportError("SmolLM2; run `make lm`")
    with TemporaryDirectory() as exported:
        make = {library: partial(_open, library, str(CACHE)) for library in (OURS, BRIDGE)}
        if lens_3 := os.environ.get(LENS_3):
            _export(Path(exported))
            make[CLASS] = partial(_open, CLASS, exported, {"PYTHONPATH": os.pathsep.join([lens_3, _paths()])})
        rows = []
        with peers(make) as opened:
            first = torch.tensor(opened[OURS].call("logits"))
            for name, one in opened.items():
                difference = float((torch.tensor(one.call("logits")) - first).abs().max())
                if difference > 1e-3:
                    raise ValueError(f"logits of {name} differ by {difference:.1e}")
            for call, bar in CALLS.items():
                times = alternate(
                    {name: partial(one.call, "call", call) for name, one in opened.items()}, settings.rounds + 1
                )
                rows += _compare(call, {name: values[1:] for name, values in times.items()}, bar)
            for call, bar in SWEEPS.items():
                times = alternate({name: partial(one.call, "sweep", call) for name, one in opened.items()}, 1)
                if CLASS in times:
                    times[CLASS] = [N_HEADS / N_SAMPLED * value for value in times[CLASS]]
                rows += _compare(f"{call}, all heads", times, bar)
    least = peak("transformers", str(CACHE))
    for library in (OURS, BRIDGE):
        quantity, bar = f"SmolLM2, peak memory of opening: {library} over transformers", "<= 1.1"
        value = [peak(library, str(CACHE)) / least]
        rows.append(row(quantity, value, bar if library == OURS else "shown", f"transformers {least / 2**30:.2f} GiB"))
    return rows


def _compare(call: str, times: dict[str, list[float]], bar: str) -> list[Row]:
    rows = []
    for name, values in times.items():
        if name != OURS:
            detail = f"ours {min(times[OURS]):.3g} s, theirs {min(values):.3g} s"
            bound = bar if name == BRIDGE or bar == "shown" else ">= 1.0"
            rows.append(row(f"SmolLM2, {call}: {name} over ours", ratios(values, times[OURS]), bound, detail))
    return rows


def _open(library: str, folder: str, environment: dict[str, str] | None = None) -> Apart:
    return Apart("opened:Opened", one_core=True, environment=environment, library=library, folder=folder)


def _paths() -> str:
    root = Path(__file__).resolve().parents[2]
    return os.pathsep.join([str(root / "analyses"), str(root)])


def _export(folder: Path) -> None:
    """Write the model for TransformerLens 3."""
    from mechicl.interop import to_transformer_lens
    from mechicl.models import HookedTransformer

    state, fields = to_transformer_lens(HookedTransformer.from_pretrained_no_processing(str(CACHE)))
    buffers = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
    save_file(
        {k: w.contiguous().clone() for k, w in state.items() if not k.endswith(buffers)}, folder / "lens.safetensors"
    )
    del fields["dtype"]  # float32
    (folder / "fields.json").write_text(json.dumps(fields))
