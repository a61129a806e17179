"""Copying: the construction has all of it, random weights have none, and derivatives are autograd's."""

from typing import Any

import numpy as np
import pytest
import torch

from mechicl import constructions
from mechicl.analysis import measure_target_copying
from mechicl.analysis.heads import measure_token_sensitivity
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.strategies import random_model

TASK = LinearRegression(x_dim=3, n_context=4, y_dim=2)
CONFIG = TransformerConfig(
    x_dim=3, n_context=4, y_dim=2, prompt_format="interleaved", keys="full", n_layers=2, n_heads=2, d_model=12, d_mlp=6,
    attention="softmax", normalization_type="LN", positional_embedding_type="standard", dtype="float64",
)  # fmt: skip


def prompts(n: int = 6, seed: int = 0, **fields) -> Prompts:
    return TASK.replace(**fields).sample(n, seed=seed, dtype=torch.float64)


def mirrored(n: int) -> Prompts:
    """Each prompt once more with its targets negated, so that the mean of all targets is 0."""
    p = prompts(n)
    return Prompts(torch.cat([p.xs, p.xs]), torch.cat([p.ys, -p.ys]))


def close(a: torch.Tensor, b: torch.Tensor | float, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype).expand(a.shape), rtol=0, atol=atol)


# ---- derivatives ----


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


@pytest.mark.parametrize("layer", [0, 1, 2])
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


def test_within_little_memory_results_are_the_same():
    model, p, sizes = random_model(CONFIG).eval(), prompts(7), []
    slopes, copied = measure_token_sensitivity(model, p), measure_target_copying(model, p)
    few = 3.5 * ModelAdapter(model).bytes_per_row(model.encode(p))
    model.add_hook("hook_embed", lambda tensor, hook: sizes.append(len(tensor)))
    for name, values in measure_target_copying(model, p, memory=few).samples().items():
        close(values, getattr(copied, name), 1e-10)
    assert sizes[-3:] == [3, 3, 1]
    model.reset_hooks()
    part = measure_token_sensitivity(model, p, memory=3 * 27 * model.bytes_per_prompt(p))
    torch.testing.assert_close(part.norms, slopes.norms)


def test_the_construction_depends_on_a_token_and_the_next_alone():
    model, p = constructions.copy_targets(x_dim=3, y_dim=2, n_context=4), prompts()
    before, after = (measure_token_sensitivity(model, p, layer) for layer in (0, 1))
    close(before.itself, 3**0.5)  # each token of three dimensions is unchanged in the stream
    close(before.next, 0)
    close(after.itself, 3**0.5)
    close(after.next, 2**0.5)  # two dimensions of it are targets
    close(after.other, 0)


# ---- the construction ----


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("n_context", [1, 4])
def test_the_construction_copies_everything(attention, n_context):
    model = constructions.copy_targets(x_dim=3, y_dim=2, n_context=4, attention=attention)
    p = mirrored(150)
    p = Prompts(p.xs[:, -n_context - 1 :], p.ys[:, -n_context - 1 :])
    result = measure_target_copying(model, p)
    close(result.attention[0], 1)
    close(result.pattern_cosine[0], 1)
    close(result.decoding_errors, 0)
    # no linear function of the input tells targets whose signs are random
    assert 0.9 < result.decoding_errors_before.mean() < 1.15
    squares = p.query.ys.square().mean(-1)  # it predicts 0
    for errors in (result.errors, result.errors_without, result.errors_without_elsewhere, result.errors_transplanted):
        close(errors, squares)


def test_without_its_copies_gradient_descent_predicts_0():
    model = constructions.copy_then_gradient_descent(x_dim=3, y_dim=2, n_context=4, step_size=0.8)
    p = mirrored(20)
    result = measure_target_copying(model, p)
    errors = squared_errors(model, p)[:, 0]
    close(result.errors, errors)
    close(result.errors_transplanted, errors)
    close(result.errors_without, p.query.ys.square().mean(-1))
    close(result.errors_without_elsewhere, errors)  # targets left at their own tokens do not move the first step
    assert result.errors.mean() < 0.8 * result.errors_without.mean()


# ---- other weights ----


