"""What each hypothesis explains of each model, as one table made of the results of `does_it_run.py`.

python analyses/does_it_run_table.py
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mechicl.reports import Row
from mechicl.reports.causes import EXPLAINED, STAND, WEAKEST
from support.results import Results

RESULTS = Path(__file__).parent / "results"
MODELS = ("lsa-2l-looped", "lsa-5l", "lsa-12l-mlp", "copy-2l", "gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill", "lstm-4l")
OTHERS = {
    WEAKEST: "R² of the best one's weakest counterfactual",
    STAND: "seeds with a hypothesis that stands",
    "untrained: largest R² of a hypothesis's weakest counterfactual": "the same R², the best of all, untrained",
    "weights shuffled: largest R² of a hypothesis's weakest counterfactual": "the same, weights shuffled",
}
"""Rows below the hypotheses, and their words in the table."""
LEAST = -9.0  # below which only that it is below is said


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Row]]:
    """By model and quantity, the rows of the results files that there are."""
    files = {name: folder / f"does_it_run_{name}.json" for name in MODELS}
    read = {name: Results.read(path).rows for name, path in files.items() if path.exists()}
    return {name: {row.quantity: row for row in rows} for name, rows in read.items()}


def make_table(results: Mapping[str, Mapping[str, Row]]) -> str:
    """Hypotheses by rows, models by columns, in Markdown."""
    explained = list(dict.fromkeys(name for rows in results.values() for name in rows if name.startswith(EXPLAINED)))

    def mean(name: str) -> float:
        values = [rows[name].ends[1] for rows in results.values() if name in rows]
        return sum(values) / len(values)

    explained.sort(key=mean, reverse=True)
    names = {name: name.removeprefix(EXPLAINED) for name in explained} | OTHERS
    lines: list[Sequence[str]] = [("hypothesis", *(f"`{name}`" for name in results)), ("---",) * (len(results) + 1)]
    for name, words in names.items():
        lines.append((words, *(_cell(rows.get(name), name in explained) for rows in results.values())))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row | None, with_interval: bool) -> str:
    if row is None:
        return "—"
    if isinstance(row.measured, str):
        return row.measured.removesuffix(" seeds have one")
    low, middle, high = row.ends
    if middle < LEAST:
        return f"below {LEAST:g}"
    half = (high - low) / 2
    if not with_interval:
        return f"{middle:.2f}"
    digits = 2 if half >= 0.005 else 3 if half >= 0.0005 else 4
    return f"{middle:.{digits}f} ± {half:.{digits}f}"


if __name__ == "__main__":
    print(make_table(read_results()))
