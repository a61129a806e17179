"""Scripts of sweeps reproduce their results files from the saved tables."""

import pytest

from support.results import Results
from tests.scripts import ANALYSES, import_script

NAMES = sorted(path.stem for path in ANALYSES.glob("sweep_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_kept_tables(name):
    script = import_script(name)
    comparison = script.compare(script.Args())
    saved = Results.read(ANALYSES / "results" / f"{name}.json")
    assert [(row.quantity, str(row), row.note) for row in comparison.rows] == [
        (row.quantity, str(row), row.note) for row in saved.rows
    ]
    assert comparison.title == saved.title


@pytest.mark.parametrize("path", sorted((ANALYSES / "results").glob("sweep_*.csv")), ids=lambda path: path.stem)
def test_kept_tables_are_small(path):
    assert path.stat().st_size <= 30_000
