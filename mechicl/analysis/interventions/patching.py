"""Activation patching: activations of one run put into another, cell by cell (Meng et al. 2022; Wang et al. 2023)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from mechicl.analysis.interventions.grids import CellGrid, Only, make_grid
from mechicl.analysis.interventions.metrics import Inputs, Metrics, evaluate_metrics, name_metrics
from mechicl.analysis.interventions.runs import Baseline, CellResults, Experiment, record_within
from mechicl.analysis.interventions.sweeps import InterventionSweep
from mechicl.base.arguments import checked
from mechicl.base.memory import MEMORY, Budget
from mechicl.base.progress import progress_bar
from mechicl.models.holding import holds_models
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import At, Prompts

Direction = Literal["denoising", "noising"]


@checked
@holds_models
def patch(
    model: Any,
    clean: Inputs,
    corrupted: Inputs,
    component: str = "z",
    axes: Sequence[str] | None = None,
    *,
    direction: Direction = "denoising",
    metrics: Metrics = None,
    only: Only | None = None,
    at: At = "query",
    keep_predictions: bool | None = None,
    memory: float = MEMORY,
    progress: bool = True,
) -> InterventionSweep:
    """What the model predicts when part of its activations comes from another run.

    Each cell of the sweep is one run on the corrupted prompts in which the component, at one layer and at the cell's
    position, head, ..., is replaced by that of the clean run. Axes that are not swept are replaced as a whole:
    `("layer", "head")` replaces a head's output at all positions. Cells are run in batches, each from the stream
    before the patched layer on; the results do not depend on how they are batched.

    Works on our models (given `Prompts`, or token ids), and given token ids on any model of TransformerLens' protocol
    such as a `TransformerBridge`, where results agree with `transformer_lens.patching`.

    Args:
        model: in eval mode.
        clean: the prompts whose activations are put in (denoising).
        corrupted: the prompts on which the model runs, as many and as long; see `corrupt`.
        component: "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z", "attn_scores",
            "pattern", "pre" or "post" (the MLP's hidden layer); where the model computes them, "result", "attn_in",
            "q_input", "k_input", "v_input" and "mlp_in".
        axes: what to sweep: "layer" and any of "pos", and "head" for parts of attention, or "head", "query" and "key"
            (positions) for scores and patterns, or "pos" and "neuron" for an MLP's hidden layer; by default layer and
            head, or layer and pos for streams.
        direction: "denoising" puts clean activations into the corrupted run, "noising" corrupted ones into the clean.
        metrics: one, or several by name: functions of predictions `[prompt ...]` that return `[prompt]`. By default
            the "loss" of what is read against the clean prompts' targets: squared error, or cross entropy in nats for
            `TokenSequences`; none for plain token ids, and for outputs at all positions of points.
        only: to sweep only some layers, positions, ...: `{"layer": [3], "pos": range(10, 20)}`.
        at: which predictions: of the "query" (the last position), of all "points", or the outputs at all "positions".
        keep_predictions: keep the predictions of each cell; by default where they are not logits beside metrics.
        memory: bound in bytes on what the sweep allocates.
        progress: show a progress bar, if it takes more than two seconds.

    Returns:
        Predictions `[*axes prompt y]` (or logits), and each metric `[*axes prompt]`.

    Raises:
        TypeError: a model without hooks, or prompts that it does not read.
        ValueError: prompts of unequal number or length, a model in training mode, an unknown component or axis, a hook
            that the model does not have, or without whose edits it goes on (`models.opening.edits`), a metric that
            returns another shape than `[prompt]`, or too little memory.

    Example:
        >>> swept = patch(model, prompts, corrupt(prompts, "labels"), "z", ("layer", "head"))
        >>> swept.predictions.shape, swept.recovered().shape
        (torch.Size([8, 4, 64, 1]), torch.Size([8, 4]))

    Source: Wang et al. 2023, section 3; Heimersheim and Nanda 2024 for the two directions.
    """
    adapter, into, source = encode_pair(model, clean, corrupted, direction, at)
    grid = make_grid(adapter, into, component, axes, only)
    experiment = make_experiment(adapter, into, clean, metrics, keep_predictions, memory)
    values = record_within(adapter, source, grid.hook_names, experiment.budget)
    return sweep_grid(experiment, grid, values, f"{direction} {component}", source=source, progress=progress)


def make_experiment(
    adapter: ModelAdapter,
    tokens: Tensor,
    prompts: Inputs,
    metrics: Metrics,
    keep_predictions: bool | None,
    memory: float,
) -> Experiment:
    """The experiment that a user of `patch` asks for; by default the loss is against the targets of `prompts`."""
    named = name_metrics(metrics, prompts, adapter.at)
    keep = isinstance(prompts, Prompts) or not named if keep_predictions is None else keep_predictions
    return Experiment(adapter, tokens, named, keep, Budget(memory))


def sweep_grid(
    experiment: Experiment,
    grid: CellGrid,
    values: Mapping[str, Tensor],
    what: str,
    *,
    source: Tensor | None = None,
    progress: bool,
) -> InterventionSweep:
    """Run the cells of a grid, with `values` by hook name put there; `source` are the tokens that these come from."""
    cells = grid.cells()
    baseline = experiment.run_baseline(len(cells), values)
    with progress_bar(total=len(cells), unit="run", progress=progress) as bar:
        results = experiment.run_cells(baseline, cells, values, bar.update)
    results = results.map(lambda tensor: tensor.unflatten(0, grid.shape))
    return make_sweep(experiment, baseline, results, what, grid.axes, grid.indices, source)


def make_sweep(
    experiment: Experiment,
    baseline: Baseline,
    results: CellResults,
    what: str,
    axes: tuple[str, ...],
    indices: tuple[tuple[int, ...], ...],
    source: Tensor | None = None,
) -> InterventionSweep:
    """The sweep of results `[*axes prompt ...]`, beside the runs without intervention on both kinds of tokens."""
    from_source = None if source is None else experiment.adapter.predict(source, baseline.batch_size)
    return InterventionSweep(
        what=what,
        axes=axes,
        indices=indices,
        predictions=results.predictions,
        unpatched=baseline.predictions,
        source=from_source,
        values=results.values,
        unpatched_values=evaluate_metrics(experiment.metrics, baseline.predictions),
        source_values={} if from_source is None else evaluate_metrics(experiment.metrics, from_source),
    )


def encode_pair(
    model: Any, clean: Inputs, corrupted: Inputs, direction: Direction, at: At
) -> tuple[ModelAdapter, Tensor, Tensor]:
    """The adapter, the tokens of the run that is intervened in, and those that activations are taken from."""
    adapter = ModelAdapter(model, at)
    into, source = adapter.encode(corrupted), adapter.encode(clean)
    if into.shape != source.shape:
        raise ValueError(
            f"clean and corrupted prompts must be as many and as long: {len(source)} of {source.shape[1]} positions, "
            f"and {len(into)} of {into.shape[1]}"
        )
    if not len(into):
        raise ValueError("there are no prompts to patch")
    return (adapter, into, source) if direction == "denoising" else (adapter, source, into)
