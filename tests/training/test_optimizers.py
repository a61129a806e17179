"""SOAP against its steps one by one, and interchange training against the analysis."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl import analysis
from mechicl.algorithms.stepwise import Hypothesis, QueryDescent, ResidualDescent
from mechicl.checkpoints import load_checkpoint, save
from mechicl.constructions import known_models
from mechicl.models import TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.training import SOAP, TrainingConfig, TrainingDivergedError, optimizers, train_interchange
from mechicl.training.interchange import interchange_r2
from mechicl.training.optimizers import eigenvectors

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


def test_gradients_that_overflowed_reach_the_weights_but_not_the_eigenvectors():
    factors = torch.stack([torch.eye(3), torch.full((3, 3), torch.nan), torch.full((3, 3), torch.inf)])
    assert eigenvectors(factors).isfinite().all()
    assert not run_soap(torch.zeros(1, 4), [torch.Size((2, 2))], [torch.full((1, 4), torch.nan)]).isfinite().any()


# ---- interchange training: its interventions are those of the analysis, and its models come to contain algorithms ----
TASK = LinearRegression(x_dim=2, n_context=5)
MODEL = TransformerConfig(
    x_dim=2, n_context=5, n_layers=2, n_heads=1, d_model=6, read_in="linear", read_out="linear", initializer_range=0.2
)
CONFIG = TrainingConfig(
    TASK, MODEL, steps=30, batch_size=16, optimizer="soap", learning_rate=2e-2, eval_every=20, eval_prompts=64
)
TWO = Hypothesis(ResidualDescent(2, step_size=0.8))


@pytest.mark.parametrize("name", ["GD++, 3 steps", "copying, then gradient descent, 1 step", "Newton, 3 iterations"])
def test_interventions_are_those_of_the_analysis(name):
    known = next(known for known in known_models() if known.name == name)
    prompts = known.task.sample(6, seed=0, dtype=torch.float64)
    sources = analysis.sample_sources(known.task, prompts, seed=1)
    model = known.model
    for layer in range(model.cfg.n_layers):  # no longer the algorithm
        model.blocks[layer].attn.W_O.data *= 1.1 + layer / 10
    result = analysis.interchange(model, known.hypothesis, prompts, sources, progress=False)
    measured = interchange_r2(model, known.hypothesis, prompts, sources)
    distances = (result.predictions - result.expected).square().mean((1, 2))
    states = [known.hypothesis.algorithm.predict(each) for each in (prompts, sources)]
    apart = (states[1] - states[0]).square().mean()
    others = [value for name, value in measured.items() if not name.startswith("point")]
    mine = torch.tensor(others, dtype=torch.float64)
    trained = [(cell, d) for cell, d in zip(result.cells, distances, strict=True) if cell.kind != "mixture"]
    theirs = torch.stack([d for cell, d in trained if cell.intervention != "point exchanged"])
    torch.testing.assert_close(((1 - mine) * apart).sort().values, theirs.sort().values, rtol=1e-6, atol=1e-12)
    assert len(measured) == len(trained)
    assert len({round(value, 9) for value in measured.values()}) > 5  # they differ, so that a mix-up would show


def test_a_model_that_runs_it_has_nothing_to_learn():
    known = known_models()[1]
    prompts = known.task.sample(8, seed=0, dtype=torch.float64)
    sources = analysis.sample_sources(known.task, prompts, seed=1)
    assert min(interchange_r2(known.model, known.hypothesis, prompts, sources).values()) > 1 - 1e-9
    other = Hypothesis(QueryDescent(2, step_size=0.14))  # the same predictions
    measured = interchange_r2(known.model, other, prompts, sources)
    assert measured["prediction"] > 1 - 1e-9
    assert min(measured.values()) < 0.99


@pytest.mark.parametrize("optimizer", ["adam", "soap"])
def test_training_brings_model_and_algorithm_nearer(optimizer, tmp_path):
    config = CONFIG.replace(optimizer=optimizer, learning_rate=2e-2 if optimizer == "soap" else 1e-2)
    result = train_interchange(config, TWO, progress=False)
    losses = [row[0] for row in result.record["curve"]["loss"]]
    assert losses[-1] < 0.5 * losses[0]
    measured = result.record["interchange"]["r2"][0]
    assert losses[-1] == pytest.approx(sum(1 - value for value in measured.values()) / len(measured))
    folder = save(tmp_path / "mine", result.models, result.record)
    assert load_checkpoint(folder).task == TASK
    assert not result.models[0].training


def test_each_seed_is_trained_as_if_alone():
    both = train_interchange(CONFIG.replace(seeds=(3, 4), steps=3), TWO, progress=False)
    alone = train_interchange(CONFIG.replace(seeds=(4,), steps=3), TWO, progress=False)
    assert both.models[1].W_Q.equal(alone.models[0].W_Q)
    assert not both.models[0].W_Q.equal(both.models[1].W_Q)
    assert [len(row) for row in both.record["curve"]["loss"]] == [2, 2]


def test_divergence_is_named():
    config = CONFIG.replace(steps=40, optimizer="adam", learning_rate=1e9, gradient_clip=None)
    with pytest.raises(TrainingDivergedError, match="smaller learning_rate"):
        train_interchange(config, TWO, progress=False)
