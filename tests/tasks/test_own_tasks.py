"""Tasks of the user's own: trained on, saved, loaded elsewhere; and what a record may not do."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import mechicl
from mechicl.analysis import identify
from mechicl.checkpoints import load_checkpoint, save
from mechicl.learners import AlgorithmLearner
from mechicl.models import TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import FixedTasks, Task, register, registry, task_from_dict, task_to_dict
from mechicl.training import TrainingConfig, train
from tests.tasks.own_tasks import Mixture, NoData, Plain, SparseRegression
from tests.tasks.reference import same

SPARSE = SparseRegression(n_nonzero=2, scales=(2.0, 1.0))
PATH = "tests.tasks.own_tasks:SparseRegression"


@pytest.fixture(autouse=True)
def _no_more_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TASK_TYPES", dict(registry.TASK_TYPES))


def run(code: str) -> str:
    """What Python prints in another process, errors too."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    return ran.stdout + ran.stderr


TASKS = [SPARSE, Plain(), FixedTasks(SPARSE, 7), FixedTasks(Plain(), 3), Mixture(SPARSE, SPARSE.replace(n_nonzero=1))]


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_a_task_of_ones_own_survives_json(task):
    assert isinstance(task, Task)
    back = task_from_dict(json.loads(json.dumps(task_to_dict(task))))
    assert back == task
    assert type(back) is type(task)
    assert same(back.sample(3, seed=0), task.sample(3, seed=0))


@pytest.mark.slow
def test_it_is_trained_on_saved_and_loaded_in_another_process(tmp_path):
    model = TransformerConfig(x_dim=4, n_context=5, n_layers=1, prompt_format="interleaved", d_model=16, n_heads=2)
    config = TrainingConfig(
        task=FixedTasks(SPARSE, 256), model=model, steps=30, batch_size=32, learning_rate=0.01, eval_every=15,
        eval_prompts=64, cpu=True,
    )  # fmt: skip
    result = train(config, tmp_path / "run", progress=False)
    folder = save(tmp_path / "mine", result.models, result.record)
    assert load_checkpoint(folder).task == FixedTasks(SPARSE, 256)
    load = f"from mechicl.checkpoints import load_checkpoint; print(load_checkpoint({str(folder)!r}).task)"
    alone = run(load)
    assert f"task type {PATH!r} is not known here" in alone.replace("\\'", "'")
    assert "import tests.tasks.own_tasks first, or mechicl.tasks.register" in alone
    assert repr(FixedTasks(SPARSE, 256)) in run(f"import tests.tasks.own_tasks; {load}")
    moved = "from tests.tasks.own_tasks import SparseRegression; import mechicl; import sys; "
    moved += f"mechicl.tasks.register(SparseRegression, name={PATH!r}); del sys.modules['tests.tasks.own_tasks']; "
    assert repr(FixedTasks(SPARSE, 256)) in run(moved + load)


def test_a_registered_name_is_what_records_say():
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


def test_a_class_that_is_defined_anew_takes_the_old_ones_name():
    def define(default):
        @register
        @dataclass(frozen=True)
        class Anew(SparseRegression):
            x_dim: int = default

        return Anew

    define(3)
    again = define(4)
    assert task_from_dict({"type": "Anew"}) == again(x_dim=4)


def test_names_that_are_taken():
    @dataclass(frozen=True)
    class LinearRegression(SparseRegression):
        pass

    with pytest.raises(ValueError, match=r"'LinearRegression' is taken by mechicl.tasks.linear_regression:Lin"):
        register(LinearRegression)
    with pytest.raises(ValueError, match="defined inside another: register it"):
        task_to_dict(LinearRegression())


@pytest.mark.parametrize(
    ("task_type", "message"),
    [
        (NoData, "NoData'> is no dataclass"),
        (Prompts, r"Prompts lacks \['sample', 'replace'\]"),
        (SPARSE, "is no dataclass"),
    ],
)
def test_what_is_no_kind_of_task(task_type, message):
    with pytest.raises(TypeError, match=message):
        register(task_type)


def test_a_task_that_cannot_be_saved_is_refused_before_training(tmp_path):
    model = TransformerConfig(x_dim=4, n_context=5, n_layers=1)
    held = SparseRegression(scales=torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="SparseRegression cannot be saved, its fields must be plain data"):
        train(TrainingConfig(task=held, model=model, steps=1, batch_size=4, cpu=True), tmp_path, progress=False)
    with pytest.raises(TypeError, match="is no dataclass"):
        task_to_dict(NoData())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind",
    [
        "this:that", "antigravity:Task", "os:system", "subprocess:Popen", "mechicl.tasks.registry:TASK_TYPES",
        "mechicl.learners:AlgorithmLearner", "mechicl.tasks:LinearRegression", "tests.tasks.own_tasks:NoData",
        "tests.tasks.own_tasks:", ":SparseRegression", "mechicl.tasks.sampling:PromptDistribution",
    ],
)  # fmt: skip
def test_a_record_runs_nothing_and_imports_nothing(kind):
    loaded = set(sys.modules)
    with pytest.raises(ValueError, match=r"task type|Can't instantiate abstract class"):
        task_from_dict({"type": kind})
    assert set(sys.modules) == loaded


def test_an_unknown_name_says_how_to_make_it_known():
    with pytest.raises(ValueError, match=r"'Sparse' is not one of .*register\(its class\), before loading"):
        task_from_dict({"type": "Sparse"})


def test_analyses_take_tasks_of_ones_own():
    exact = AlgorithmLearner(lambda prompts: prompts.query.xs.sum(1, keepdim=True))
    result = identify(exact, Plain(), n_prompts=64, progress=False)
    assert result.distance(result.best).mean < 1e-10  # two weights of three points: least squares
    assert result.squared_errors.max() < 1e-12  # its prompts are rounded to float32


def test_a_checkpoint_trained_on_a_task_of_ones_own_is_reported_on(tmp_path):
    task = Plain()
    model = TransformerConfig(x_dim=2, n_context=3, n_layers=1, prompt_format="interleaved", d_model=8, n_heads=1)
    config = TrainingConfig(task=task, model=model, steps=3, batch_size=8, eval_every=3, eval_prompts=16, cpu=True)
    result = train(config, tmp_path / "run", progress=False)
    folder = save(tmp_path / "mine", result.models, result.record)
    page = mechicl.report(
        load_checkpoint(folder), path=tmp_path / "report", sections=["loss"], n_prompts=64, progress=False
    )
    measured = (page.parent / "report.json").read_text()
    assert "html" in page.suffix
    assert json.loads(measured)
