"""Which layer and token carries what an algorithm would hold (the quantities of Fu et al. 2024, section 3)."""

from typing import Any

from analyses.support.script import script
from mechicl import algorithms, viz
from mechicl.analysis import probe
from mechicl.analysis.layers import algorithm_weights, cross_moments, ols_weights, second_moments
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Comparison, Section
from mechicl.reports.rows import over_models


@script(checkpoint="gpt2-8l", n_fitting=3072, n_prompts=1024, seed=0)
def compare(args: Any) -> Comparison:
    """Probe for XᵀY, S, and weights after some iterations."""
    checkpoint = load_checkpoint(args.checkpoint)
    task = checkpoint.task
    fitting, held_out = (task.sample(n, seed=args.seed + i) for i, n in enumerate((args.n_fitting, args.n_prompts)))
    step_size = algorithms.stable_step_size(fitting)
    quantities = {
        "XᵀY": cross_moments,
        "S = XᵀX": second_moments,
        "weights, 16 steps of gradient descent": algorithm_weights(
            algorithms.gradient_descent, steps=[16], step_size=step_size
        ),
        "weights, 4 Newton iterations": algorithm_weights(algorithms.newton, steps=[4]),
        "weights, 12 Newton iterations": algorithm_weights(algorithms.newton, steps=[12]),
        "weights, ridge after 4 halvings": algorithm_weights(algorithms.ridge_path, steps=[4]),
        "least-squares weights": ols_weights,
    }
    results = [probe(model, quantities, fitting, held_out, progress=True) for model in checkpoint.models]
    result = results[0]
    late = range(2 * task.x_dim, len(result.positions))  # after as many points as dimensions
    rows = []
    for name in quantities:
        best = [each.best(name, late) for each in results]
        control = [
            each.control()[each.quantities.index(name), layer, position].item()
            for each, (layer, position, _) in zip(results, best, strict=True)
        ]
        where = "; ".join(
            f"layer {layer}, token {result.positions[position]}, R² of the shuffled control {shuffled:.3f}"
            for (layer, position, _), shuffled in zip(best, control, strict=True)
        )
        quantity = f"{name}: best R² after {task.x_dim} points"
        rows.append(over_models(quantity, [explained for _, _, explained in best], checkpoint, note=where))
    words = "R² on held-out prompts minus that of probes fitted to another prompt's quantity."
    figures = [Section(name, words, viz.plot(result, quantity=name)) for name in quantities]
    lead = (
        f"{checkpoint.name}: ridge probes in closed form at every layer and position, fitted on {args.n_fitting} "
        f"prompts and measured on {args.n_prompts} (seeds {args.seed} and {args.seed + 1})."
    )
    return Comparison(f"What do the layers carry? ({checkpoint.name})", lead, rows, figures)


if __name__ == "__main__":
    compare.run()
