"""The report on models of texts: demonstrations read in context against fine-tuning on them."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from mechicl import viz
from mechicl.analysis import read_dual_form, score_heads
from mechicl.analysis.finetuning import (
    METHOD_NAMES,
    METHODS,
    FineTuningComparison,
    TaskTexts,
    draw_texts,
    measure_accuracy,
    study_task,
)
from mechicl.analysis.finetuning.text_tasks import TaskStudy
from mechicl.checkpoints import Checkpoint
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.kind import Kind, Part, plural
from mechicl.reports.rows import Row
from mechicl.reports.study import Study
from mechicl.reports.verdict import Verdict, beside_published, percent
from mechicl.statistics import Interval, interval
from mechicl.text import TEXT_TASKS, text_shots, topic_tokenizer

SEED = 2_000_003
N_HELD_OUT = 25  # queries of each task to choose fine-tuning by
PICTURE = "Do they change the same?"
LEARNING_RATES = (0.03, 0.1, 0.3)
EPOCHS = (1, 8)
WORDS = {
    "learning": """
        Each seed's cross entropy of the tokens that can be predicted, on held-out sequences.""",
    "shots": """
        Accuracy among the labels of each task by the number of demonstrations before the query; bands are 95% intervals
        over queries. """,
    "settings": """
        Accuracy without demonstrations, after them, and without them after fine-tuning on them (SGD on the key and
        value projections, in the demonstrations' order; learning rate and epochs best on other queries): the model, its
        first-order expansion, and layer by layer. Bars are 95% intervals over queries; dotted: one over the number of
        classes.""",
    "updates": """
        Cosine between what demonstrations and what fine-tuning change in each attention layer's output at the last
        token (SimAOU), all tasks together; random changes have 0. With 95% intervals over queries.""",
    "maps": """
        Cosine of the scores that the last token gives to the query's own tokens, with demonstrations and without
        (SimAM), mean over heads.""",
    "heads": """
        The cosine between the two changes of what each head moves, after plain fine-tuning.""",
    "scores": """
        Scores of every head on random words that are repeated: shares of attention (0 to 1), and eigenvalue scores of
        the weights (-1 to 1). """,
}


def _demonstrations(kind: "Texts") -> Measured:
    """Accuracy by demonstrations, the three settings and how alike they are."""
    checkpoint, progress, tokenizer = kind.study, kind.progress, topic_tokenizer()
    model, n = checkpoint.model, kind.n_prompts
    tasks = [task for task in TEXT_TASKS.values() if task.topics]
    texts = {task.name: draw_texts(task, n_queries=n, n_held_out=N_HELD_OUT, seed=SEED) for task in tasks}
    studies = {
        name: study_task(
            model, tokenizer, part, learning_rates=LEARNING_RATES, epochs=EPOCHS, seed=SEED, progress=progress
        )
        for name, part in texts.items()
    }
    numbers = range(max(len(part.demonstrations) for part in texts.values()) + 1)
    by_shots = {
        name: [interval(right) for right in measure_accuracy(model, tokenizer, part, numbers).accuracy]
        for name, part in texts.items()
    }
    together = {
        METHOD_NAMES[method]: FineTuningComparison.concatenate(
            [study.comparisons[method] for study in studies.values()]
        )
        for method in METHODS
    }
    shots = text_shots(tokenizer, texts[tasks[0].name].demonstrations, texts[tasks[0].name].queries)
    n_demonstrations = len(shots.in_context[0]) - shots.query_lengths[0]
    form = [
        read_dual_form(model, shots.in_context[0][None], layer, n_demonstration_tokens=n_demonstrations)
        for layer in range(model.cfg.n_layers)
    ]
    rows = _rows(checkpoint, texts, together, tokenizer)
    errors = ", ".join(f"{layer.relative_error.median():.3g}" for layer in form)
    rows.append(Row("error of reading softmax attention as a weight update, by layer", None, errors, "",
                    "relative to what heads write, median over heads, one prompt; 0 for linear attention"))  # fmt: skip
    sections = _figures(checkpoint, studies, together, by_shots, list(numbers))
    data = {
        "tunings": {
            name: {
                method: {"learning_rate": t.learning_rate, "epochs": t.epochs} for method, t in study.tunings.items()
            }
            for name, study in studies.items()
        },
        "accuracy_by_demonstrations": {name: [accuracy.mean for accuracy in line] for name, line in by_shots.items()},
        "seed": SEED,
        "n_prompts": n,
    }
    return rows, sections, data


