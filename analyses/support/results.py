"""The results of a script, as saved in analyses/results, and the papers' claims on them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from analyses.support.claims import Claim, row_from_json, state_claims
from mechicl.base.files import read_json
from mechicl.reports import Comparison, Row

MORE = ("derived", "untrained_rows")


@dataclass(frozen=True, eq=False)
class Results(Comparison):
    """A comparison, and further rows that papers' claims are on."""

    name: str = ""  # of the file
    derived: Sequence[Row] = ()  # rows that the script derives from the data
    untrained_rows: Sequence[Row] = ()  # of untrained models, derived ones too

    @classmethod
    def of(cls, comparison: Comparison, name: str, derived: Sequence[Row] = ()) -> "Results":
        known = {each.name: getattr(comparison, each.name) for each in fields(Comparison)}
        return cls(**known, name=name, derived=derived)

    @classmethod
    def read(cls, path: str | Path) -> "Results":
        """Saved results, without their pictures.

        Raises:
            ValueError: not a file that `write` made.
        """
        try:
            data = read_json(Path(path))
            title, lead = data.pop("title"), data.pop("lead")
            rows = [row_from_json(row) for row in data.pop("table")]
            more = {name: [row_from_json(row) for row in data.pop(name, [])] for name in MORE}
        except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not contain a saved comparison ({error!r}): run its script again") from error
        return cls(title, lead, rows, (), data, Path(path).stem, **more)

    @cached_property
    def claims(self) -> list[Claim]:
        """The claims of the papers' tables on these rows."""
        try:
            return state_claims(self.name, [*self.rows, *self.derived], self.untrained_rows)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.name}: {error}") from error

    def more_data(self) -> dict[str, Any]:
        return {name: [row.to_json() for row in getattr(self, name)] for name in MORE if getattr(self, name)}

    def verdict_on(self, row: Row) -> str:
        """Whether the paper is right in this row: by the row itself, or by the claim that is stated on it alone."""
        alone = [claim.verdict for claim in self.claims if claim.rows == [row]]
        return alone[0] if row.verdict == "not printed" and alone else row.verdict
