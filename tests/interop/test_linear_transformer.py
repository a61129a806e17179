"""Imported linear transformers against their formula, written out token by token."""

import numpy as np
import pytest
import torch

from mechicl.interop import from_linear_transformer
from mechicl.tasks import LinearRegression


def predict(allparam: np.ndarray, xs: np.ndarray, ys: np.ndarray) -> float:
    n, d = len(xs) - 1, xs.shape[1]
    tokens = np.concatenate([xs, ys], axis=1)
    tokens[-1, -1] = 0
    for heads in allparam:
        update = np.zeros_like(tokens)
        for p, q in heads:
            full_p, full_q = np.zeros((d + 1, d + 1)), np.zeros((d + 1, d + 1))
            full_p[:d, :d], full_p[d, d], full_q[:d, :d] = p, 1, q
            for i in range(n + 1):
                for j in range(n):
                    update[i] += (tokens[i] @ full_q @ tokens[j]) * (full_p @ tokens[j]) / n
        tokens = tokens + update
    return -tokens[-1, -1]


@pytest.mark.parametrize(("n_layers", "n_heads"), [(1, 1), (3, 2)])
def test_predictions_are_the_originals(n_layers, n_heads):
    generator = torch.Generator().manual_seed(0)
    allparam = 0.4 * torch.randn(n_layers, n_heads, 2, 4, 4, dtype=torch.float64, generator=generator)
    prompts = LinearRegression(x_dim=4, n_context=6, inputs="gaussian").sample(5, seed=1, dtype=torch.float64)
    got = from_linear_transformer(allparam, n_context=6).predict(prompts).detach()
    expected = [predict(allparam.numpy(), x.numpy(), y.numpy()) for x, y in zip(prompts.xs, prompts.ys, strict=True)]
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("allparam", [torch.zeros(1, 1, 3, 4, 4), torch.zeros(1, 1, 2, 4, 4, dtype=torch.float16)])
def test_other_shapes_and_types_are_refused(allparam):
    with pytest.raises(ValueError, match=r"allparam must be .*float32s \[layer head 2 x x\]"):
        from_linear_transformer(allparam, n_context=6)
