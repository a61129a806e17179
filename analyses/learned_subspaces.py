"""Where in a model's stream the running prediction of gradient descent and of Newton's method lies, with controls.

python analyses/learned_subspaces.py
"""

from typing import Any

from mechicl.analysis.causes import fit_hypotheses
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Comparison
from support.script import Option, script
from support.subspaces import subspaces_part

ASKED = ("a step size each, by the query alone", "running prediction")
"""Words in the names of the hypotheses whose running prediction is looked for."""


@script(
    checkpoint=Option("gpt2-8l", "Name or folder of a model that reads prompts of points"),
    layers=Option((4, 6), "Numbers of layers after which to search"),
    dims=Option((1, 4, 16), "Numbers of dimensions"),
    n_prompts=Option(512, "Held-out prompts, and as many to search with"),
    iterations=Option(40, "Of each search"),
    seed=Option(0, "Seed of prompts and searches"),
)
def compare(args: Any) -> Comparison:
    """The searches for each hypothesis, on the checkpoint's best seed."""
    checkpoint = load_checkpoint(args.checkpoint)
    model, task = checkpoint.best, checkpoint.task
    hypotheses = fit_hypotheses(model, task, seed=args.seed)
    chosen = [hypothesis for hypothesis in hypotheses if any(words in hypothesis.name for words in ASKED)]
    asked = [(hypothesis, "prediction") for hypothesis in chosen]
    options = {"n_fitting": args.n_prompts, "n_prompts": args.n_prompts, "iterations": args.iterations, "restarts": 0}
    rows, sections, data = subspaces_part(
        model, asked, task, layers=args.layers, dims=args.dims, seed=args.seed, **options
    )
    lead = (
        f"{checkpoint.name}, its best seed: searched on {args.n_prompts} prompts and measured on as many others (seed "
        f"{args.seed}); R² is 0 where the exchange changes nothing of what it should, 1 where it does what the "
        f"algorithm does."
    )
    return Comparison(f"Where predictions lie in {checkpoint.name}", lead, rows, sections, data)


if __name__ == "__main__":
    compare.run()
