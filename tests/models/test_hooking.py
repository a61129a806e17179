"""No hook is left, wherever a run is interrupted, and whatever TransformerLens' lists have lost."""

import random
import signal
import threading
from typing import Any

import pytest
import torch

from mechicl.analysis import patch
from mechicl.analysis.finetuning import linearized_outputs
from mechicl.analysis.finetuning.forward_passes import weights_changed
from mechicl.models.hooking import adding, leaving_no_hooks, listening
from mechicl.models.layered import LayeredModel
from tests.interrupts import interrupt, run_interrupted
from tests.models.test_holding import CORRUPTED, MODELS, PROMPTS, double, is_free

POINT = "blocks.0.hook_resid_post"


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def assert_clean(model: LayeredModel, expected: torch.Tensor) -> None:
    for part in model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert not part._backward_hooks
    for point in model.hook_dict.values():
        assert not point.fwd_hooks
        assert not point.bwd_hooks
    assert is_free(model)
    assert model.context_level == 0
    assert not any(part.training for part in model.modules())
    assert torch.equal(model.predict(PROMPTS), expected)


def test_hooks_are_off_wherever_a_run_is_interrupted(model):
    expected = model.eval().predict(PROMPTS)

    def work() -> None:
        with model.hooks(fwd_hooks=[(POINT, double)], bwd_hooks=[(POINT, lambda gradient, hook: None)]):
            model(model.encode(PROMPTS[:2]))
        model.run_with_cache(PROMPTS[:2])

    work()
    looks, n_interrupted = run_interrupted(work), 0
    assert looks > 300
    for at in random.Random(0).sample(range(looks), 12):
        n_interrupted += interrupt(work, at)
        assert_clean(model, expected)
    assert n_interrupted > 6


# an interrupt may fall into a callback of the garbage collector, from which none comes out
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["transformer", "wrapped"])
def test_sweeps_leave_no_hook_when_a_signal_comes(name):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")
    model, seed = MODELS[name](), random.randrange(10**6)
    print(f"{seed=}")
    expected, generator, interrupted = model.predict(PROMPTS), random.Random(seed), 0

    def raise_interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-5, 0.02))
                patch(model, PROMPTS, CORRUPTED, "resid_post", progress=False)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert_clean(model, expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 5


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


def test_contexts_may_be_left_in_another_order():
    model = MODELS["transformer"]()
    first, second = (model.hooks(fwd_hooks=[(POINT, double)]) for _ in range(2))
    first.__enter__()
    second.__enter__()
    assert model.context_level == 2
    first.close()
    assert len(model.hook_dict[POINT].fwd_hooks) == 1
    second.close()
    assert_clean(model, model.predict(PROMPTS))


def test_reset_hooks_finds_what_the_lists_have_lost():
    model = MODELS["transformer"]()
    expected = model.predict(PROMPTS)
    point = model.hook_dict[POINT]
    model.add_perma_hook(POINT, lambda activation, hook: None)
    point.add_hook(double)
    point.add_hook(double, dir="bwd")
    point.fwd_hooks.pop()  # as an interrupt in `add_hook` leaves it
    point.bwd_hooks.clear()
    model.reset_hooks()
    assert len(point._forward_hooks) == 1
    assert not point._backward_hooks
    model.reset_hooks(including_permanent=True)
    assert_clean(model, expected)
    with pytest.raises(ValueError, match="direction='both ways' is not one of"):
        model.reset_hooks(direction="both ways")


def test_hooks_on_modules_and_points():
    model = MODELS["transformer"]()
    point, block, calls = model.hook_dict[POINT], model.blocks[0], []
    model.add_hook(POINT, lambda activation, hook: calls.append("user"))
    with adding([(point, lambda activation, hook: calls.append("first"), "fwd")], prepend=True):
        model.predict(PROMPTS)
    assert calls == ["first", "user"]
    with leaving_no_hooks([point, point]):
        point.add_hook(double)
        point.add_hook(double, dir="bwd")
    assert len(point._forward_hooks) == len(point.fwd_hooks) == 1
    assert not point._backward_hooks
    model.reset_hooks()
    calls.clear()
    with listening([(block, lambda part, args, kwargs: calls.append("in"))], [(block, lambda *_: calls.append("out"))]):
        model.predict(PROMPTS)
    assert calls == ["in", "out"]
    assert not model.has_hooks()


@pytest.mark.parametrize("changed", [weights_changed, linearized_outputs])
def test_weights_are_put_back_wherever_a_run_is_interrupted(changed):
    model = MODELS["transformer"]()
    tokens, expected = model.encode(PROMPTS), model.predict(PROMPTS)
    parameters = dict(model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in parameters.items()}
    changes = {name: torch.ones_like(weight) for name, weight in before.items() if name.endswith(("W_Q", "W_in"))}

    def work() -> None:
        if changed is linearized_outputs:
            linearized_outputs(model, tokens, changes)
        else:
            with weights_changed(model, changes):
                model(tokens)

    work()
    looks, n_interrupted = run_interrupted(work), 0
    for at in random.Random(0).sample(range(looks), 10):
        n_interrupted += interrupt(work, at)
        assert_clean(model, expected)
        for name, weight in model.named_parameters():
            assert weight is parameters[name]
            assert torch.equal(weight, before[name])
    assert n_interrupted > 5


def test_unknown_hooks_are_refused():
    model = MODELS["transformer"]()
    with pytest.raises(KeyError, match=r"blocks\.9"), model.hooks(fwd_hooks=[("blocks.9.hook_resid_post", double)]):
        pass
    with pytest.raises(TypeError, match="is no hook but a part"), model.hooks(fwd_hooks=[("blocks.0", double)]):
        pass
    assert_clean(model, model.predict(PROMPTS))
