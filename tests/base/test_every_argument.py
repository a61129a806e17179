"""Every exported function refuses an argument that does not fit its annotation, by name and before it does anything."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, get_type_hints

import pytest

from mechicl.base.arguments import ArgumentError, fits
from mechicl.tasks import FixedTasks
from mechicl.tasks.registry import TASK_KINDS
from mechicl.training import TrainingConfig
from tests.public import exported

BAD = (object(), "no such choice", math.nan, math.inf, -1, 0, 1.5, [object()], {0: object()})


def functions() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Yield the exported functions and the public methods of exported classes, each with a `self`."""
    for _, member in exported():
        if inspect.isfunction(member):
            yield member, ()
        if inspect.isclass(member) and member.__module__.startswith("mechicl.") and not issubclass(member, Enum):
            methods = {} if getattr(member, "_is_protocol", False) else vars(member)
            yield from ((each, (None,)) for key, each in methods.items() if key[0] != "_" and inspect.isfunction(each))


UNCHECKED = {
    "runs in the loops of trainings or of forward passes, and has its own errors": (
        "Clamp.hook HookedLSTM.embed_tokens HookedLSTM.read_out HookedTransformer.embed_tokens "
        "HookedTransformer.load_state_dict HookedTransformer.read_out PromptedModel.forward PromptedModel.loss_fn "
        "PromptedModel.query_streams TableTransformer.embed_tokens TableTransformer.forward TableTransformer.read_out "
        "WrappedModel.forward"
    ),
    "is called by the library": (
        "Algorithm.fitted AfterCopying.read CausalModel.answer FitProblem.error FitProblem.first Shots.after "
        "Study.with_compared Study.stand_in TextLearner.predict"
    ),
    "has its own errors": "report Circuit.to_networkx",
}
EXPORTED = {function.__qualname__: (function, owner) for function, owner in functions()}
CHECKED = [name for name in EXPORTED if not name.endswith(".step") and name not in " ".join(UNCHECKED.values()).split()]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("name", CHECKED)
def test_an_argument_that_does_not_fit_is_named(name: str):
    function, owner = EXPORTED[name]
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            for bad in (each for each in BAD if not fits(each, hints.get(parameter.name, Any))):
                with pytest.raises(ArgumentError, match=rf"\(\): .*\b{parameter.name}\b"):
                    function(*owner, **{parameter.name: bad})


OF_TASKS = ("task", "more_tasks")  # a task of any kind, by its methods
SETTINGS = [*(kind for kind in TASK_KINDS if kind is not FixedTasks), TrainingConfig]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_a_field_that_does_not_fit_is_named(kind: Any):
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        for bad in (each for each in BAD if field.name not in OF_TASKS and not fits(each, hints[field.name])):
            with pytest.raises(ValueError, match=rf"\b{field.name}\b"):
                kind(**{field.name: bad})
