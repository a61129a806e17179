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
from tests.analysis.interventions.oracles import (
    SINGLE,
    inputs,
    model_of,
    no_hook_left,
    putting,
    recorded,
    run,
    shared_bridge,
    tokens_of,
)
from tests.families import open_family, place_of, token_ids
from tests.families import putting as putting_by_torch

SITES = [
    Site("resid_pre", 1, pos=4),
    Site("z", 0, pos=3, head=1),
    Site("z", 1, head=0),
    Site("q", 1, pos=4),
    Site("mlp_out", 0),
    Site("pattern", 1, head=1, query=4),
    Site("attn_scores", 0, head=0, query=4, key=2),
]


@pytest.fixture
def model() -> HookedTransformer:
    return model_of("gpt")


def session_of(model: HookedTransformer, **options: Any) -> PatchingSession:
    return PatchingSession(model, inputs(model, 0), inputs(model, 1), **options)


def token_model() -> HookedTransformer:
    return model_of("ids", d_vocab=20, n_ctx=7, d_mlp=None, attn_only=True)


def ids(seed: int) -> Tensor:
    return oracles.ids(seed, n_pos=7, d_vocab=20)


def by_hand(model: Any, clean: Any, corrupted: Any, sites: list[Site]) -> Tensor:
    """The last position's output where each site's part is written over by a hook of its own."""
    hooks = []
    for site in sites:
        named = {axis: getattr(site, axis) for axis in ("pos", "head", "query", "key")}
        where = {axis: place for axis, place in named.items() if place is not None}
        hooks.append(putting(site.component, site.layer, where, recorded(model, clean, site.hook_name)))
    return run(model, corrupted, hooks)[0]


def executed(session: PatchingSession) -> Tensor:
    names = {"model": session.model, "clean": session.clean, "corrupted": session.corrupted}
    exec(session.code(), names)
    return names["prediction"]


@pytest.mark.parametrize("site", SITES, ids=str)
def test_one_patch_is_what_hooks_written_by_hand_do(model: HookedTransformer, site: Site):
    session = session_of(model)
    session.clean_prompt, session.corrupted_prompt = 1, 2
    session.toggle(site)
    corrupted = session.corrupted[2:3]
    expected = by_hand(model, session.clean[1:2], corrupted, [site])
    assert not expected.allclose(run(model, corrupted)[0], atol=1e-4)  # the patch does something
    assert_close(session.result().prediction, expected)
    assert_close(executed(session), expected)
    outputs = model.run_with_hooks(tokens_of(model, corrupted), fwd_hooks=session.hooks())
    assert_close(outputs[0, -1], expected)
    assert no_hook_left(model)


@pytest.mark.parametrize("make_model", [shared_bridge, token_model])
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
    assert no_hook_left(model)


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
    session.undo()
    session.toggle(a)
    session.toggle(b)
    assert session.interventions == (a, b)
    session.toggle(a)
    assert session.interventions == (b,)
    session.undo()
    assert session.interventions == (a, b)
    session.redo()
    assert session.interventions == (b,)
    session.clear()
    session.clear()
    assert session.interventions == ()
    session.undo()
    assert session.interventions == (b,)
    session.toggle(a)
    assert not session.can_redo
    session.redo()
    assert session.interventions == (b, a)


def test_the_clean_run_is_made_once_a_prompt(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch):
    runs = []
    plain = model.run_with_cache
    monkeypatch.setattr(model, "run_with_cache", lambda *a, **k: runs.append(1) or plain(*a, **k))
    session = session_of(model)
    for site in SITES:
        session.toggle(site)
        session.result()
    assert len(runs) == 1
    before = session.result().prediction
    session.clean_prompt = 2
    assert not session.result().prediction.equal(before)
    assert len(runs) == 2


def test_a_prompt_is_chosen_with_its_corrupted_one(model: HookedTransformer):
    session = session_of(model)
    session.clean_prompt = 2
    assert (session.clean_prompt, session.corrupted_prompt) == (2, 2)
    session.corrupted_prompt = 1  # another pair
    assert (session.clean_prompt, session.corrupted_prompt) == (2, 1)
    for kind in ("clean", "corrupted"):
        with pytest.raises(ValueError, match=f"{kind} prompt 3: there are prompts 0 to 2"):
            setattr(session, f"{kind}_prompt", 3)
    assert (session.clean_prompt, session.corrupted_prompt) == (2, 1)
    fewer = PatchingSession(model, inputs(model, 0), inputs(model, 1, n=2))
    fewer.corrupted_prompt = 1
    fewer.clean_prompt = 2  # there is no such corrupted prompt
    assert (fewer.clean_prompt, fewer.corrupted_prompt) == (2, 1)


