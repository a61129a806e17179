"""The part of reports on fine-tuning: a model tuned on a prompt's context against the same model reading it."""

from collections.abc import Mapping
from typing import Any

from mechicl import viz
from mechicl.analysis.finetuning import (
    FineTuning,
    FineTuningComparison,
    FineTuningDivergedError,
    compare_on_prompts,
    search_on_prompts,
)
from mechicl.checkpoints.study import Models
from mechicl.models import HookedTransformer
from mechicl.reports.comparison import Measured, Section
from mechicl.reports.rows import Row
from mechicl.statistics import interval

_PROMPT_SEED = 3_000_003
_LEARNING_RATES = (0.003, 0.01, 0.03, 0.1)
_EPOCHS = (1, 4)
N_PROMPTS = 24  # fewer have intervals that are too wide
UNASKED_STEPS = 1200  # most steps of gradient descent that a report takes unasked
ONE_TOKEN = "the query is one token: the cosine of one score is a sign"
UPDATES = """For each prompt the model's key and value projections are fine-tuned on the context's points (SGD; learning
    rate and epochs are the best on other prompts), and the fine-tuned model predicts the query without them. The figure
    shows the cosine between the changes that fine-tuning and reading the context make to each attention layer's output
    at the query (SimAOU of Dai et al. 2023). Random changes have 0. Bars are 95% intervals over prompts."""
MAPS = """Cosine of each layer's attention scores, before the softmax, between the model that reads the context and the
    one that does not (SimAM), before and after fine-tuning; mean over heads. Only tokens that both prompts have are
    used."""


def no_finetuning(checkpoint: Models) -> str:
    """Return the reason why a model cannot be fine-tuned on contexts; empty if it can."""
    model = checkpoint.models[0]
    if not isinstance(model, HookedTransformer) or not model.cfg.n_layers:
        return "there are no keys and values to fine-tune"
    if model.cfg.attention_weights != "learned":
        return "its attention is fixed, not learned"
    return "" if checkpoint.task.n_context else "there is no context to fine-tune on"


def slow_finetuning(checkpoint: Models) -> str:
    """Return the reason why fine-tuning is measured only on request; empty if it is quick."""
    steps = N_PROMPTS * max(_EPOCHS) * checkpoint.task.n_context * checkpoint.models[0].cfg.n_layers
    if steps <= UNASKED_STEPS:
        return ""
    return f"{N_PROMPTS} fine-tuned copies of a model of this size take minutes: --sections fine-tuning measures them"


def finetuning(checkpoint: Models) -> Measured:
    """Compare fine-tuning on contexts with reading them, for a model with keys and values; see `no_finetuning`."""
    model, task = checkpoint.models[0], checkpoint.task
    assert isinstance(model, HookedTransformer)
    prompts = task.sample(N_PROMPTS + 2, seed=_PROMPT_SEED)
    options: dict[str, Any] = {"learning_rates": _LEARNING_RATES, "epochs": _EPOCHS}
    try:
        tuning = search_on_prompts(model, prompts[N_PROMPTS:], **options).best
        measured = compare_on_prompts(model, prompts[:N_PROMPTS], tuning)
    except FineTuningDivergedError as error:
        return [Row("fine-tuning on contexts", None, "diverged", "", str(error))], [], {"finetuning": None}
    rows, sections, data = finetuning_sections({"fine-tuned": measured}, {"fine-tuned": tuning})
    return rows, sections, {"finetuning": {**data, "seed": _PROMPT_SEED, "n_prompts": N_PROMPTS}}


def finetuning_sections(comparisons: Mapping[str, FineTuningComparison], tunings: Mapping[str, FineTuning]) -> Measured:
    """Make rows, sections and numbers on fine-tuning against reading a prompt's context, by kind of fine-tuning."""
    first = next(iter(comparisons.values()))
    rows = [
        Row("squared error without the context", None, interval(first.zero_shot_loss), "prompts"),
        Row("squared error reading the context", None, interval(first.in_context_loss), "prompts"),
    ]
    for name, comparison in comparisons.items():
        tuning = tunings[name]
        note = f"key and value projections, learning rate {tuning.learning_rate:g}, epochs {tuning.epochs}"
        rows += [
            Row(f"squared error without the context, {name} on it", None, interval(comparison.finetuned_loss),
                "prompts", note),
            Row(f"share of prompts improved by fine-tuning that reading improves (Rec2FTP), {name}", None,
                comparison.recall(), "prompts"),
            *metric_rows(comparison, name, "prompts"),
        ]  # fmt: skip
    updates = viz.update_similarity_figure(comparisons)
    sections = [Section("Does fine-tuning change what reading changes?", UPDATES, updates)]
    if first.map_similarity_before.isfinite().any():
        sections.append(Section("Attention after fine-tuning", MAPS, viz.map_similarity_figure(comparisons)))
    data = {
        name: {field: value.mean(-1).tolist() for field, value in comparison.samples().items()}
        | {"learning_rate": tunings[name].learning_rate, "epochs": tunings[name].epochs}
        for name, comparison in comparisons.items()
    }
    return rows, sections, data


def metric_rows(comparison: FineTuningComparison, name: str, over: str) -> list[Row]:
    """Return means over layers and heads; metrics that are not defined for all prompts are reported as such."""
    means = comparison.intervals()
    rows = []
    for field, words in (
        ("random_update_similarity", "SimAOU, random change"),
        ("update_similarity", "SimAOU"),
        ("map_similarity_before", "SimAM before"),
        ("map_similarity_after", "SimAM after"),
        ("rank_correlation", "rank correlation of attention to the context"),
        ("rank_correlation_before", "rank correlation of attention to the context before fine-tuning"),
    ):
        defined = means[field].mean == means[field].mean
        note = ONE_TOKEN if not defined and field.startswith("map_similarity") else ""
        rows.append(Row(f"{words}, {name}", None, means[field] if defined else "not defined", over, note))
    return rows
