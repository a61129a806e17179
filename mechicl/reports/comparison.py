"""Published beside measured: the table that every reproduction prints, saves and shows."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from mechicl.base.arguments import takes_undefined
from mechicl.base.files import read_json, write_bytes, write_json
from mechicl.reports.claims import Claim, verdict_of
from mechicl.reports.rows import Row
from mechicl.viz.page import Section, page, table

HEADER = ("quantity", "published", "measured", "interval", "note")
Part = tuple[list[Row], list[Section], dict[str, Any]]
"""Rows, sections and numbers of a part of a comparison."""


@takes_undefined  # what could not be measured
@dataclass(frozen=True, eq=False)
class Comparison:
    """What a reproduction measured beside what was published.

    Attributes:
        title: of the page.
        lead: what was measured, on what.
        rows: published beside measured.
        sections: pictures with their words.
        data: every number behind them, as plain data.
        claims: what a paper says of these rows.
    """

    title: str
    lead: str
    rows: Sequence[Row]
    sections: Sequence[Section] = ()
    data: dict[str, Any] = field(default_factory=dict)
    claims: Sequence[Claim] = ()

    def __str__(self) -> str:
        lines = [HEADER, *(row.cells() for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        text = "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in lines
        )
        return f"{self.title}\n{self.lead}\n\n{text}"

    def with_more(
        self, rows: Sequence[Row] = (), sections: Sequence[Section] = (), data: dict[str, Any] | None = None
    ) -> "Comparison":
        """A comparison with further rows, sections and numbers after those that it has.

        Rows without a section belong to the first of the sections that they come with.
        """
        if sections:
            rows = [row if row.section else replace(row, section=sections[0].title) for row in rows]
        return replace(
            self, rows=[*self.rows, *rows], sections=[*self.sections, *sections], data={**self.data, **(data or {})}
        )

    @classmethod
    def read(cls, path: str | Path) -> "Comparison":
        """A saved comparison, without its pictures.

        Raises:
            ValueError: no file that `write` made.
        """
        try:
            data = read_json(Path(path))
            title, lead = data.pop("title"), data.pop("lead")
            rows = [Row.from_json(row) for row in data.pop("table")]
            claims = [Claim.from_json(claim) for claim in data.pop("claims", [])]
        except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"the path {path} holds no saved comparison ({error!r}): make it anew with its script"
            ) from error
        return cls(title, lead, rows, (), data, claims)

    def write(self, out: str | Path, name: str, *, opening: Section | None = None) -> Path:
        """Save NAME.json and NAME.html in a folder, and return the path of the page.

        Args:
            out: the folder; made if need be.
            name: of the files.
            opening: what the page opens with.
        """
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        self.write_numbers(out / f"{name}.json")
        html = page(self.title, self.lead, self._laid_out(), opening=opening)
        write_bytes(out / f"{name}.html", html.encode())
        return out / f"{name}.html"

    def write_numbers(self, path: Path) -> None:
        """Save what is measured, without the page."""
        saved = {"title": self.title, "lead": self.lead, "date": time.strftime("%Y-%m-%d"), **self.data}
        saved |= {
            "table": [row.to_json() | {"verdict": verdict_of(row)} for row in self.rows],
            "claims": [claim.to_json() for claim in self.claims],
        }
        write_json(path, finite(saved))

    def _laid_out(self) -> list[Section]:
        """What the page shows: a table of what was published, each section with its rows, and the rows of none."""
        titles = {section.title for section in self.sections}
        printed = [row for row in self.rows if row.published is not None]
        others = [row for row in self.rows if row.published is None]
        sections = []
        for section in self.sections:
            rows = [row for row in others if row.section == section.title]
            sections.append(replace(section, content=[*section.parts, _measured(rows)]) if rows else section)
        if printed:
            lines = [(*row.cells()[:3], self._verdict_on(row), *row.cells()[3:]) for row in printed]
            header = (*HEADER[:3], "verdict", *HEADER[3:])
            sections.insert(0, Section("Published and measured", "", table(header, lines)))
        homeless = [row for row in others if row.section not in titles]
        if homeless:
            sections.append(Section("Also measured", "", _measured(homeless)))
        return sections

    def _verdict_on(self, row: Row) -> str:
        """Whether the paper is right in this row: by the row itself, or by the claim that is stated on it alone."""
        verdict = verdict_of(row)
        if verdict == "not printed":  # words without a check of the row's own
            alone = [claim.verdict for claim in self.claims if claim.rows == [row]]
            verdict = alone[0] if alone else verdict
        return "—" if verdict == "not printed" else verdict


def _measured(rows: Sequence[Row]) -> str:
    """A table of rows of which nothing was published."""
    lines = [(cells[0], *cells[2:]) for cells in (row.cells() for row in rows)]
    return table((HEADER[0], *HEADER[2:]), lines)


def published(key: str) -> dict[str, Any]:
    """Numbers printed in the papers: an entry of `published.json`, whose keys are an author, a year and a place.

    Raises:
        KeyError: no such entry.
    """
    entries = json.loads(files("mechicl").joinpath("published.json").read_text())
    if key not in entries:
        raise KeyError(f"key must be one of {', '.join(entries)}, got {key!r}")
    return entries[key]


def finite(value: Any) -> Any:
    """JSON data in which numbers that are not finite are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
