"""The part of reports on a model's components: attention heads, the loss without them, and where information is."""

from typing import Any

from mechicl import viz
from mechicl.analysis import InterventionSweep, Replacement, ablate, corrupt, patch, score_heads
from mechicl.checkpoints.study import Models
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.rows import Row
from mechicl.reports.verdict import percent
from mechicl.statistics import Interval, interval
from mechicl.statistics.results import largest

N_PROMPTS, N_FEWEST = 64, 8
N_MEASURED = 256  # other prompts, on which the components chosen among many are measured
RUNS = 8192  # prompts times places to patch; beyond it there are fewer prompts
HEADS_SEED = 2_000_003
ATTENTION = "What the heads attend to"
ABLATED = "change of the loss (MSE) without the head that changes it most"
RESTORED = "share of the loss recovered when one head's output, at one position, sees the right labels"
_SCORES = """Share of each head's attention (of its absolute value, if attention is not softmax) to the token before,
    from a target to its input and, where positions see later ones, from an input to its target. All that follows is of
    the opened seed."""
ABLATION = """Change of the mean squared error of the query's prediction when a head's output is replaced by its mean
    over prompts at the same position. Hovering shows the 95% interval over prompts."""
STREAM = """The model reads prompts whose labels are exchanged within the context. The residual stream before one layer,
    at one position, is restored to its value with the right labels. Cells are the share of the loss that this recovers:
    blue cells carry information on the labels."""
HEADS_TEXT = """The output of one head at one position is restored on these prompts. A head that acts only together with
    others may recover nothing alone."""


def model_parts(checkpoint: Models) -> Measured:
    """Measure the components of a checkpoint's first model; see `no_model_parts`."""
    prompts = checkpoint.task.sample(N_PROMPTS + N_MEASURED, seed=HEADS_SEED)
    rows, sections, data = measure_model_parts(checkpoint.models[0], prompts[:N_PROMPTS], prompts[N_PROMPTS:])
    return rows, sections, {"model_parts": {**data, "seed": HEADS_SEED}}


def no_model_parts(checkpoint: Models) -> str:
    """Return the reason why a model has no heads to ablate or patch; empty if it has."""
    model = checkpoint.models[0]
    if not isinstance(model, HookedTransformer):
        return f"{type(model).__name__} has no attention heads with hooks to ablate or patch"
    if not model.cfg.n_layers:
        return "the model has no layers"
    return "" if checkpoint.task.n_context >= 2 else "labels are exchanged within a context of two points or more"


def ablate_heads(model: Any, prompts: Prompts, **options: Any) -> tuple[InterventionSweep, list[Section]]:
    """Replace each head's output by its mean; the effects are drawn if there are several heads."""
    without = ablate(model, prompts, "z", **options)
    if without.effect().shape[:-1].numel() == 1:
        return without, []
    drawn = viz.patching_grid(without, title="Every head's output replaced by its mean")
    return without, [Section("What is lost without each head", ABLATION, drawn)]


def restore_stream(model: Any, prompts: Prompts, *, seed: int) -> tuple[InterventionSweep, Section]:
    """Restore the residual stream at each layer and position where labels were exchanged."""
    form = getattr(model.cfg, "format", None)
    stream = patch(model, prompts, corrupt(prompts, "labels", seed=seed), "resid_pre")
    drawn = viz.patching_grid(stream, labels=form.labels(prompts.n_context) if form else None,
                              title="The stream before each layer restored")  # fmt: skip
    return stream, Section("Where the labels are", STREAM, drawn)


