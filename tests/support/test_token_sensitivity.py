"""Derivatives with respect to tokens against autograd's Jacobian, entry by entry, and a construction."""

from typing import Any

import pytest
import torch

from analyses.support.token_sensitivity import measure_token_sensitivity
from mechicl import constructions
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.strategies import random_model

CONFIG = TransformerConfig(
    x_dim=3, n_context=4, y_dim=2, prompt_format="interleaved", keys="full", n_layers=2, n_heads=2, d_model=12, d_mlp=6,
    attention="softmax", normalization_type="LN", positional_embedding_type="standard", dtype="float64",
)  # fmt: skip


def prompts(n: int = 6) -> Prompts:
    return LinearRegression(x_dim=3, n_context=4, y_dim=2).sample(n, seed=0, dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor | float, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype).expand(a.shape), rtol=0, atol=atol)


def norms_by_jacobian(model: HookedTransformer, p: Prompts, layer: int) -> torch.Tensor:
    """`[position token prompt]`, one prompt, position and token after the other."""
    n = 2 * p.n_context + 1
    norms = torch.zeros(n, n, len(p), dtype=torch.float64)
    for i in range(len(p)):
        tokens = model.encode(p[i : i + 1])
        jacobian: Any = torch.autograd.functional.jacobian(lambda t: model(t, stop_at_layer=layer), tokens)
        for position in range(n):
            for token in range(n):
                norms[position, token, i] = jacobian[0, position, :, 0, token].square().sum().sqrt()
    return norms


@pytest.mark.parametrize("layer", [1, 2])
def test_norms_are_those_of_the_jacobian(layer):
    model, p = random_model(CONFIG).eval(), prompts(3)
    result = measure_token_sensitivity(model, p, layer)
    expected = norms_by_jacobian(model, p, layer)
    torch.testing.assert_close(result.norms, expected, rtol=1e-9, atol=1e-12)
    for i in range(3):
        itself = [expected[t, t, i] for t in (0, 2, 4, 6)]
        following = [expected[t, t + 1, i] for t in (0, 2, 4, 6)]
        other = [expected[t, k, i] for t in (0, 2, 4, 6) for k in range(9) if k not in (t, t + 1)]
        for field, values in ((result.itself, itself), (result.next, following), (result.other, other)):
            assert field[i].item() == pytest.approx(torch.stack(values).mean().item(), rel=1e-9, abs=1e-12)


def test_the_construction_depends_on_a_token_and_the_next_alone():
    model, p = constructions.copy_targets(x_dim=3, y_dim=2, n_context=4), prompts()
    before, after = (measure_token_sensitivity(model, p, layer) for layer in (0, 1))
    close(before.itself, 3**0.5)  # each token of three dimensions is unchanged in the stream
    close(before.next, 0)
    close(after.itself, 3**0.5)
    close(after.next, 2**0.5)  # two dimensions of it are targets
    close(after.other, 0)


def test_models_of_paired_prompts_are_refused():
    paired = HookedTransformer(TransformerConfig(x_dim=3, y_dim=2, n_context=4))
    with pytest.raises(ValueError, match="interleaved prompts"):
        measure_token_sensitivity(paired, prompts())
