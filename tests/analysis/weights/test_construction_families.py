"""Members of families against the algorithms as plain loops, and against the constructions."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.analysis.weights.construction_families import Family, family_for
from mechicl.models import TransformerConfig
from mechicl.prompts import Prompts


def prompts_for(x_dim: int, y_dim: int, n_context: int, seed: int = 0) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    xs, ys = (torch.randn(4, n_context + 1, d, generator=generator, dtype=torch.float64) for d in (x_dim, y_dim))
    return Prompts(xs, ys)


def descend(prompts: Prompts, preconditioners: list[np.ndarray], gammas: list[float]) -> torch.Tensor:
    """Every point takes `y_i -= Σ_j (x_i A x_j) y_j` and `x_i -= γ Σ_j (x_i x_j) x_j` over the context, by loops."""
    result = []
    for prompt_xs, prompt_ys in zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True):
        xs, ys, n = prompt_xs.copy(), prompt_ys.copy(), len(prompt_xs) - 1
        ys[-1] = 0
        for A, gamma in zip(preconditioners, gammas, strict=True):
            old_xs, old_ys = xs.copy(), ys.copy()
            for i in range(n + 1):
                for j in range(n):
                    ys[i] -= (old_xs[i] @ A @ old_xs[j]) * old_ys[j]
                    xs[i] -= gamma * (old_xs[i] @ old_xs[j]) * old_xs[j]
        result.append(-ys[-1])
    return torch.tensor(np.array(result))


def iterate_newton(prompts: Prompts, alpha: float, steps: int) -> torch.Tensor:
    result = []
    for xs, ys in zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True):
        S, B = xs[:-1].T @ xs[:-1], xs[:-1].T @ ys[:-1]
        M = alpha * S
        for _ in range(steps):
            M = 2 * M - M @ S @ M
        result.append(xs[-1] @ M @ B)
    return torch.tensor(np.array(result))


def by_loops(family: Family, parameters: torch.Tensor, prompts: Prompts, n_layers: int) -> torch.Tensor:
    """The algorithm that the family is named after."""
    d, n = prompts.x_dim, prompts.n_context
    numbers = parameters.numpy()
    if family.name == "newton":
        return iterate_newton(prompts, numbers[0], n_layers - 2)
    copies = n_layers if family.name.endswith("per layer") else 1

    def each(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values] * (n_layers // copies))

    if family.name.startswith("pgd"):
        return descend(prompts, list(each(numbers.reshape(copies, d, d)) / n), [0.0] * n_layers)
    gammas = each(numbers[copies:]) if "++" in family.name else [0.0] * n_layers
    return descend(prompts, [a * np.eye(d) for a in each(numbers[:copies])], list(gammas))


def config(name: str, x_dim: int, y_dim: int, n_context: int, n_layers: int, **fields) -> TransformerConfig:
    if name == "newton":
        return constructions.newton(x_dim=x_dim, y_dim=y_dim, n_context=n_context, steps=n_layers - 2, alpha=1.0).cfg
    cfg = TransformerConfig(x_dim=x_dim, y_dim=y_dim, n_context=n_context, n_layers=n_layers, dtype="float64")
    return cfg.replace(**fields)


NAMES = ("gd", "gd per layer", "gd++", "gd++ per layer", "pgd", "pgd per layer", "newton")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4)
@given(
    x_dim=st.integers(1, 3), y_dim=st.integers(1, 2), n_context=st.integers(1, 4), n_layers=st.integers(1, 3),
    normalize=st.booleans(), recurrent=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_every_member_is_the_algorithm(name, x_dim, y_dim, n_context, n_layers, normalize, recurrent, seed):
    assume(not (recurrent and name.endswith("per layer")))
    if name == "newton":
        n_layers += 2
    fields = {"normalize_by_context": normalize, "recurrent": recurrent}
    family = family_for(name, config(name, x_dim, y_dim, n_context, n_layers, **fields))
    generator = torch.Generator().manual_seed(seed)
    parameters = 0.2 * torch.randn(family.n_parameters, generator=generator, dtype=torch.float64)
    prompts = prompts_for(x_dim, y_dim, n_context, seed)
    member = family.member(parameters)
    expected = by_loops(family, parameters, prompts, n_layers)
    torch.testing.assert_close(member.predict(prompts), expected, rtol=1e-9, atol=1e-11)
    if name != "newton":
        assert (member.cfg.recurrent, member.cfg.normalize_by_context) == (recurrent, normalize)


def test_a_family_keeps_other_settings_of_the_model():
    cfg = config("gd", 2, 1, 3, 2, token_clip=0.3, recurrent=True)
    prompts = prompts_for(2, 1, 3)
    result = family_for("gd", cfg).member(torch.tensor([2.0], dtype=torch.float64)).predict(prompts)
    expected = []
    for prompt_xs, prompt_ys in zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True):
        tokens = np.concatenate([prompt_xs, prompt_ys], axis=1)
        tokens[-1, -1] = 0
        for _ in range(2):
            moments = tokens[:-1, :2].T @ tokens[:-1, 2:]
            tokens = tokens - 2.0 * np.concatenate([np.zeros((4, 2)), tokens[:, :2] @ moments], axis=1)
            tokens = tokens.clip(-0.3, 0.3)
        expected.append(-tokens[-1, 2:])
    torch.testing.assert_close(result, torch.tensor(np.array(expected)), rtol=1e-11, atol=1e-13)


def test_parameters_have_names_and_shapes():
    family = family_for("gd++ per layer", config("gd++", 2, 1, 3, 3))
    assert family.n_parameters == 6
    named = family.named(torch.arange(12.0).reshape(2, 6))  # two seeds
    assert {name: value.tolist() for name, value in named.items()} == {
        "step_size": [[0, 1, 2], [6, 7, 8]],
        "gamma": [[3, 4, 5], [9, 10, 11]],
    }
    shapes = {name: family_for(name, config(name, 2, 1, 3, 3)).shapes for name in NAMES}
    assert shapes["pgd"] == {"preconditioner": (1, 2, 2)}
    assert shapes["pgd per layer"] == {"preconditioner": (3, 2, 2)}
    assert shapes["newton"] == {"alpha": (1,)}
    assert shapes["gd"] == {"step_size": (1,)}
