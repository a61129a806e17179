from dataclasses import dataclass

import pytest
import torch

from mechicl.models import build
from mechicl.prompts import Prompts
from mechicl.tasks import FixedTasks, LinearRegression, RandomTensors, register
from mechicl.training import Curriculum, Ramp, TrainingConfig, train
from mechicl.training.data import examples, losses, make_generators
from mechicl.training.ensemble import Ensemble
from mechicl.training.optimizers import make_optimizer
from mechicl.training.whole_steps import ALIGNED, WholeStep, was_compiled
from tests.training.runs import (
    EXACT,
    EXACT_READER,
    INTERLEAVED,
    LSTM,
    TASK,
    BlowsUp,
    assert_close,
    assert_same_bits,
    interrupted,
    reading,
    small,
    weights,
)

CPU = torch.device("cpu")


@register
@dataclass(frozen=True)
class ThroughNumpy(LinearRegression):
    """A task whose targets are computed without torch."""

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        xs = super()._sample(n_prompts, random).xs
        return Prompts(xs, torch.tensor(xs.numpy().sum(axis=2, keepdims=True)))


def whole_step(config: TrainingConfig, threads: int = 1) -> WholeStep:
    ensemble = Ensemble([build(config.model, seed) for _, seed in config.members])
    optimizer = make_optimizer(config.optimizer, ensemble.flat, ensemble.shapes, 1e-3)
    return WholeStep(config, build(config.model, 0), ensemble, optimizer, make_generators(config, CPU), threads=threads)


@pytest.fixture
def traced_only(monkeypatch):
    """Run the traced operations one by one, which takes no time to compile."""
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)


DEEP = INTERLEAVED.replace(n_layers=2, d_mlp=12, dtype="float64")


