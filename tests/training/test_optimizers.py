import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl.training import SOAP, optimizers
from mechicl.training.optimizers import eigenvectors, make_optimizer

BETA, BETA_2, EVERY, EPS, RATE = 0.9, 0.99, 3, 1e-5, 0.02


def plain_soap(start: Tensor, gradients: list[Tensor], turn: bool = True) -> Tensor:
    """One matrix, step by step as in Vyas et al. 2024, algorithm 3, with whole eigenbases; not turned it is Adam."""
    w, m = start.clone(), torch.zeros_like(start)
    left, right = torch.zeros(len(w), len(w)).double(), torch.zeros(len(w.T), len(w.T)).double()
    v, basis_left, basis_right = torch.zeros_like(w), left, right
    for t, g in enumerate(gradients, start=1):
        left = BETA_2 * left + (1 - BETA_2) * g @ g.T
        right = BETA_2 * right + (1 - BETA_2) * g.T @ g
        if not turn:
            basis_left, basis_right = torch.eye(len(left)).double(), torch.eye(len(right)).double()
        elif t % EVERY == 1:
            basis_left, basis_right = (
                torch.linalg.eigh(f + 1e-6 * f.trace() / len(f) * torch.linspace(0, 1, len(f)).double().diag())[1]
                for f in (left, right)
            )
        m = BETA * m + (1 - BETA) * g
        turned = basis_left.T @ g @ basis_right
        v = BETA_2 * v + (1 - BETA_2) * turned**2
        turned_mean = basis_left.T @ (m / (1 - BETA**t)) @ basis_right
        second = v / (1 - BETA_2**t)
        w = w - RATE * basis_left @ (turned_mean / (second.sqrt() + EPS * second.mean().sqrt())) @ basis_right.T
    return w


def run_soap(start: Tensor, shapes: list[torch.Size], gradients: list[Tensor], **changes: int) -> Tensor:
    flat = start.clone().requires_grad_()
    optimizer = SOAP(flat, shapes, lr=RATE, betas=(BETA, BETA_2), every=EVERY, eps=EPS, **changes)
    for gradient in gradients:
        flat.grad = gradient.clone()
        optimizer.step()
    return flat.detach()


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_each_matrix_of_each_model_takes_the_steps_that_it_would_take_alone():
    shapes = [torch.Size(s) for s in [(2, 3, 4), (4,), (3, 4), (4, 4), (4,)]]
    start = draw(2, sum(shape.numel() for shape in shapes), seed=0)
    gradients = list(draw(10, *start.shape, seed=1))
    after = run_soap(start, shapes, gradients)
    for model in range(2):
        place = 0
        for shape in shapes:
            here = slice(place, place + shape.numel())
            place += shape.numel()
            got = after[model, here].reshape(shape)
            first, each = start[model, here].reshape(shape), [g[model, here].reshape(shape) for g in gradients]
            if len(shape) == 1:
                expected = plain_soap(first[None], [g[None] for g in each], turn=False)[0]
            else:
                matrices = [first.reshape(-1, *shape[-2:]), *(g.reshape(-1, *shape[-2:]) for g in each)]
                heads = zip(*matrices, strict=True)
                expected = torch.stack([plain_soap(w, g) for w, *g in heads]).reshape(shape)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 5))
def test_turned_weights_are_trained_as_the_weights_themselves(seed, size):
    # square: of a wide matrix's first gradient, some axes are not determined
    start, gradients = draw(1, size * size, seed=seed), draw(7, size, size, seed=seed + 1)
    left, right = (torch.linalg.qr(draw(size, size, seed=seed + i))[0] for i in (2, 3))

    def turned(matrices: Tensor) -> Tensor:
        return left @ matrices @ right

    shape = [torch.Size((size, size))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "TIE", 0.0)  # ties go to the weights' own axes, which are turned here
        straight = run_soap(start, shape, [g.reshape(1, -1) for g in gradients]).reshape(size, size)
        around = run_soap(
            turned(start.reshape(size, size)).reshape(1, -1), shape, [turned(g).reshape(1, -1) for g in gradients]
        )
    torch.testing.assert_close(around.reshape(size, size), turned(straight), rtol=0, atol=1e-5)


def test_sides_longer_than_the_bound_keep_their_axes():
    start, gradients = draw(1, 12, seed=0), list(draw(5, 1, 12, seed=1))
    bounded = run_soap(start, [torch.Size((3, 4))], gradients, max_size=2)
    as_vector = run_soap(start, [torch.Size((12,))], gradients)
    torch.testing.assert_close(bounded, as_vector, rtol=0, atol=1e-14)


def test_it_goes_down_an_ill_conditioned_valley_that_adam_crosses_slowly():
    basis = torch.linalg.qr(draw(6, 6, seed=0))[0]
    curvature = basis @ torch.logspace(0, -4, 6, dtype=torch.float64).diag() @ basis.T
    losses = {}
    for name in ("adam", "soap"):
        flat = torch.zeros(1, 36, dtype=torch.float64, requires_grad=True)
        optimizer = make_optimizer(name, flat, [torch.Size((6, 6))], 0.02)
        for _ in range(300):
            optimizer.zero_grad()
            error = flat.reshape(6, 6) - draw(6, 6, seed=1)
            loss = (error * (curvature @ error)).sum()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["soap"] < 0.1 * losses["adam"]


def test_gradients_that_overflowed_reach_the_weights_but_not_the_eigenvectors():
    factors = torch.stack([torch.eye(3), torch.full((3, 3), torch.nan), torch.full((3, 3), torch.inf)])
    assert eigenvectors(factors).isfinite().all()
    assert not run_soap(torch.zeros(1, 4), [torch.Size((2, 2))], [torch.full((1, 4), torch.nan)]).isfinite().any()
