"""Published and measured: the table that every report and reproduction prints, saves and shows."""

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mechicl.base.arguments import check_fields, checked
from mechicl.base.files import write_bytes, write_json
from mechicl.reports.published import authors_and_year, read_sources
from mechicl.reports.rows import Row
from mechicl.viz.page import Section, page, table

HEADER = ("quantity", "published", "measured", "interval", "note")
SHOWN = 12
"""Rows of a long table that are shown; the others are folded under it."""
Measured = tuple[list[Row], list[Section], dict[str, Any]]
"""Rows, sections and numbers of a part of a comparison."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Measured values next to published ones, printed as a table and written as a page.

    Attributes:
        title: title of the page.
        lead: description of the model and the prompts.
        rows: published and measured values.
        sections: pictures with their captions.
        data: every number behind them, as plain data.
    """

    title: str
    lead: str
    rows: Sequence[Row]
    sections: Sequence[Section] = ()
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, undefined=True)

    def __str__(self) -> str:
        lines = [HEADER, *(row.cells() for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        text = "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip()
            for line in lines
        )
        return f"{self.title}\n{self.lead}\n\n{text}"

    @checked(undefined=True)
    def with_more(
        self, rows: Sequence[Row] = (), sections: Sequence[Section] = (), data: dict[str, Any] | None = None
    ) -> "Comparison":
        """Append rows, sections and numbers; rows without a section belong to the first of the new sections."""
        if sections:
            rows = [row if row.section else replace(row, section=sections[0].title) for row in rows]
        data = {**self.data, **(data or {})}
        return replace(self, rows=[*self.rows, *rows], sections=[*self.sections, *sections], data=data)

    @checked
    def write(self, out: str | Path, name: str, *, opening: Section | None = None) -> Path:
        """Save NAME.json and NAME.html (after the `opening` section) in a folder; return the path of the page.

        Raises:
            OSError: a file cannot be written, for example to a full disk. The numbers are written first, to the folder
                for temporary files if need be, and the message names the file that has them.
        """
        numbers, path, kept = Path(out) / f"{name}.json", Path(out) / f"{name}.html", None
        try:
            numbers.parent.mkdir(parents=True, exist_ok=True)
            self.write_numbers(numbers)
            kept = numbers
            write_bytes(path, page(self.title, self.lead, self._laid_out(), opening=opening).encode())
        except OSError as error:
            if kept is None:
                self.write_numbers(kept := Path(tempfile.mkdtemp()) / numbers.name)
            failed = error.filename or str(path)
            raise OSError(error.errno, f"{error.strerror}; all numbers were saved in {kept}", failed) from error
        return path

    @checked
    def write_numbers(self, path: Path) -> None:
        """Save the numbers as a JSON file, without the page."""
        saved = {"title": self.title, "lead": self.lead, "date": time.strftime("%Y-%m-%d"), **self.data}
        saved |= {"table": [row.to_json() | {"verdict": row.verdict} for row in self.rows], **self.more_data()}
        write_json(path, finite(saved))

    def more_data(self) -> dict[str, Any]:
        """Return further entries of the saved file; for subclasses."""
        return {}

    @checked
    def verdict_on(self, row: Row) -> str:
        """Return the outcome of a row's comparison with its paper: "agrees", "differs" or "not printed"."""
        return row.verdict

    def _laid_out(self) -> list[Section]:
        """The sections of the page: published values, each section with its rows, and rows without a section."""
        titles = {section.title for section in self.sections}
        printed = [row for row in self.rows if row.published is not None]
        others = [row for row in self.rows if row.published is None]
        sections = []
        for section in self.sections:
            rows = [row for row in others if row.section == section.title]
            sections.append(replace(section, content=[*section.parts, _measured(rows)]) if rows else section)
        if printed:
            known = read_sources()
            lines = [(*row.cells()[:3], self.verdict_on(row).replace("not printed", "—"), *row.cells()[3:])
                     for row in printed]  # fmt: skip
            header = (*HEADER[:3], "verdict", *HEADER[3:])
            papers = {row.source: None for row in printed if row.source in known}
            words = f"Published by {' and '.join(authors_and_year(known[key]) for key in papers)}." if papers else ""
            sections.insert(0, Section("Published and measured", words, folded_table(header, lines)))
        if rest := [row for row in others if row.section not in titles]:
            sections.append(Section("Also measured", "", _measured(rest)))
        return sections


def _measured(rows: Sequence[Row]) -> str:
    return folded_table((HEADER[0], *HEADER[2:]), [(cells[0], *cells[2:]) for cells in (row.cells() for row in rows)])


def folded_table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Make a table that shows its first lines and folds the others."""
    if len(lines) <= SHOWN + 2:
        return table(header, lines)
    rest = f"<details><summary>{len(lines) - SHOWN} more rows</summary>{table(header, lines[SHOWN:])}</details>"
    return table(header, lines[:SHOWN]) + rest


def finite(value: Any) -> Any:
    """Copy JSON data with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