def reference(model: HookedTransformer, p: Prompts, layer: int) -> dict[str, np.ndarray]:
    """Attention, cosine and decoding errors by loops over numpy arrays."""
    names = {"pattern": "attn.hook_pattern", "before": "hook_resid_pre", "after": "hook_resid_post"}
    _, cache = model.run_with_cache(model.encode(p))
    arrays = {k: cache[f"blocks.{layer}.{name}"].detach().double().numpy() for k, name in names.items()}
    n, n_heads = p.n_context, model.cfg.n_heads
    share, cosine = np.zeros((n_heads, len(p))), np.zeros((n_heads, len(p)))
    for head in range(n_heads):
        for i in range(len(p)):
            for t in range(n):
                row = arrays["pattern"][i, head, 2 * t]
                share[head, i] += abs(row[2 * t + 1]) / np.abs(row).sum() / n
                cosine[head, i] += row[2 * t + 1] / np.sqrt((row**2).sum()) / n
    result = {"attention": share, "pattern_cosine": cosine}
    ys = p.context.ys.numpy()
    half = len(p) // 2
    for name, which in (("decoding_errors", "after"), ("decoding_errors_before", "before")):
        errors = np.zeros(len(p))
        for judged in range(len(p)):
            others = range(half, len(p)) if judged < half else range(half)
            rows = np.stack([[*arrays[which][i, 2 * t], 1] for i in others for t in range(n)])
            readout = np.linalg.lstsq(rows, np.stack([ys[i, t] for i in others for t in range(n)]), rcond=None)[0]
            inputs = np.stack([[*arrays[which][judged, 2 * t], 1] for t in range(n)])
            errors[judged] = ((inputs @ readout - ys[judged]) ** 2).mean()
        result[name] = errors / (ys**2).mean()
    return result


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("layer", [0, 1])
def test_shares_and_readouts_are_those_of_plain_loops(attention, layer):
    model, p = random_model(CONFIG.replace(attention=attention)).eval(), prompts(25)
    result = measure_target_copying(model, p, layer)
    for name, expected in reference(model, p, layer).items():
        np.testing.assert_allclose(getattr(result, name).numpy(), expected, rtol=1e-7, atol=1e-9)


def with_outputs(model: HookedTransformer, p: Prompts, layer: int, positions: list[int]) -> torch.Tensor:
    """Errors with the layer's attention output at some positions replaced by its mean, layer by layer."""
    streams = model.forward(p, stop_at_layer=layer)
    block = model.blocks[layer]
    out = block.attn(block.ln1(streams))
    for position in positions:
        out[:, position] = sum(out[i, position] for i in range(len(p))) / len(p)
    mid = streams + out
    streams = mid + block.mlp(block.ln2(mid))
    predictions = model.forward(streams, start_at_layer=layer + 1)[:, -1]
    return (predictions - p.query.ys).square().mean(-1).detach()


@torch.no_grad()
def test_ablations_are_those_of_a_pass_by_hand():
    model, p = random_model(CONFIG).eval(), prompts(8)
    result = measure_target_copying(model, p)
    close(result.errors, squared_errors(model, p)[:, 0])
    close(result.errors_without, with_outputs(model, p, 0, [0, 2, 4, 6]), 1e-9)
    close(result.errors_without_elsewhere, with_outputs(model, p, 0, [1, 3, 5, 7, 8]), 1e-9)
    assert (result.errors_without - result.errors).abs().max() > 1e-4


@torch.no_grad()
def test_a_transplant_gives_each_head_the_construction_times_its_own_weight():
    model, p = random_model(CONFIG.replace(attention="linear")).eval(), prompts(8)
    name = "blocks.0.attn.hook_pattern"
    _, cache = model.run_with_cache(model.encode(p), names_filter=name)
    pattern = cache[name].clone()
    for head in range(2):
        total = sum(pattern[i, head, 2 * t].sum() for i in range(8) for t in range(4)) / 32
        for t in range(4):
            pattern[:, head, 2 * t] = 0
            pattern[:, head, 2 * t, 2 * t + 1] = total
    outputs = model.run_with_hooks(model.encode(p), fwd_hooks=[(name, lambda value, hook: pattern)])
    close(measure_target_copying(model, p).errors_transplanted, (outputs[:, -1] - p.query.ys).square().mean(-1), 1e-10)


# ---- what it leaves behind, what it refuses ----
