"""Curricula: prompts that start short and in few dimensions."""

import dataclasses
from dataclasses import dataclass

from mechicl.base.arguments import Count, check_fields, checked
from mechicl.tasks import AnyTask


@dataclass(frozen=True)
class Ramp:
    """A whole number that grows during training, for a `Curriculum`.

    Attributes:
        start: value at step 0.
        end: last value, which is then kept.
        increment: amount by which the value grows at once.
        interval: number of training steps between two increments.

    Example:
        >>> Ramp(start=5, end=20, increment=1, interval=2000).at(4000)
        7
    """

    start: Count
    end: Count
    increment: Count = 1
    interval: Count = 2000

    def __post_init__(self):
        check_fields(self)
        if self.start > self.end:
            raise ValueError(f"a ramp needs start <= end, got {self}")

    @checked
    def at(self, step: int) -> int:
        """Return the value at a training step."""
        return min(self.end, self.start + self.increment * (step // self.interval))

    @property
    def done_at(self) -> int:
        """The first training step with the end value."""
        return self.interval * _ceil(self.end - self.start, self.increment)

    @checked
    def resized(self, end: int, done_at: int) -> "Ramp":
        """Return a ramp to another `end`, in proportion, that reaches it at step `done_at` or before."""
        start = min(end, max(1, round(self.start * end / self.end))) if done_at > 0 else end
        if start == end:
            return Ramp(end, end)
        increment = max(1, round(self.increment * end / self.end), _ceil(end - start, done_at))
        return Ramp(start, end, increment, interval=done_at // _ceil(end - start, increment))


@dataclass(frozen=True)
class Curriculum:
    """Prompts that start short and in few dimensions (Garg et al. 2022, appendix A).

    Attributes:
        dims: growing number of input coordinates that are not zero; None for all from the start.
        points: growing number of points, including the query; None for all from the start.
    """

    dims: Ramp | None = None
    points: Ramp | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        ramps = {"dims": self.dims, "points": self.points}
        parts = [f"{name} {r.start} to {r.end} by step {r.done_at}" for name, r in ramps.items() if r is not None]
        return ", ".join(parts) or "none"

    @checked
    def task_at(self, task: AnyTask, step: int) -> AnyTask:
        """Return the task with the number of dimensions and points of a training step."""
        changes: dict[str, int] = {}
        if self.dims is not None:
            changes["active_dims"] = self.dims.at(step)
        if self.points is not None:
            changes["n_context"] = self.points.at(step) - 1
        return task.replace(**changes) if changes else task

    @checked
    def check(self, task: AnyTask, steps: int) -> None:
        """Refuse (ValueError) a task that the curriculum cannot change, or whose size it does not reach in the run."""
        if not dataclasses.is_dataclass(task):
            raise ValueError(f"task must be a dataclass, as the library's are, got {type(task).__name__}")
        changed = {name for name, ramp in (("active_dims", self.dims), ("n_context", self.points)) if ramp}
        if fixed := changed - {field.name for field in dataclasses.fields(task)}:
            raise ValueError(f"a curriculum cannot change {sorted(fixed)} of {type(task).__name__}: use None")
        remedy = "`resized` changes task, model and curriculum together (--d, --n), curriculum=None turns it off"
        for name, ramp, end, whole in self._sizes(task):
            if ramp.end != end:
                raise ValueError(f"curriculum.{name} ends at {ramp.end}, but {whole}: {remedy}")
            if steps and ramp.at(steps - 1) != end:
                raise ValueError(
                    f"curriculum.{name} ends at step {ramp.done_at}, but the run has steps={steps}: it would never use "
                    f"whole prompts; {remedy}"
                )

    @checked
    def resized(self, task: AnyTask, share: float = 1.0) -> "Curriculum":
        """Return the curriculum for a task of another size, in proportion.

        Args:
            task: the task whose size the curriculum shall reach.
            share: factor on the number of training steps that the curriculum takes.
        """
        ramps = {
            name: ramp if ramp.end == end and share == 1 else ramp.resized(end, int(ramp.done_at * share))
            for name, ramp, end, _ in self._sizes(task)
        }
        return dataclasses.replace(self, **ramps)

    def _sizes(self, task: AnyTask) -> list[tuple[str, Ramp, int, str]]:
        """Name, ramp, and the value at which the ramp must end for a task, as number and as text."""
        sizes = []
        if self.dims is not None:
            sizes.append(("dims", self.dims, task.x_dim, f"the task has x_dim={task.x_dim}"))
        if self.points is not None:
            words = f"the task has n_context={task.n_context}, which makes {task.n_context + 1} points with the query"
            sizes.append(("points", self.points, task.n_context + 1, words))
        return sizes


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
