"""Seeds, generators, devices and dtypes of every task; tasks as data, the library's and a user's."""

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch

from mechicl.analysis import identify
from mechicl.checkpoints import load_checkpoint, save
from mechicl.learners import AlgorithmLearner
from mechicl.models import TransformerConfig
from mechicl.prompts import Prompts, prompt_format
from mechicl.prompts.prompts import lies_prompts_last
from mechicl.tasks import FixedTasks, LinearRegression, Task, register, registry, task_from_dict, task_to_dict
from mechicl.tasks.sampling import QuickGenerator, random_rotations
from mechicl.training import TrainingConfig, train
from tests.tasks.own_tasks import Mixture, Plain, SparseRegression
from tests.tasks.reference import PROMPT_TASKS, TOKEN_TASKS, assert_follows, same

# ---- sampling ----
every_task = pytest.mark.parametrize("task", PROMPT_TASKS + TOKEN_TASKS, ids=repr)


@every_task
@pytest.mark.parametrize(("n_prompts", "dtype"), [(0, torch.float32), (12, torch.float64)])
def test_samples_have_the_requested_number_sizes_and_dtype(task, dtype, n_prompts):
    assert isinstance(task, Task) == (task in PROMPT_TASKS)
    if task in TOKEN_TASKS:
        sequences = task.sample(n_prompts, seed=2**40)
        assert sequences.ids.shape == sequences.predictable.shape == (n_prompts, task.n_ctx + 1)
        assert sequences.targets().shape == sequences.read.shape == (n_prompts, task.n_ctx)
        return
    prompts = task.sample(n_prompts, seed=2**40, dtype=dtype)
    assert prompts.xs.shape == (n_prompts, task.n_context + 1, task.x_dim)
    assert prompts.ys.shape == (n_prompts, task.n_context + 1, task.y_dim)
    assert prompts.dtype == dtype


@every_task
def test_a_seed_gives_the_same_bits_and_a_generator_moves_on(task):
    first, state = task.sample(4, seed=0), torch.get_rng_state()
    assert same(first, task.sample(4, seed=0, device="cpu"))
    generator = torch.Generator().manual_seed(0)
    assert same(first, task.sample(4, generator=generator, device=torch.device("cpu", 0)))
    assert not same(first, task.sample(4, generator=generator))
    assert not same(first, task.sample(4, seed=1))
    assert torch.equal(torch.get_rng_state(), state)  # the global random numbers are left alone


@pytest.mark.parametrize("task", PROMPT_TASKS, ids=repr)
def test_half_precision_prompts_are_the_single_precision_ones_rounded(task):
    assert same(task.sample(50, seed=0, dtype=torch.bfloat16), task.sample(50, seed=0).to(torch.bfloat16))


