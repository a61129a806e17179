"""The memory of predicting many prompts, measured in a separate process."""

import json
import subprocess
import sys

import mechicl
from benchmarks.rows import Row, Settings, row

SCRIPT = """
import json, resource, sys, time
import mechicl, psutil
from mechicl.checkpoints import load_checkpoint

checkpoint = load_checkpoint(sys.argv[1])
prompts = checkpoint.task.sample(int(sys.argv[2]), seed=0)
checkpoint.models[0].predict(prompts[:64])
before = psutil.Process().memory_info().rss
started = time.perf_counter()
checkpoint.models[0].predict(prompts)
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"peak": peak - before, "seconds": seconds}))
"""


def predict_row(name: str, n_prompts: int) -> Row:
    """Measure the peak above the memory before the call."""
    command = [sys.executable, "-c", SCRIPT, name, str(n_prompts)]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    peak, bound = measured["peak"], mechicl.settings.memory
    return row(f"{name}: peak of predict on {n_prompts:,} prompts over the bound", [peak / bound], "<= 1.1",
               f"{peak / 1e9:.2f} GB of {bound / 1e9:.2f}: growth of the whole process; "
               f"{measured['seconds']:.1f} s")  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    return [predict_row("gpt2-8l", 100_000)]
