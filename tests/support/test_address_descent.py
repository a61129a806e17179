"""Address descent: against plain loops, its transformers, and fits that find it where it is true."""

from typing import Any

import pytest
import torch

from analyses.support.address_descent import AddressDescent, address_descent, fit_address_descent
from mechicl.algorithms.stepwise import Hypothesis, QueryDescent
from mechicl.analysis.causes import exchange_patterns, interchange, sample_sources
from mechicl.tasks import LinearRegression

TASK = LinearRegression(x_dim=3, n_context=8, inputs="gaussian")


def make(kernel="softmax", *, moving_keys: bool = False, causal: bool = False, steps: int = 3) -> AddressDescent:
    generator = torch.Generator().manual_seed(1)
    scale = 1.0 if kernel == "softmax" else 0.1
    noise = torch.randn(steps, 2, 3, 3, generator=generator, dtype=torch.float64)
    rates = 0.4 + 0.2 * torch.rand(2, steps, 2, generator=generator, dtype=torch.float64)
    options = {"kernel": kernel, "moving_keys": moving_keys, "causal": causal}
    return AddressDescent(scale * (torch.eye(3, dtype=torch.float64) + 0.3 * noise), *rates, **options)


@pytest.mark.parametrize("kernel", ["softmax", "linear"])
@pytest.mark.parametrize(("moving_keys", "causal"), [(False, False), (True, False), (True, True)])
def test_equals_a_plain_loop(kernel, moving_keys, causal):
    algorithm, prompts = (
        make(kernel, moving_keys=moving_keys, causal=causal),
        TASK.sample(4, seed=0, dtype=torch.float64),
    )
    predictions = algorithm.predict(prompts)
    for b in range(4):
        xs, ys = prompts.xs[b], prompts.ys[b]
        z, p = [x.clone() for x in xs], torch.zeros(1, dtype=torch.float64)
        for k in range(3):
            keys, new = (z if moving_keys else xs), []
            for j in range(9):
                seen = range(min(j + 1, 8)) if causal else range(8)
                moved, read = torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
                for h in range(2):
                    scores = [keys[i] @ algorithm.matrices[k, h] @ z[j] for i in seen]
                    powers = [s.exp() if kernel == "softmax" else s for s in scores]
                    total = sum(powers) if kernel == "softmax" else 1.0
                    for i, power in zip(seen, powers, strict=True):
                        moved += algorithm.address_rates[k, h] * power / total * keys[i]
                        read += algorithm.target_rates[k, h] * power / total * ys[i]
                new.append(z[j] - moved)
                p = p + read if j == 8 else p
            z = new
        torch.testing.assert_close(predictions[b], p, rtol=0, atol=1e-10)
    torch.testing.assert_close(algorithm.run_query(prompts)[0], predictions, rtol=0, atol=1e-12)


def test_linear_heads_contain_descent_by_the_query():
    one = torch.ones(3, 1, dtype=torch.float64)
    algorithm = AddressDescent(torch.eye(3).double().expand(3, 1, 3, 3), 0.1 * one, 0.1 * one, kernel="linear")
    prompts = TASK.sample(4, seed=0, dtype=torch.float64)
    torch.testing.assert_close(algorithm.predict(prompts), QueryDescent(3, step_size=0.1).predict(prompts))


@pytest.mark.parametrize("kernel", ["softmax", "linear"])
@pytest.mark.parametrize("moving_keys", [False, True])
def test_transformers_run_it(kernel, moving_keys):
    algorithm = make(kernel, moving_keys=moving_keys)
    model, prompts = address_descent(algorithm, n_context=8), TASK.sample(16, seed=0, dtype=torch.float64)
    torch.testing.assert_close(model.predict(prompts), algorithm.predict(prompts), rtol=0, atol=1e-10)
    _, cache = model.run_with_cache(model.encode(prompts))
    scores = algorithm.run_query(prompts)[1]
    for k in range(3):
        found = cache[f"blocks.{k + 1}.attn.hook_attn_scores"][:, :, -1, :8].transpose(0, 1)
        torch.testing.assert_close(found, scores[k], rtol=0, atol=1e-10)
    hypothesis = Hypothesis(algorithm, ((0, 0), (1, 0), (2, 1), (3, 2), (4, 3)))
    test = interchange(model, hypothesis, prompts, sample_sources(TASK, prompts, seed=1), progress=False)
    own = [r2.mean for r2, cell in zip(test.r2, test.cells, strict=True) if "exchanged" in cell.intervention]
    assert min(own) > 0.999


@pytest.mark.parametrize("moving_keys", [False, True])
@pytest.mark.parametrize("component", ["pattern", "q"])
@pytest.mark.parametrize("steps", [(1,), (0, 1, 2)])
def test_exchange_equals_the_transformers(moving_keys, component, steps):
    algorithm = make(moving_keys=moving_keys)
    model = address_descent(algorithm, n_context=8)
    prompts, sources = (TASK.sample(16, seed=seed, dtype=torch.float64) for seed in (0, 1))
    expected = exchange_patterns(model, prompts, sources, layers=[1 + k for k in steps], component=component)
    found = algorithm.exchange(prompts, sources, steps=steps, component=component)
    torch.testing.assert_close(found, expected.predictions.T, rtol=0, atol=1e-9)
    assert (found - algorithm.predict(prompts)).abs().max() > 0.01


def test_causal_points_have_no_paired_transformer():
    with pytest.raises(ValueError, match="must not be causal"):
        address_descent(make(moving_keys=True, causal=True), n_context=8)


@pytest.mark.slow
def test_scores_tell_kernels_apart():
    algorithm, prompts = make(steps=2), TASK.sample(3000, seed=0, dtype=torch.float64)
    targets, scores = algorithm.run_query(prompts)
    options: dict[str, Any] = {"steps": 2, "heads": 2, "starts": 1, "iterations": 200, "held_out": 500}
    held_out = prompts[2500:]

    def r2(algorithm) -> float:
        found, true = (
            each - each.mean(-1, keepdim=True) for each in (algorithm.run_query(held_out)[1], scores[:, :, 2500:])
        )
        return 1 - ((found - true).square().mean((2, 3)) / true.square().mean((2, 3))).max().item()

    kernels = ("softmax", "linear")
    fits = {k: fit_address_descent(prompts, targets, scores=scores, kernel=k, **options)[0] for k in kernels}
    assert fits["softmax"].unexplained < 1e-6
    assert r2(fits["softmax"].algorithm) > 0.99999
    assert fits["softmax"].objective < 1e-6
    assert r2(fits["linear"].algorithm) < 0.98
    assert fits["linear"].converged
    alone = fit_address_descent(prompts, targets, **{**options, "starts": 2})
    assert alone[0].unexplained < 0.05
    assert alone[0].objective <= alone[1].objective
