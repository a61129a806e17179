"""Use a GPU for some minutes: device tests, a table of speeds, and trainings of the papers' size.

python analyses/on_a_gpu.py --minutes 40

`make gpu MINUTES=40` sets up and runs it. Trainings go on from their saves: several short sessions make a long one.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tyro

from mechicl import __version__
from mechicl.base.files import write_json
from mechicl.checkpoints import save
from mechicl.training import PRESETS, TrainingConfig, train
from mechicl.training.results import hardware_name
from mechicl.training.state import STATE_FILE

SPEEDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, fused": {"fused_attention": True},
    "fp32, compiled": {"fused_attention": True, "compile": True},
    "tf32": {"tf32": True},
    "tf32, compiled": {"tf32": True, "fused_attention": True, "compile": True},
    "bf16": {"mixed_precision": "bf16"},
    "bf16, fused": {"mixed_precision": "bf16", "fused_attention": True},
    "bf16, compiled": {"mixed_precision": "bf16", "fused_attention": True, "compile": True},
}
"""Kinds of steps that are timed; trainings take the quickest of those in TRAINED."""
TRAINED = ("tf32", "tf32, compiled")
"""bf16 rounds the stream itself to 8 bits; what that does to the loss of these models has not been measured."""
WHOLE_STEPS: dict[str, dict[str, Any]] = {"fp32": {}, "fp32, compiled": {"compile": True}}
"""For small models: one call per operation, and whole steps as CUDA graphs."""
SHARE_OF_TABLE, N_SMALL = 0.25, 10


@dataclass(frozen=True)
class Args:
    """Device tests, a speed table, then trainings for the minutes that are left."""

    minutes: float = 40.0
    """How long, all in all."""
    presets: tuple[str, ...] = ("gpt2-12l", "gpt2-12l-1h")
    """What to train; they share the time."""
    runs: Path = Path("runs")
    """Folder of the trainings' saves; each resumes in RUNS/PRESET-gpu."""
    out: Path = Path("analyses/results")
    """Folder of gpu_speed.json."""
    tests: bool = True
    """Run the tests that need a GPU first."""
    dry: bool = False
    """Try everything on the CPU in tiny settings, without the tests."""


class NoTimeLeftError(Exception):
    """The minutes are over: the training was saved and stops."""


def main(args: Args) -> int:
    """Exit code: 0, or 1 without a GPU or where a device test fails."""
    deadline = time.monotonic() + 60 * args.minutes
    if not args.dry and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device. On a machine with one, install a build of torch "
            f"for it (see docs/how-to/gpu.md); `make gpu DRY=1` tries everything on the CPU in tiny settings",
            file=sys.stderr,
        )
        return 1
    device = torch.device("cpu" if args.dry else "cuda")
    print(f"{hardware_name(device)}, torch {torch.__version__}, {args.minutes:g} minutes", flush=True)
    failed = args.tests and not args.dry and not tests_pass(60 * args.minutes * SHARE_OF_TABLE)
    configs = {name: config_of(name, args.dry) for name in args.presets}
    seconds, folder = 60 * args.minutes * SHARE_OF_TABLE, args.runs / "speed"
    small = PRESETS["lsa-1l"].replace(seeds=tuple(range(N_SMALL)), n_snapshots=0, cpu=args.dry)
    of_small = speed_table(small, seconds / 4, folder, args.dry, WHOLE_STEPS)
    table = speed_table(next(iter(configs.values())), seconds, folder, args.dry, SPEEDS)
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {"hardware": hardware_name(device), "torch": str(torch.__version__), "dry": args.dry}
    speeds = {"steps_per_second": table, f"steps_per_second_of_{N_SMALL}_lsa-1l": of_small}
    write_json(args.out / "gpu_speed.json", {**machine, "preset": args.presets[0], **speeds})
    known = {name: speed for name, speed in table.items() if name in TRAINED and isinstance(speed, float)}
    quickest = SPEEDS[max(known, key=known.__getitem__)] if known else {}
    for i, (name, config) in enumerate(configs.items()):
        share = (deadline - time.monotonic()) / (len(configs) - i)
        go_on(config, quickest, args.runs / f"{name}-gpu", time.monotonic() + share)
    return int(failed)


