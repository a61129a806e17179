"""Which layer and token carries what an algorithm would hold (the quantities of Fu et al. 2024, section 3).

python analyses/fu_probes.py
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from mechicl import algorithms, viz
from mechicl.analysis import cross_moments, gradient_descent_weights, newton_weights, ols_weights, probe, second_moments
from mechicl.checkpoints import load_checkpoint
from mechicl.report import Comparison, Figure, Row


@dataclass(frozen=True)
class Args:
    """Linear probes with control tasks, at every layer and position."""

    checkpoint: str = "gpt2-8l"
    """Name or folder of an interleaved model."""
    out: Path = Path("analyses/results")
    """Folder for NAME.json and NAME.html."""
    n_fitting: int = 8192
    """Prompts to fit probes on."""
    n_prompts: int = 2048
    """Held-out prompts."""
    seed: int = 0
    """Of the prompts."""


def compare(args: Args) -> Comparison:
    """Probe for XᵀY, S, and weights after some iterations."""
    checkpoint = load_checkpoint(args.checkpoint)
    task = checkpoint.task
    fitting, held_out = (task.sample(n, seed=args.seed + i) for i, n in enumerate((args.n_fitting, args.n_prompts)))
    step_size = algorithms.stable_step_size(held_out)
    quantities = {
        "XᵀY": cross_moments,
        "S = XᵀX": second_moments,
        "weights, 16 steps of gradient descent": gradient_descent_weights(16, step_size),
        "weights, 4 Newton iterations": newton_weights(4),
        "weights, 12 Newton iterations": newton_weights(12),
        "least-squares weights": ols_weights,
    }
    result = probe(checkpoint.models[0], quantities, fitting, held_out, progress=True)
    selectivity = result.selectivity().nan_to_num(-1.0)
    rows = []
    for q, name in enumerate(quantities):
        n_pos = selectivity.shape[2]
        for kind, positions in (("x", range(2 * task.x_dim, n_pos, 2)), ("y", range(2 * task.x_dim + 1, n_pos, 2))):
            by_layer = selectivity[q][:, list(positions)].mean(1)
            layer = int(by_layer.argmax())
            best = max(positions, key=lambda pos: selectivity[q, layer, pos].item())
            rows.append(
                Row(
                    f"{name}: best R² at {kind} tokens after {task.x_dim} points",
                    None,
                    result.interval(name, layer, best),
                    "prompts",
                    f"layer {layer}, token {result.positions[best]}; "
                    f"control {result.control()[q, layer, best].item():.3f}; "
                    f"mean over such tokens by layer {', '.join(f'{v:.2f}' for v in by_layer.tolist())}",
                )
            )
    figures = [
        Figure(
            name,
            "R² on held-out prompts minus that of probes fitted to another prompt's quantity.",
            viz.probe_heatmap(result, name),
        )
        for name in quantities
    ]
    lead = (
        f"{checkpoint.name}: ridge probes in closed form at every layer and position, fitted on {args.n_fitting} "
        f"prompts and measured on {args.n_prompts} (seeds {args.seed} and {args.seed + 1})."
    )
    data = {
        "quantities": list(quantities),
        "explained": result.explained().tolist(),
        "control": result.control().tolist(),
    }
    return Comparison(f"What do the layers carry? ({checkpoint.name})", lead, rows, figures, data)


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    comparison = compare(arguments)
    print(comparison)
    print(comparison.write(arguments.out, f"fu_probes_{Path(arguments.checkpoint).name}"))
