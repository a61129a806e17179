"""The results of a script, with a paper's claims on them, as saved in analyses/results."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from analyses.support.claims import Claim, row_from_json
from mechicl.base.files import read_json
from mechicl.reports import Comparison, Row


@dataclass(frozen=True, eq=False)
class Results(Comparison):
    """A comparison and what a paper claims of its rows."""

    claims: Sequence[Claim] = ()  # made by the script

    @classmethod
    def of(cls, comparison: Comparison, claims: Sequence[Claim] = ()) -> "Results":
        known = {each.name: getattr(comparison, each.name) for each in fields(Comparison)}
        return cls(**known, claims=claims)

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
            claims = [Claim.from_json(claim) for claim in data.pop("claims", [])]
        except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not contain a saved comparison ({error!r}): run its script again") from error
        return cls(title, lead, rows, (), data, claims)

    def more_data(self) -> dict[str, Any]:
        return {"claims": [claim.to_json() for claim in self.claims]}

    def verdict_on(self, row: Row) -> str:
        """Whether the paper is right in this row: by the row itself, or by the claim that is stated on it alone."""
        alone = [claim.verdict for claim in self.claims if claim.rows == [row]]
        return alone[0] if row.verdict == "not printed" and alone else row.verdict
