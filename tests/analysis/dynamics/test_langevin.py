"""Learning coefficients against known values, quadrature and a plain loop of the sampler."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from mechicl import viz
from mechicl.analysis import dynamics
from mechicl.analysis.dynamics import LearningCoefficient, Sampler, SamplingWarning
from mechicl.analysis.dynamics.langevin import _mask
from mechicl.learners import squared_errors
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.tasks import LinearRegression, RepeatedTokens
from tests.analysis.dynamics.test_training import random_checkpoint


def learning_coefficient(models: Any, data: Any, **options: Any) -> LearningCoefficient:
    """Estimate with the sampler's settings among the other options."""
    sampler = {name: options.pop(name) for name in Sampler.__dataclass_fields__ if name in options}
    return dynamics.learning_coefficient(models, data, sampler=Sampler(**sampler), **options)


TASK = LinearRegression(x_dim=2, n_context=4)
CFG = TransformerConfig(x_dim=2, n_context=4, n_layers=2, n_heads=2)


class Weights(nn.Module):
    """Two parameters of any size, all 0."""

    def __init__(self, n_first: int = 1, n_second: int = 1):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(n_first, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(n_second, dtype=torch.float64))


def estimate(loss: Callable[[Weights], Tensor], model: nn.Module | None = None, **options) -> LearningCoefficient:
    """The coefficient of a function of the weights, which needs no data."""
    options = {"n_beta": 1e4, "n_chains": 32, "n_draws": 1000, "burn_in": 500, "localization": 0.01} | options
    return learning_coefficient(
        model or Weights(), torch.zeros(1), loss=lambda model, _: loss(model), progress=False, **options
    )


