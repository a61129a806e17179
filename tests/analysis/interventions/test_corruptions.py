"""Corrupted prompts differ in one respect."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from mechicl.analysis.interventions import corrupt, corrupt_tokens
from mechicl.tasks import LinearRegression

KINDS = ("task", "labels", "query", "prompt", "noise")


def prompts(n: int = 6, n_context: int = 5, y_dim: int = 2, dtype: torch.dtype = torch.float64):
    return LinearRegression(x_dim=3, n_context=n_context, y_dim=y_dim).sample(n, seed=3, dtype=dtype)


@settings(max_examples=12)
@given(st.sampled_from(KINDS), st.integers(2, 5), st.integers(2, 5), st.integers(1, 2), st.integers(0, 99))
def test_what_changes_and_what_does_not(kind, n, n_context, y_dim, seed):
    clean = prompts(n, n_context, y_dim)
    xs, ys = clean.xs.clone(), clean.ys.clone()
    corrupted = corrupt(clean, kind, seed=seed)
    assert torch.equal(clean.xs, xs)
    assert torch.equal(clean.ys, ys)
    assert (corrupted.xs.shape, corrupted.ys.shape) == (xs.shape, ys.shape)
    again = corrupt(clean, kind, seed=seed)
    assert torch.equal(corrupted.xs, again.xs)
    assert torch.equal(corrupted.ys, again.ys)
    assert corrupt(prompts(dtype=torch.float32), kind).ys.dtype == torch.float32
    if kind == "task":
        assert torch.equal(corrupted.xs, xs)
        assert_close(corrupted.ys.square().mean(), ys.square().mean())
        for i in range(n):  # linear in the inputs, by other weights
            weights = torch.linalg.lstsq(xs[i], corrupted.ys[i], driver="gelsd").solution
            assert_close(xs[i] @ weights, corrupted.ys[i], atol=1e-8, rtol=1e-6)
        assert not torch.allclose(corrupted.ys, ys)
    elif kind == "labels":
        assert torch.equal(corrupted.xs, xs)
        assert torch.equal(corrupted.ys[:, -1], ys[:, -1])
        for i in range(n):
            taken = [(ys[i, :-1] == y).all(-1).nonzero().item() for y in corrupted.ys[i, :-1]]
            assert sorted(taken) == list(range(n_context))
            assert all(t != here for here, t in enumerate(taken))
    elif kind == "query":
        assert torch.equal(corrupted.ys[:, :-1], ys[:, :-1])
        assert torch.equal(corrupted.xs[:, :-1], xs[:, :-1])
        taken = [(xs[:, -1] == x).all(-1).nonzero().item() for x in corrupted.xs[:, -1]]
        assert all(t != here for here, t in enumerate(taken))
    elif kind == "prompt":
        taken = [(xs == x).all((1, 2)).nonzero().item() for x in corrupted.xs]
        assert sorted(taken) == list(range(n))
        assert all(t != here for here, t in enumerate(taken))
        assert torch.equal(corrupted.ys, ys[torch.tensor(taken)])
    else:
        assert torch.equal(corrupted.xs, xs)
        assert torch.equal(corrupted.ys[:, -1], ys[:, -1])
        assert not torch.isclose(corrupted.ys[:, :-1], ys[:, :-1]).all()


def test_seeds_differ_and_the_noise_has_its_size():
    clean = prompts(2000, y_dim=1)
    for size in (0.5, 2.0):
        moved = (corrupt(clean, "noise", noise_std=size).ys - clean.ys)[:, :-1]
        assert moved.std().item() == pytest.approx(size * clean.ys.std().item(), rel=0.03)
    for kind in KINDS:
        drawn = [corrupt(clean, kind, seed=seed) for seed in (0, 1)]
        assert not (torch.equal(drawn[0].xs, drawn[1].xs) and torch.equal(drawn[0].ys, drawn[1].ys))


def test_one_prompt_without_context_is_a_task():
    assert corrupt(prompts(1, n_context=0), "task").n_context == 0


# ---- token ids ----


@st.composite
def sequences(draw: st.DrawFn) -> torch.Tensor:
    n, n_pos, d_vocab = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(2, 6))
    return torch.randint(d_vocab, (n, n_pos), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))


@settings(max_examples=25)
@given(sequences(), st.one_of(st.none(), st.integers(6, 9)), st.integers(0, 99))
def test_no_earlier_occurrence_of_the_last_token_remains(clean, d_vocab, seed):
    size = d_vocab or int(clean.max()) + 1
    assume(size > 1)
    before = clean.clone()
    corrupted = corrupt_tokens(clean, "occurrences", d_vocab=d_vocab, seed=seed)
    assert torch.equal(clean, before)
    assert (corrupted.shape, corrupted.dtype) == (clean.shape, torch.int64)
    assert torch.equal(corrupted[:, -1], clean[:, -1])
    earlier = clean[:, :-1] == clean[:, -1:]
    assert not (corrupted[:, :-1] == clean[:, -1:]).any()
    assert torch.equal(corrupted[:, :-1][~earlier], clean[:, :-1][~earlier])
    assert ((corrupted >= 0) & (corrupted < size)).all()
    assert torch.equal(corrupted, corrupt_tokens(clean, d_vocab=d_vocab, seed=seed))


def test_another_sequence():
    clean = torch.arange(20).reshape(5, 4)
    corrupted = corrupt_tokens(clean, "sequence", seed=2)
    taken = corrupted[:, 0] // 4
    assert torch.equal(corrupted, clean[taken])
    assert sorted(taken.tolist()) == list(range(5))
    assert (taken != torch.arange(5)).all()


def test_all_other_tokens_are_equally_frequent():
    clean = torch.full((400, 10), 3)
    drawn = corrupt_tokens(clean, d_vocab=5)[:, :-1]
    counts = torch.bincount(drawn.flatten(), minlength=5)
    assert counts[3] == 0
    assert ((counts[[0, 1, 2, 4]] - 900).abs() < 5 * (3600 * 3 / 16) ** 0.5).all()
    assert not torch.equal(drawn, corrupt_tokens(clean, d_vocab=5, seed=1)[:, :-1])
    assert corrupt_tokens(clean)[:, :-1].max() == 2  # only tokens up to the largest that occurs
