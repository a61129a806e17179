import threading

import pytest
import torch

from mechicl.models import HookedTransformer
from mechicl.tasks import FixedTasks
from mechicl.tasks.sampling import QuickGenerator
from mechicl.training import Curriculum, Ramp, data
from mechicl.training.data import TIMED_BATCHES, batches, batches_ahead, make_generators, sample_batch
from tests.training.runs import MODEL, TASK, small

CPU = torch.device("cpu")


def stream(config, first_step=0, generators=None, draw=batches):
    model, generators = HookedTransformer(config.model), generators or make_generators(config, CPU)
    return draw(lambda step: data.sample_batch(config, model, generators, step), first_step, config.steps)


def sampling_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mechicl-batches")]


def assert_no_thread_is_left():
    for thread in sampling_threads():
        thread.join(timeout=300)
    assert sampling_threads() == []


class Clock:
    """A fake module `time`, whose time passes only where a test advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(data, "time", self)
        monkeypatch.setattr(data, "sample_batch", self.sample)

    def perf_counter(self) -> float:
        return self.now

    def sample(self, *args):
        if threading.current_thread() is threading.main_thread():
            self.now += 0.02
        return sample_batch(*args)


def test_each_task_has_the_prompts_that_it_would_have_had_alone():
    gaussian, fixed = TASK.replace(inputs="gaussian"), FixedTasks(TASK, 20, seed=5)
    config = small(more_tasks=(gaussian, fixed), seeds=(4, 9), steps=3)
    members = {
        (i, seed): config.replace(task=config.tasks[i], more_tasks=(), seeds=(seed,)) for i, seed in config.members
    }
    generators = {member: make_generators(alone, CPU)[0] for member, alone in members.items()}
    for batch in stream(config):
        assert batch.tokens.shape == (6, 16, 5, 4)
        for i, (task, seed) in enumerate([(0, 4), (0, 9), (1, 4), (1, 9), (2, 4), (2, 9)]):
            prompts = (TASK, gaussian, fixed)[task].sample(16, generator=generators[task, seed])
            assert torch.equal(batch.tokens[i, :, :, :3], prompts.xs)
            assert torch.equal(batch.targets[i], prompts.ys[:, -1:])
            assert torch.equal(batch.generator_states[i], generators[task, seed].get_state())


def test_large_batches_are_the_same_with_or_without_a_thread_and_from_any_step():
    config = small(steps=4, seeds=(0, 1), batch_size=QuickGenerator.LARGE // 12)  # 5 points of 3 numbers: a quick block
    assert all(isinstance(generator, QuickGenerator) for generator in make_generators(config, CPU))
    plain = list(stream(config))
    assert not torch.equal(plain[0].tokens, plain[1].tokens)
    assert not torch.equal(*plain[0].tokens)
    for near, far in zip(plain, stream(config, draw=batches_ahead), strict=True):
        assert torch.equal(near.tokens, far.tokens)
        assert torch.equal(near.targets, far.targets)
    later = make_generators(config, CPU)
    for generator, state in zip(later, plain[1].generator_states, strict=True):
        generator.set_state(state.clone())
    resumed = list(stream(config, first_step=2, generators=later))
    assert torch.equal(resumed[0].tokens, plain[2].tokens)
    assert torch.equal(resumed[1].tokens, plain[3].tokens)


@pytest.mark.parametrize(("changes", "across"), [
    ({}, True),
    ({"seeds": (0,)}, True),
    ({"seeds": (0,), "task": TASK.replace(n_context=200), "model": MODEL.replace(n_context=200)}, False),
    ({"model": MODEL.replace(n_layers=2)}, False),
])  # fmt: skip
def test_prompts_lie_last_in_memory_where_one_layer_is_quicker_so(changes, across):
    batch = sample_batch(config := small(**changes), HookedTransformer(config.model), make_generators(config, CPU), 0)
    assert (batch.tokens.stride(1) == 1) == across


@pytest.mark.parametrize(("step_seconds", "n_cores", "ahead"), [(0.02, 100, 1), (0.02, 1, 0), (0.2, 100, 0)])
def test_batches_are_drawn_in_the_quicker_way(monkeypatch, step_seconds, n_cores, ahead):
    """Sampling takes 0.02 s. A thread samples ahead only if that is notable and a core is free."""
    monkeypatch.setattr("mechicl.training.data.n_cores", lambda: n_cores)
    clock, seen = Clock(monkeypatch), []
    config = small(steps=TIMED_BATCHES + 3)
    for batch in stream(config):
        seen.append(batch)
        if batch.step == TIMED_BATCHES:
            assert len(sampling_threads()) == ahead
        clock.now += step_seconds
    assert_no_thread_is_left()
    monkeypatch.undo()
    generators = make_generators(config, CPU)
    model = HookedTransformer(config.model)
    for step, batch in enumerate(seen):
        expected = sample_batch(config, model, generators, step)
        assert batch.step == step
        assert torch.equal(batch.tokens, expected.tokens)
        assert torch.equal(batch.generator_states, expected.generator_states)


@pytest.mark.parametrize(("batch_size", "world"), [(16, 2), (7, 3), (3, 3), (10, 4), (QuickGenerator.LARGE // 12, 3)])
def test_the_shares_of_the_processes_make_up_the_whole_batch(batch_size, world):
    config = small(batch_size=batch_size)
    model = HookedTransformer(MODEL)
    whole = sample_batch(config, model, make_generators(config, CPU), 0)
    shares = [sample_batch(config, model, make_generators(config, CPU), 0, (rank, world)) for rank in range(world)]
    assert torch.equal(torch.cat([share.tokens for share in shares], dim=1), whole.tokens)
    assert torch.equal(torch.cat([share.targets for share in shares], dim=1), whole.targets)
    assert all(torch.equal(share.generator_states, whole.generator_states) for share in shares)
    sizes = {share.tokens.shape[1] for share in shares}
    assert max(sizes) - min(sizes) <= 1


def test_a_curriculum_lengthens_prompts_and_fills_in_dimensions():
    curriculum = Curriculum(dims=Ramp(1, 3, 1, 2), points=Ramp(2, 5, 1, 2))
    for batch in stream(small(steps=8, curriculum=curriculum)):
        dims, points = min(3, 1 + batch.step // 2), min(5, 2 + batch.step // 2)
        assert batch.tokens.shape == (1, 16, points, 4)
        used = (batch.tokens[0, :, :, :3] != 0).any(dim=(0, 1)).tolist()
        assert used == [True] * dims + [False] * (3 - dims)


def test_a_full_batch_of_fixed_tasks_is_the_whole_set_at_every_step():
    task = FixedTasks(TASK, 16, seed=5)
    xs = task.prompts.xs.float()
    orders = []
    for batch in stream(small(task=task, steps=4)):
        seen = batch.tokens[0, :, :, :3]
        order = [next(i for i in range(16) if torch.equal(seen[j], xs[i])) for j in range(16)]
        assert sorted(order) == list(range(16))
        orders.append(order)
    assert len(set(map(tuple, orders))) > 1


@pytest.mark.parametrize("draw", [batches, batches_ahead])
def test_an_error_while_drawing_reaches_the_training_thread_unchanged(monkeypatch, draw):
    model, drawn, received = HookedTransformer(MODEL), [], []

    def encode(prompts):
        drawn.append(prompts)
        if len(drawn) == 3:
            raise RuntimeError("no more prompts")
        return torch.zeros(len(prompts), 5, 4)

    monkeypatch.setattr(model, "encode", encode)
    with pytest.raises(RuntimeError, match="no more prompts"):  # noqa: PT012 - the batches before it arrive
        generators = make_generators(small(), CPU)
        for batch in draw(lambda step: sample_batch(small(), model, generators, step), 0, small().steps):
            received.append(batch.step)
    assert received == [0, 1]
    early = stream(small(steps=10_000), draw=batches_ahead)  # and leaving the stream early ends its thread
    next(early)
    assert len(sampling_threads()) == 1
    early.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert_no_thread_is_left()
