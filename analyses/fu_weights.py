"""Fu et al. 2024, Figs. 8 and 15: induced weights by number of points, and whether they lie in the examples' span.

python analyses/fu_weights.py
"""

from dataclasses import dataclass

from mechicl import viz
from mechicl.analysis import fit_readouts, match
from mechicl.analysis.behaviour import measure_outside_span, similarity_of_weights
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Claim, Claims, Comparison, Row, Section
from mechicl.reports.layers import reference_families
from mechicl.reports.script import ScriptArgs, run_script
from mechicl.statistics import Interval, interval


@dataclass(frozen=True)
class Args(ScriptArgs):
    """The weights that a model's layers have led to, point by point."""

    checkpoint: str = "gpt2-8l"
    """Name or folder of an interleaved model."""
    n_prompts: int = 1024
    """Held-out prompts."""
    n_fitting: int = 8192
    """Prompts to fit readouts on."""
    seed: int = 0
    """Seed of the prompts."""


def compare(args: Args) -> Comparison:
    """Similarities of induced weights for each number of points, and the share outside the span."""
    checkpoint = load_checkpoint(args.checkpoint)
    task, model = checkpoint.task, checkpoint.models[0]
    readouts = fit_readouts(model, task.sample(args.n_fitting, seed=args.seed), progress=True)
    prompts = task.sample(args.n_prompts, seed=args.seed + 1)
    trajectory = readouts.trajectory(prompts, with_weights=True)
    families = reference_families(task)
    d, n_layers = task.x_dim, model.cfg.n_layers
    rows: list[Row] = []
    figures: list[Section] = []
    data: dict[str, object] = {"checkpoint": checkpoint.name, "n_prompts": args.n_prompts}
    by_family: dict[str, dict[int, list[Interval]]] = {}
    for name, learner in families.items():
        reference = learner.trajectory(prompts, with_weights=True)
        best = match(trajectory, reference, prompts, similarity="weights").best_columns()
        cosines = similarity_of_weights(trajectory, reference)
        by_family[name] = {
            layer: [interval(v[v.isfinite()]) for v in cosines[layer, best[layer]].T] for layer in range(n_layers + 1)
        }
        data[name] = {layer: [i.mean for i in intervals] for layer, intervals in by_family[name].items()}
    for layer in sorted({2, 3, n_layers}):
        lines = {name: by_layer[layer] for name, by_layer in by_family.items()}
        title = f"Similarity of induced weights, layer {layer}"
        figures.append(
            Section(
                title,
                "Cosine with the best-matching step of each family (Fig. 8).",
                viz.interval_lines(title, "context points", "cosine", list(range(1, task.n_context + 1)), lines),
            )
        )
        for name, intervals in lines.items():
            known = "a dip for OLS, none for Newton (Fig. 8)" if layer == n_layers else None
            quantity = f"cosine of weights at {d} points (n = d), layer {layer} and {name}"
            rows.append(Row(quantity, known, intervals[d - 1], "prompts"))
    span = measure_outside_span(readouts, prompts)
    data["outside_span"] = span.share.mean(-1).tolist()
    lines = {f"layer {layer}": span.by_point(layer)[1:d] for layer in range(1, n_layers + 1)}
    figures.append(
        Section(
            "Share of the weights outside the span of the points seen",
            "Squared norm of that part over the whole's, while fewer points than dimensions were seen (Fig. 15); "
            "random weights would have 1 - n/d.",
            viz.interval_lines("Outside the span", "context points", "share", list(range(1, d)), lines),
        )
    )
    for t in range(1, d):
        quantity, note = f"share outside the span of {t} points, last layer", f"random weights: {1 - t / d:.2f}"
        rows.append(Row(quantity, "near 0 (Fig. 15)", span.by_point()[t], "prompts", note))
    lead = (
        f"Induced weights of {checkpoint.name}: exact derivatives of each layer's readout with respect to the query, "
        f"on {args.n_prompts} held-out prompts (seed {args.seed + 1}), d = {d}, {task.n_context} points."
    )
    return Comparison(f"Induced weights, point by point ({checkpoint.name})", lead, rows, figures, data)


def claims(comparison: Comparison) -> list[Claim]:
    """What the paper says of the weights that layers lead to."""
    paper = Claims("fu2024", comparison.rows)
    cosine = "cosine of weights at 5 points (n = d), layer"
    families = ("Newton", "gradient descent", "OLS")
    paper.add("Fig. 8", "layer 2, n = d: cosine of weights with Newton, gradient descent, OLS",
              *(f"{cosine} 2 and {family}" for family in families), check="near 0", published="0",
              why="this layer has learned something already")  # fmt: skip
    paper.add("Fig. 8", "layer 3, n = d: cosine of weights with Newton, gradient descent, OLS",
              *(f"{cosine} 3 and {family}" for family in families), check="a > b and a > c",
              published="most similar to Newton")  # fmt: skip
    paper.add("Fig. 8", "layer 8, n = d: cosine of weights with OLS, Newton", f"{cosine} 8 and OLS",
              f"{cosine} 8 and Newton", check="a < b")  # fmt: skip
    paper.add("Fig. 15", "share of the last layer's weights outside the span of 1, 2, 3, 4 points",
              "share outside the span of * points, last layer", check="near 0",
              why="random weights would have 4/5, 3/5, 2/5, 1/5")  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "fu_weights", claims)
