"""The part of every report that opens the model: what heads do, what is lost without them, where information is."""

from pathlib import Path
from typing import Any

import torch

from mechicl import viz
from mechicl.analysis import Sweep, ablate, corrupt, patch, score_heads
from mechicl.checkpoints import Checkpoint
from mechicl.learners import squared_errors
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports.comparison import Comparison, Row, Section
from mechicl.statistics import interval

N_PROMPTS, N_FEWEST = 64, 16
N_MEASURED = 256  # other prompts, on which what was chosen among many is measured
RUNS = 8192  # prompts times places to patch; beyond it there are fewer prompts
PROMPT_SEED = 2_000_003
WORDS = {
    "learning": """
        Half the mean squared error of each seed on held-out prompts.""",
    "heads": """
        Share of each head's attention (of its absolute value, where attention is not softmax) that goes to the token
        before, from a target to its own input, and, where a position sees later ones, from an input to its target.
        First seed, as all that follows.""",
    "ablation": """
        Change of the mean squared error of the query's prediction when a head's output is replaced by its mean over
        prompts at the same position. Hovering shows the 95% interval over prompts. First seed.""",
    "patching": """
        The model reads prompts whose labels are exchanged within the context. The stream before one layer, at one
        position, is put back as it is with the right labels: the share of the loss that this recovers. Blue cells are
        where information on the labels is at that depth.""",
    "head patching": """
        The output of one head at one position put back, on these prompts. A head that acts only on top of others may
        recover nothing alone.""",
}


def add_model_parts(comparison: Comparison, checkpoint: Checkpoint, *, progress: bool = True) -> Comparison:
    """Add what the model's parts do, where it is a transformer that has them."""
    model, task = checkpoint.models[0], checkpoint.task
    if not isinstance(model, HookedTransformer) or not model.cfg.n_layers or task.n_context < 2:
        return comparison
    prompts = task.sample(N_PROMPTS + N_MEASURED, seed=PROMPT_SEED)
    rows, sections, data = measure_model_parts(model, prompts[:N_PROMPTS], prompts[N_PROMPTS:], progress=progress)
    return comparison.with_more(rows, sections, {"model_parts": {**data, "seed": PROMPT_SEED}})


