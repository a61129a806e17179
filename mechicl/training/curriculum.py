"""Curricula: prompts that start short and in few dimensions."""

import dataclasses
from dataclasses import dataclass

from mechicl.base.arguments import check_fields
from mechicl.base.checks import is_whole
from mechicl.tasks import AnyTask


@dataclass(frozen=True)
class Ramp:
    """A whole number that grows during training: `start`, then `increment` more every `interval` steps, up to `end`."""

    start: int
    end: int
    increment: int = 1
    interval: int = 2000

    def __post_init__(self):
        check_fields(self)
        whole = all(map(is_whole, (self.start, self.end, self.increment, self.interval)))
        if not (whole and 1 <= self.start <= self.end and self.increment >= 1 and self.interval >= 1):
            raise ValueError(f"a ramp needs whole 1 <= start <= end, positive increment and interval, got {self}")

    def at(self, step: int) -> int:
        """Its value at a step."""
        return min(self.end, self.start + self.increment * (step // self.interval))

    @property
    def done_at(self) -> int:
        """The first step at which it has its end."""
        return self.interval * _ceil(self.end - self.start, self.increment)

    def resized(self, end: int, done_at: int) -> "Ramp":
        """A ramp to another end, with start and increment in proportion, that has it at step `done_at` or before."""
        start = min(end, max(1, round(self.start * end / self.end))) if done_at > 0 else end
        if start == end:
            return Ramp(end, end)
        increment = max(1, round(self.increment * end / self.end), _ceil(end - start, done_at))
        return Ramp(start, end, increment, interval=done_at // _ceil(end - start, increment))


@dataclass(frozen=True)
class Curriculum:
    """Prompts that start short and in few dimensions (Garg et al. 2022, appendix A).

    Attributes:
        dims: number of input coordinates that are not zero; None leaves all of them.
        points: number of points, the query counted; None leaves all of them.
    """

    dims: Ramp | None = None
    points: Ramp | None = None

    def __str__(self) -> str:
        ramps = {"dims": self.dims, "points": self.points}
        parts = [f"{name} {r.start} to {r.end} by step {r.done_at}" for name, r in ramps.items() if r is not None]
        return ", ".join(parts) or "none"

    def task_at(self, task: AnyTask, step: int) -> AnyTask:
        """The task at a step."""
        changes: dict[str, int] = {}
        if self.dims is not None:
            changes["active_dims"] = self.dims.at(step)
        if self.points is not None:
            changes["n_context"] = self.points.at(step) - 1
        return task.replace(**changes) if changes else task

    def check(self, task: AnyTask, steps: int) -> None:
        """Refuse a task that the curriculum cannot change, or whose own size it does not reach within a run.

        Raises:
            ValueError: names the part of the curriculum and what to do.
        """
        if not dataclasses.is_dataclass(task):
            raise ValueError(f"task must be a dataclass, as the library's are, got {type(task).__name__}")
        changed = {"active_dims"} if self.dims else set()
        changed |= {"n_context"} if self.points else set()
        fixed = changed - {field.name for field in dataclasses.fields(task)}
        if fixed:
            raise ValueError(f"a curriculum cannot change {sorted(fixed)} of {type(task).__name__}: take None")
        remedy = "`resized` changes task, model and curriculum together (--d, --n), curriculum=None does without"
        for name, ramp, end, whole in self._sizes(task):
            if ramp.end != end:
                raise ValueError(f"curriculum.{name} ends at {ramp.end}, but {whole}: {remedy}")
            if steps and ramp.at(steps - 1) != end:
                raise ValueError(
                    f"curriculum.{name} ends at step {ramp.done_at}, but the run has steps={steps}: it would never see "
                    f"whole prompts; {remedy}"
                )

    def resized(self, task: AnyTask, share: float = 1.0) -> "Curriculum":
        """The curriculum for a task of another size, in proportion, which takes a share of the steps that it took."""
        ramps = {
            name: ramp if ramp.end == end and share == 1 else ramp.resized(end, int(ramp.done_at * share))
            for name, ramp, end, _ in self._sizes(task)
        }
        return dataclasses.replace(self, **ramps)

    def _sizes(self, task: AnyTask) -> list[tuple[str, Ramp, int, str]]:
        """Name, ramp, and where the ramp has to end for a task, as number and in words."""
        sizes = []
        if self.dims is not None:
            sizes.append(("dims", self.dims, task.x_dim, f"the task has x_dim={task.x_dim}"))
        if self.points is not None:
            words = f"the task has n_context={task.n_context}, which makes {task.n_context + 1} points with the query"
            sizes.append(("points", self.points, task.n_context + 1, words))
        return sizes


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
