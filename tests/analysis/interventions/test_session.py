"""A patching session against hand-written hooks, on our models and on TransformerLens' bridge."""

import math
from typing import Any

import pytest
from torch import Tensor
from torch.testing import assert_close

from mechicl.analysis import PatchingSession
from mechicl.models import HookedTransformer
from mechicl.models.opening.sites import Site
from mechicl.tasks import RepeatedTokens
from tests.analysis.interventions import oracles
from tests.analysis.interventions.oracles import SINGLE, model_of, recorded, run

SITES = [
    Site("resid_pre", 1, pos=4), Site("z", 0, pos=3, head=1), Site("z", 1, head=0), Site("q", 1, pos=4),
    Site("mlp_out", 0), Site("pattern", 1, head=1, query=4), Site("attn_scores", 0, head=0, query=4, key=2),
]  # fmt: skip


@pytest.fixture
def model() -> HookedTransformer:
    return model_of("gpt")


def session_of(model: HookedTransformer, **options: Any) -> PatchingSession:
    return PatchingSession(model, oracles.inputs(model, 0), oracles.inputs(model, 1), **options)


def token_model() -> HookedTransformer:
    return model_of("ids", d_vocab=20, n_ctx=7, d_mlp=None, attn_only=True)


def ids(seed: int) -> Tensor:
    return oracles.ids(seed, n_pos=7, d_vocab=20)


def by_hand(model: Any, clean: Any, corrupted: Any, sites: list[Site]) -> Tensor:
    """The last position's output where each site's part is written over by a separate hook."""
    hooks = []
    for site in sites:
        named = {axis: getattr(site, axis) for axis in ("pos", "head", "query", "key")}
        where = {axis: place for axis, place in named.items() if place is not None}
        hooks.append(oracles.putting(site.component, site.layer, where, recorded(model, clean, site.hook_name)))
    return run(model, corrupted, hooks)[0]


def executed(session: PatchingSession) -> Tensor:
    names = {"model": session.model, "clean": session.clean, "corrupted": session.corrupted}
    exec(session.code(), names)
    return names["prediction"]


@pytest.mark.parametrize("site", SITES, ids=str)
def test_one_patch_is_one_hook_written_by_hand(model: HookedTransformer, site: Site):
    session = session_of(model)
    session.clean_prompt, session.corrupted_prompt = 1, 2
    session.toggle(site)
    corrupted = session.corrupted[2:3]
    expected = by_hand(model, session.clean[1:2], corrupted, [site])
    assert not expected.allclose(run(model, corrupted)[0], atol=1e-4)  # the patch does something
    assert_close(session.result().prediction, expected)
    assert_close(executed(session), expected)
    outputs = model.run_with_hooks(oracles.tokens_of(model, corrupted), fwd_hooks=session.hooks())
    assert_close(outputs[0, -1], expected)
    assert oracles.no_hook_left(model)


@pytest.mark.parametrize("make_model", [oracles.shared_bridge, token_model])
def test_several_patches_in_models_of_tokens(make_model):
    model, clean = make_model(), ids(0)
    # the metric compares two answers, so the prompts have to have different ones
    answers = {seed: run(model, ids(seed)[:1])[0].argmax() for seed in range(30)}
    corrupted = ids(next(seed for seed, answer in answers.items() if answer != answers[0]))
    session = PatchingSession(model, clean, corrupted)
    sites = [Site("z", 0, pos=4, head=1), Site("pattern", 1, head=0, query=6), Site("resid_pre", 1, pos=2)]
    for site in sites:
        session.toggle(site)
    result = session.result()
    expected = by_hand(model, clean[:1], corrupted[:1], sites)
    assert_close(result.prediction, expected, **SINGLE)
    assert_close(executed(session), result.prediction, **SINGLE)
    plain = run(model, clean[:1])[0], run(model, corrupted[:1])[0]
    correct, wrong = (logits.argmax() for logits in plain)
    assert correct != wrong
    metrics = (result.metric, result.clean_metric, result.corrupted_metric)
    for logits, metric in zip((expected, *plain), metrics, strict=True):
        assert metric == pytest.approx((logits[correct] - logits[wrong]).item(), abs=1e-5)
    assert session.labels[0] == f"{clean[0, 0]}/{corrupted[0, 0]}"
    assert oracles.no_hook_left(model)


def test_the_last_residual_stream_recovers_all_and_no_patch_nothing(model: HookedTransformer):
    session = session_of(model)
    assert session.result().recovered == 0
    session.toggle(Site("resid_post", 1, pos=4))
    result = session.result()
    assert result.recovered == pytest.approx(1)
    assert_close(result.prediction, result.clean_prediction)
    target = session.clean.query.ys[0]
    for prompts, metric in ((session.clean, result.clean_metric), (session.corrupted, result.corrupted_metric)):
        assert metric == pytest.approx((model.predict(prompts)[0] - target).square().item())
    assert math.isnan(PatchingSession(model, session.clean, session.clean).result().recovered)


def test_toggle_undo_redo_and_clear(model: HookedTransformer):
    session, (a, b) = session_of(model), SITES[:2]
    steps = [
        (session.undo, ()), (lambda: session.toggle(a), (a,)), (lambda: session.toggle(b), (a, b)),
        (lambda: session.toggle(a), (b,)), (session.undo, (a, b)), (session.redo, (b,)), (session.clear, ()),
        (session.clear, ()), (session.undo, (b,)), (lambda: session.toggle(a), (b, a)), (session.redo, (b, a)),
    ]  # fmt: skip
    for step, expected in steps:
        step()
        assert session.interventions == expected
    assert not session.can_redo


def test_a_prompt_is_chosen_with_its_corrupted_one(model: HookedTransformer):
    session = session_of(model)
    session.clean_prompt = 2
    assert (session.clean_prompt, session.corrupted_prompt) == (2, 2)
    session.corrupted_prompt = 1  # another pair
    assert (session.clean_prompt, session.corrupted_prompt) == (2, 1)
    fewer = PatchingSession(model, oracles.inputs(model, 0), oracles.inputs(model, 1, n=2))
    fewer.corrupted_prompt = 1
    fewer.clean_prompt = 2  # there is no such corrupted prompt
    assert (fewer.clean_prompt, fewer.corrupted_prompt) == (2, 1)


def test_sequences_are_their_ids():
    task = RepeatedTokens(d_vocab=20, n_ctx=7, min_period=3, max_period=4)
    model, clean, corrupted = token_model(), task.sample(3, seed=0), task.sample(3, seed=1)
    plain = PatchingSession(model, clean.read, corrupted.read)
    for session in (plain, PatchingSession(model, clean, corrupted), PatchingSession(model, clean, corrupted.read)):
        session.clean_prompt = 1
        session.toggle(Site("z", 0, pos=4, head=1))
        assert_close(session.result().prediction, plain.result().prediction, atol=0, rtol=0)
        assert_close(executed(session), plain.result().prediction)
        assert session.code() == plain.code()
