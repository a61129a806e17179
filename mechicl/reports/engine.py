"""Every report is made here: the parts of its kind are measured, and a page is written that opens with a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mechicl.base.progress import progress_bar
from mechicl.reports.comparison import Comparison, Part, Section
from mechicl.reports.verdict import Verdict
from mechicl.viz.page import table


@dataclass(frozen=True, eq=False)
class Kind:
    """What a report on one kind of model is made of.

    Attributes:
        title: of the page.
        lead: what was measured, on what.
        parts: by the name that `--sections` knows, what measures each; in the order of the page.
        verdict: from all that was measured, the sentences that the page opens with.
        data: numbers that belong to no part.
        on_request: names of parts that are measured only where they are asked for, and why.
        missing: parts that this model has no use for, and why.
    """

    title: str
    lead: str
    parts: Mapping[str, Callable[[], Part]]
    verdict: Callable[[Comparison], Verdict]
    data: dict[str, Any] = field(default_factory=dict)
    on_request: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def chosen(self, sections: Sequence[str] | None) -> list[str]:
        """The names of the parts to measure, in the order of the page.

        Raises:
            ValueError: a part that this kind of report does not have.
        """
        if sections is None:
            return [name for name in self.parts if name not in self.on_request]
        unknown = [name for name in sections if name not in self.parts]
        if unknown:
            reasons = "".join(f"; {name} is left out here: {self.missing[name]}" for name in unknown
                              if name in self.missing)  # fmt: skip
            raise ValueError(
                f"this report has no section {', '.join(map(repr, unknown))}; it has {', '.join(self.parts)}{reasons}"
            )
        return [name for name in self.parts if name in sections]

    def measure(self, sections: Sequence[str] | None = None, *, progress: bool = True) -> Comparison:
        """All that the chosen parts measure."""
        comparison = Comparison(self.title, self.lead, [], [], dict(self.data))
        chosen = self.chosen(sections)
        for name in progress_bar(chosen, unit="section", progress=progress, desc=self.title):
            comparison = comparison.with_more(*self.parts[name]())
        return comparison

    def write(self, out: Path, name: str, sections: Sequence[str] | None = None, *, progress: bool = True) -> Path:
        """NAME.html and NAME.json in a folder; the path of the page."""
        comparison = self.measure(sections, progress=progress)
        verdict = self.verdict(comparison)
        comparison = comparison.with_more(
            sections=self._left_out(sections),
            data={"verdict": {"headline": verdict.headline, "sentences": verdict.sentences} | verdict.numbers},
        )
        return comparison.write(out, name, opening=verdict.section())

    def _left_out(self, sections: Sequence[str] | None) -> list[Section]:
        """What a reader may look for in vain, and why it is not there."""
        measured = self.chosen(sections)
        reasons = {**self.missing, **{n: why for n, why in self.on_request.items() if n not in measured}}
        if sections is not None:
            reasons |= {n: "not among the sections that were asked for" for n in self.parts if n not in measured}
        if not reasons:
            return []
        return [Section("What this report leaves out", "", table(("section", "why"), list(reasons.items())))]
