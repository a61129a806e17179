"""Fu et al. 2024, Figs. 3 and 9: loss by number of context points, layer by layer, compared with Newton's iterations.

python analyses/fu2024/fu_progression.py                                   # transformer, Newton, LSTM
python analyses/fu2024/fu_progression.py --checkpoint gpt2-8l-ill --lstm None
"""

import statistics
from typing import Any

import torch

from analyses.support.script import Option, script
from mechicl import algorithms
from mechicl.analysis import fit_readouts, match
from mechicl.analysis.layers import LayerErrors
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import AlgorithmLearner
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.layers import loss_figure
from mechicl.reports.rows import over_models
from mechicl.statistics import ratio_interval


@script(
    checkpoint="gpt2-8l",
    lstm=Option("lstm-4l", "name or folder of an LSTM trained on the same task; None to leave it out", kind=str | None),
    n_prompts=1024,
    n_fitting=4096,
    seed=0,
)
def compare(args: Any) -> Comparison:
    """Losses of all layers and points, and those of the best-matching Newton iterations."""
    checkpoint = load_checkpoint(args.checkpoint)
    task = checkpoint.task
    fitting, prompts = (task.sample(n, seed=args.seed + i) for i, n in enumerate((args.n_fitting, args.n_prompts)))
    square = prompts.ys.double().square().mean((1, 2))  # of each prompt's targets
    signal = square.mean().item()
    names = {"transformer": checkpoint.name} | ({"LSTM": args.lstm} if args.lstm else {})
    rows: list[Row] = []
    figures: list[Section] = []
    data: dict[str, object] = {"n_prompts": args.n_prompts, "signal": signal}
    at_twice_d = min(2 * task.x_dim, task.n_context)
    for kind, name in names.items():
        opened = checkpoint if kind == "transformer" else load_checkpoint(name)
        all_readouts = [fit_readouts(model, fitting, progress=True) for model in opened.models]
        all_errors = [each.errors(prompts, at="points") for each in all_readouts]
        readouts, errors = all_readouts[0], all_errors[0]
        figures.append(loss_figure(f"{kind}: loss by number of context points, after each layer", errors, prompts))
        data[kind] = torch.stack([each.squared_errors.mean(-1) for each in all_errors]).mean(0).tolist()  # of all seeds
        after = [ratio_interval(each.squared_errors[-1, at_twice_d], square) for each in all_errors]
        rows.append(over_models(f"{kind}: MSE after {at_twice_d} points, last layer, over E y²", after, opened))
        for i, ordinal in enumerate(("first", "second", "third"), 1):
            if i < len(errors.squared_errors) - 1:
                by_layer = [each.squared_errors.mean(1) for each in all_errors]
                over_last = [ratio_interval(each[i], each[-1]) for each in by_layer]
                known = "1 (Fig. 3c)" if kind == "LSTM" else "falls from layer to layer (Fig. 3a)"
                words = f"{kind}: MSE of the {ordinal} layer over that of the last, all points"
                rows.append(over_models(words, over_last, opened, known if i == 1 else None))
        if kind == "transformer":
            newton = AlgorithmLearner(algorithms.newton, {"steps": tuple(range(1, 24))})
            best = [int(b.column) for b in match(readouts, newton, prompts).best()[1:]]
            matched = algorithms.newton(prompts, best)
            labels = [f"layer {i + 1}: {steps:g} iterations" for i, steps in enumerate(best)]
            title = "Newton: loss after the iterations that match each layer"
            figures.append(loss_figure(title, LayerErrors.of(matched, prompts, at="points"), prompts, labels))
    lead = (
        f"{' and '.join(names.values())} (d = {task.x_dim}, {task.n_context} points), read by linear readouts "
        f"fitted on {args.n_fitting} prompts, on {args.n_prompts} held-out prompts (seed {args.seed + 1}). Losses are "
        f"divided by the mean square of the targets, {signal:.3f}."
    )
    return Comparison(f"Do layers improve predictions? ({checkpoint.name})", lead, rows, figures, data)


@compare.derive
def derived_rows(comparison: Comparison) -> list[Row]:
    """Return each layer's mean loss over the numbers of points."""
    return [
        Row(f"mean loss of layer {i}, over E y²", None, statistics.fmean(losses) / comparison.data["signal"])
        for i, losses in enumerate(comparison.data["transformer"])
    ]


if __name__ == "__main__":
    compare.run()
