"""The best known learners of each task, which a model trained on it is measured against."""

from collections.abc import Callable
from functools import singledispatch
from typing import Any, TypeVar, cast

from mechicl.learners import Learner, named_learners, named_token_learners
from mechicl.tasks import TokenDistribution


def references(task: Any) -> dict[str, Any]:
    """Reference learners of a task by name, the best known first; learners of tokens for tasks of tokens.

    Where the first one is exact Bayes, no learner has a smaller expected loss on the task.

    Args:
        task: of the library, or one's own. A task with a method `references()` brings its own learners, by name or in
            a list; `register_references` adds a function that makes them for a class that is not one's own.

    Raises:
        TypeError: nobody has said what to measure this kind of task against.

    Example:
        >>> learners = algorithms.references(TaskPool(n_tasks=16))
        >>> list(learners)
        ['dmmse', 'ridge', 'ols']
        >>> learners["dmmse"].predict(TaskPool(n_tasks=16).sample(5, seed=0)).shape
        torch.Size([5, 1])
    """
    brought: Callable[[], Any] | None = getattr(task, "references", None)
    learners = brought() if callable(brought) else _references(task)
    return named_token_learners(learners) if isinstance(task, TokenDistribution) else named_learners(learners)


@singledispatch
def _references(task: Any) -> dict[str, Learner]:
    kind = type(task).__name__
    raise TypeError(
        f"no reference learner is known for {kind}: give the class a method references() that returns learners by "
        f"name, or decorate a function of a {kind} that does with mechicl.algorithms.register_references"
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def register_references(function: Function) -> Function:
    """Decorates a function of a kind of task (its annotation says which) that returns reference learners by name.

    Raises:
        TypeError: the function's first argument has no annotation that is a class.
    """
    try:
        return cast(Function, _references.register(function))
    except (TypeError, AttributeError, NameError) as error:
        raise TypeError(f"function must say by an annotation which class of tasks it is for: {error}") from error
