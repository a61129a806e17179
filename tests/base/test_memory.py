"""Bounds on memory, in numbers and as the operating system measures them."""

import subprocess
import sys

import pytest

from mechicl.base.memory import SET_ASIDE, Budget, TooLittleMemory


@pytest.mark.parametrize(
    ("memory", "for_tensors"),
    [(1000, 1000), (SET_ASIDE, SET_ASIDE), (3 * 2**24, SET_ASIDE), (2**26, SET_ASIDE), (2**30, 31 * 2**25)],
)  # fmt: skip
def test_part_of_a_large_bound_is_set_aside(memory, for_tensors):
    assert Budget(memory).for_tensors == for_tensors
    assert Budget(memory, kept=500).rows(100) == (for_tensors - 500) // 100


@pytest.mark.parametrize("per_row", [10, SET_ASIDE - 7, SET_ASIDE + 1, 5 * SET_ASIDE])
def test_what_is_said_to_be_enough_is_enough(per_row):
    with pytest.raises(TooLittleMemory, match="is too little") as refused:
        Budget(9, kept=7).rows(per_row)
    assert Budget(refused.value.needed, kept=7).rows(per_row) == 1
    with pytest.raises(TooLittleMemory):
        Budget(refused.value.needed - 1, kept=7).rows(per_row)
    with pytest.raises(TooLittleMemory):
        Budget(float("nan")).rows(1)


MEASURE = """
import gc, sys
from mechicl.analysis import corrupt, patch
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

cfg = TransformerConfig(x_dim=5, n_context=20, prompt_format="interleaved", n_layers=4, n_heads=4, d_model=64,
                        d_head=16, d_mlp=256, attention="softmax", normalization_type="LN")
model, bound = HookedTransformer(cfg), float(sys.argv[1])
prompts = LinearRegression(x_dim=5, n_context=20).sample(200, seed=0)
corrupted = corrupt(prompts, "labels")
for _ in range(3):  # the first time is cold
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmRSS:")
    patch(model, prompts, corrupted, "z", ("layer", "head"), memory=bound, progress=False)
    print(1024 * (kilobytes("VmHWM:") - before) / bound)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("bound", [2**26, 2**27])
def test_a_sweep_stays_within_its_bound_also_when_it_is_the_first(bound):
    ran = subprocess.run([sys.executable, "-c", MEASURE, str(bound)], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    ratios = [float(line) for line in ran.stdout.split()]
    assert len(ratios) == 3
    assert max(ratios) <= 1.1, ratios
