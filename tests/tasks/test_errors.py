"""Errors name the argument: fields out of range, data that no task wrote, classes that are not tasks."""

import json
import math
import sys
from dataclasses import dataclass, field

import pytest
import torch

from mechicl import tasks
from mechicl.prompts import Prompts
from mechicl.tasks import RandomTensors, TopicClassification, register, task_from_dict, task_to_dict
from mechicl.training import TrainingConfig, train
from tests.tasks.own_tasks import NoData, SparseRegression
from tests.tasks.reference import PROMPT_TASKS, TOKEN_TASKS
from tests.training.runs import MODEL

NAN, INF = math.nan, math.inf
NORMAL, PLANE, INVERSE = {"inputs": "gaussian"}, {"x_dim": 2}, {"weight_covariance": "inverse"}


@pytest.mark.parametrize(("kind", "fields", "named"), [
    *((kind, {field: value}, field) for kind, field, value in [
        ("Conjunctions", "positive_share", 1.1), ("MixedRegression", "noise_stds", ()),
        ("MixedRegression", "noise_stds", (0.0, 1.0)), ("SineRegression", "x_range", (1.0, 0.0)),
        ("SineRegression", "amplitude_range", (0.0, NAN)), ("SineRegression", "phase_range", (0.0, INF)),
        ("MarkovChains", "d_vocab", 1),
    ]),
    ("Parities", {"x_dim": 3, "degree": 4}, "degree must be at most x_dim=3"),
    ("SparseLinearRegression", {"x_dim": 3, "sparsity": 4}, "sparsity must be 1 to x_dim=3"),
    ("QuadraticRegression", {"active_dims": 21}, "active_dims must be 1 to x_dim=20"),
    ("MixedRegression", {"weight_stds": (1.0, 2.0, 3.0)}, "one for each of the 2 noise_stds"),
    ("FixedTasks", {"task": tasks.LinearRegression(), "n_tasks": 0}, "n_tasks"),
    ("FixedTasks", {"task": tasks.MarkovChains(), "n_tasks": 3}, "a task of points, got MarkovChains"),
    ("MarkovChains", {"order": 64}, "order must be below n_ctx=64"),
    ("MarkovChains", {"order": 8}, "at most 4096, got order=8 and d_vocab=3"),
    ("MarkovChains", {"order": 2, "start": "stationary"}, "needs order=1, got order=2"),
    ("MarkovChains", {"order": 0, "start": "stationary"}, "needs order=1, got order=0"),
    ("MarkovChains", {"n_chains": 0}, "n_chains"),
    ("BallsAndUrns", {"n_urns": 0}, "n_urns"),
    *(("GraphTracing", {"sides": sides, "periodic": periodic}, "sides")
      for sides, periodic in [((), False), ((1,), False), ((0, 3), False), ((2, 4), True)]),
    ("GaussianClusters", {"burstiness": 3}, "burstiness must divide"),
    ("GaussianClusters", {"n_classes": 4}, "n_classes must be at least"),
    ("RepeatedTokens", {"min_period": 5, "max_period": 4}, "min_period <= max_period < n_ctx=64, got 5 to 4"),
    ("RepeatedTokens", {"n_ctx": 32}, "max_period < n_ctx=32, got 4 to 32"),
    ("TopicClassification", {"min_classes": 3, "max_classes": 2}, "min_classes <= max_classes <= 12, got 3 to 2"),
    ("TopicClassification", {"max_classes": 13}, "max_classes <= 12, got 2 to 13"),
    *(("TopicClassification", {name: n}, "got n_topical=2") for name, n in (("min_words", 1), ("max_words", 5))),
    ("LinearRegression", {"inputs": ()}, "inputs"),
    *(("LinearRegression", NORMAL | fields, named) for fields, named in [
        ({"normalize_inputs": True, "n_context": 0}, "normalize_inputs=True needs a context"),
        (INVERSE, "needs covariance, condition_number or eigen"),
        (INVERSE | {"condition_number": 2.0, "eigenbasis": "per_task"}, "for one covariance"),
        (PLANE | INVERSE | {"eigenvalues": (1.0, 0.0)}, "has no inverse"),
        ({"condition_number": 2.0, "eigenvalues": (1.0,) * 10}, "exclude each other"),
        ({"covariance": ((1.0,),), "x_dim": 1, "inputs": "uniform"}, "covariance is for Gaussian inputs"),
        ({"condition_number": 2.0, "inputs": ("gaussian", "uniform")}, "condition_number is for"),
        ({"eigenbasis": "shared"}, "needs a condition_number or eigenvalues"),
        ({"covariance": ((1.0,),), "x_dim": 1, "eigenbasis": "per_task"}, "to rotate"),
        *(({"condition_number": v}, "condition_number") for v in (0.5, NAN, INF)),
        *((PLANE | {"eigenvalues": v}, "eigenvalues") for v in ((1.0,), (1.0, -1.0))),
        *((PLANE | {"covariance": matrix}, "covariance")
          for matrix in (((1.0,),), ((1.0, 0.5), (0.4, 1.0)), ((INF, 0.0), (0.0, 1.0)))),
        (PLANE | {"covariance": ((1.0, 2.0), (2.0, 1.0))}, "no negative eigenvalue, got -1"),
        ({"n_context": 3, "n_distractors": 4}, "n_distractors must be 0 to n_context=3, got 4"),
    ]),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked_types")
def test_fields_out_of_range_are_refused_by_name(kind, fields, named):
    with pytest.raises(ValueError, match=named):
        getattr(tasks, kind)(**fields)


@pytest.mark.parametrize("task", PROMPT_TASKS + TOKEN_TASKS, ids=repr)
def test_sampling_needs_one_seed_or_generator_on_the_device_and_a_number_of_prompts(task):
    for arguments, named in (
        ({}, "a seed or a generator"),
        ({"seed": 0, "generator": torch.Generator()}, "not both"),
        ({"generator": torch.Generator(), "device": "cuda"}, "cannot sample on cuda"),
        ({"n_prompts": -1, "seed": 0}, "n_prompts must not be negative, got -1"),
    ):
        with pytest.raises(ValueError, match=named):
            task.sample(**{"n_prompts": 1, **arguments})
    with pytest.raises(TypeError, match="dtype"):
        task.sample(1, seed=0, dtype=torch.int64)


RANDOM = RandomTensors(torch.Generator())


@pytest.mark.parametrize(("call", "named"), [
    *((lambda a=a: RANDOM.dirichlet(a, 3), "concentration") for a in (0.0, INF)),
    (lambda: RANDOM.integers(3, 3, 2), "low must be below high, got 3 and 3"),
    (lambda: RANDOM.normal(2**20, 2**20), "too many"),
    *((lambda t=t: TopicClassification().texts(t, 1, seed=0), "topics must be") for t in ([], ["birds", "bird"])),
    (lambda: register(NoData), "task_type must be a dataclass, .*NoData"),
    (lambda: register(Prompts), r"Prompts lacks \['sample', 'replace'\]"),
    (lambda: register(SparseRegression()), "task_type must be a dataclass"),  # type: ignore[call-overload]
    (lambda: task_to_dict(NoData()), "must be a dataclass"),
])  # fmt: skip
def test_what_is_wrong_is_named(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()


@pytest.mark.parametrize(("data", "named"), [
    ({}, "task type None is not one of"),
    ({"type": ["LinearRegression"]}, "is not one of"),
    ({"type": "Sparse"}, r"'Sparse' is not one of .*register\(its class\) before loading"),
    ({"type": "LinearRegression", "xdim": 3}, r"LinearRegression has no field \['xdim'\]"),
    ({"type": "LinearRegression", "x_dim": "10"}, "x_dim must be an int of at least 1, got '10'"),
    ({"type": "LinearRegression", "noise_std": "loud"}, "noise_std must be a number of at least 0, got 'loud'"),
    ({"type": "LinearRegression", "inputs": "cauchy"}, "inputs must be 'uniform', 'gaussian',"),
    ({"type": "LinearRegression", "inputs": "gaussian", "eigenvalues": 5}, "eigenvalues"),
    ({"type": "LinearRegression", "noise_std": 10**400}, "noise_std must be a number of at least 0, got 1000"),
    ({"type": "LinearRegression", "eigenvalues": [[1]]}, "eigenvalues"),
    ({"type": "SineRegression", "x_range": [1.0]}, "x_range must be a tuple of a number, a number"),
    ({"type": "RepeatedTokens", "task": {}}, r"RepeatedTokens has no field \['task'\]"),
    ({"type": "FixedTasks", "n_tasks": 3}, "FixedTasks: .*task"),
    ({"type": "FixedTasks", "n_tasks": 3, "task": "all"}, "the task of FixedTasks must be a dict"),
    ({"type": "FixedTasks", "n_tasks": 3, "task": {"type": "Mine"}}, "task type 'Mine' is not one of"),
    (None, "data must be a dictionary of strings to anything, got None"),
    ([{"type": "LinearRegression"}], "data must be a dictionary of strings to anything, got the list"),
    *(
        ({"type": kind}, "task type|Can't instantiate abstract class")
        for kind in (
            "this:that", "antigravity:Task", "os:system", "subprocess:Popen", "mechicl.tasks.registry:TASK_TYPES",
            "mechicl.learners:AlgorithmLearner", "mechicl.tasks:LinearRegression", "tests.tasks.own_tasks:NoData",
            "tests.tasks.own_tasks:", ":SparseRegression", "mechicl.tasks.sampling:PromptDistribution",
        )
    ),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked_types")
def test_data_that_no_task_wrote_are_refused_and_import_nothing(data, named):
    loaded = set(sys.modules)
    with pytest.raises(ValueError, match=named):
        task_from_dict(data)
    assert set(sys.modules) == loaded


def test_deeply_nested_tasks_are_refused():
    data: dict = {"type": "LinearRegression"}
    for _ in range(10_000):
        data = {"type": "FixedTasks", "n_tasks": 1, "task": data}
    with pytest.raises(ValueError, match="FixedTasks: maximum recursion depth"):
        task_from_dict(data)


def test_names_that_are_taken_and_classes_that_have_none():
    @dataclass(frozen=True)
    class LinearRegression(SparseRegression):
        pass

    with pytest.raises(ValueError, match=r"'LinearRegression' is taken by mechicl.tasks.linear_regression:Lin"):
        register(LinearRegression)
    with pytest.raises(ValueError, match=r"defined inside a function or class .*: register it"):
        task_to_dict(LinearRegression())


def test_a_task_that_cannot_be_saved_is_refused_before_training(tmp_path):
    unsaved = SparseRegression(x_dim=3, n_context=4, scales=torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="SparseRegression cannot be saved, its fields must be plain data"):
        train(TrainingConfig(task=unsaved, model=MODEL, steps=1, batch_size=4, cpu=True), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


@tasks.register
@dataclass(frozen=True)
class Repeating(tasks.LinearRegression):
    """A task of another task, with a field that it computes."""

    inner: tasks.PromptDistribution | None = None
    doubled: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "doubled", 2 * self.x_dim)


def test_registered_tasks_of_tasks_and_with_computed_fields_are_read_again():
    task = Repeating(x_dim=3, n_context=5, inner=tasks.LinearRegression(x_dim=7))
    again = tasks.task_from_dict(json.loads(json.dumps(tasks.task_to_dict(task))))
    assert isinstance(again, Repeating)
    assert again == task
    assert (again.doubled, again.inner) == (6, tasks.LinearRegression(x_dim=7))


@dataclass(frozen=True)
class FaultyTask(tasks.LinearRegression):
    fault: str = ""

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        if self.fault == "raises":
            raise KeyError("weights")
        prompts = super()._sample(n_prompts, random)
        if self.fault == "shorter":
            return prompts.prefix(2)
        return prompts[1:] if self.fault == "fewer" else prompts.xs  # type: ignore[return-value]


@pytest.mark.parametrize(("fault", "message"), [
    ("raises", "_sample of FaultyTask failed: KeyError: 'weights'"),
    ("fewer", r"_sample of FaultyTask must return 5 prompts as Prompts, got Prompts\(n_prompts=4"),
    ("shorter", "_sample of FaultyTask must return prompts of n_context=3, the task's, got 2"),
    ("", r"_sample of FaultyTask must return 5 prompts as Prompts, got tensor"),
])  # fmt: skip
def test_errors_of_a_user_s_task_name_it(fault, message):
    with pytest.raises(ValueError, match=message):
        FaultyTask(x_dim=2, n_context=3, fault=fault).sample(5, seed=0)
