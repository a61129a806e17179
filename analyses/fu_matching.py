"""Fu et al. 2024, Figs. 2, 4, 5 and 7 (errors), 6 (weights), 10 to 13: which iteration does each layer match?

python analyses/fu_matching.py                              # the small isotropic model
python analyses/fu_matching.py --checkpoint gpt2-8l-1h      # one head (Figs. 12, 13)
python analyses/fu_matching.py --checkpoint gpt2-8l-ill     # ill-conditioned (B.3)
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mechicl import algorithms, viz
from mechicl.analysis import Growth, Match, fit_readouts, match
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import AlgorithmLearner, interval
from mechicl.report import Comparison, Figure, Row, published

NEWTON_STEPS = tuple(range(1, 24))
GD_STEPS = tuple(sorted({round(4096 ** (i / 39)) for i in range(40)} | {2**i for i in range(13)}))


@dataclass(frozen=True)
class Args:
    """Which layer of a model matches which iteration of Newton's method and of gradient descent."""

    checkpoint: str = "gpt2-8l"
    """Name or folder of an interleaved model."""
    similarities: tuple[Literal["errors", "weights"], ...] = ("errors", "weights")
    """What to compare."""
    out: Path = Path("analyses/results")
    """Folder for NAME.json and NAME.html."""
    n_prompts: int = 1024
    """Held-out prompts to compare on."""
    n_fitting: int = 8192
    """Prompts to fit readouts on."""
    seed: int = 0
    """Of the prompts."""


def compare(args: Args) -> Comparison:
    """Fit readouts, match layers, and put the paper's statements beside what was found."""
    checkpoint = load_checkpoint(args.checkpoint)
    task, model = checkpoint.task, checkpoint.models[0]
    readouts = fit_readouts(model, task.sample(args.n_fitting, seed=args.seed), progress=True)
    prompts = task.sample(args.n_prompts, seed=args.seed + 1)
    step_size = algorithms.stable_step_size(prompts)
    families = {
        "Newton": AlgorithmLearner(algorithms.newton, {"steps": NEWTON_STEPS}),
        "gradient descent": AlgorithmLearner(algorithms.gradient_descent, {"steps": GD_STEPS, "step_size": step_size}),
        "OLS": AlgorithmLearner(algorithms.ols),
    }
    printed = published("002_isotropic_similarity_of_errors")
    n_layers = model.cfg.n_layers
    last = {
        "Newton": max(filter(None, printed["newton_layer12_by_iteration_1_to_23"])),
        "gradient descent": max(printed["gd_layer12_by_steps"].values()),
    }
    claims = {
        "Newton": "linear, about 3 a layer in layers 3 to 9",
        "gradient descent": "exponential",
    }
    rows: list[Row] = []
    figures: list[Figure] = []
    data: dict[str, object] = {"checkpoint": checkpoint.name, "n_prompts": args.n_prompts, "gd_step_size": step_size}
    for similarity in args.similarities:
        trajectory = readouts.trajectory(prompts, with_weights=similarity == "weights")
        matches = {
            name: match(trajectory, learner, prompts, similarity=similarity) for name, learner in families.items()
        }
        growths: dict[str, Growth] = {}
        for name in ("Newton", "gradient descent"):
            found = matches[name]
            best = found.best()
            rows.append(
                Row(
                    f"{similarity}: similarity of the last layer with its best {name} step",
                    last[name] if similarity == "errors" else None,
                    best[-1].similarity,
                    "prompts",
                    f"step {best[-1].column} ({best[-1].low} to {best[-1].high})",
                )
            )
            try:
                growths[name] = growth = found.growth()
            except ValueError as error:
                rows.append(
                    Row(f"{similarity}: growth of the best {name} step", claims[name], "not fitted", "", str(error))
                )
                continue
            layers = f"layers {growth.rows[0]} to {growth.rows[-1]}"
            steps = ", ".join(map(str, growth.columns))
            rows += [
                Row(
                    f"{similarity}: growth of the best {name} step",
                    claims[name],
                    growth.better,
                    layers,
                    f"best steps {steps}; AICc {growth.linear_aic:.1f} and {growth.exponential_aic:.1f} (exponential)",
                ),
                Row(
                    f"{similarity}: {name} steps a layer, linear fit",
                    3 if name == "Newton" else None,
                    growth.slope,
                    "layers",
                ),
                Row(f"{similarity}: {name} doublings a layer, exponential fit", None, growth.doubling, "layers"),
            ]
        alike = matches["OLS"].similarities[-1, 0]
        rows.append(
            Row(f"{similarity}: similarity of the last layer with OLS", "near 1 (Fig. 7)", interval(alike), "prompts")
        )
        rows += _paired_difference(similarity, matches)
        figures += _figures(similarity, matches, growths)
        data[similarity] = {
            name: {
                "rows": m.rows,
                "columns": m.columns,
                "mean": m.mean().tolist(),
                "best": [(b.column, b.low, b.high, b.similarity.mean) for b in m.best()],
            }
            for name, m in matches.items()
        }
    lead = (
        f"Layers of {checkpoint.name} ({n_layers} layers, d = {task.x_dim}, {task.n_context} points), read by linear "
        f"readouts, against algorithms on {args.n_prompts} held-out prompts (seed {args.seed + 1}). Published "
        f"numbers are of the paper's 12-layer model with d = 20 and 40 points."
    )
    return Comparison(f"Which iteration does each layer match? ({checkpoint.name})", lead, rows, figures, data)


def _paired_difference(similarity: str, matches: dict[str, Match]) -> list[Row]:
    """How much more alike the best Newton iteration is than the best number of GD steps, on the same prompts."""
    rows = []
    for layer in matches["Newton"].rows[1:]:
        best = [
            m.similarities[layer, m.best_columns()[layer]] for m in (matches["Newton"], matches["gradient descent"])
        ]
        difference = best[0] - best[1]
        rows.append(
            Row(
                f"{similarity}: layer {layer}, best Newton minus best gradient descent",
                "positive (Fig. 7)",
                interval(difference[difference.isfinite()]),
                "prompts",
            )
        )
    return rows


def _figures(similarity: str, matches: dict[str, Match], growths: dict[str, Growth]) -> list[Figure]:
    of = "errors" if similarity == "errors" else "induced weights"
    heatmaps = [
        Figure(
            f"Similarity of {of}: {name}",
            "Mean cosine over held-out prompts; white squares mark each layer's best match.",
            viz.match_heatmap(matches[name], f"Similarity of {of}"),
        )
        for name in ("Newton", "gradient descent")
    ]
    two = {name: matches[name] for name in ("Newton", "gradient descent")}
    lines = {name: [best.similarity for best in found.best()] for name, found in matches.items()}
    return [
        *heatmaps,
        Figure(
            f"Best-matching steps ({of})",
            "Bars: 95% intervals from resampled prompts. Open circles lie at the edge of the "
            "steps that were tried. Dotted: the better of the two fitted curves.",
            viz.match_curve(two, growths),
        ),
        Figure(
            f"Similarity of each layer with the best of each family ({of})",
            "Bands: 95% intervals over prompts (Fig. 7).",
            viz.interval_lines(f"Best similarity of {of}", "layer", "cosine", list(matches["OLS"].rows), lines),
        ),
    ]


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    comparison = compare(arguments)
    print(comparison)
    print(comparison.write(arguments.out, f"fu_matching_{Path(arguments.checkpoint).name}"))
