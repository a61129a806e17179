"""Fu et al. 2024, Figs. 2, 4, 5 and 7 with the size of the model: what changes from 8 layers to the paper's 12?

python analyses/fu2024/fu_size.py                                       # all sizes that are there
python analyses/fu2024/fu_size.py --checkpoints gpt2-8l runs/mine
"""

from typing import Any

from analyses.support.script import script
from mechicl import viz
from mechicl.checkpoints import Checkpoint, available, load_checkpoint
from mechicl.models import build
from mechicl.reports import Comparison, Row, Section
from mechicl.reports.layer_matches import RIVALS, LayerMatching, seed_rows
from mechicl.statistics import Interval

SIZES = ("gpt2-4l", "gpt2-6l", "gpt2-8l", "gpt2-12l-medium", "gpt2-12l")
STATISTICS = {  # words for what a statistic is of a size
    "Newton iterations a layer": "Newton, steps a layer (linear fit)",
    "doublings of gradient descent steps a layer": "gradient descent, doublings a layer (exponential fit)",
    "halvings of a ridge path a layer": "ridge path, steps a layer (linear fit)",
    "Newton iterations for each doubling": "Newton iterations for each doubling of gradient descent steps",
    "similarity of the last layer and its best Newton iteration": "last layer and its best Newton step",
    "similarity of the last layer and its best gradient descent step": "last layer and its best gradient descent step",
    "similarity of the last layer and its best ridge path step": "last layer and its best ridge path step",
}

SIMILARITY = "similarity of the last layer and its best"
BEYOND = f"{SIMILARITY} Newton iteration, beyond an untrained model's, of what this lacks to 1"
UNTRAINED_SEED = 2_000_003


@script(
    checkpoints=tuple(name for name in SIZES if name in available()),
    n_prompts=512,
    n_fitting=2048,
    seed=0,
)
def compare(args: Any) -> Comparison:
    """The statistics of each size."""
    rows: list[Row] = []
    lines: dict[str, dict[int, Interval]] = {}
    data: dict[str, Any] = {"n_prompts": args.n_prompts, "n_fitting": args.n_fitting, "seed": args.seed, "sizes": {}}
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        measured = _of_size(checkpoint, args)
        cfg, task = checkpoint.models[0].cfg, checkpoint.task
        size = f"{cfg.n_layers} layers, d = {task.x_dim}"
        data["sizes"][checkpoint.name] = {
            "n_layers": cfg.n_layers, "d_model": cfg.d_model, "x_dim": task.x_dim, "n_context": task.n_context,
            "seeds": len(checkpoint.models), "label": size,
        }  # fmt: skip
        for words, row in measured.items():
            known = 3 if words == "Newton iterations a layer" else None
            rows.append(Row(f"{checkpoint.name}: {words}", known, row.measured, row.over, f"{size}; {row.note}",
                            source="fu2024"))  # fmt: skip
            if isinstance(row.measured, Interval):
                lines.setdefault(words, {})[cfg.n_layers] = row.measured
    caption = "By size, with 95% intervals over seeds, or over prompts where there is one."
    figures = [
        Section(words[:1].upper() + words[1:], caption,
                viz.interval_lines(words, "layers", words, list(each), {words: list(each.values())}))
        for words, each in lines.items() if len(each) > 1
    ]  # fmt: skip
    lead = (
        f"Errors after each layer of {', '.join(data['sizes'])}, by linear readouts fitted on {args.n_fitting} "
        f"prompts, against algorithms on {args.n_prompts} held-out ones (seed {args.seed + 1}). The paper's model has "
        f"12 layers, width 256, d = 20 and 40 points."
    )
    return Comparison("Fu et al.'s statistics by size", lead, rows, figures, data)


def _of_size(checkpoint: Checkpoint, args: Any) -> dict[str, Row]:
    """The statistics of all seeds of a checkpoint, by their words."""
    matching = LayerMatching(
        checkpoint.task, ("errors",), n_prompts=args.n_prompts, n_fitting=args.n_fitting, seed=args.seed, shared=False,
        resamples=50,
    )  # fmt: skip
    table = {row.quantity: row for row in seed_rows("errors", [matching.of(m) for m in checkpoint.models], checkpoint)}
    unknown = Row("", None, "cannot be determined", note="fewer than 5 layers match a step inside those tried")
    measured = {words: table.get(f"errors: {quantity}", unknown) for words, quantity in STATISTICS.items()}
    n_layers = checkpoint.models[0].cfg.n_layers
    for rival in RIVALS[:3]:
        minus = [table[f"errors: layer {i}, best Newton minus best {rival}"] for i in range(1, n_layers + 1)]
        measured[f"last layer, best Newton minus best {rival}"] = minus[-1]
        nearer = sum(row.ends[0] > 0 for row in minus)
        note = "the interval of the difference lies above 0"
        words = f"{nearer} of {n_layers} layers"
        measured[f"layers nearer to Newton than to {rival}"] = Row("", None, words, minus[0].over, note)
    similarity = measured[f"{SIMILARITY} Newton iteration"]
    untrained = matching.of(build(checkpoint.models[0].cfg, UNTRAINED_SEED).eval())
    start = untrained.matches["errors"]["Newton"].best()[-1].similarity.mean
    low, mean, high = ((end - start) / (1 - start) for end in similarity.ends)
    beyond = Interval(mean, low, high, similarity.measured.n if isinstance(similarity.measured, Interval) else 1)
    measured[BEYOND] = Row("", None, beyond, similarity.over, f"the untrained model's is {start:.4g}")
    return measured


if __name__ == "__main__":
    compare.run()
