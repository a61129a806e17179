"""Fu et al. 2024, Figs. 8 and 15: induced weights by number of points, and whether they lie in the examples' span."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import script
from mechicl import viz
from mechicl.analysis import fit_readouts, match
from mechicl.analysis.behaviour.alignment import similarity_of_weights
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.layer_matches import reference_families
from mechicl.reports.rows import over_models
from mechicl.statistics import Interval, interval


@script(checkpoint="gpt2-8l", n_prompts=512, n_fitting=4096, seed=0)
def compare(args: Any) -> Comparison:
    """Similarities of induced weights for each number of points, and the share outside the span."""
    checkpoint = load_checkpoint(args.checkpoint)
    task = checkpoint.task
    fitting, prompts = (task.sample(n, seed=args.seed + i) for i, n in enumerate((args.n_fitting, args.n_prompts)))
    all_readouts = [fit_readouts(model, fitting, progress=True) for model in checkpoint.models]
    trajectories = [readouts.trajectory(prompts, with_weights=True) for readouts in all_readouts]
    d, n_layers = task.x_dim, checkpoint.models[0].cfg.n_layers
    rows: list[Row] = []
    figures: list[Section] = []
    by_family: dict[str, dict[int, list[Interval]]] = {}  # of the first seed
    at_d: dict[str, list[list[Interval]]] = {}  # of n = d: by seed and layer
    for name, learner in reference_families(task).items():
        reference = learner.trajectory(prompts, with_weights=True)
        by_seed = [_cosines(trajectory, reference, prompts) for trajectory in trajectories]
        by_family[name] = by_seed[0]
        at_d[name] = [[layers[layer][d - 1] for layer in range(n_layers + 1)] for layers in by_seed]
    for layer in sorted({1, 2, 3, n_layers}):
        lines = {name: by_layer[layer] for name, by_layer in by_family.items()}
        title, points = f"Similarity of induced weights, layer {layer}", list(range(1, task.n_context + 1))
        drawn = viz.interval_lines(title, "context points", "cosine", points, lines)
        figures.append(Section(title, "Cosine with the best-matching step of each family (Fig. 8).", drawn))
        for name in lines:
            known = "a dip for OLS, none for Newton (Fig. 8)" if layer == n_layers else None
            quantity = f"cosine of weights at {d} points (n = d), layer {layer} and {name}"
            rows.append(over_models(quantity, [layers[layer] for layers in at_d[name]], checkpoint, known))
    spans = [[[interval(share, within=(0, 1)) for share in shares] for shares in shares_outside_span(each, prompts)]
             for each in trajectories]  # fmt: skip
    lines = {f"layer {layer}": spans[0][layer][1:d] for layer in range(1, n_layers + 1)}
    words = ("Squared norm of that part over the whole's, while fewer points than dimensions were seen (Fig. 15); "
             "random weights would have 1 - n/d.")  # fmt: skip
    drawn = viz.interval_lines("Outside the span", "context points", "share", list(range(1, d)), lines)
    figures.append(Section("Share of the weights outside the span of the points seen", words, drawn))
    for t in range(1, d):
        quantity, note = f"share outside the span of {t} points, last layer", f"random weights: {1 - t / d:.2f}"
        values = [by_layer[-1][t] for by_layer in spans]
        rows.append(over_models(quantity, values, checkpoint, "near 0 (Fig. 15)", note))
    lead = (
        f"Induced weights of {checkpoint.name}: exact derivatives of each layer's readout with respect to the query, "
        f"on {args.n_prompts} held-out prompts (seed {args.seed + 1}), d = {d}, {task.n_context} points."
    )
    return Comparison(f"Induced weights, point by point ({checkpoint.name})", lead, rows, figures)


def _cosines(trajectory: Trajectory, reference: Trajectory, prompts: Prompts) -> dict[int, list[Interval]]:
    """By layer and number of points, the cosine with the weights of the family's best step."""
    best = match(trajectory, reference, prompts, similarity="weights").best_columns()
    cosines = similarity_of_weights(trajectory, reference)
    return {layer: [interval(v[v.isfinite()]) for v in cosines[layer, best[layer]].T] for layer in range(len(cosines))}


def shares_outside_span(trajectory: Trajectory, prompts: Prompts) -> Float[Tensor, "step point prompt"]:
    """Shares of the weights' squared norm outside the span of the inputs of the first points (C.4, eq. 42).

    Entry t of `point` is after t points: 1 after none, NaN for weights of 0. Weights that are a polynomial in XᵀX times
    XᵀY, as those of gradient descent, Newton's method and ridge regression, stay in the span.
    """
    assert trajectory.weights is not None
    weights, shares = trajectory.weights.detach().double(), []
    for t in range(prompts.n_context + 1):
        outside = weights[:, :, t]
        if t:
            # right singular vectors with a singular value above rounding are an orthonormal basis of the inputs' span,
            # also where points repeat; the others become 0, and project nothing out
            _, singular, directions = torch.linalg.svd(prompts.xs[:, :t].to(weights), full_matrices=False)
            basis = directions * (singular > 1e-10 * singular[:, :1])[..., None]
            outside = outside - basis.mT @ (basis @ outside)
        shares.append(outside.square().sum((-2, -1)) / weights[:, :, t].square().sum((-2, -1)))
    return torch.stack(shares, dim=1)


if __name__ == "__main__":
    compare.run()
