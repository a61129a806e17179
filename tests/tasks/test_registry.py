"""Tasks as data: the library's, and a user's, which are registered or found by their module."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

import mechicl
from mechicl.analysis import identify
from mechicl.checkpoints import load_checkpoint, save
from mechicl.learners import AlgorithmLearner
from mechicl.models import TransformerConfig
from mechicl.tasks import FixedTasks, register, registry, task_from_dict, task_to_dict
from mechicl.training import TrainingConfig, train
from tests.tasks.own_tasks import Mixture, Plain, SparseRegression
from tests.tasks.reference import PROMPT_TASKS, TOKEN_TASKS, same

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


def test_a_checkpoint_trained_on_a_users_task_is_reported_on(tmp_path):
    model = TransformerConfig(x_dim=2, n_context=3, n_layers=1, prompt_format="interleaved", d_model=8, n_heads=1)
    config = TrainingConfig(task=Plain(), model=model, steps=3, batch_size=8, eval_every=3, eval_prompts=16, cpu=True)
    result = train(config, tmp_path / "run", progress=False)
    folder = save(tmp_path / "mine", result.models, result.record)
    page = mechicl.report(
        load_checkpoint(folder), path=tmp_path / "report", sections=["loss"], n_prompts=64, progress=False
    )
    assert json.loads((page.parent / "report.json").read_text())
