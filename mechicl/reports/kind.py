"""What a report is made of: a kind of report is a table of parts that are measured, and a verdict made from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from mechicl.base.progress import progress_bar
from mechicl.checkpoints import Checkpoint
from mechicl.reports.algorithm import AlgorithmQuestion, causes_in_words
from mechicl.reports.causes import causes, no_causes, slow_causes
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.finetuning import finetuning, no_finetuning, slow_finetuning
from mechicl.reports.heads import model_parts, no_model_parts
from mechicl.reports.study import as_study
from mechicl.reports.verdict import Verdict
from mechicl.viz.page import table


def _never(kind: Any) -> str:
    return ""


@dataclass(frozen=True)
class Part:
    """A part of a report.

    Attributes:
        name: as in `--sections`.
        measure: from the report, its rows, sections and numbers.
        missing: why this model has no such part; empty if it has.
        slow: why it is measured only on request; empty if it is quick.
    """

    name: str
    measure: Callable[[Any], Measured]
    missing: Callable[[Any], str] = _never
    slow: Callable[[Any], str] = _never


class Kind:
    """A report on one kind of model; subclasses list their parts and name what is compared.

    Args:
        checkpoint: the models; a `Study` also says which one is opened, and the user's own task and learners.
        n_prompts: held-out prompts; by default what the intervals need.
        seed: of the prompts; by default the kind's.
        progress: show progress bars.
    """

    parts: ClassVar[tuple[Part, ...]] = ()
    n_held_out: ClassVar[int] = 10_000
    prompt_seed: ClassVar[int] = 1_000_003
    no_weights: ClassVar[str] = ""
    """Why weights decide nothing, unless `weights_in_words` is overridden."""

    def __init__(
        self, checkpoint: Checkpoint, *, n_prompts: int | None = None, seed: int | None = None, progress: bool = True
    ):
        self.study, self.progress = as_study(checkpoint), progress
        self.n_prompts = n_prompts or self.n_held_out
        self.seed = self.prompt_seed if seed is None else seed

    @property
    def title(self) -> str:
        """Of the page."""
        raise NotImplementedError

    @property
    def lead(self) -> str:
        """What was measured, on what."""
        raise NotImplementedError

    @property
    def data(self) -> dict[str, Any]:
        """Numbers that belong to no part."""
        return {}

    @cached_property
    def held_out(self) -> Any:
        """The held-out prompts, or sequences."""
        return self.study.task.sample(self.n_prompts, seed=self.seed)

    @cached_property
    def question(self) -> AlgorithmQuestion:
        """Which algorithm the opened model behaves like."""
        return AlgorithmQuestion(self.study, self.progress)

    @cached_property
    def _missing(self) -> dict[str, str]:
        return {part.name: why for part in self.parts if (why := part.missing(self))}

    @cached_property
    def _slow(self) -> dict[str, str]:
        return {part.name: why for part in self.parts if part.name not in self._missing and (why := part.slow(self))}

    def weights_in_words(self) -> str:
        """What the weights show, in a sentence."""
        return self.no_weights

    def verdict(self, comparison: Comparison) -> Verdict:
        """The sentences that the page opens with, from all that was measured."""
        return self.question.verdict(comparison, self.weights_in_words(), causes_in_words(comparison.rows))

    def chosen(self, sections: Sequence[str] | None) -> list[Part]:
        """The parts to measure, in the order of the page.

        Raises:
            ValueError: a part that this kind of report does not have.
        """
        parts = {part.name: part for part in self.parts if part.name not in self._missing}
        if sections is None:
            return [part for name, part in parts.items() if name not in self._slow]
        unknown = [name for name in sections if name not in parts]
        if unknown:
            reasons = "".join(f"; {n} is left out here: {self._missing[n]}" for n in unknown if n in self._missing)
            raise ValueError(
                f"this report has no section {', '.join(map(repr, unknown))}; it has {', '.join(parts)}{reasons}"
            )
        return [part for name, part in parts.items() if name in sections]

    def measure(self, sections: Sequence[str] | None = None) -> Comparison:
        """Everything that the chosen parts measure."""
        comparison = Comparison(self.title, self.lead, [], [], self.data)
        parts = self.chosen(sections)
        for part in progress_bar(parts, unit="section", progress=self.progress, desc=self.study.name):
            comparison = comparison.with_more(*part.measure(self))
        return comparison

    def write(self, out: Path, name: str, sections: Sequence[str] | None = None) -> Path:
        """Write NAME.html and NAME.json to a folder and return the path of the page."""
        comparison = self.measure(sections)
        verdict = self.verdict(comparison)
        measured = {part.name for part in self.chosen(sections)}
        unasked = "not among the sections that were asked for"
        left_out = self._missing | {
            part.name: unasked if sections is not None else self._slow[part.name]
            for part in self.parts
            if part.name not in measured | self._missing.keys()
        }
        more = [Section("What this report leaves out", "", table(("section", "why"), list(left_out.items())))]
        comparison = comparison.with_more(
            sections=more if left_out else (),
            data={"verdict": {"headline": verdict.headline, "sentences": verdict.sentences} | verdict.numbers},
        )
        return comparison.write(out, name, opening=verdict.section())


# ---- parts of several kinds ----


ALGORITHM = Part("algorithm", lambda kind: kind.question.part())
CAUSES = Part("causes", lambda kind: causes(kind.study, progress=kind.progress), lambda kind: no_causes(kind.study),
              lambda kind: slow_causes(kind.study))  # fmt: skip
HEADS = Part("heads", lambda kind: model_parts(kind.study, progress=kind.progress),
             lambda kind: no_model_parts(kind.study))  # fmt: skip
FINETUNING = Part("fine-tuning", lambda kind: finetuning(kind.study, progress=kind.progress),
                  lambda kind: no_finetuning(kind.study), lambda kind: slow_finetuning(kind.study))  # fmt: skip


def plural(number: int, noun: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
