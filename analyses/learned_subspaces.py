"""Where in a model's stream the running prediction of gradient descent and of Newton's method lies, with controls."""

from collections.abc import Sequence
from typing import Any

from analyses.support.script import Option, script
from mechicl import viz
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.analysis import SubspaceSearch, fit_subspace
from mechicl.analysis.causes import SubspaceFit, fit_hypotheses
from mechicl.analysis.causes.subspaces import MODEL
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Comparison, Row, Section
from mechicl.tasks import Task

ASKED = ("a step size each, by the query alone", "running prediction")
"""Words in the names of the hypotheses whose running prediction is looked for."""
TITLE = "Where do its variables lie?"


@script(
    checkpoint="gpt2-8l",
    layers=Option((4, 6), "numbers of layers after which to search"),
    dims=Option((1, 4, 16), "numbers of dimensions"),
    n_prompts=Option(512, "held-out prompts, and as many to search with"),
    iterations=Option(40, "of each search"),
    seed=Option(0, "seed of prompts and searches"),
)
def compare(args: Any) -> Comparison:
    """The searches for each hypothesis, on the checkpoint's best seed."""
    checkpoint = load_checkpoint(args.checkpoint)
    model, task = checkpoint.best, checkpoint.task
    chosen = [
        each for each in fit_hypotheses(model, task, seed=args.seed) if any(words in each.name for words in ASKED)
    ]
    searches = search_subspaces(
        model, chosen, "prediction", task, args.layers, dims=args.dims,
        fit=SubspaceFit(args.n_prompts, args.n_prompts, args.iterations, restarts=0, seed=args.seed),
    )  # fmt: skip
    rows = [row for search in searches for row in rows_of(search)]
    sections = [Section(f"{TITLE} prediction: {each.hypothesis}", WORDS.format(each.place), viz.plot(each))
                for each in searches]  # fmt: skip
    data = {"subspaces": [{"hypothesis": each.hypothesis, "variable": "prediction",
                           "rows": each.to_dataframe().to_dict("records")} for each in searches]}  # fmt: skip
    lead = (
        f"{checkpoint.name}, its best seed: searched on {args.n_prompts} prompts and measured on as many others (seed "
        f"{args.seed}); R² is 0 where the exchange changes nothing of what it should, 1 where it does what the "
        f"algorithm does."
    )
    return Comparison(f"Where predictions lie in {checkpoint.name}", lead, rows, sections, data)


def search_subspaces(
    model: Any, hypotheses: Sequence[Hypothesis], variable: str, task: Task, layers: Sequence[int], **options: Any
) -> list[SubspaceSearch]:
    """Search for a variable of hypotheses at the query, after layers that are in a hypothesis's schedule."""
    return [
        fit_subspace(model, each, variable, task, layers=[n for n, _ in each.between if n in layers], **options)
        for each in hypotheses
    ]


def rows_of(search: SubspaceSearch) -> list[Row]:
    """R² for each layer and number of dimensions, with the controls in the note."""
    rows, name = [], ", ".join(search.variables)
    for layer in search.layers:
        for dim in search.dims:
            controls = "; ".join(f"{each} {search.r2(layer, dim, each)}" for each in search.searches if each != MODEL)
            note = f"{search.hypothesis}; of the rest {search.rest_r2(layer, dim)}; {controls}"
            quantity = f"{name} in {dim} dimensions after {layer} layers: R² of its exchange"
            rows.append(Row(quantity, None, search.r2(layer, dim), "prompts", note, section=TITLE))
    return rows


WORDS = (
    "Subspaces were fitted so that exchanging what lies in them at the {} does what exchanging the algorithm's "
    "variable does, and exchanging the rest what all other variables do; R² on prompts that the search has not seen. "
    "Controls are searched alike: targets of other prompts, and an untrained model."
)


if __name__ == "__main__":
    compare.run()
