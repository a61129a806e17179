"""Threads: predictions side by side, interventions alone, and nobody waits for ever."""

import copy
import gc
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import mechicl
from mechicl.analysis import PatchingSession, ablate, corrupt, patch
from mechicl.models import HookedLSTM, HookedTransformer, LayeredModel, LSTMConfig, TransformerConfig, holding
from mechicl.models.holding import ModelsHeldInACircle, holds_models, lock_of
from mechicl.models.opening.sites import Site
from mechicl.tasks import LinearRegression
from tests.models.modules import NanoGPT

TASK = LinearRegression(x_dim=2, n_context=5)
PROMPTS = TASK.sample(16, seed=0)
CORRUPTED = corrupt(PROMPTS, "labels")
GPT2 = TransformerConfig(
    x_dim=2, n_context=5, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_mlp=16, attention="softmax",
    normalization_type="LN",
)  # fmt: skip
PARTS: dict[str, Any] = {
    "layers": "blocks.{}",
    "attention": {"z": "blocks.{}.attn.proj", "n_heads": 4},
    "mlp": "blocks.{}.mlp",
}


def make_wrapped() -> LayeredModel:
    torch.manual_seed(0)
    return mechicl.wrap(NanoGPT(d_in=2).eval(), encode="interleaved", **PARTS)


MODELS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: HookedTransformer(GPT2),
    "linear": lambda: HookedTransformer(TransformerConfig(x_dim=2, n_context=5, n_layers=2)),
    "lstm": lambda: HookedLSTM(LSTMConfig(x_dim=2, n_context=5, n_layers=2, d_model=6)).eval(),
    "wrapped": make_wrapped,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def double(activation, hook):
    return 2 * activation


def in_threads(*works: Callable[[], object]) -> list[Any]:
    """What functions return that run at once, each in a thread of its own."""
    barrier = threading.Barrier(len(works))

    def start(work: Callable[[], object]) -> object:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(start, work) for work in works]]


def is_free(model: LayeredModel) -> bool:
    lock = lock_of(model)
    return not (lock.passes or lock._holder or lock._holds or lock._queue)


def test_predictions_of_eight_threads_are_those_of_one(model):
    expected = [model.predict(PROMPTS[i : i + 4]) for i in range(8)]
    prefixes = model.predict_prefixes(PROMPTS)
    fresh = copy.deepcopy(model)  # which has not read prompts yet

    def predict(thread: int) -> int:
        for _ in range(99):
            assert torch.equal(fresh.predict(PROMPTS[thread : thread + 4]), expected[thread])
        assert torch.equal(fresh.predict_prefixes(PROMPTS), prefixes)
        return 100

    assert sum(in_threads(*(lambda thread=thread: predict(thread) for thread in range(8)))) == 800
    assert is_free(fresh)


def test_predictions_do_not_see_the_hooks_of_other_threads(model):
    plain, point = model.predict(PROMPTS), "blocks.0.hook_resid_post"
    with model.hooks(fwd_hooks=[(point, double)]):
        doubled = model.predict(PROMPTS)
    assert not torch.allclose(plain, doubled)

    def patched_and_ablated() -> tuple[torch.Tensor, torch.Tensor]:
        patched = patch(model, PROMPTS, CORRUPTED, "resid_post", progress=False).predictions
        ablated = ablate(model, PROMPTS, "resid_post", progress=False).predictions
        assert patched is not None
        assert ablated is not None
        return patched, ablated

    patched, ablated = patched_and_ablated()
    activation = model.run_with_cache(PROMPTS)[1][point]

    def predict() -> None:
        for _ in range(30):
            assert torch.equal(model.predict(PROMPTS), plain)
            assert not model.has_hooks()

    def hook() -> None:
        for _ in range(15):
            with model.hooks(fwd_hooks=[(point, double)]):
                assert torch.equal(model.predict(PROMPTS), doubled)

    def sweep() -> None:
        for _ in range(2):
            for now, before in zip(patched_and_ablated(), (patched, ablated), strict=True):
                assert torch.equal(now, before)

    def record() -> None:
        for _ in range(10):
            assert torch.equal(model.run_with_cache(PROMPTS)[1][point], activation)

    in_threads(predict, predict, predict, hook, hook, sweep, sweep, record)
    assert is_free(model)
    assert not model.has_hooks()