def measure_model_parts(
    model: HookedTransformer, prompts: Prompts, others: Prompts, *, seed: int = 0, progress: bool = True
) -> tuple[list[Row], list[Section], dict[str, Any]]:
    """Rows, sections and numbers on heads, ablation and patching of a model on prompts.

    Args:
        model: one seed's.
        prompts: at least two, of two context points or more. In large models only the first 16 are patched.
        others: on which the head that does most is measured once more; means of ablation are over all of both.
        seed: of the corruption.
        progress: show progress bars.

    Raises:
        ValueError: too few prompts or points.
    """
    labels = model.cfg.format.labels(prompts.n_context)
    places = model.cfg.n_layers * model.cfg.n_heads * len(labels)
    patched = prompts[: max(N_FEWEST, RUNS // places)]
    corrupted = corrupt(patched, "labels", seed=seed)
    everything = prompts + others
    without = ablate(model, prompts, "z", reference=everything, progress=progress)
    stream = patch(model, patched, corrupted, "resid_pre", progress=progress)
    heads = patch(model, patched, corrupted, "z", ("layer", "pos", "head"), progress=progress)
    rows = [_ablation_row(model, without, others, everything), *_patching_rows(model, heads, others, labels, seed)]
    pictures = {
        "ablation": viz.patching_grid(without, title="Every head's output replaced by its mean"),
        "patching": viz.patching_grid(stream, labels=labels, title="The stream before each layer put back"),
        "head patching": viz.patching_grid(heads, labels=labels, title="Each head's output put back"),
    }
    titles = ("What is lost without each head", "Where the labels are", "Which heads move them")
    sections = [
        Section(title, WORDS[name], picture) for title, (name, picture) in zip(titles, pictures.items(), strict=True)
    ]
    data = {
        "mean_ablation_of_heads": without.effect().mean(-1).tolist(),
        "resid_pre_recovered": stream.recovered().tolist(),
        "z_recovered": heads.recovered().tolist(),
        "n_prompts": len(prompts),
        "n_patched": len(patched),
    }
    if model.cfg.prompt_format == "interleaved":
        scores = score_heads(model, prompts=prompts)
        sections.insert(
            0, Section("What the heads attend to", WORDS["heads"], viz.head_table(scores, "Scores of heads"))
        )
        data["head_scores"] = scores.to_dataframe().to_dict("records")
        for name in scores.scores:
            layer, head = scores.best(name)
            note = f"head {layer}.{head}, the highest; {scores.chance[name]:.3f} if attention were uniform"
            rows.append(
                Row(f"{name.replace('_', ' ')} score", None, scores.interval(name, layer, head), "prompts", note)
            )
    return rows, sections, data


def write_model_parts_report(checkpoint: Checkpoint, out: Path, *, n_prompts: int, progress: bool) -> Path:
    """The loss and the model's parts alone, for models that are compared with no algorithm.

    Those are models on interleaved prompts whose tokens see later ones, as in von Oswald et al. 2023, section 4.
    """
    task, models = checkpoint.task, checkpoint.models
    held_out = task.sample(n_prompts, seed=PROMPT_SEED)
    errors = torch.stack([squared_errors(model, held_out)[:, 0] for model in models])
    rows = [Row("half-MSE, trained, mean of the seeds", None, interval(errors.mean(0) / 2), "prompts")]
    sections = []
    if "curve" in checkpoint.record:
        curve = checkpoint.record["curve"]
        drawn = viz.losses_over_training(curve["eval_step"], {"each seed": curve["eval_loss"]})
        sections.append(Section("Learning", WORDS["learning"], drawn))
    cfg = models[0].cfg
    lead = (
        f"{checkpoint.name}: {len(models)} seed{'s' if len(models) > 1 else ''}, {cfg.n_layers} layers, on "
        f"{task.n_context} points in {task.x_dim} dimensions; {n_prompts:,} held-out prompts (seed {PROMPT_SEED})."
    )
    data = {"mse": errors.mean(-1).tolist(), "seed": PROMPT_SEED, "n_prompts": n_prompts}
    comparison = Comparison(f"Loss and heads ({checkpoint.name})", lead, rows, sections, data)
    return add_model_parts(comparison, checkpoint, progress=progress).write(out, "report")


def _ablation_row(model: HookedTransformer, sweep: Sweep, others: Prompts, reference: Prompts) -> Row:
    strongest = sweep.strongest(1).iloc[0]
    layer, head = int(strongest["layer"]), int(strongest["head"])
    again = ablate(model, others, "z", only={"layer": layer, "head": head}, reference=reference, progress=False)
    before = interval(again.unpatched_values["loss"]).mean
    note = f"head {layer}.{head}, chosen on other prompts; the loss is {before:.3g} with all heads"
    return Row(
        "change of the loss (MSE) without the head that changes it most", None, again.interval(0, 0), "prompts", note
    )


def _patching_rows(model: HookedTransformer, sweep: Sweep, others: Prompts, labels: list[str], seed: int) -> list[Row]:
    """The head output that recovers most, on prompts that it was not chosen on; no row where labels do not matter."""
    share = sweep.recovered()
    if not share.isfinite().any():
        return []
    layer, pos, head = (int(i) for i in (share == share[share.isfinite()].max()).nonzero()[0])
    only = {"layer": layer, "pos": pos, "head": head}
    again = patch(
        model, others, corrupt(others, "labels", seed=seed), "z", ("layer", "pos", "head"), only=only, progress=False
    )
    cost = interval(again.unpatched_values["loss"] - again.source_values["loss"]).mean
    note = f"head {layer}.{head} at {labels[pos]}, chosen on other prompts; exchanged labels cost {cost:.3g}"
    quantity = "share of the loss recovered when one head's output, at one position, sees the right labels"
    return [Row(quantity, None, again.recovered_interval(0, 0, 0), "prompts", note)]
