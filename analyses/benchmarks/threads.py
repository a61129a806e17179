"""Small workloads on a machine with a busy process, with different settings of torch's threads.

Each setting runs in a separate process, because the variables are read when torch is loaded.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from statistics import median

from benchmarks.rows import Row, Settings, alternate, ratios, row

SCRIPT = """
import json, tempfile, time
import mechicl
from mechicl.analysis import corrupt, patch
from mechicl.checkpoints import load_checkpoint
from mechicl.models import TransformerConfig
from mechicl.training import TrainingConfig, train

def patching():
    checkpoint = load_checkpoint("gpt2-8l")
    clean = checkpoint.task.sample(16, seed=0)
    cells = {"layer": [0, 4], "pos": None, "head": None}
    patch(checkpoint.models[0], clean, corrupt(clean, "labels"), "z", cells)

def training(steps=30):
    model = TransformerConfig(x_dim=10, n_context=10, n_layers=5)
    config = TrainingConfig(
        model=model, steps=steps, batch_size=2048, log_every=steps, eval_every=steps, eval_prompts=64, cpu=True
    )
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, progress=False)

seconds = {}
for work in (patching, training):
    started = time.perf_counter()
    work()
    seconds[work.__name__] = time.perf_counter() - started
print(json.dumps(seconds))
"""
WORDS = {"patching": "a sweep of 328 small patched runs", "training": "30 steps of five layers"}
FIXED = {
    "one thread": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    "two that sleep": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
    "two that spin": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "active"},
}
SPIN = "two that spin"


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """One that takes all that it gets of one core, while this lasts."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def work_seconds(chosen: dict[str, str]) -> dict[str, float]:
    """Return the seconds of each workload in a new process with these variables about threads."""
    others = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "GOMP_"))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**others, **chosen})
    return json.loads(done.stdout.splitlines()[-1])


def situation_rows(words: str, rounds: int) -> list[Row]:
    """Ours over the best fixed choice, and threads that spin over ours."""
    times = alternate(
        {name: lambda c=chosen: work_seconds(c) for name, chosen in {"ours": {}, **FIXED}.items()}, rounds
    )
    rows = []
    for work, work_words in WORDS.items():
        of_work = {name: [each[work] for each in values] for name, values in times.items()}
        best = min(FIXED, key=lambda name: median(of_work[name]))
        detail = ", ".join(f"{name} {median(values):.1f} s" for name, values in of_work.items())
        rows += [
            row(f"{words}, {work_words}: ours over the best fixed choice", ratios(of_work["ours"], of_work[best]),
                "<= 1.2", detail),
            row(f"{words}, {work_words}: {SPIN} over ours", ratios(of_work[SPIN], of_work["ours"])),
        ]  # fmt: skip
    return rows


def measure(settings: Settings) -> list[Row]:
    rounds = min(settings.rounds, 2)
    idle = situation_rows("idle", rounds)
    with busy_process():
        return [*idle, *situation_rows("one core busy", rounds)]