def test_a_session_beside_predictions():
    model = MODELS["transformer"]()
    plain, session = model.predict(PROMPTS), PatchingSession(model, PROMPTS, CORRUPTED)
    session.toggle(Site("z", layer=1, head=0))
    expected = session.result().prediction

    def work() -> None:
        for _ in range(10):
            session.clean_prompt = 0
            assert torch.equal(session.result().prediction, expected)

    def predict() -> None:
        for _ in range(50):
            assert torch.equal(model.predict(PROMPTS), plain)

    in_threads(predict, work, predict)


def test_who_holds_a_model_may_run_it_and_hold_it_again():
    model = MODELS["transformer"]()
    with holding.holding(model), holding.holding(model):
        assert model.predict(PROMPTS).shape == (16, 1)
        with model.hooks(fwd_hooks=[("hook_embed", double)]):
            model.run_with_cache(PROMPTS)
            waiting = threading.Thread(target=model.predict, args=(PROMPTS,), daemon=True)
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()
    assert is_free(model)


def test_a_hook_may_run_the_model_and_change_it():
    model, seen = MODELS["transformer"](), []

    def look(activation, hook):
        if not seen:
            seen.append(None)
            seen[0] = model.run_with_cache(PROMPTS)[1]["hook_embed"]

    model.add_hook("hook_embed", look)  # of no context: the run is a pass, and holds the model in its middle
    model.predict(PROMPTS)
    assert seen[0].shape[0] == 16
    model.reset_hooks()
    assert is_free(model)


def test_two_models_in_two_orders_end_in_an_error_and_not_in_silence():
    a, b = MODELS["transformer"](), MODELS["linear"]()
    both = threading.Barrier(2)

    def hold(first: LayeredModel, second: LayeredModel) -> str:
        with holding.holding(first):
            both.wait()
            try:
                with holding.holding(second):
                    return "held"
            except ModelsHeldInACircle:
                return "refused"

    outcomes = in_threads(lambda: hold(a, b), lambda: hold(b, a))
    assert "refused" in outcomes
    assert is_free(a)
    assert is_free(b)

    @holds_models
    def hold_both(models: list[LayeredModel], other: dict[str, LayeredModel]) -> None:
        time.sleep(0.001)

    in_threads(*[lambda: hold_both([a], {"b": b}), lambda: hold_both([b], {"a": a})] * 4)  # always in one order


def test_waiting_for_long_is_said(monkeypatch):
    monkeypatch.setattr(holding, "WORTH_A_WORD", 0.05)
    model = MODELS["transformer"]()
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with model.hooks(fwd_hooks=[("hook_embed", double)]):
            future = pool.submit(model.predict, PROMPTS)
            time.sleep(0.4)
        future.result(timeout=10)
    assert any("MainThread" in str(each.message) for each in said if each.category is RuntimeWarning)


def test_locks_are_neither_copied_nor_saved_nor_kept(tmp_path):
    model = MODELS["transformer"]()
    plain = model.predict(PROMPTS)
    with model.hooks(fwd_hooks=[]):
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with model.hooks(fwd_hooks=[("hook_embed", double)]):  # others are not held by it
        for other in (copied, pickled, loaded):
            assert torch.equal(in_threads(lambda other=other: other.predict(PROMPTS))[0], plain)
    assert len({id(lock_of(each)) for each in (model, copied, pickled, loaded)}) == 4
    gone = weakref.ref(lock_of(copied))
    del copied, other
    gc.collect()
    assert gone() is None


def test_two_wrappings_of_one_module_share_a_lock():
    model = make_wrapped()
    other = mechicl.wrap(model.module, encode="interleaved", **PARTS)
    assert lock_of(model) is lock_of(other)


def test_what_is_compiled_takes_no_lock(monkeypatch):
    model = MODELS["transformer"]()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(holding, "lock_of", lambda model: pytest.fail("a lock"))
    assert model(model.encode(PROMPTS)).shape == (16, 11, 1)