def test_sequences_are_what_is_read_of_them():
    task = RepeatedTokens(d_vocab=20, n_ctx=7, min_period=3, max_period=4)
    model, clean, corrupted = token_model(), task.sample(3, seed=0), task.sample(3, seed=1)
    plain = PatchingSession(model, clean.read, corrupted.read)
    for session in (plain, PatchingSession(model, clean, corrupted), PatchingSession(model, clean, corrupted.read)):
        session.clean_prompt = 1
        session.toggle(Site("z", 0, pos=4, head=1))
        assert_close(session.result().prediction, plain.result().prediction, atol=0, rtol=0)
        assert_close(executed(session), plain.result().prediction)
        assert session.code() == plain.code()


def test_components_are_those_that_the_model_has(model: HookedTransformer):
    components = session_of(model).components
    assert components["z"] == 2
    assert components["resid_mid"] is None
    assert "result" not in components
    assert "mlp_out" not in PatchingSession(token_model(), ids(0), ids(1)).components


def test_places_that_the_model_does_not_have_are_named(model: HookedTransformer):
    session = session_of(model)
    for site, message in [
        (Site("z", 2, pos=0), r"layer 2.*layers 0 to 1"),
        (Site("z", 0, pos=5), "pos goes from 0 to 4"),
        (Site("pattern", 0, head=-1), "head goes from 0 to 1"),
        (Site("result", 0), r"no hook 'blocks.0.attn.hook_result'"),
    ]:
        with pytest.raises(ValueError, match=message):
            session.toggle(site)
    assert session.interventions == ()
    with pytest.raises(ValueError, match="set_use_attn_result"):
        PatchingSession(shared_bridge(), ids(0), ids(1)).toggle(Site("result", 0))


def test_prompts_that_do_not_fit_are_refused(model: HookedTransformer):
    prompts = inputs(model, 0)
    with pytest.raises(ValueError, match="5 positions and corrupted ones 3"):
        PatchingSession(model, prompts, prompts.prefix(1))
    with pytest.raises(TypeError, match="prompts and token ids"):
        PatchingSession(model, prompts, ids(0))
    with pytest.raises(ValueError, match="0 corrupted prompts"):
        PatchingSession(model, prompts, prompts[:0])
    with pytest.raises(TypeError):
        PatchingSession(token_model(), "a b c", ids(1))  # pyright: ignore[reportArgumentType]


def test_training_mode_is_refused_also_later(model: HookedTransformer):
    session = session_of(model)
    session.toggle(SITES[0])
    model.train()
    for refused in (session.result, lambda: session_of(model)):
        with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
            refused()


def test_a_metric_of_ones_own_and_its_shape(model: HookedTransformer):
    def size(predictions: Tensor) -> Tensor:
        return predictions.abs().sum(-1)

    session = session_of(model, metric=size)
    result = session.result()
    assert session.metric_name == "size"
    assert result.clean_metric == pytest.approx(result.clean_prediction.abs().sum().item())
    with pytest.raises(ValueError, match=r"must return a number a prompt, \[1\].*got \(\)"):
        session_of(model, metric=lambda predictions: predictions.mean()).result()
    assert no_hook_left(model)


@pytest.mark.parametrize("family", ["GPT-2", "BLOOM"])
def test_a_bridge_is_patched_as_the_plain_model(family):
    bridge, plain = open_family(family)
    clean, corrupted = token_ids(0, 1), token_ids(1, 1)
    for component in ("resid_mid", "attn_out", "resid_post"):
        session = PatchingSession(bridge, clean, corrupted)
        session.toggle(Site(component, 1, pos=2))
        at, values = place_of(bridge, plain, component, 1), recorded(bridge, clean, oracles.hook_name(component, 1))
        assert at is not None

        def put(activation: Tensor, values: Tensor = values) -> None:
            activation[:, 2] = values[:, 2]

        with putting_by_torch(plain, at, put):
            expected = plain(corrupted).logits[0, -1]
        assert_close(session.result().prediction, expected.detach(), **SINGLE)
        names: dict[str, Any] = {"model": bridge, "clean": clean, "corrupted": corrupted}
        exec(session.code(), names)
        assert_close(names["prediction"], expected.detach(), **SINGLE)


def test_a_site_that_a_bridge_goes_on_without_is_refused():
    bridge, _ = open_family("GPT-J")
    session = PatchingSession(bridge, token_ids(0, 1), token_ids(1, 1))
    with pytest.raises(ValueError, match=r"ignores edits at 'blocks.1.attn.hook_pattern'"):
        session.toggle(Site("pattern", 1, head=0))
    assert session.interventions == ()
