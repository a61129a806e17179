"""Numbers printed in papers (`published.json`), and the papers (`sources.bib`)."""

import json
import re
from importlib.resources import files
from typing import Any

from mechicl.base.arguments import checked


@checked
def published(key: str) -> dict[str, Any]:
    """Return numbers printed in a paper, for comparison with measured ones.

    Args:
        key: name of an entry of the library's file `published.json`, made of author, year and place in the paper.

    Returns:
        The entry, a dictionary of numbers and lists as printed. Its own keys name them; "setting", if present, is the
        experiment; None is a number that is not printed.

    Raises:
        KeyError: no such entry; the message lists the entries.

    Example:
        >>> published("oswald2023_fig2")["half_mse_gd_and_trained"]
        0.2
    """
    entries = json.loads(files("mechicl").joinpath("published.json").read_text())
    if key not in entries:
        raise KeyError(f"key must be one of {', '.join(entries)}, got {key!r}")
    return entries[key]


def read_sources() -> dict[str, dict[str, str]]:
    """Read every entry of `sources.bib` by key; the file must have one `name = {value},` per line."""
    text = files("mechicl").joinpath("sources.bib").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{([^,]+),\n(.*?)^\}", text, flags=re.DOTALL | re.MULTILINE)
    return {key: dict(re.findall(r"^\s*(\w+) = \{(.*)\},?$", fields, flags=re.MULTILINE)) for key, fields in entries}


def authors_and_year(entry: dict[str, str]) -> str:
    """Format a citation, such as "Fu et al. 2024"; without a year if none is known."""
    names = [name.split(",")[0].strip("{}") for name in entry["author"].split(" and ")]
    authors = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    return f"{authors} {entry.get('year', '')}".strip()