def config_of(name: str, dry: bool) -> TrainingConfig:
    """A preset, or something tiny in its place."""
    config = PRESETS[name]
    if not dry:
        return config.replace(save_every=500)
    model = config.model.replace(n_layers=1, n_heads=1, d_model=8, d_head=8, d_mlp=8)
    return config.resized(x_dim=2, n_context=3, steps=4).replace(
        model=model.replace(x_dim=2, n_context=3), batch_size=2, eval_prompts=4, save_every=2, curriculum=None, cpu=True
    )


def tests_pass(seconds: float) -> bool:
    """Run the tests marked "gpu"; where pytest is missing, say so and go on."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/test_devices.py"]
    if subprocess.run([*words[:3], "--version"], capture_output=True).returncode:
        print("device tests: left out, pytest is not installed", flush=True)
        return True
    # without the requirements of the whole suite, such as a browser
    alone = "-o addopts=--strict-markers -o filterwarnings=default -p no:cacheprovider --noconftest"
    try:
        passed = subprocess.run([*words, *alone.split()], timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"device tests: not done after {seconds:.0f} s; continuing", flush=True)
        return False
    print(f"device tests: {'passed' if passed else 'FAILED'}", flush=True)
    return passed


def speed_table(
    config: TrainingConfig, seconds: float, folder: Path, dry: bool, kinds: dict[str, dict[str, Any]]
) -> dict[str, float | str]:
    """Steps per second of each kind, without its first steps, which compile; words for what does not run."""
    table: dict[str, float | str] = {}
    deadline = time.monotonic() + seconds
    for name, fields in kinds.items():
        if dry and (fields.get("compile") or fields.get("tf32")):
            speed = "left out in a dry run"
        elif time.monotonic() > deadline:
            speed = "no time left"
        else:
            speed = steps_per_second(config.replace(**fields), 4 if dry else 300, folder)
        table[name] = speed
        print(f"  {name:16} {f'{speed:8.1f} steps/s' if isinstance(speed, float) else speed}", flush=True)
    return table


def steps_per_second(config: TrainingConfig, n_steps: int, folder: Path) -> float | str:
    """Return the speed of the second half of a short run on whole prompts."""
    every = max(1, n_steps // 2)
    marks: list[float] = []
    short = config.replace(steps=n_steps, curriculum=None, save_every=every, eval_every=n_steps, log_every=every,
                           eval_prompts=8)  # fmt: skip
    try:
        train(short, folder, restart=True, progress=False, on_save=lambda _: marks.append(now()))
    except (ValueError, RuntimeError, FloatingPointError) as error:
        return f"does not run: {' '.join(str(error).split())[:160]}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return every / max(marks[-1] - marks[-2], 1e-9)


def now() -> float:
    """The time when all that was asked of the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def go_on(config: TrainingConfig, fields: dict[str, Any], folder: Path, deadline: float) -> None:
    """Train until the deadline, from the folder's last save, in the way in which the folder was begun."""
    how = folder / "speed.json"
    if (folder / STATE_FILE).is_file() and how.is_file():
        fields = json.loads(how.read_text())
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(how, fields)
    reached = [0]

    def stop_in_time(step: int) -> None:
        reached[0] = step
        if time.monotonic() > deadline:
            raise NoTimeLeftError

    try:
        result = train(config.replace(**fields), folder, progress=False, on_save=stop_in_time)
    except NoTimeLeftError:
        print(f"{folder}: saved at step {reached[0]:,} of {config.steps:,}; `make gpu` resumes there", flush=True)
        return
    except (ValueError, RuntimeError, FloatingPointError) as error:
        print(f"{folder}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return
    name = folder.name.removesuffix("-gpu")
    record = {"name": name, "command": f"make gpu, {folder}", **result.record}
    record["versions"] |= {"mechicl": __version__, "transformer-lens": version("transformer-lens")}
    losses = ", ".join(f"{loss:.5f}" for loss in result.record["curve"]["eval_loss"][-1])
    print(f"{save(folder / 'checkpoint', result.models, record)}: done, held-out loss {losses}", flush=True)


def run(words: Sequence[str] | None = None) -> int:
    return main(tyro.cli(Args, args=words))


if __name__ == "__main__":
    sys.exit(run())
