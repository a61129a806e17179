"""Use a GPU for some minutes: device tests, a table of speeds, and trainings of the papers' size.

python analyses/on_a_gpu.py --minutes 40
python analyses/on_a_gpu.py --minutes 10 --presets gpt2-8l-d10 --fit 10000    # a training that ends in that time

`make gpu MINUTES=40` sets up and runs it. Trainings go on from their saves: several short sessions make a long one.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import tyro

from mechicl import __version__
from mechicl.base.files import write_json
from mechicl.checkpoints import save
from mechicl.training import PRESETS, TrainingConfig, train
from mechicl.training.metrics import Metrics
from mechicl.training.results import hardware_name
from mechicl.training.state import STATE_FILE

SPEEDS: dict[str, dict[str, Any]] = {
    "tf32, compiled": {"tf32": True, "fused_attention": True, "compile": True},
    "tf32": {"tf32": True},
    "fp32": {},
    "bf16": {"mixed_precision": "bf16"},
    "fp32, fused": {"fused_attention": True},
    "bf16, fused": {"mixed_precision": "bf16", "fused_attention": True},
    "bf16, compiled": {"mixed_precision": "bf16", "fused_attention": True, "compile": True},
    "fp32, compiled": {"fused_attention": True, "compile": True},
}
"""Kinds of steps that are timed, while there is time; several seeds at once, and linear attention, are not fused."""
TRAINED = ("tf32, compiled", "tf32")
"""Trainings take the quicker of these. bf16 rounds the stream itself to 8 bits; what that does to the loss of these
models has not been measured."""
SHARE_OF_TABLE, SECONDS_OF_TESTS, SECONDS_BETWEEN_SAVES, TIMED_STEPS = 0.2, 60, 15, 300
SPARE = 0.1  # share of a fitted training's time for evaluations, saves and a slower machine


@dataclass(frozen=True)
class Args:
    """Device tests, a speed table, then trainings for the minutes that are left."""

    minutes: float = 40.0
    """How long, all in all."""
    presets: tuple[str, ...] = ("gpt2-12l", "gpt2-12l-1h")
    """What to train; they share the time."""
    timed: tuple[str, ...] = ("gpt2-12l", "lsa-1l")
    """What else to time, in every kind of steps."""
    fit: int | None = None
    """Let new trainings have the number of steps that fit into the time, if that is at least this number."""
    runs: Path = Path("runs")
    """Folder of the trainings' saves; each resumes in RUNS/PRESET-gpu."""
    out: Path = Path("analyses/results")
    """Folder of gpu_speed.json and gpu_tests.txt."""
    tests: bool = True
    """Run the tests that need a GPU, while the first steps are compiled."""
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
    args.out.mkdir(parents=True, exist_ok=True)
    tests = start_tests(args.out / "gpu_tests.txt") if args.tests and not args.dry else None
    began = time.monotonic()
    begun = {name for name in args.presets if (args.runs / f"{name}-gpu" / STATE_FILE).is_file()}
    names = [name for name in dict.fromkeys((*args.presets, *args.timed)) if name not in begun]
    speeds: dict[str, dict[str, Any]] = {name: {} for name in names}
    machine = {"hardware": hardware_name(device), "torch": str(torch.__version__), "dry": args.dry}
    for name in names:
        kinds = TRAINED if name in args.presets else SPEEDS
        print(f"steps of {name}:", flush=True)
        for kind, timing in timings(config_of(name, args.dry), kinds, args, began + 60 * args.minutes * SHARE_OF_TABLE):
            speeds[name][kind] = timing
            write_json(args.out / "gpu_speed.json", {**machine, "speeds": speeds})
    failed = tests is not None and not passed(tests, began + SECONDS_OF_TESTS)
    for i, name in enumerate(args.presets):
        config, folder = config_of(name, args.dry), args.runs / f"{name}-gpu"
        share = (deadline - time.monotonic()) / (len(args.presets) - i)
        known = [(t["steps_per_second"], kind) for kind, t in speeds.get(name, {}).items() if "steps_per_second" in t]
        speed, kind = max(known, default=(0.0, ""))
        fields = fields_of(kind, config) if known else {}
        if known and not args.dry:
            fields["save_every"] = max(100, int(SECONDS_BETWEEN_SAVES * speed))
        if args.fit is not None and name not in begun:
            left = share - (speeds[name][kind]["seconds"] if "compile" in fields else 0)  # it compiles once more
            fields["steps"] = int((1 - SPARE) * left * speed)
            if fields["steps"] < args.fit:
                print(f"{name}: {fields['steps']} steps fit, fewer than {args.fit}: not trained", flush=True)
                failed = True
                continue
        go_on(config, fields, folder, time.monotonic() + share)
    return int(failed)


