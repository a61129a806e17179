"""Print the best hypothesis about each model as one table, from the results of `does_it_run.py`."""

from collections.abc import Mapping
from pathlib import Path

from analyses.support.results import Results
from mechicl.reports import Row
from mechicl.reports.causes import EXPLAINED, STAND, WEAKEST

RESULTS = Path(__file__).parent / "results"
MODELS = ("lsa-2l-looped", "lsa-5l", "lsa-12l-mlp", "copy-2l", "gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill", "lstm-4l")
HEADER = ("model", "best hypothesis", "effects explained", "weakest R²", "seeds that support it",
          "next best hypothesis")  # fmt: skip
LEAST = -9.0  # values below are printed as "below -9"


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Row]]:
    files = {name: folder / f"does_it_run_{name}.json" for name in MODELS}
    read = {name: Results.read(path).rows for name, path in files.items() if path.exists()}
    return {name: {row.quantity: row for row in rows} for name, rows in read.items()}


def make_table(results: Mapping[str, Mapping[str, Row]]) -> str:
    """Return a Markdown table with a row per model."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for name, rows in results.items():
        explained = sorted((q for q in rows if q.startswith(EXPLAINED)), key=lambda q: rows[q].ends[1], reverse=True)
        best, second = explained[:2]
        weakest = rows[WEAKEST].ends[1]
        lines.append((
            f"`{name}`", best.removeprefix(EXPLAINED), str(rows[best].measured),
            f"below {LEAST:g}" if weakest < LEAST else f"{weakest:.2f}",
            str(rows[STAND].measured).removesuffix(" seeds have one"),
            f"{second.removeprefix(EXPLAINED)} ({rows[second].ends[1]:.2f})",
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(make_table(read_results()))
