"""The part of every report that opens the model: what heads do, what is lost without them, where information is."""

from typing import Any

from mechicl import viz
from mechicl.analysis import Sweep, ablate, corrupt, patch, score_heads
from mechicl.checkpoints import Checkpoint
from mechicl.learners import interval
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.report.comparison import Comparison, Figure, Row

N_PROMPTS = 64
PROMPT_SEED = 2_000_003
WORDS = {
    "heads": """
        Share of each head's attention (its absolute value, where attention is not softmax) that goes to the token
        before, from a target to its own input, and, where a position sees later ones, from an input to its target.""",
    "ablation": """
        What the loss of the query's prediction gains when each head's output is replaced by its mean over prompts at
        the same position. Hovering shows the mean and its 95% interval over prompts.""",
    "patching": """
        The model reads prompts whose labels are exchanged within the context, with the stream before one layer, at one
        position, put back as it is with the right labels: the share of the loss that this recovers. Dark cells are
        where the labels' information is at that depth.""",
    "head patching": """
        The same for the output of one head at one position.""",
}


def opened_comparison(comparison: Comparison, checkpoint: Checkpoint) -> Comparison:
    """A comparison with the sections on the model's parts behind it, where it is a transformer that has them."""
    model, task = checkpoint.models[0], checkpoint.task
    if not isinstance(model, HookedTransformer) or task.n_context < 2:
        return comparison
    rows, figures, data = opened_sections(model, task.sample(N_PROMPTS, seed=PROMPT_SEED))
    return comparison.with_more(rows, figures, {"opened": {**data, "seed": PROMPT_SEED}})


def opened_sections(
    model: HookedTransformer, prompts: Prompts, *, seed: int = 0
) -> tuple[list[Row], list[Figure], dict[str, Any]]:
    """Rows, figures and numbers on heads, ablation and patching of a model on prompts.

    Args:
        model: one seed's.
        prompts: at least two, of two context points or more; the first 64 are used.
        seed: of the corruption.

    Raises:
        ValueError: too few prompts or points.
    """
    prompts = prompts[:N_PROMPTS]
    corrupted = corrupt(prompts, "labels", seed=seed)
    labels = model.cfg.format.labels(prompts.n_context)
    without = ablate(model, prompts, "z")
    stream = patch(model, prompts, corrupted, "resid_pre")
    heads = patch(model, prompts, corrupted, "z", ("layer", "pos", "head"))
    rows = [_ablation_row(without), _patching_row(heads, labels)]
    figures = [
        Figure("What is lost without each head", WORDS["ablation"], viz.patching_grid(without)),
        Figure("Where the labels are", WORDS["patching"], viz.patching_grid(stream, labels=labels)),
        Figure("Which heads move them", WORDS["head patching"], viz.patching_grid(heads, labels=labels)),
    ]
    data = {
        "mean_ablation_of_heads": without.effect().mean(-1).tolist(),
        "resid_pre_recovered": stream.recovered().tolist(),
        "z_recovered": heads.recovered().tolist(),
        "n_prompts": len(prompts),
    }
    if model.cfg.prompt_format == "interleaved":
        scores = score_heads(model, prompts=prompts)
        figures.insert(0, Figure("What the heads attend to", WORDS["heads"], viz.head_table(scores)))
        data["head_scores"] = scores.to_dataframe().to_dict("records")
        for name in scores.scores:
            layer, head = scores.best(name)
            note = f"head {layer}.{head}, the highest; uniform attention has {scores.chance[name]:.3f}"
            rows.append(
                Row(f"{name.replace('_', ' ')} score", None, scores.interval(name, layer, head), "prompts", note)
            )
    return rows, figures, data


def _ablation_row(sweep: Sweep) -> Row:
    strongest = sweep.strongest(1).iloc[0]
    layer, head = int(strongest["layer"]), int(strongest["head"])
    before = interval(sweep.unpatched_values["loss"]).mean
    note = f"head {layer}.{head} changes it most; {before:.3g} with all heads"
    return Row("loss gained without the head that matters most", None, sweep.interval(layer, head), "prompts", note)


def _patching_row(sweep: Sweep, labels: list[str]) -> Row:
    share = sweep.recovered()
    place = [int(i) for i in (share == share[share.isfinite()].max()).nonzero()[0]]
    layer, pos, head = place
    note = f"head {layer}.{head} at {labels[pos]} recovers {share[layer, pos, head].item():.0%} of the loss"
    return Row(
        "loss changed by the best single head output, labels exchanged", None, sweep.interval(*place), "prompts", note
    )
