"""Published and measured: the table that every report and reproduction prints, saves and shows."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mechicl.base.files import write_bytes, write_json
from mechicl.reports.rows import Row
from mechicl.viz.page import Section, page, table

HEADER = ("quantity", "published", "measured", "interval", "note")
Measured = tuple[list[Row], list[Section], dict[str, Any]]
"""Rows, sections and numbers of a part of a comparison."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Measured values next to published ones.

    Attributes:
        title: of the page.
        lead: what was measured, on what.
        rows: published and measured values.
        sections: pictures with their captions.
        data: every number behind them, as plain data.
    """

    title: str
    lead: str
    rows: Sequence[Row]
    sections: Sequence[Section] = ()
    data: dict[str, Any] = field(default_factory=dict)

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
        saved |= {"table": [row.to_json() | {"verdict": row.verdict} for row in self.rows], **self.more_data()}
        write_json(path, finite(saved))

    def more_data(self) -> dict[str, Any]:
        """What a subclass saves besides."""
        return {}

    def verdict_on(self, row: Row) -> str:
        """Whether what was published of a row holds."""
        return row.verdict

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
            lines = [(*row.cells()[:3], self.verdict_on(row).replace("not printed", "—"), *row.cells()[3:])
                     for row in printed]  # fmt: skip
            header = (*HEADER[:3], "verdict", *HEADER[3:])
            sections.insert(0, Section("Published and measured", "", table(header, lines)))
        homeless = [row for row in others if row.section not in titles]
        if homeless:
            sections.append(Section("Also measured", "", _measured(homeless)))
        return sections


def _measured(rows: Sequence[Row]) -> str:
    """A table of rows of which nothing was published."""
    lines = [(cells[0], *cells[2:]) for cells in (row.cells() for row in rows)]
    return table((HEADER[0], *HEADER[2:]), lines)


def finite(value: Any) -> Any:
    """JSON data in which numbers that are not finite are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
