"""The part of reports that opens a transformer: what heads do, what is lost without them, where information is."""

from mechicl import viz
from mechicl.analysis import InterventionSweep, ablate, corrupt, patch, score_heads
from mechicl.checkpoints import Checkpoint
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports.comparison import Measured, Section
from mechicl.reports.rows import Row
from mechicl.statistics import interval

N_PROMPTS, N_FEWEST = 64, 8
N_MEASURED = 256  # other prompts, on which what was chosen among many is measured
RUNS = 8192  # prompts times places to patch; beyond it there are fewer prompts
PROMPT_SEED = 2_000_003
ATTENTION = "What the heads attend to"
WORDS = {
    "heads": """
        Share of each head's attention (of its absolute value, where attention is not softmax) that goes to the token
        before, from a target to its own input, and, where a position sees later ones, from an input to its target.
        Of the opened seed, as all that follows.""",
    "ablation": """
        Change of the mean squared error of the query's prediction when a head's output is replaced by its mean over
        prompts at the same position. Hovering shows the 95% interval over prompts.""",
    "patching": """
        The model reads prompts whose labels are exchanged within the context. The stream before one layer, at one
        position, is put back as it is with the right labels: the share of the loss that this recovers. Blue cells are
        where information on the labels is at that depth.""",
    "head patching": """
        The output of one head at one position put back, on these prompts. A head that acts only on top of others may
        recover nothing alone.""",
}


def model_parts(checkpoint: Checkpoint, *, progress: bool = True) -> Measured:
    """What the parts of a checkpoint's first model do; see `no_model_parts`."""
    prompts = checkpoint.task.sample(N_PROMPTS + N_MEASURED, seed=PROMPT_SEED)
    rows, sections, data = measure_model_parts(
        checkpoint.models[0], prompts[:N_PROMPTS], prompts[N_PROMPTS:], progress=progress
    )
    return rows, sections, {"model_parts": {**data, "seed": PROMPT_SEED}}


def no_model_parts(checkpoint: Checkpoint) -> str:
    """Why a model has no parts to open; empty if it has."""
    model = checkpoint.models[0]
    if not isinstance(model, HookedTransformer):
        return f"{type(model).__name__} has no attention heads with hooks to ablate or patch"
    if not model.cfg.n_layers:
        return "the model has no layers"
    return "" if checkpoint.task.n_context >= 2 else "labels are exchanged within a context of two points or more"


def measure_model_parts(
    model: HookedTransformer, prompts: Prompts, others: Prompts, *, seed: int = 0, progress: bool = True
) -> Measured:
    """Rows, sections and numbers on heads, ablation and patching of a model on prompts.

    Args:
        model: one seed's.
        prompts: at least two, of two context points or more. In large models only the first 8 are patched.
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
        sections.insert(0, Section(ATTENTION, WORDS["heads"], viz.head_table(scores, "Scores of heads")))
        data["head_scores"] = scores.to_dataframe().to_dict("records")
        for name in scores.scores:
            layer, head = scores.best(name)
            note = f"head {layer}.{head}, the highest; {scores.chance[name]:.3f} if attention were uniform"
            rows.append(
                Row(f"{name.replace('_', ' ')} score", None, scores.interval(name, layer, head), "prompts", note)
            )
    return rows, sections, data


def _ablation_row(model: HookedTransformer, sweep: InterventionSweep, others: Prompts, reference: Prompts) -> Row:
    strongest = sweep.strongest(1).iloc[0]
    layer, head = int(strongest["layer"]), int(strongest["head"])
    again = ablate(model, others, "z", only={"layer": layer, "head": head}, reference=reference, progress=False)
    before = interval(again.unpatched_values["loss"]).mean
    note = f"head {layer}.{head}, chosen on other prompts; the loss is {before:.3g} with all heads"
    return Row(
        "change of the loss (MSE) without the head that changes it most", None, again.interval(0, 0), "prompts", note
    )


def _patching_rows(
    model: HookedTransformer, sweep: InterventionSweep, others: Prompts, labels: list[str], seed: int
) -> list[Row]:
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