def measure_model_parts(model: HookedTransformer, prompts: Prompts, others: Prompts, *, seed: int = 0) -> Measured:
    """Measure rows, sections and numbers on heads, ablation and patching of a model, on two prompts or more.

    In large models only the first 8 are patched. On `others` the strongest head is measured again; ablation's means are
    over both.
    """
    labels = model.cfg.format.labels(prompts.n_context)
    patched = prompts[: max(N_FEWEST, RUNS // (model.cfg.n_layers * model.cfg.n_heads * len(labels)))]
    axes = ("layer", "pos", "head")
    means = Replacement("mean", Prompts.concatenate([prompts, others]))
    without, ablation = ablate_heads(model, prompts, method=means)
    stream, streams = restore_stream(model, patched, seed=seed)
    heads = patch(model, patched, corrupt(patched, "labels", seed=seed), "z", axes)
    drawn = viz.patching_grid(heads, labels=labels, title="Each head's output restored")
    sections = [*ablation, streams, Section("Which heads move them", HEADS_TEXT, drawn)]

    (cell,), tie = largest(without.effect().mean(-1).abs(), 1)
    ablated: dict[str, int] = dict(zip(("layer", "head"), divmod(cell, model.cfg.n_heads), strict=True))
    again = ablate(model, others, "z", ablated, method=means, progress=False)
    before = interval(again.unpatched_values["loss"]).mean
    note = f"{_head(ablated)}{tie and ' (tied with others)'}, chosen on other prompts"
    note += f"; the loss is {before:.3g} with all heads"
    rows = [Row(ABLATED, None, again.interval(0, 0), "prompts", note)]
    restored: dict[str, int] = {}
    share = heads.recovered()
    if share.isfinite().any():  # else labels do not matter to the model
        place = (share == share[share.isfinite()].max()).nonzero()[0].tolist()
        restored = dict(zip(axes, place, strict=True))
        again = patch(model, others, corrupt(others, "labels", seed=seed), "z", restored, progress=False)
        cost = interval(again.unpatched_values["loss"] - again.source_values["loss"]).mean
        at = "the query" if "query" in labels[restored["pos"]] else f"position {labels[restored['pos']]}"
        note = f"{_head(restored)} at {at}, chosen on other prompts; exchanged labels cost {cost:.3g}"
        rows.append(Row(RESTORED, None, again.recovered_interval(0, 0, 0), "prompts", note, share=True))
    data = {
        "mean_ablation_of_heads": without.effect().mean(-1).tolist(),
        "resid_pre_recovered": stream.recovered().tolist(),
        "z_recovered": heads.recovered().tolist(),
        "n_prompts": len(prompts),
        "n_patched": len(patched),
    }
    if model.cfg.prompt_format == "interleaved":
        scores = score_heads(model, prompts=prompts)
        sections.insert(0, Section(ATTENTION, _SCORES, viz.head_table(scores, "Scores of heads")))
        data["head_scores"] = scores.to_dataframe().to_dict("records")
        for name in scores.scores:
            layer, head, score = scores.best(name)
            note = f"head {head} of layer {layer}, the highest on other prompts; "
            note += f"{scores.chance[name]:.3f} if attention were uniform"
            rows.append(Row(f"{name.replace('_', ' ')} score", None, score, "prompts", note))
    return rows, sections, data


def heads_as_text(comparison: Comparison) -> str:
    """Describe the effects of the strongest heads in sentences; empty if they were not measured."""
    words = []
    for row in comparison.rows:
        if row.quantity not in (ABLATED, RESTORED) or not isinstance(row.measured, Interval):
            continue
        where = row.note.partition(", chosen")[0]
        if row.quantity == RESTORED:
            head, _, at = where.partition(" at ")
            words.append(f"If labels are exchanged, restoring the output of {head} at {at} alone recovers "
                         f"{percent(row.measured)} of the loss.")  # fmt: skip
        elif row.measured.low > 0:
            words.append(f"Ablating {where} raises the squared error by {row.measured}.")
        else:
            words.append(
                f"No ablation of a single head raises the squared error: the largest change is {row.measured}."
            )
    return " ".join([*words, "These tests locate the computation; they do not identify it."]) if words else ""


def _head(place: dict[str, int]) -> str:
    return f"head {place['head']} of layer {place['layer']}"
