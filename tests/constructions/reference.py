"""Prompts and random models for tests of constructions."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts

quick = settings(max_examples=8)
Predict = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Case:
    """Prompts, the (larger or equal) number of points of the model, and a source of more random numbers."""

    prompts: Prompts
    n_context: int
    steps: int
    rng: np.random.Generator

    @property
    def sizes(self) -> dict[str, int]:
        return {"x_dim": self.prompts.x_dim, "y_dim": self.prompts.y_dim, "n_context": self.n_context}


@st.composite
def cases(draw: st.DrawFn, y_dim: int | None = None, most_steps: int = 6) -> Case:
    """Draw sizes up to 20 dimensions, also more of them than points, no context, and fewer points than n_context."""
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    n, x_dim, y_dim = draw(st.integers(0, 25)), draw(st.integers(1, 20)), y_dim or draw(st.integers(1, 3))
    steps = draw(st.integers(1, most_steps))
    return Case(random_prompts(n, x_dim, y_dim, rng=rng), n + draw(st.integers(0, 4)), steps, rng)


def random_prompts(n_context: int = 6, x_dim: int = 3, y_dim: int = 2, *, n_prompts: int = 2, rng=None) -> Prompts:
    """Draw normal inputs and targets, float64."""
    rng = np.random.default_rng(0) if rng is None else rng
    xs = 0.5 * rng.standard_normal((n_prompts, n_context + 1, x_dim))
    ys = rng.standard_normal((n_prompts, n_context + 1, y_dim))
    return Prompts(torch.from_numpy(xs), torch.from_numpy(ys))


def largest_eigenvalue(prompts: Prompts) -> float:
    """Return the largest eigenvalue of any prompt's S; 1 without a context."""
    xs = prompts.context.xs.numpy()
    return max((float(np.linalg.norm(x.T @ x, 2)) for x in xs if len(x)), default=1.0)


def assert_same(model: Tensor, expected: np.ndarray, tolerance: float = 1e-10) -> None:
    """Assert equality up to a fraction of the largest expected value; exact if that is 0."""
    assert np.isfinite(expected).all()
    scale = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(model.detach().numpy(), expected, rtol=0, atol=tolerance * scale)


def random_model(**config) -> HookedTransformer:
    """Build a float64 model with random weights and biases: two linear layers of two heads, unless changed."""
    sizes = {"x_dim": 3, "n_context": 8, "n_layers": 2, "d_model": 8, "n_heads": 2, "initializer_range": 0.3}
    cfg = TransformerConfig(**{**sizes, "read_in": "linear", "read_out": "linear", "dtype": "float64", **config})
    model = HookedTransformer(cfg, seed=0)
    for name, weight in model.named_parameters():
        if ".b_" in name:
            weight.data.normal_()
    return model.eval()
