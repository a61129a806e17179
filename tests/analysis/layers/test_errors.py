"""Calls that readouts and probes refuse, with the argument or the cause that the error names."""

from typing import Any

import pytest
import torch

from mechicl.analysis import fit_readouts, probe
from mechicl.analysis.layers import cross_moments
from mechicl.analysis.layers.linear_maps import RidgeSums
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=2, n_context=4)
PROMPTS = TASK.sample(12, seed=0)
FORMAT: Any = {"prompt_format": "interleaved", "d_model": 8, "attention": "softmax"}
MODEL = HookedTransformer(TransformerConfig(x_dim=2, n_context=4, **FORMAT)).eval()
PAIRED = HookedTransformer(TransformerConfig(x_dim=2, n_context=4)).eval()
CROSS = {"cross": cross_moments}


def other(value: object) -> Any:
    """A value of a type that the call does not take."""
    return value


def sums(n: int, folds: int = 4) -> RidgeSums:
    made = RidgeSums(folds)
    made.add(torch.randn(1, n, 1, 2), torch.randn(1, n, 1, 1))
    return made


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: sums(3).solve(), "4-fold cross-validation of 3 prompts"),
        (lambda: sums(4).solve([]), "penalties must be one or more"),
        (lambda: fit_readouts(MODEL, PROMPTS[:0]), "0 prompts"),
        (lambda: fit_readouts(MODEL, PROMPTS).read(7, torch.zeros(1, 1, 1, 8)), "layer must be 0 to 1, got 7"),
        (lambda: fit_readouts(MODEL, PROMPTS.prefix(3)).trajectory(PROMPTS), "fitted for 4 points, the prompts have 5"),
        (lambda: probe(MODEL, {}, PROMPTS, PROMPTS), "at least one quantity"),
        (lambda: probe(MODEL, other(TASK)), "quantities must be a dictionary .* got a LinearRegression"),
        (lambda: probe(MODEL, CROSS, PROMPTS), "needs prompts: "),
        (lambda: probe(MODEL, CROSS, PROMPTS, PROMPTS.prefix(2)), "same number of points"),
        (lambda: probe(MODEL, {"x": lambda p: p.xs[:, 0]}, PROMPTS, PROMPTS), r"'x' must give \[prompt point quantity"),
        (lambda: probe(PAIRED, CROSS, PROMPTS, PROMPTS), "interleaved model with causal keys"),
        (lambda: probe(MODEL, CROSS, PROMPTS, PROMPTS).interval("S", 0, 1), "quantity must be one of 'cross'; got 'S'"),
        (lambda: probe(MODEL, CROSS, PROMPTS, PROMPTS).interval("cross", 2, 1), "layer must be 0 to 1"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_or_the_cause(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
