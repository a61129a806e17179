"""Threads: right predictions beside interventions, no hooks left, whole copies."""

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import mechicl
from mechicl.analysis import PatchingSession, ablate, corrupt, patch
from mechicl.analysis.finetuning import linearized_outputs
from mechicl.analysis.finetuning.forward_passes import weights_changed
from mechicl.checkpoints.stacks import models_from_stack, stack_models
from mechicl.models import HookedLSTM, HookedTransformer, LayeredModel, LSTMConfig, TransformerConfig, holding
from mechicl.models.holding import adding, holds_models, lock_of
from mechicl.models.opening.sites import Site
from mechicl.tasks import LinearRegression
from tests.models.modules import NanoGPT

TASK = LinearRegression(x_dim=2, n_context=5)
PROMPTS = TASK.sample(16, seed=0)
CORRUPTED = corrupt(PROMPTS, "labels")
POINT = "blocks.0.hook_resid_post"
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
        return [future.result(timeout=600) for future in [pool.submit(start, work) for work in works]]


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


def test_two_models_are_locked_in_one_order():
    a, b = MODELS["transformer"](), MODELS["linear"]()

    @holds_models
    def hold_both(models: list[LayeredModel], other: dict[str, LayeredModel]) -> None:
        time.sleep(0.001)

    in_threads(*[lambda: hold_both([a], {"b": b}), lambda: hold_both([b], {"a": a})] * 4)


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


# ---- copies, pickles and saved weights while another thread has hooks ----


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def stacked(model: Any) -> Any:
    return models_from_stack(model.cfg, stack_models([model]))[0]


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled])
def test_a_copy_has_no_temporary_hooks(model, copy_of):
    expected, point = model.predict(PROMPTS), model.hook_dict[POINT]
    with model.hooks(fwd_hooks=[(POINT, double)]):
        copied = copy_of(model)
        assert point._forward_hooks
    assert torch.equal(copied.predict(PROMPTS), expected)
    assert not copied.has_hooks()
    assert copied.context_level == 0
    model.add_hook(POINT, double)  # this one stays
    assert not torch.equal(copy.deepcopy(model).predict(PROMPTS), expected)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled, stacked])
def test_copies_wait_for_another_threads_changes(copy_of):
    model = MODELS["transformer"]()
    expected, started, done = model.predict(PROMPTS), threading.Event(), threading.Event()
    changes = {name: torch.ones_like(weight) for name, weight in model.named_parameters()}

    def change() -> None:
        with model.hooks(fwd_hooks=[(POINT, double)]), weights_changed(model, changes):
            started.set()
            done.wait(0.2)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(change)
        started.wait()
        copied = copy_of(model)
        done.set()
    assert torch.equal(copied.predict(PROMPTS), expected)
    assert not copied.has_hooks()


# ---- hooks come and go ----


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_a_hook_leaves_none(model, error):
    expected = model.predict(PROMPTS)

    def fail(activation, hook):
        raise error

    with pytest.raises(error), model.hooks(fwd_hooks=[(POINT, double), (POINT, fail)], bwd_hooks=[(POINT, fail)]):
        model(model.encode(PROMPTS))
    with pytest.raises(error):
        model.run_with_hooks(model.encode(PROMPTS), fwd_hooks=[(POINT, fail)])
    with pytest.raises(error):
        patch(
            model, PROMPTS, CORRUPTED, "resid_post", metrics=lambda predictions: fail(predictions, None), progress=False
        )
    assert_clean(model, expected)


def assert_clean(model: LayeredModel, expected: torch.Tensor) -> None:
    for part in model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert not part._backward_hooks
    for point in model.hook_dict.values():
        assert not point.fwd_hooks
        assert not point.bwd_hooks
    assert model.context_level == 0
    assert torch.equal(in_threads(lambda: model.predict(PROMPTS))[0], expected)  # the lock is free


def test_only_ones_own_hooks_go():
    model = MODELS["transformer"]()
    seen = []
    model.add_hook(POINT, lambda activation, hook: seen.append("before"))
    with model.hooks(fwd_hooks=[(POINT, lambda activation, hook: seen.append("context"))]):
        model.add_hook(POINT, lambda activation, hook: seen.append("within"))
        model.predict(PROMPTS)
        assert seen == ["before", "context", "within"]
    seen.clear()
    model.predict(PROMPTS)
    assert seen == ["before", "within"]
    assert len(model.hook_dict[POINT].fwd_hooks) == 2
    with model.hooks(fwd_hooks=[(POINT, double)], reset_hooks_end=False):
        pass
    assert len(model.hook_dict[POINT].fwd_hooks) == 3
    model.reset_hooks()
    assert not model.has_hooks()


def test_hooks_on_modules_and_points():
    model = MODELS["transformer"]()
    point, calls = model.hook_dict[POINT], []
    model.add_hook(POINT, lambda activation, hook: calls.append("user"))
    with adding([(point, lambda activation, hook: calls.append("first"), "fwd")], prepend=True):
        model.predict(PROMPTS)
    assert calls == ["first", "user"]
    assert len(point._forward_hooks) == len(point.fwd_hooks) == 1
    model.reset_hooks()


@pytest.mark.parametrize("changed", [weights_changed, linearized_outputs])
def test_weights_are_restored_after_an_error(changed):
    model = MODELS["transformer"]()
    tokens, expected = model.encode(PROMPTS), model.predict(PROMPTS)
    parameters = dict(model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in parameters.items()}
    changes = {name: torch.ones_like(weight) for name, weight in before.items() if name.endswith(("W_Q", "W_in"))}

    def fail(activation, hook):
        raise KeyboardInterrupt

    model.add_hook(POINT, fail)

    def work() -> None:
        if changed is linearized_outputs:
            linearized_outputs(model, tokens, changes)
        else:
            with weights_changed(model, changes):
                model(tokens)

    with pytest.raises(KeyboardInterrupt):
        work()
    model.reset_hooks()
    assert_clean(model, expected)
    for name, weight in model.named_parameters():
        assert weight is parameters[name]
        assert torch.equal(weight, before[name])


def test_unknown_hooks_are_refused():
    model = MODELS["transformer"]()
    with pytest.raises(KeyError, match=r"blocks\.9"), model.hooks(fwd_hooks=[("blocks.9.hook_resid_post", double)]):
        pass
    with pytest.raises(TypeError, match="is not a hook but a part"), model.hooks(fwd_hooks=[("blocks.0", double)]):
        pass
    with pytest.raises(ValueError, match="Invalid direction"):
        model.reset_hooks(direction="both ways")
    assert_clean(model, model.predict(PROMPTS))
