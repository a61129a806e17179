from typing import Any

from mechicl.checkpoints import Checkpoint
from mechicl.reports import Row
from mechicl.tasks import task_to_dict


def made(task: Any, *models: Any, **record: Any) -> Checkpoint:
    """A checkpoint of models on a task."""
    return Checkpoint("made", list(models), {"training": {"task": task_to_dict(task)}, **record})


def by_quantity(rows: Any) -> dict[str, Row]:
    named = {row.quantity: row for row in rows}
    assert len(named) == len(rows)  # no name twice
    return named
