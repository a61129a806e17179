"""Threads: right predictions next to interventions, no hooks left, complete copies."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import mechicl
from mechicl.analysis import corrupt, patch
from mechicl.analysis.finetuning.forward_passes import weights_changed
from mechicl.base import threads
from mechicl.base.arguments import ArgumentError
from mechicl.base.threads import holding, holds_models, lock_of
from mechicl.checkpoints.checkpoint import models_from_stack, stack_models
from mechicl.models import LayeredModel
from mechicl.models.temporary_hooks import adding
from tests.models.kinds import KINDS, PARTS, TASK

PROMPTS = TASK.sample(16, seed=0)
CORRUPTED = corrupt(PROMPTS, "labels")
POINT = "blocks.0.hook_resid_post"


@pytest.fixture(params=[name for name in KINDS if name != "looped"])
def model(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


@pytest.fixture
def transformer() -> Any:
    return KINDS["transformer"]()


def double(activation, hook):
    return 2 * activation


def in_threads(*works: Callable[[], object]) -> list[Any]:
    """Run functions at once, each in a separate thread, and return their results."""
    barrier = threading.Barrier(len(works))

    def start(work: Callable[[], object]) -> object:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(timeout=600) for future in [pool.submit(start, work) for work in works]]


def test_predictions_of_eight_threads_are_those_of_one(model):
    expected = [model.predict(PROMPTS[i : i + 4]) for i in range(8)]
    prefixes = model.predict_prefixes(PROMPTS)
    fresh = copy.deepcopy(model)  # it has not read prompts yet

    def predict(thread: int) -> None:
        for _ in range(99):
            assert torch.equal(fresh.predict(PROMPTS[thread : thread + 4]), expected[thread])
        assert torch.equal(fresh.predict_prefixes(PROMPTS), prefixes)

    in_threads(*(lambda thread=thread: predict(thread) for thread in range(8)))


def test_predictions_do_not_see_the_hooks_of_other_threads(model):
    def patched() -> Any:
        return patch(model, PROMPTS, CORRUPTED, "resid_post", progress=False).predictions

    def hooked() -> torch.Tensor:
        with model.hooks(fwd_hooks=[(POINT, double)]):
            return model.predict(PROMPTS)

    plain, doubled, swept = model.predict(PROMPTS), hooked(), patched()
    activation = model.run_with_cache(PROMPTS)[1][POINT]
    assert not torch.allclose(plain, doubled)

    def repeat(times: int, check: Callable[[], bool]) -> Callable[[], None]:
        def work() -> None:
            assert all(check() for _ in range(times))

        return work

    predict = repeat(30, lambda: torch.equal(model.predict(PROMPTS), plain) and not model.has_hooks())
    hook = repeat(15, lambda: torch.equal(hooked(), doubled))
    sweep = repeat(2, lambda: torch.equal(patched(), swept))
    record = repeat(10, lambda: torch.equal(model.run_with_cache(PROMPTS)[1][POINT], activation))
    in_threads(predict, predict, predict, hook, hook, sweep, sweep, record)
    assert not model.has_hooks()


def test_a_thread_with_the_lock_may_run_the_model_and_lock_it_again(transformer):
    with holding(transformer), holding(transformer):
        assert transformer.predict(PROMPTS).shape == (16, 1)
        with transformer.hooks(fwd_hooks=[("hook_embed", double)]):
            transformer.run_with_cache(PROMPTS)
            waiting = threading.Thread(target=transformer.predict, args=(PROMPTS,), daemon=True)
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
    waiting.join(600)
    assert not waiting.is_alive()


def test_two_models_are_locked_in_one_order(transformer):
    other = KINDS["linear"]()

    @holds_models
    def hold_both(models: list[LayeredModel], others: dict[str, LayeredModel]) -> None:
        models[0].predict(PROMPTS)

    in_threads(*[lambda: hold_both([transformer], {"b": other}), lambda: hold_both([other], {"a": transformer})] * 4)


def test_locks_are_neither_copied_nor_saved_nor_kept(transformer, tmp_path):
    plain = transformer.predict(PROMPTS)
    with transformer.hooks(fwd_hooks=[]):
        copied = copy.deepcopy(transformer)
        torch.save(transformer, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with transformer.hooks(fwd_hooks=[("hook_embed", double)]):  # others are not locked by it
        for other in (copied, loaded):
            assert torch.equal(in_threads(lambda other=other: other.predict(PROMPTS))[0], plain)
    assert len({id(lock_of(each)) for each in (transformer, copied, loaded)}) == 3
    gone = weakref.ref(lock_of(copied))
    del copied, other
    gc.collect()
    assert gone() is None
    wrapped = KINDS["wrapped"]()  # two wrappings of one module share a lock
    assert lock_of(wrapped) is lock_of(mechicl.wrap(wrapped.module, encode="interleaved", **PARTS))


def test_compiled_code_takes_no_lock(transformer, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(threads, "lock_of", lambda model: pytest.fail("a lock"))
    assert transformer(transformer.encode(PROMPTS)).shape == (16, 11, 1)


# ---- copies, pickles and saved weights while another thread has hooks ----
def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def stacked(model: Any) -> Any:
    return models_from_stack(model.cfg, stack_models([model]))[0]


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled])
def test_a_copy_has_no_temporary_hooks(model, copy_of):
    expected = model.predict(PROMPTS)
    with model.hooks(fwd_hooks=[(POINT, double)]):
        copied = copy_of(model)
        assert model.has_hooks()
    assert torch.equal(copied.predict(PROMPTS), expected)
    assert not copied.has_hooks()
    model.add_hook(POINT, double)  # this one stays
    assert not torch.equal(copy.deepcopy(model).predict(PROMPTS), expected)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled, stacked])
def test_copies_wait_for_another_threads_changes(transformer, copy_of):
    expected, started, done = transformer.predict(PROMPTS), threading.Event(), threading.Event()
    changes = {name: torch.ones_like(weight) for name, weight in transformer.named_parameters()}

    def change() -> None:
        with transformer.hooks(fwd_hooks=[(POINT, double)]), weights_changed(transformer, changes):
            started.set()
            done.wait(0.2)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(change)
        started.wait()
        copied = copy_of(transformer)
        done.set()
    assert torch.equal(copied.predict(PROMPTS), expected)
    assert not copied.has_hooks()


# ---- hooks come and go ----
def assert_clean(model: LayeredModel, expected: torch.Tensor) -> None:
    assert not any(p._forward_hooks or p._forward_pre_hooks or p._backward_hooks for p in model.modules())
    assert not any(point.fwd_hooks or point.bwd_hooks for point in model.hook_dict.values())
    assert not model.is_caching
    assert model.context_level == 0
    assert torch.equal(in_threads(lambda: model.predict(PROMPTS))[0], expected)  # the lock is free


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_a_hook_leaves_none(model, error):
    expected = model.predict(PROMPTS)

    def fail(activation, hook=None):
        raise error

    with pytest.raises(error), model.hooks(fwd_hooks=[(POINT, double), (POINT, fail)], bwd_hooks=[(POINT, fail)]):
        model(model.encode(PROMPTS))
    with pytest.raises(error), model.hooks(fwd_hooks=[(POINT, fail)]):
        model.run_with_cache(PROMPTS)
    with pytest.raises((ArgumentError, KeyboardInterrupt)):
        patch(model, PROMPTS, CORRUPTED, "resid_post", metrics=fail, progress=False)
    assert_clean(model, expected)


def test_a_context_removes_only_its_own_hooks(transformer):
    seen, point = [], transformer.hook_dict[POINT]
    transformer.add_hook(POINT, lambda activation, hook: seen.append("before"))
    with transformer.hooks(fwd_hooks=[(POINT, lambda activation, hook: seen.append("context"))]):
        transformer.add_hook(POINT, lambda activation, hook: seen.append("within"))
        transformer.predict(PROMPTS)
    with adding([(point, lambda activation, hook: seen.append("first"), "fwd")], prepend=True):
        transformer.predict(PROMPTS)
    assert seen == ["before", "context", "within", "first", "before", "within"]
    assert len(point.fwd_hooks) == len(point._forward_hooks) == 2
    with transformer.hooks(fwd_hooks=[(POINT, double)], reset_hooks_end=False):
        pass
    assert len(point.fwd_hooks) == 3
    transformer.reset_hooks()
    assert not transformer.has_hooks()
