"""The papers that this package cites: `mechicl/sources.bib`, whose keys are author and year."""

import re
from importlib.resources import files


def read_sources() -> dict[str, dict[str, str]]:
    """Fields of every entry of `sources.bib`, by key.

    Only the layout of that file is understood: one `name = {value},` a line.
    """
    text = files("mechicl").joinpath("sources.bib").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{([^,]+),\n(.*?)^\}", text, flags=re.DOTALL | re.MULTILINE)
    return {key: dict(re.findall(r"^\s*(\w+) = \{(.*)\},?$", fields, flags=re.MULTILINE)) for key, fields in entries}


def authors_and_year(entry: dict[str, str]) -> str:
    """How the text cites an entry: "Fu et al. 2024"; without a year where none is known."""
    names = [name.split(",")[0].strip("{}") for name in entry["author"].split(" and ")]
    authors = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    return f"{authors} {entry.get('year', '')}".strip()