def _verdict(study: Study, comparison: Comparison) -> Verdict:
    """Whether reading is like fine-tuning, by what both change and by what both get right."""
    rows = {row.quantity: row for row in comparison.rows}
    alone, after, tuned = (
        rows[name] for name in ("accuracy without demonstrations", "accuracy after demonstrations",
                                "accuracy, fine-tuned")
    )  # fmt: skip
    alike, random = rows["SimAOU, fine-tuned"], rows["SimAOU of a random change, fine-tuned"]
    recall = rows["Rec2FTP, fine-tuned"]
    learns = rows["accuracy gained by demonstrations"].ends[0] > 0
    above = alike.ends[0] > random.ends[2]
    kind = "hardly alike" if alike.ends[1] < 0.3 else "alike in part" if alike.ends[1] < 0.7 else "much alike"
    first = "It learns from demonstrations" if learns else "It does not learn from demonstrations"
    which = (
        f"{first}: accuracy is {after} after them and {alone} without; fine-tuned on them, without reading them, it is "
        f"{tuned}."
    )
    how = (
        f"What both change in the attention layers' outputs is {kind if above else 'no more alike than by chance'}: a "
        f"cosine of {alike} (random changes: {random}). Of the queries that fine-tuning puts right, reading puts "
        f"{percent(recall.ends[1])} right too. That is likeness, not a sign that reading runs gradient descent."
    )
    since = "No snapshots were saved during training, so that this page cannot say since which step."
    if study.snapshots is not None:
        since = "Snapshots were saved, but fine-tuning on each would take hours: only the end is measured."
    sentences = {
        "Is reading like fine-tuning?": f"{which} {how}",
        "Since when?": since,
        "Do causes and papers agree?": f"Nothing was patched or ablated here. {beside_published(comparison.rows)}",
    }
    picture = next(part for section in comparison.sections if section.title == PICTURE for part in section.parts)
    numbers = {"learns": learns, "likeness": [*alike.ends], "random": [*random.ends], "seed": study.seeds[0],
               "chosen": study.chosen}  # fmt: skip
    headline = f"{first}; inside, that and fine-tuning are {kind if above else 'not alike'}"
    return Verdict(headline, sentences, picture if isinstance(picture, go.Figure) else None, numbers)


def _rows(
    checkpoint: Checkpoint, texts: dict[str, TaskTexts], together: dict[str, FineTuningComparison], tokenizer: Any
) -> list[Row]:
    first = together["fine-tuned"]
    gain = first.in_context_score - first.zero_shot_score
    rows = [
        Row("accuracy without demonstrations", None, interval(first.zero_shot_score), "queries", "all tasks"),
        Row("accuracy after demonstrations", None, interval(first.in_context_score), "queries"),
        Row("accuracy gained by demonstrations", None, interval(gain), "queries"),
    ]
    if len(checkpoint.models) > 1:
        gains = torch.tensor([_gain(model, tokenizer, texts) for model in checkpoint.models])
        rows.append(Row("accuracy gained by demonstrations, all seeds", None, interval(gains), "seeds"))
    for name, comparison in together.items():
        rows += [
            Row(f"accuracy, {name}", None, interval(comparison.finetuned_score), "queries"),
            Row(f"Rec2FTP, {name}", None, comparison.recall(), "queries", "share of what fine-tuning puts right"),
            Row(f"SimAOU, {name}", None, comparison.intervals()["update_similarity"], "queries",
                "cosine of what both change in the attention layers' outputs"),
            Row(f"SimAOU of a random change, {name}", None, comparison.intervals()["random_update_similarity"],
                "queries"),
            Row(f"SimAM after, {name}", None, comparison.intervals()["map_similarity_after"], "queries",
                f"before: {comparison.intervals()['map_similarity_before']}"),
        ]  # fmt: skip
    ranks = first.intervals()["rank_correlation"]
    note = f"random weights: {first.intervals()['random_rank_correlation']}"
    rows.append(Row("rank correlation of attention to demonstrations, fine-tuned", None, ranks, "queries", note))
    return rows


