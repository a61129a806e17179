"""The twins do what `mechicl train` does: on the same numbers, the same loss, gradients and steps."""

import numpy as np
import pytest
import torch

from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.training.optimizers import clip_each_seed
from tests.scripts import import_script

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
twins = import_script("benchmarks.jax_twins")


def model_and_weights(n_layers, scale=1.0):
    config = TransformerConfig(x_dim=3, n_context=5, n_layers=n_layers, dtype="float64")
    model = HookedTransformer(config, seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale / weight.std())
    names = {"q": "W_Q", "k": "W_K", "v": "W_V", "o": "W_O"}
    weights = {short: getattr(model, name).detach()[:, 0].numpy().copy() for short, name in names.items()}
    return model, weights


def draws():
    random = torch.Generator().manual_seed(1)
    xs = torch.rand(16, 6, 3, generator=random, dtype=torch.float64) - 0.5
    return xs, torch.randn(16, 3, generator=random, dtype=torch.float64)


def our_loss(model, xs, ws):
    prompts = Prompts(xs, xs @ ws[..., None])
    return (model(model.encode(prompts), at="query") - prompts.ys[:, -1:]).square().mean()


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("name", ["plain", "folded", "moments"])
def test_each_form_has_our_loss_and_gradients(name, n_layers):
    model, weights = model_and_weights(n_layers, scale=0.3)
    xs, ws = draws()
    loss = our_loss(model, xs, ws)
    loss.backward()
    with jax.enable_x64(True):
        theirs, gradients = jax.value_and_grad(twins.LOSSES[name])(
            {key: jax.numpy.asarray(value) for key, value in weights.items()}, xs.numpy(), ws.numpy()
        )
        np.testing.assert_allclose(theirs, loss.item(), rtol=1e-12)
        for short, layers in {"q": "W_Q", "k": "W_K", "v": "W_V", "o": "W_O"}.items():
            ours = torch.stack([getattr(block.attn, layers).grad[0] for block in model.blocks])
            np.testing.assert_allclose(gradients[short], ours, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("scale", [0.1, 3.0])  # below the norm at which gradients are clipped, and above
def test_optax_steps_as_ours(scale):
    _, weights = model_and_weights(1, scale)
    flat = torch.cat([torch.from_numpy(weights[name]).flatten() for name in "qkvo"])[None]
    gradients = [
        scale**3 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(i)).double() for i in (2, 3)
    ]
    ours = flat.clone().requires_grad_()
    adam = torch.optim.Adam([ours], lr=1e-3)
    with jax.enable_x64(True):
        theirs, twin = jax.numpy.asarray(flat[0].numpy()), twins.optimizer(1e-3)
        state = twin.init(theirs)
        for gradient in gradients:
            ours.grad = clipped = gradient.clone()
            clip_each_seed(clipped, 10.0)
            adam.step()
            updates, state = twin.update(jax.numpy.asarray(gradient[0].numpy()), state, theirs)
            theirs = theirs + updates
        np.testing.assert_allclose(theirs, ours[0].detach(), rtol=1e-9)


@pytest.mark.parametrize("name", ["unsafe_rbg", "threefry"])
def test_prompts_are_of_our_distribution(name):
    sample, generator = twins.DRAWS[name]
    xs, ws = sample(jax.random.key(0, impl=generator), 4096, 5, 3)
    assert xs.shape == (4096, 6, 3)
    assert ws.shape == (4096, 3)
    np.testing.assert_allclose(np.mean(xs, (0, 1)), 0, atol=0.01)
    np.testing.assert_allclose(np.var(xs, (0, 1)), 1 / 12, rtol=0.03)
    assert -0.5 <= np.min(xs) <= -0.499
    assert 0.499 <= np.max(xs) <= 0.5
    np.testing.assert_allclose(np.cov(np.asarray(ws).T), np.eye(3), atol=0.08)
