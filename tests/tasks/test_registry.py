"""Tasks as data, and what all kinds of tasks promise."""

import json
import subprocess
import sys

import pytest

from mechicl.tasks import task_from_dict, task_to_dict
from tests.tasks.reference import PROMPT_TASKS, TOKEN_TASKS, same


@pytest.mark.parametrize("task", PROMPT_TASKS + TOKEN_TASKS, ids=repr)
def test_a_task_survives_json(task):
    data = json.loads(json.dumps(task_to_dict(task)))
    before = json.dumps(data)
    back = task_from_dict(data)
    assert json.dumps(data) == before  # reading leaves the data as they were
    assert back == task
    assert type(back) is type(task)
    assert same(back.sample(3, seed=0), task.sample(3, seed=0))


TAMPERED = [
    ({}, "task type None is not one of"),
    ({"type": "os.system"}, "task type 'os.system' is not one of"),
    ({"type": ["LinearRegression"]}, "is not one of"),
    ({"type": "LinearRegression", "xdim": 3}, "LinearRegression has no field ['xdim']"),
    ({"type": "LinearRegression", "x_dim": "10"}, "x_dim must be an int, got '10'"),
    ({"type": "LinearRegression", "x_dim": True}, "x_dim must be an int"),
    ({"type": "LinearRegression", "active_dims": 1.5}, "active_dims must be an int"),
    ({"type": "LinearRegression", "eigenbasis_seed": "a"}, "eigenbasis_seed must be an int"),
    ({"type": "LinearRegression", "noise_std": "loud"}, "noise_std must be a number, got 'loud'"),
    ({"type": "LinearRegression", "query_noise": "no"}, "query_noise must be True or False, got 'no'"),
    ({"type": "LinearRegression", "inputs": "cauchy"}, "inputs must be 'uniform', 'gaussian',"),
    (
        {"type": "LinearRegression", "eigenbasis": "mine"},
        "eigenbasis must be 'axes', 'shared' or 'per_task', got 'mine'",
    ),
    ({"type": "LinearRegression", "inputs": "gaussian", "eigenvalues": 5}, "LinearRegression:"),
    (
        {"type": "SineRegression", "x_range": [1.0]},
        "x_range must be a tuple of a number, a number, got the tuple (1.0,)",
    ),
    ({"type": "RepeatedTokens", "task": {}}, "RepeatedTokens has no field ['task']"),
    ({"type": "FixedTasks", "n_tasks": 3}, "FixedTasks:"),
    ({"type": "FixedTasks", "n_tasks": 3, "task": "all"}, "the task of FixedTasks must be a dict"),
    ({"type": "FixedTasks", "n_tasks": 3, "task": {"type": "Mine"}}, "task type 'Mine' is not one of"),
    (None, "task_from_dict(): data must be a dictionary of strings to anything, got None"),
    ([{"type": "LinearRegression"}], "data must be a dictionary of strings to anything, got the list"),
    ({"type": "LinearRegression", "noise_std": 10**400}, "noise_std must be a number, got 1000"),
    ({"type": "LinearRegression", "eigenvalues": [[1]]}, "eigenvalues"),
]

PLAIN = """
import json, sys
from mechicl.tasks import task_from_dict
for data in json.load(sys.stdin):
    try:
        print("accepted", task_from_dict(data))
    except ValueError as error:
        print(error)
"""


def test_a_task_in_a_task_in_a_task_is_refused():
    data: dict = {"type": "LinearRegression"}
    for _ in range(10_000):
        data = {"type": "FixedTasks", "n_tasks": 1, "task": data}
    with pytest.raises(ValueError, match="FixedTasks: maximum recursion depth"):
        task_from_dict(data)


def test_tampered_task_data_is_refused_with_the_reason():
    data = json.dumps([data for data, _ in TAMPERED])
    run = subprocess.run([sys.executable, "-c", PLAIN], input=data, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert len(lines) == len(TAMPERED)
    for line, (_, message) in zip(lines, TAMPERED, strict=True):
        assert message in line
        assert not line.startswith("accepted")