def config_of(name: str, dry: bool) -> TrainingConfig:
    """A preset, or something tiny in its place."""
    config = PRESETS[name]
    if not dry:
        return config
    model = config.model.replace(n_layers=1, n_heads=1, d_model=8, d_head=8, d_mlp=8)
    return config.resized(x_dim=2, n_context=3, steps=4).replace(
        model=model.replace(x_dim=2, n_context=3), batch_size=2, eval_prompts=4, save_every=2, curriculum=None, cpu=True
    )


def start_tests(output: Path) -> subprocess.Popen[bytes] | None:
    """Start the tests marked "gpu", in several processes where pytest can; where pytest is missing, say so."""
    if not find_spec("pytest"):
        print("device tests: left out, pytest is not installed", flush=True)
        return None
    words = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "tests/test_devices.py", "--durations=8", "--tb=short"]
    # without the requirements of the whole suite, such as a browser
    words += [
        "-o",
        "addopts=--strict-markers",
        "-o",
        "filterwarnings=default",
        "-p",
        "no:cacheprovider",
        "--noconftest",
    ]
    words += ["-n", "6"] if find_spec("xdist") else []
    with open(output, "wb") as file:
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)


def passed(tests: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait for the tests until the deadline."""
    try:
        done = tests.wait(max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        tests.terminate()
        print("device tests: not done in time; continuing", flush=True)
        return False
    print(f"device tests: {'passed' if done else 'FAILED'}", flush=True)
    return done


def fields_of(kind: str, config: TrainingConfig) -> dict[str, Any]:
    """The settings of a kind of steps; several seeds have no fused attention."""
    return {name: on for name, on in SPEEDS[kind].items() if name != "fused_attention" or len(config.members) == 1}


def timings(
    config: TrainingConfig, kinds: Iterable[str], args: Args, deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Time each kind of steps that differs: "steps_per_second" without compilation and "seconds" with it, or words."""
    longest = 0.0  # of the kinds that were compiled
    for kind in kinds:
        fields = fields_of(kind, config)
        if fields.keys() < SPEEDS[kind].keys() and "fused" in kind:
            continue
        started = time.monotonic()
        if args.dry and fields.keys() & {"compile", "tf32"}:
            timing: dict[str, Any] = {"reason": "left out in a dry run"}
        elif started + (longest if "compile" in fields else 0) > deadline:
            timing = {"reason": "no time left"}
        else:
            timing = steps_per_second(config.replace(**fields), 4 if args.dry else TIMED_STEPS, args.runs / "speed")
        timing["seconds"] = round(time.monotonic() - started, 1)
        longest = max(longest, timing["seconds"]) if "compile" in fields else longest
        print(f"  {kind:15}", *(f"{name} {value}" for name, value in timing.items()), flush=True)
        yield kind, timing


def steps_per_second(config: TrainingConfig, n_steps: int, folder: Path) -> dict[str, Any]:
    """Return the speed in the middle of a short run on whole prompts, or the reason why there is none."""
    # whole prompts by a curriculum that is done, because compiled steps do not sample where there is one
    whole = config.curriculum and config.curriculum.resized(config.task, 0.0)
    every = max(1, n_steps // 3)
    short = config.replace(steps=n_steps, curriculum=whole, save_every=n_steps, eval_every=n_steps, log_every=every,
                           eval_prompts=8)  # fmt: skip
    try:
        train(short, folder, restart=True, progress=False)
        speeds = [line["steps_per_second"] for line in Metrics.read(folder) if "steps_per_second" in line]
    except Exception as error:  # compilers fail in many ways, and the other kinds shall still be timed
        return {"reason": f"does not run: {' '.join(str(error).split())[:300] or type(error).__name__}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"steps_per_second": speeds[1]}


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

    config = config.resized(steps=fields.pop("steps", config.steps)).replace(**fields)
    print(f"{folder}: {config.steps:,} steps, {fields or 'plain'}", flush=True)
    try:
        result = train(config, folder, progress=False, on_save=stop_in_time)
    except NoTimeLeftError:
        print(f"{folder}: saved at step {reached[0]:,} of {config.steps:,}; `make gpu` resumes there", flush=True)
        return
    except (ValueError, RuntimeError, FloatingPointError) as error:
        print(f"{folder}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return
    name = folder.name.removesuffix("-gpu")
    record = {"name": name, "command": "make gpu", **result.record}
    record["versions"] |= {"mechicl": __version__, "transformer-lens": version("transformer-lens")}
    losses = ", ".join(f"{loss:.5f}" for loss in result.record["curve"]["eval_loss"][-1])
    print(f"{save(folder / 'checkpoint', result.models, record)}: done, held-out loss {losses}", flush=True)


def run(words: Sequence[str] | None = None) -> int:
    return main(tyro.cli(Args, args=words))


if __name__ == "__main__":
    sys.exit(run())