@pytest.mark.parametrize(("config", "draws", "updates"), [
    (small(model=EXACT, seeds=(0, 5), gradient_clip=0.05, weight_decay=0.5, warmup_steps=5), True, True),
    (small(model=DEEP, schedule="cosine"), True, True),
    (small(model=LSTM), True, True),
    (small(model=EXACT, optimizer="soap"), True, False),
    (reading(seeds=(0, 5), model=EXACT_READER), False, True),
    (small(model=EXACT, task=FixedTasks(TASK, 24)), False, True),
    (small(model=EXACT, task=ThroughNumpy(x_dim=3, n_context=4)), False, True),
    (small(model=EXACT, curriculum=Curriculum(points=Ramp(2, 5, 1, 3))), False, True),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("traced_only")
def test_whole_steps_train_the_same_models_as_single_operations(tmp_path, monkeypatch, config, draws, updates, threads):
    """Also if each of two threads takes half of the batch."""
    monkeypatch.setattr("mechicl.training.routes.threads_for", lambda config, device: threads)
    step = whole_step(config)
    assert (step.drawn is not None, step.updates) == (draws, updates)
    plain = train(config, tmp_path / "plain", progress=False)
    whole = train(config.replace(compile=True), tmp_path / "whole", progress=False)
    for i in range(len(config.members)):
        assert_close(weights(whole, i), weights(plain, i), atol=1e-9)
    for kind in ("loss", "eval_loss"):
        ours, expected = (torch.tensor(run.record["curve"][kind]) for run in (whole, plain))
        torch.testing.assert_close(ours, expected)
    assert whole.record["training"]["compile"]


@pytest.mark.usefixtures("traced_only")
def test_whole_steps_in_float16_train_as_single_operations_do(tmp_path):
    """There, Adam's eps and small squares of gradients would be 0."""
    config = small(model=EXACT.replace(dtype="float16"), steps=20, eval_every=10)
    plain, whole = (
        train(config.replace(compile=compiled), tmp_path / str(compiled), progress=False) for compiled in (False, True)
    )
    assert_close(weights(whole, 0), weights(plain, 0), atol=2e-3)


@pytest.mark.usefixtures("traced_only")
def test_models_that_diverge_stop_and_the_others_are_unchanged(tmp_path):
    config = small(seeds=(0, 1), steps=6, eval_every=2, save_every=2)
    both = config.replace(more_tasks=(BlowsUp(x_dim=3, n_context=4),))
    plain, whole = (
        train(both.replace(compile=compiled), tmp_path / str(compiled), stop_diverged=True, progress=False)
        for compiled in (False, True)
    )
    assert whole.record["diverged_at"] == plain.record["diverged_at"]
    assert max(whole.record["diverged_at"]) > 1
    for i in range(4):
        assert_close(weights(whole, i), weights(plain, i), atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_a_compiled_run_resumes_bit_for_bit_and_agrees_with_an_eager_loop(tmp_path, monkeypatch, threads):
    monkeypatch.setattr("mechicl.training.routes.threads_for", lambda config, device: threads)
    config = small(seeds=(0, 3), compile=True, target_loss=0.25, eval_every=2)
    whole = train(config, tmp_path / "whole", progress=False)
    interrupted(config, tmp_path / "parts", 5)
    resumed = train(config, tmp_path / "parts", progress=False)
    plain = train(config.replace(compile=False), tmp_path / "plain", progress=False)
    assert whole.record["stopped_at"] == plain.record["stopped_at"]
    for i in range(2):
        assert_same_bits(weights(resumed, i), weights(whole, i))
        assert_close(weights(whole, i), weights(plain, i), atol=1e-5)


def test_inputs_of_a_step_make_the_prompts_of_other_runs():
    """Sampling is part of the step, which gets numbers only: they make the batch that `task.sample` draws from them."""
    step, generators = whole_step(small(seeds=(0, 4), batch_size=6000)), make_generators(small(batch_size=6000), CPU)
    for number in range(2):
        inputs = step.sample(number)
        assert [tensor.dtype for tensor in inputs.tensors] == 2 * [torch.int32, torch.float32]
        prompts = TASK.sample(6000, generator=generators[0])
        expected = examples(step.encoder, prompts, "query")
        tokens, targets = step._prompts(*inputs.tensors)
        torch.testing.assert_close((tokens[0], targets[0]), expected)
        assert torch.equal(inputs.generator_states[0], generators[0].get_state())


def test_a_run_that_cannot_be_compiled_trains_on_the_same_prompts(tmp_path, monkeypatch):
    def fails(graph, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr("mechicl.training.routes.COMPILE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr("mechicl.training.routes.ROUNDS", (1, 1))
    config = small(steps=500, eval_every=500, save_every=500)
    tried = train(config, tmp_path / "tried", progress=False)
    plain = train(config.replace(compile=False), tmp_path / "plain", progress=False)
    assert_same_bits(weights(tried), weights(plain))


@pytest.mark.parametrize("folder", ["/proc/nothing", "file/below"])
def test_a_cache_that_cannot_be_used_is_no_mark(tmp_path, monkeypatch, folder):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
    assert not was_compiled(small())
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr("getpass.getuser", lambda: {}["a user without a name"])
    assert not was_compiled(small())


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-13), ("bfloat16", 1e-6)])
def test_weights_of_parts_are_of_the_losses_precision(dtype, within):
    step = whole_step(reading(model=EXACT_READER.replace(dtype=dtype), batch_size=9), threads=3)
    shares = torch.stack(step._shares_of_parts(step.sample(0).tensors[1]))
    assert (shares.double().sum() - 1).abs() < within
    assert shares.dtype == (torch.float64 if dtype == "float64" else torch.float32)


@pytest.mark.usefixtures("traced_only")
def test_parts_of_a_batch_are_equal_and_weigh_as_much_as_they_have_to_predict():
    config = reading(model=EXACT_READER, batch_size=6)
    step = whole_step(config, threads=4)
    assert step.n_parts == 3
    inputs = step.sample(0)
    tokens, targets = inputs.tensors
    targets[:, :2] = -100  # the first part has nothing to predict
    targets[:, 4, 1:] = -100
    expected = losses(step.ensemble(tokens, config.loss_at), targets).detach()
    torch.testing.assert_close(step(inputs, torch.tensor([True])), expected)
    assert step.weights.isfinite().all()
    targets[:] = -100
    assert step(inputs, torch.tensor([True])).isnan().all()
    assert step.weights.isfinite().all()


def test_a_step_on_a_gpu_is_a_cuda_graph_that_changes_the_weights_in_place(monkeypatch):
    """On a CPU, only how the compiler is called can be tested, and that it may keep the addresses of what changes."""
    kept, options, marks = [], [], []
    monkeypatch.setattr(WholeStep, "on_gpu", True)
    monkeypatch.setattr(torch._dynamo, "mark_static_address", kept.append)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    monkeypatch.setattr(torch, "compile", lambda graph, **given: options.append(given) or graph)
    step = whole_step(small(model=EXACT))
    addresses = {tensor.data_ptr() for tensor in kept}
    for number in range(2):
        step(step.sample(number), torch.tensor([True]))
    assert options == [{"dynamic": False, "fullgraph": True, "mode": "reduce-overhead"}]
    assert len(marks) == 2
    changing = (step.weights, step.rate, *step.moments.values())
    assert {tensor.data_ptr() for tensor in changing} == addresses
    assert step.weights.data_ptr() == step.ensemble.flat.data_ptr()
    assert float(step.moments["step"]) == 2


def test_aligning_the_seeds_weights_for_a_gpu_changes_no_number(traced_only, monkeypatch):
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    moved = []
    for on_gpu in (True, False):
        monkeypatch.setattr(WholeStep, "on_gpu", on_gpu)
        step = whole_step(small(model=DEEP.replace(d_mlp=13), seeds=(0, 1)))
        assert step.weights.shape[1] % ALIGNED
        before = step.weights.clone()
        for number in range(2):
            step(step.sample(number), torch.tensor([True, True]))
        moved.append(step.weights - before)
    assert torch.equal(*moved)
    assert moved[0].abs().max() > 1e-4