def _gain(model: Any, tokenizer: Any, texts: dict[str, TaskTexts]) -> float:
    gains = []
    for part in texts.values():
        alone, after = measure_accuracy(model, tokenizer, part, (0, len(part.demonstrations))).accuracy
        gains.append((after - alone).mean())
    return torch.stack(gains).mean().item()


def _figures(
    checkpoint: Checkpoint,
    studies: dict[str, TaskStudy],
    together: dict[str, FineTuningComparison],
    by_shots: dict[str, list[Interval]],
    numbers: Sequence[int],
) -> list[Section]:
    scores = {
        "zero-shot": {name: interval(study.comparisons["plain"].zero_shot_score) for name, study in studies.items()},
        "in context": {name: interval(study.comparisons["plain"].in_context_score) for name, study in studies.items()},
    }
    for method in METHODS:
        scores[METHOD_NAMES[method]] = {
            name: interval(study.comparisons[method].finetuned_score) for name, study in studies.items()
        }
    chance = [1 / TEXT_TASKS[name].n_classes for name in studies]
    sections = []
    if "curve" in checkpoint.record:
        curve = checkpoint.record["curve"]
        by_seed = torch.tensor(curve["eval_loss"]).T
        lines = {f"seed {i}": [interval(loss) for loss in losses.split(1)] for i, losses in enumerate(by_seed)}
        drawn = viz.interval_lines("Cross entropy", "optimisation step", "nats", curve["eval_step"], lines)
        sections.append(Section("Learning", WORDS["learning"], drawn))
    lines = viz.interval_lines("Accuracy by demonstrations", "demonstrations", "accuracy", list(numbers), by_shots)
    sections += [
        Section("What demonstrations do", WORDS["shots"], lines),
        Section("Three settings", WORDS["settings"], viz.settings_figure(scores, chance=chance)),
        Section(PICTURE, WORDS["updates"], viz.update_similarity_figure(together)),
        Section("Do they attend alike?", WORDS["maps"], viz.map_similarity_figure(together)),
        Section("Head by head", WORDS["heads"], viz.head_similarity_figure(together["fine-tuned"])),
        Section("What the heads do", WORDS["scores"],
               viz.head_table(score_heads(checkpoint.models[0], n_prompts=32, seed=SEED), "Scores of heads")),
    ]  # fmt: skip
    return sections


class Texts(Kind):
    """Reading demonstrations and fine-tuning on them, of models that read texts of the made-up language.

    At most 200 queries of each task are measured on. Source: Dai et al. 2023; Bar Natan, Deutch & Magar.
    """

    parts = (Part("demonstrations", _demonstrations),)
    n_held_out, prompt_seed = 60, SEED

    def __init__(self, checkpoint: Checkpoint, **options: Any):
        super().__init__(checkpoint, **options)
        self.n_prompts = max(2, min(self.n_prompts, 200))

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Reading demonstrations and fine-tuning on them ({self.study.name})"

    @property
    def lead(self) -> str:
        """What was measured, on what."""
        cfg = self.study.model.cfg
        return (
            f"{self.study.name}: {plural(len(self.study.models), 'seed')} of {cfg.n_layers} layers with {cfg.n_heads} "
            f"heads, which read texts of a made-up language of {cfg.d_vocab} words. Intervals over queries are for one "
            f"set of demonstrations a task (seed {SEED}). {self.study.chosen}"
        )

    def verdict(self, comparison: Comparison) -> Verdict:
        """Whether reading is like fine-tuning."""
        return _verdict(self.study, comparison)