def regression(n: int = 300, d: int = 4) -> tuple[nn.Linear, tuple[Tensor, Tensor]]:
    """A least-squares solution in float64 and its data."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(n, d, generator=generator, dtype=torch.float64)
    ys = xs.sum(1, keepdim=True) + torch.randn(n, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(d, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(xs, ys).solution.T)
    return model, (xs, ys)


def half_mse(model: nn.Module, xs: Tensor, ys: Tensor) -> Tensor:
    return (model(xs) - ys).square().mean() / 2


# ---- known values ----
@pytest.mark.parametrize("localization", [0.01, 60.0])
def test_regular_regression_has_half_its_number_of_parameters_less_what_the_localization_holds(localization):
    model, (xs, ys) = regression()
    result = learning_coefficient(
        model, (xs, ys), loss=half_mse, n_chains=16, n_draws=1500, localization=localization, progress=False
    )
    assert result.n_beta == pytest.approx(300 / math.log(300))
    curvatures = torch.linalg.eigvalsh(xs.T @ xs / 300) * result.n_beta
    exact = (curvatures / (curvatures + localization)).sum().item() / 2
    assert exact == pytest.approx(2 if localization < 1 else 0.92, abs=0.01)
    assert exact in result.estimate(level=0.99)
    assert result.estimate().half_width < 0.05
    assert result.failures == ()
    assert result.acceptance.mean().item() == pytest.approx(0.9, abs=0.05)


def test_a_product_of_two_weights_is_as_quadrature_gives_it():
    # 1/2 in the limit of large n, from which it is far at any n: the singularity has multiplicity 2
    grid = np.linspace(-6, 6, 4001)
    density = 300 * grid[:, None] ** 2 * grid[None] ** 2
    weight = np.exp(-density - (grid[:, None] ** 2 + grid[None] ** 2) / 2)
    exact = (density * weight).sum() / weight.sum()
    result = estimate(lambda model: (model.first * model.second)[0] ** 2, n_beta=300.0, localization=1.0,
                      n_chains=256, n_draws=1500, burn_in=500)  # fmt: skip
    assert exact == pytest.approx(0.374, abs=0.001)
    assert exact in result.estimate(level=0.99)
    assert result.estimate().half_width < 0.1 * exact


def test_each_part_has_its_own_coefficient():
    result = estimate(
        lambda model: model.first.square().sum() + (model.second**4).sum(), Weights(3, 1),
        parts=["all", "first", "second"], n_chains=96, n_draws=1000,
    )  # fmt: skip
    for part, known in (("all", 1.75), ("first", 1.5), ("second", 0.25)):
        assert result.estimate(part=part).mean == pytest.approx(known, rel=0.06)


# ---- the sampler against a plain loop ----
@pytest.mark.parametrize("batch_size", [None, 20])
def test_chains_are_those_of_a_plain_loop(batch_size):
    model, (xs, ys) = regression(n=60, d=3)
    options = {"n_chains": 2, "n_draws": 12, "burn_in": 4, "step_size": 0.02, "n_beta": 30.0, "localization": 5.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        result = learning_coefficient(
            model, (xs, ys), loss=half_mse, batch_size=batch_size, seed=3, progress=False, **options
        )
    generator, center = torch.Generator().manual_seed(3 << 24), model.weight.detach()[0]
    rows = torch.randint(60, (2, batch_size or 0), generator=generator)
    weights, traces = center.repeat(2, 1), torch.zeros(2, 16, dtype=torch.float64)

    def energy(w: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        some = slice(None) if batch_size is None else chosen
        residual = xs[some] @ w - ys[some, 0]
        loss = residual.square().mean() / 2
        force = 30 * xs[some].T @ residual / len(residual) + 5 * (w - center)
        return loss, 30 * loss + 2.5 * (w - center).square().sum(), force

    for t in range(16):
        if batch_size:
            rows = torch.randint(60, (2, batch_size), generator=generator)
        noise = torch.randn(2, 3, generator=generator)
        uniform = None if batch_size else torch.rand(2, 1, generator=generator)
        for i in range(2):
            loss, before, force = energy(weights[i], rows[i])
            traces[i, t] = 30 * (loss - energy(center, rows[i])[0])
            moved = weights[i] - 0.01 * force + 0.02**0.5 * noise[i]
            if uniform is not None:
                _, after, force_there = energy(moved, rows[i])
                ahead = Normal(weights[i] - 0.01 * force, 0.02**0.5).log_prob(moved).sum()
                back = Normal(moved - 0.01 * force_there, 0.02**0.5).log_prob(weights[i]).sum()
                if uniform[i, 0] >= (before - after + back - ahead).exp():
                    continue
            weights[i] = moved
    torch.testing.assert_close(result.traces[0, 0, 0].double(), traces, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.coefficients[0, 0, 0], traces[:, 4:].mean(1), rtol=1e-5, atol=1e-6)
    drift = traces[:, 10:].mean(1) - traces[:, 4:10].mean(1)
    torch.testing.assert_close(result.drifts[0, 0, 0], drift, rtol=1e-5, atol=1e-6)


# ---- models, seeds, snapshots and parts ----
SHORT = {"n_chains": 2, "n_draws": 20, "burn_in": 50, "n_beta": 10.0, "progress": False}


@pytest.mark.filterwarnings("ignore::mechicl.analysis.dynamics.SamplingWarning")
def test_coefficients_of_1_are_no_share():
    found = learning_coefficient(random_checkpoint(CFG, 1, 3), TASK.sample(8, seed=0), **SHORT)
    exact = replace(found, coefficients=torch.ones_like(found.coefficients))
    assert (exact.estimate().low, exact.estimate().high) == (1, 1)


@pytest.mark.filterwarnings("ignore::mechicl.analysis.dynamics.SamplingWarning")
def test_all_snapshots_and_seeds_are_measured_together():
    made, prompts = random_checkpoint(CFG, 2, 2), TASK.sample(32, seed=0)
    result = learning_coefficient(made, prompts, parts=["all", "layer 1"], **SHORT)
    assert (result.steps, result.parts) == ((0, 4), ("all", "layer 1"))
    assert result.coefficients.shape == (2, 2, 2, 2)
    expected = [[squared_errors(model, prompts).mean() for model in made.models_at(i)] for i in range(2)]
    torch.testing.assert_close(result.losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)
    late = learning_coefficient(made, prompts, steps=[4], **SHORT)
    assert late.steps == (4,)
    torch.testing.assert_close(late.losses, result.losses[1:])
    assert result.estimate(step=0, part="layer 1").n == 2
    assert set(result.intervals()) == {"coefficients", "temperatures", "drifts"}
    assert list(result.to_dataframe()["part"]) == ["all", "layer 1"] * 2


@pytest.mark.filterwarnings("ignore::mechicl.analysis.dynamics.SamplingWarning")
def test_token_models_and_models_that_cannot_be_stacked_have_their_loss():
    task = RepeatedTokens(d_vocab=8, n_ctx=8, min_period=2, max_period=4)
    cfg = TransformerConfig(prompt_format="token_ids", d_vocab=8, n_ctx=8, n_layers=1, d_model=8, attention="softmax")
    sequences = task.sample(16, seed=0)
    model = HookedTransformer(cfg, seed=0)
    result = learning_coefficient(model, sequences, batch_size=8, **SHORT)
    logits = model(sequences.read).log_softmax(-1)
    scored = sequences.predictable[:, 1:]
    nats = -logits.gather(-1, sequences.ids[:, 1:, None])[..., 0][scored].mean()
    lstm = HookedLSTM(LSTMConfig(x_dim=2, n_context=4, n_layers=1, d_model=4), seed=0)
    prompts = TASK.sample(16, seed=0)
    recurrent = learning_coefficient(lstm, prompts, **SHORT)
    mse = squared_errors(lstm, prompts, at="points").mean()
    # with minibatches the loss is that of the first one
    assert result.losses.item() == pytest.approx(nats.item(), rel=0.2)
    assert recurrent.losses.item() == pytest.approx(mse.item(), rel=1e-5)
    assert recurrent.coefficients.isfinite().all()


@pytest.mark.parametrize("attention", ["linear", "delta", "gated_linear", "mamba2", "mesa"])
def test_a_head_moves_all_that_its_z_depends_on_and_its_rows_of_the_output(attention):
    own = {"attn_bias": True} if attention == "linear" else {"conv_width": 2}
    cfg = CFG.replace(attention=attention, keys="causal", d_head=3, dtype="float64", **own)
    model = HookedTransformer(cfg, seed=0)
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    recorded: list[Tensor] = []
    tokens = torch.randn(2, cfg.n_ctx, cfg.d_token, dtype=torch.float64)
    model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: recorded.append(z))])
    attn = {name: weight for name, weight in model.named_parameters() if ".1.attn." in name}
    grads = torch.autograd.grad(recorded[0][:, :, 1].square().sum(), list(attn.values()), allow_unused=True)
    moves, mask, place = dict(zip(attn, grads, strict=True)), _mask(model, "head 1.1"), 0
    for name, weight in model.named_parameters():
        of_part = mask[place : place + weight.numel()].view(weight.shape)
        place += weight.numel()
        grad = moves.get(name)
        expected = torch.zeros_like(of_part) if grad is None else grad != 0
        if name == "blocks.1.attn.W_O":
            expected[1] = True
        assert torch.equal(of_part, expected), name
    of_layer = [torch.full((w.numel(),), name.startswith("blocks.1.")) for name, w in model.named_parameters()]
    assert torch.equal(_mask(model, "layer 1"), torch.cat(of_layer))


# ---- diagnostics ----
@pytest.mark.parametrize(("loss", "options", "message"), [
    (lambda m: m.first[0] ** 2, {"n_draws": 20, "step_size": 1e-7}, "chains are too short to spread"),
    (lambda m: m.first[0] ** 2, {"n_draws": 200, "burn_in": 0, "step_size": 1e-6}, "chains drift"),
    (lambda m: m.first[0] ** 2, {"step_size": 1.0}, "most steps are rejected"),
    (lambda m: (m.first[0] - 0.1) ** 2, {}, "the coefficient is negative"),
    (lambda m: (m.first[0] ** 2 - 0.1) ** 2 + 0.005 * m.first[0], {"n_draws": 300}, "chains disagree"),
    (lambda m: m.first[0] ** 2, {"batch_size": 1, "step_size": 1.2e-4}, "the temperature is above 1.2"),
    (lambda m: m.first[0] ** 2, {"batch_size": 1, "step_size": 1.0}, "chains diverge"),
])  # fmt: skip
def test_a_diagnostic_that_fails_is_a_warning(loss, options, message):
    with pytest.warns(SamplingWarning, match=message):
        result = estimate(loss, parts=["first"], **options)
    assert any(message in failure for failure in result.failures)


# ---- results and errors ----
def test_snapshots_are_drawn():
    over = learning_coefficient(
        {0: Weights(), 5: Weights()}, torch.zeros(1), loss=lambda m, _: m.first[0] ** 2 + m.second[0] ** 2,
        n_beta=100.0, n_chains=4, n_draws=200, burn_in=100, progress=False,
    )  # fmt: skip
    line = viz.plot(over, title="Two weights").to_dict()["data"][-1]
    assert list(line["x"]) == [2.5, 5]
    assert list(line["y"]) == pytest.approx([over.estimate(step).mean for step in (0, 5)])


MADE, SHARED = random_checkpoint(CFG, 2, 2), HookedTransformer(CFG.replace(n_heads=4, d_head=2, n_key_value_heads=2))
LINEAR, (XS, YS) = regression()


@pytest.mark.parametrize(("models", "data", "options", "message"), [
    (MADE, None, {"parts": ["blocks.7.*"]}, "parts must be"),
    (MADE, None, {"parts": []}, "parts must be one or more different names"),
    (SHARED, None, {"parts": ["head 0.1"]}, r"heads share blocks.0.attn._W_K.* 'head 0.1', take 'layer 0'"),
    (MADE, None, {"steps": [3]}, "steps must be one of 0, 4; got 3"),
    (MADE, None, {"burn_in": 10}, "burn_in must be at least 50"),
    (MADE, None, {"batch_size": 64}, "at least batch_size=64 examples"),
    (MADE, None, {"n_chains": 1}, "n_chains must be"),
    (MADE, None, {"loss": half_mse}, "data must be tensors together with a loss"),
    (LINEAR, (XS, YS), {}, "data must be tensors together with a loss"),
    (LINEAR, (XS, YS[1:]), {"loss": half_mse}, "one entry per example"),
    ([LINEAR, nn.Linear(2, 1)], (XS, YS), {"loss": half_mse}, "parameters of the same shapes"),
])  # fmt: skip
def test_bad_input_is_named(models, data, options, message):
    with pytest.raises(ValueError, match=message):
        learning_coefficient(models, data or TASK.sample(16, seed=0), **SHORT | options)


# ---- snapshots, frozen weights and refusals ----
def mse(model: nn.Module, xs: Tensor, ys: Tensor) -> Tensor:
    return (model(xs) - ys).square().mean()


@pytest.mark.parametrize("n_frozen", [1, 3])
def test_frozen_weights_stay_and_do_not_count(n_frozen):
    # the loss is quadratic in every weight: half the number of those that move
    model = Weights(4 - n_frozen, n_frozen)
    model.second.requires_grad_(False).fill_(0.3)
    result = estimate(
        lambda m: m.first.square().sum() + (m.second - 0.1).square().sum(), model, n_chains=96, n_draws=1000
    )
    assert result.estimate().mean == pytest.approx((4 - n_frozen) / 2, rel=0.06)
    assert result.losses.item() == pytest.approx(0.04 * n_frozen)
    assert (model.second == 0.3).all()
    with pytest.raises(ValueError, match="all weights of the part 'second' are frozen"):
        estimate(lambda m: m.first.square().sum(), model, parts=["second"])


@pytest.mark.parametrize(("model", "message"), [
    (nn.Sequential(nn.Linear(3, 1), nn.Dropout()), r"its value changes between two calls: call eval\(\)"),
    (nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)), r"changes the model's buffers .*running_mean.*: call eval\(\)"),
    (nn.Linear(3, 1).half(), "float32, or all float64, on one device, got .'torch.float16"),
    (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).double()), "float32, or all float64"),
    (nn.Sequential(nn.Linear(3, 64), nn.RReLU(), nn.Linear(64, 1)), "its value changes between two calls"),
])  # fmt: skip
def test_models_that_no_chain_can_run_are_refused(model, message):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    xs = torch.randn(64, 3)  # enough for two masks of dropout to differ
    with pytest.raises(ValueError, match=message):
        learning_coefficient(model, (xs, torch.zeros(64, 1)), loss=mse)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("loss", "message"), [
    (lambda m: m.first, r"one finite number, a tensor without axes, got a tensor of float64 \[1\]"),
    (lambda m: m.first.sum().item(), "one finite number, a tensor without axes, got 0.0"),
    (lambda m: None, "one finite number, a tensor without axes, got None"),
    (lambda m: m.first[0] / 0, "one finite number.*nan"),
    (lambda m: torch.ones(()), "does not depend on the weights"),
    (lambda m: m.first[0].detach() ** 2, "does not depend on the weights"),
    (lambda m: nn.Linear(3, 1).weight.sum(), "does not depend on the weights"),
    (lambda m: m.third, "loss failed: AttributeError: .*third"),
    (lambda m: (m.first[0] * torch.rand(())) ** 2 + torch.rand(()), "its value changes between two calls"),
])  # fmt: skip
def test_a_loss_that_no_chain_can_sample_is_named(loss, message):
    with pytest.raises(ValueError, match=message):
        estimate(loss)


def test_weights_that_are_not_finite_and_seeds_out_of_range_are_refused():
    model = Weights()
    model.second.data.fill_(math.nan)
    with pytest.raises(ValueError, match="weights that are not finite"):
        estimate(lambda m: m.first[0] ** 2, model)
    for seed in (-1, 2**40, 2**63, 2**64):
        with pytest.raises(ValueError, match="seed must be"):
            estimate(lambda m: m.first[0] ** 2, seed=seed)


@pytest.mark.parametrize("batch_size", [None, 8])
def test_chains_in_parts_are_the_chains_of_one_pass(batch_size: int | None, monkeypatch: pytest.MonkeyPatch):
    model, prompts = HookedTransformer(CFG, seed=0), TASK.sample(24, seed=0)
    found = []
    for stacked in (2**30, 1):
        monkeypatch.setattr("mechicl.analysis.dynamics.langevin.STACKED_BYTES", stacked)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)
            options = {"n_chains": 3, "n_draws": 6, "burn_in": 0, "step_size": 0.05, "batch_size": batch_size}
            found.append(learning_coefficient(model, prompts, parts=["all", "layer 0"], progress=False, **options))
    torch.testing.assert_close(found[0].coefficients, found[1].coefficients, rtol=1e-3, atol=1e-5)
    assert found[0].coefficients.abs().mean() > 1e-3
