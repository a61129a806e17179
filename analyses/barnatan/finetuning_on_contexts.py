"""Fine-tuning on a prompt's context against reading it, by regression models (metrics of Bar Natan, Deutch & Magar).

python analyses/barnatan/finetuning_on_contexts.py --checkpoint lsa-1l
python analyses/barnatan/finetuning_on_contexts.py --checkpoint gpt2-8l
"""

from typing import Any

from analyses.support.script import Option, script
from mechicl.analysis import FineTuning, compare_on_prompts, read_dual_form
from mechicl.analysis.finetuning import METHOD_NAMES, METHODS, search_on_prompts
from mechicl.checkpoints import load_checkpoint
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.reports.finetuning import finetuning_sections
from mechicl.statistics import interval


@script(
    checkpoint="lsa-1l",
    n_prompts=Option(16, "number of prompts to measure on, each with its own fine-tuning"),
    n_held_out=Option(4, "to choose learning rate and epochs by"),
    learning_rates=Option((0.003, 0.01, 0.03, 0.1), "to choose from"),
    epochs=Option((1, 4, 8), "numbers of epochs to choose from"),
    seed=0,
    quiet=False,
)
def compare(args: Any) -> Comparison:
    """The three settings and the metrics, for the model, its linearisation, and layer by layer."""
    checkpoint = load_checkpoint(args.checkpoint)
    model, task = checkpoint.models[0], checkpoint.task
    if not isinstance(model, HookedTransformer) or model.cfg.prompt_format == "token_ids":
        raise ValueError(f"{checkpoint.name} is not a transformer on points; icl_against_finetuning.py is for texts")
    prompts = task.sample(args.n_prompts + args.n_held_out, seed=args.seed)
    held_out, measured = prompts[: args.n_held_out], prompts[args.n_held_out :]
    tunings, comparisons = {}, {}
    for method in METHODS:
        search = search_on_prompts(
            model, held_out, FineTuning(method=method), learning_rates=args.learning_rates, epochs=args.epochs,
            progress=not args.quiet,
        )  # fmt: skip
        tunings[METHOD_NAMES[method]] = search.best
        comparisons[METHOD_NAMES[method]] = compare_on_prompts(model, measured, search.best, progress=not args.quiet)
    rows, figures, data = finetuning_sections(comparisons, tunings)
    rows += [dual_form_row(model, measured, layer) for layer in range(model.cfg.n_layers)]
    bare = "inputs without targets" if model.cfg.keys == "context" else "the query alone"
    lead = (
        f"{checkpoint.name}, {task.n_context} points in {task.x_dim} dimensions; {args.n_prompts} prompts (seed "
        f"{args.seed}), fine-tuning chosen on {args.n_held_out} others. Without its context a prompt is {bare}."
    )
    return Comparison(f"Fine-tuning on contexts ({checkpoint.name})", lead, rows, figures, {**data, "seed": args.seed})


def dual_form_row(model: HookedTransformer, prompts: Prompts, layer: int) -> Row:
    """How wrong it is to read a layer's attention at the query as a weight update by the context."""
    linear = model.cfg.for_layer(layer).attention == "linear"
    errors = read_dual_form(model, prompts, layer).relative_error.mean(0)
    quantity = f"error of reading attention as a weight update, layer {layer}"
    note = "relative to what a head writes, mean over heads"
    return Row(quantity, "0 (eq. 4)" if linear else None, interval(errors), "prompts", note)


if __name__ == "__main__":
    compare.run()
