"""A patching session against hand-written hooks, on our models and on TransformerLens' bridge."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mechicl.analysis import PatchingSession
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.sites import Site
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression, RepeatedTokens
from tests.analysis.interventions.oracles import no_hook_left, shared_bridge

CFG = TransformerConfig(
    x_dim=3, n_context=4, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_head=4, d_mlp=16,
    attention="softmax", keys="causal", normalization_type="LN", initializer_range=0.5,
)  # fmt: skip
SITES = [
    Site("resid_pre", 1, pos=8),
    Site("z", 0, pos=3, head=1),
    Site("z", 1, head=0),
    Site("q", 1, pos=8),
    Site("mlp_out", 0),
    Site("pattern", 1, head=1, query=8),
    Site("attn_scores", 0, head=0, query=5, key=2),
]


@pytest.fixture
def model() -> HookedTransformer:
    return HookedTransformer(CFG, seed=1).eval()


def prompts(seed: int, n_context: int = 4) -> Prompts:
    return LinearRegression(x_dim=3, n_context=n_context).sample(3, seed=seed)


def session_of(model: HookedTransformer, **options) -> PatchingSession:
    return PatchingSession(model, prompts(0), prompts(1), **options)


def token_model() -> HookedTransformer:
    cfg = TransformerConfig(
        prompt_format="token_ids", d_vocab=20, n_ctx=7, n_layers=2, n_heads=2, d_model=16, d_head=8,
        attention="softmax", keys="causal", positional_embedding_type="standard", initializer_range=0.5,
    )  # fmt: skip
    return HookedTransformer(cfg, seed=2).eval()


def ids(seed: int) -> Tensor:
    return torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def by_hand(model, clean_tokens: Tensor, corrupted_tokens: Tensor, sites: list[Site]) -> Tensor:
    """The last position's output where each site's part is written over, spelled out component by component."""
    _, cache = model.run_with_cache(clean_tokens)

    def hook_for(site: Site):
        def write_over(activation: Tensor, hook) -> Tensor:
            clean, mask = cache[site.hook_name], torch.ones_like(activation, dtype=torch.bool)
            if site.component in ("pattern", "attn_scores"):
                axes = {1: site.head, 2: site.query, 3: site.key}
            else:
                axes = {1: site.pos, 2: site.head}
            for axis, place in axes.items():
                if place is not None:
                    where = torch.arange(activation.shape[axis]) == place
                    mask &= where.view([-1 if a == axis else 1 for a in range(activation.ndim)])
            return torch.where(mask, clean, activation)

        return site.hook_name, write_over

    return model.run_with_hooks(corrupted_tokens, fwd_hooks=[hook_for(site) for site in sites])[0, -1]


def executed(session: PatchingSession) -> Tensor:
    names = {"model": session.model, "clean": session.clean, "corrupted": session.corrupted}
    exec(session.code(), names)
    return names["prediction"]


@pytest.mark.parametrize("site", SITES, ids=str)
def test_one_patch_is_what_hooks_written_by_hand_do(model: HookedTransformer, site: Site):
    session = session_of(model)
    session.clean_prompt, session.corrupted_prompt = 1, 2
    session.toggle(site)
    tokens = model.encode(session.clean)[1:2], model.encode(session.corrupted)[2:3]
    expected = by_hand(model, *tokens, [site])
    assert not expected.allclose(model(tokens[1])[0, -1], atol=1e-4)  # the patch does something
    assert_close(session.result().prediction, expected, atol=1e-6, rtol=0)
    assert_close(executed(session), expected, atol=1e-6, rtol=0)
    outputs = model.run_with_hooks(tokens[1], fwd_hooks=session.hooks())
    assert_close(outputs[0, -1], expected, atol=1e-6, rtol=0)
    assert no_hook_left(model)


@pytest.mark.parametrize("make_model", [shared_bridge, token_model])
def test_several_patches_in_models_of_tokens(make_model):
    model, clean, corrupted = make_model(), ids(0), ids(4)
    session = PatchingSession(model, clean, corrupted)
    sites = [Site("z", 0, pos=4, head=1), Site("pattern", 1, head=0, query=6), Site("resid_pre", 1, pos=2)]
    for site in sites:
        session.toggle(site)
    result = session.result()
    expected = by_hand(model, clean[:1], corrupted[:1], sites)
    assert_close(result.prediction, expected, atol=1e-5, rtol=0)
    assert_close(executed(session), result.prediction, atol=1e-6, rtol=0)
    with torch.no_grad():
        plain = model(clean[:1])[0, -1], model(corrupted[:1])[0, -1]
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
    session.toggle(Site("resid_post", 1, pos=8))
    result = session.result()
    assert result.recovered == pytest.approx(1)
    assert_close(result.prediction, result.clean_prediction)
    target = session.clean.query.ys[0]
    assert result.clean_metric == pytest.approx((model.predict(session.clean)[0] - target).square().item(), rel=1e-5)
    wrong = (model.predict(session.corrupted)[0] - target).square().item()
    assert result.corrupted_metric == pytest.approx(wrong, rel=1e-5)


def test_the_same_prompt_twice_has_nothing_to_recover(model: HookedTransformer):
    assert math.isnan(PatchingSession(model, prompts(0), prompts(0)).result().recovered)


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
    tokens = model.encode(session.clean)[2:3], model.encode(session.corrupted)[2:3]
    session.toggle(SITES[0])
    assert_close(session.result().prediction, by_hand(model, *tokens, [SITES[0]]), atol=1e-6, rtol=0)
    session.corrupted_prompt = 1  # another pair
    assert (session.clean_prompt, session.corrupted_prompt) == (2, 1)
    with pytest.raises(ValueError, match="clean"):
        session.clean_prompt = 3
    assert (session.clean_prompt, session.corrupted_prompt) == (2, 1)
    fewer = PatchingSession(model, prompts(0), prompts(1)[:2])
    fewer.corrupted_prompt = 1
    fewer.clean_prompt = 2  # there is no such corrupted prompt
    assert (fewer.clean_prompt, fewer.corrupted_prompt) == (2, 1)


@pytest.mark.parametrize("make_model", [shared_bridge, token_model])
def test_sequences_are_what_is_read_of_them(make_model):
    task = RepeatedTokens(d_vocab=20, n_ctx=7, min_period=3, max_period=4)
    model, clean, corrupted = make_model(), task.sample(3, seed=0), task.sample(3, seed=1)
    one, other = PatchingSession(model, clean, corrupted), PatchingSession(model, clean.read, corrupted.read)
    mixed = PatchingSession(model, clean, corrupted.read)
    for session in (one, other, mixed):
        session.clean_prompt = 1
        session.toggle(Site("z", 0, pos=4, head=1))
    for session in (one, mixed):
        assert_close(session.result().prediction, other.result().prediction, atol=0, rtol=0)
        assert_close(executed(session), other.result().prediction, atol=1e-6, rtol=0)
        assert session.code() == other.code()


def test_components_are_those_that_the_model_has(model: HookedTransformer):
    components = session_of(model).components
    assert components["z"] == 2
    assert components["resid_mid"] is None
    assert "result" not in components
    assert "mlp_out" not in PatchingSession(token_model(), ids(0), ids(1)).components


def test_places_that_the_model_does_not_have_are_named(model: HookedTransformer):
    session = session_of(model)
    with pytest.raises(ValueError, match=r"layer 2.*layers 0 to 1"):
        session.toggle(Site("z", 2, pos=0))
    with pytest.raises(ValueError, match="pos goes from 0 to 8"):
        session.toggle(Site("z", 0, pos=9))
    with pytest.raises(ValueError, match="head goes from 0 to 1"):
        session.toggle(Site("pattern", 0, head=-1))
    with pytest.raises(ValueError, match=r"no hook 'blocks.0.attn.hook_result'"):
        session.toggle(Site("result", 0))
    with pytest.raises(ValueError, match="set_use_attn_result"):
        PatchingSession(shared_bridge(), ids(0), ids(1)).toggle(Site("result", 0))
    assert session.interventions == ()
    for kind in ("clean", "corrupted"):
        with pytest.raises(ValueError, match=f"{kind} prompt 3: there are prompts 0 to 2"):
            setattr(session, f"{kind}_prompt", 3)


def test_prompts_that_do_not_fit_are_refused(model: HookedTransformer):
    with pytest.raises(ValueError, match="9 positions and corrupted ones 7"):
        PatchingSession(model, prompts(0), prompts(1, n_context=3))
    with pytest.raises(TypeError, match="prompts and token ids"):
        PatchingSession(model, prompts(0), ids(0))
    with pytest.raises(ValueError, match="0 corrupted prompts"):
        PatchingSession(model, prompts(0), prompts(1)[:0])
    with pytest.raises(TypeError):
        PatchingSession(token_model(), "a b c", ids(1))  # pyright: ignore[reportArgumentType]


def test_training_mode_is_refused_also_later(model: HookedTransformer):
    session = session_of(model)
    session.toggle(SITES[0])
    model.train()
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        session.result()
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        session_of(model)


def test_a_metric_of_ones_own_and_its_shape(model: HookedTransformer):
    def size(predictions: Tensor) -> Tensor:
        return predictions.abs().sum(-1)

    session = session_of(model, metric=size)
    result = session.result()
    assert session.metric_name == "size"
    assert result.clean_metric == pytest.approx(result.clean_prediction.abs().sum().item())

    def averaged(predictions: Tensor) -> Tensor:
        return predictions.mean()

    with pytest.raises(ValueError, match=r"'averaged'.*\[1\].*got \(\)"):
        session_of(model, metric=averaged).result()
    assert no_hook_left(model)


def test_no_hook_is_left_after_an_error():
    model = token_model()
    session = PatchingSession(model, ids(0), ids(1), metric=lambda logits: logits / 0 if len(logits) else logits)
    session.toggle(Site("z", 0, pos=4, head=1))
    with pytest.raises(ValueError, match="must return a number a prompt"):
        session.result()
    session.corrupted = torch.full((1, 7), 10**6)  # no such token
    session.corrupted_prompt = 0
    with pytest.raises(IndexError):
        session.result()
    assert no_hook_left(model)