def test_random_rotations_are_orthogonal_and_point_anywhere():
    generator = torch.Generator().manual_seed(0)
    rotations = random_rotations(torch.randn(400, 3, 3, generator=generator, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(rotations @ rotations.swapaxes(1, 2), np.eye(3)[None].repeat(400, 0), atol=1e-12)
    for i, j in itertools.product(range(3), repeat=2):  # a coordinate of a random direction in three dimensions
        assert_follows(rotations[:, i, j], scipy.stats.uniform(-1.0, 2.0))


def quick(seed, *shape):
    return QuickGenerator().manual_seed(seed).uniform(*shape)


def test_a_quick_generator_goes_on_from_its_state_and_small_blocks_are_torchs():
    generator = QuickGenerator().manual_seed(7)
    state = generator.get_state()
    first, second = generator.uniform(300, 301), generator.uniform(300, 301)
    assert first.shape == (300, 301)
    assert not torch.equal(first, second)
    generator.set_state(state)
    assert torch.equal(first, generator.uniform(300, 301))
    assert torch.equal(second, generator.uniform(300, 301))
    plain = torch.Generator().manual_seed(7)
    few = QuickGenerator.LARGE - 1
    assert torch.equal(quick(7, few), torch.rand(few, generator=plain))
    # of an odd number of them, and what a block starts from: 128 bits of torch's
    words = np.random.SFC64(torch.randint(-(2**63), 2**63 - 1, (2,), generator=plain.manual_seed(7)).numpy().view("u8"))
    expected = (words.random_raw(2**15 + 1).view(np.uint32)[: 2**16 + 1] & 0xFFFFFF) * 2.0**-24
    np.testing.assert_array_equal(quick(7, 2**16 + 1).numpy(), expected.astype(np.float32))


def test_only_training_has_quick_numbers_and_double_precision_none():
    task = LinearRegression(x_dim=10, n_context=10)
    plain, other = (kind().manual_seed(3) for kind in (torch.Generator, QuickGenerator))
    assert same(task.sample(2048, seed=3), task.sample(2048, generator=plain))
    assert not same(task.sample(2048, seed=3), task.sample(2048, generator=other))
    double = task.sample(2048, generator=QuickGenerator().manual_seed(3), dtype=torch.float64)
    assert same(double, task.sample(2048, seed=3, dtype=torch.float64))


@pytest.mark.parametrize("n_prompts", [7, 2048])
def test_prompts_that_lie_last_in_memory_are_prompts_like_any_others(n_prompts):
    plain, across = (QuickGenerator(prompts_last=last).manual_seed(5) for last in (False, True))
    for kind in ("uniform", "normal"):  # the same numbers, in another order
        numbers, turned = getattr(plain, kind)(n_prompts, 11, 10), getattr(across, kind)(n_prompts, 11, 10)
        assert torch.equal(numbers.flatten(), turned.permute(1, 2, 0).flatten())
        assert lies_prompts_last(turned)
        assert not lies_prompts_last(numbers)
    prompts = LinearRegression(x_dim=10, n_context=10).sample(n_prompts, generator=across)
    assert lies_prompts_last(prompts.xs)
    weights = torch.linalg.solve(prompts.xs[:, :10].double(), prompts.ys[:, :10].double())
    residual = (prompts.xs[:, 10:].double() @ weights - prompts.ys[:, 10:]).abs().flatten()
    assert residual.median() < 1e-5  # linear in the inputs, as far as ten points of float32 say it
    if n_prompts > 100:
        assert_follows((prompts.xs + 0.5).flatten()[::7].double().numpy(), scipy.stats.uniform())
        assert_follows(weights.flatten().numpy(), scipy.stats.norm())
    copy = Prompts(prompts.xs.contiguous(), prompts.ys.contiguous())
    layout = prompt_format("paired", x_dim=10, y_dim=1)
    assert torch.equal(layout.encode(prompts), layout.encode(copy))
    assert lies_prompts_last(layout.encode(prompts))
    both = Prompts.concatenate([prompts, prompts[:5]])
    assert same(both, Prompts.concatenate([copy, copy[:5]]))
    assert lies_prompts_last(both.xs)


SPARSE = SparseRegression(n_nonzero=2, scales=(2.0, 1.0))
PATH = "tests.tasks.own_tasks:SparseRegression"
OWN = [SPARSE, Plain(), FixedTasks(SPARSE, 7), FixedTasks(Plain(), 3), Mixture(SPARSE, SPARSE.replace(n_nonzero=1))]


@pytest.fixture(autouse=True)
def _restore_registered_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TASK_TYPES", dict(registry.TASK_TYPES))


@pytest.mark.parametrize("task", PROMPT_TASKS + TOKEN_TASKS + OWN, ids=repr)
def test_a_task_survives_json(task):
    data = json.loads(json.dumps(task_to_dict(task)))
    before = json.dumps(data)
    back = task_from_dict(data)
    assert json.dumps(data) == before  # reading leaves the data unchanged
    assert back == task
    assert type(back) is type(task)
    assert same(back.sample(3, seed=0), task.sample(3, seed=0))


@pytest.mark.slow
def test_a_users_task_is_trained_on_saved_and_loaded_in_another_process(tmp_path):
    model = TransformerConfig(x_dim=4, n_context=5, n_layers=1, prompt_format="interleaved", d_model=16, n_heads=2)
    config = TrainingConfig(
        task=FixedTasks(SPARSE, 256), model=model, steps=30, batch_size=32, learning_rate=0.01, eval_every=15,
        eval_prompts=64, cpu=True,
    )  # fmt: skip
    result = train(config, tmp_path / "run", progress=False)
    folder = save(tmp_path / "mine", result.models, result.record)
    assert load_checkpoint(folder).task == FixedTasks(SPARSE, 256)
    load = f"from mechicl.checkpoints import load_checkpoint; print(load_checkpoint({str(folder)!r}).task)"

    def run(code: str) -> str:
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
        return ran.stdout + ran.stderr

    alone = run(load)
    assert f"task type {PATH!r} is not known here" in alone.replace("\\'", "'")
    assert "import tests.tasks.own_tasks first, or mechicl.tasks.register" in alone
    assert repr(FixedTasks(SPARSE, 256)) in run(f"import tests.tasks.own_tasks; {load}")
    moved = "from tests.tasks.own_tasks import SparseRegression; import mechicl; import sys; "
    moved += f"mechicl.tasks.register(SparseRegression, name={PATH!r}); del sys.modules['tests.tasks.own_tasks']; "
    assert repr(FixedTasks(SPARSE, 256)) in run(moved + load)


def test_records_have_the_registered_name():
    assert task_to_dict(SPARSE)["type"] == PATH
    assert register(SparseRegression) is SparseRegression
    assert task_to_dict(SPARSE)["type"] == "SparseRegression"
    assert task_from_dict(task_to_dict(SPARSE)) == SPARSE
    assert task_from_dict({**task_to_dict(SPARSE), "type": PATH}) == SPARSE  # older records still load

    @register(name="local")
    @dataclass(frozen=True)
    class Local(SparseRegression):
        pass

    assert task_to_dict(Local())["type"] == "local"
    assert task_from_dict({"type": "local", "x_dim": 3}) == Local(x_dim=3)


def test_a_redefined_class_replaces_the_old_one():
    for default in (3, 4):
        fields = {"__annotations__": {"x_dim": int}, "x_dim": default, "__module__": __name__}
        anew = register(dataclass(frozen=True)(type("Anew", (SparseRegression,), fields)))
        assert task_from_dict({"type": "Anew"}) == anew(x_dim=default)


def test_analyses_take_a_users_task():
    exact = AlgorithmLearner(lambda prompts: prompts.query.xs.sum(1, keepdim=True))
    result = identify(exact, Plain(), n_prompts=64, progress=False)
    assert result.distance(result.best).mean < 1e-10  # two weights of three points: least squares
    assert result.squared_errors.max() < 1e-12  # its prompts are rounded to float32
