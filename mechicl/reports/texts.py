"""The report on models of texts: demonstrations read in context against fine-tuning on them."""

import math
from functools import cached_property, partial
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
from mechicl.checkpoints.study import Models
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.finetuning import metric_rows
from mechicl.reports.kind import NOT_COMPARED, Kind, Part
from mechicl.reports.rows import Row
from mechicl.reports.verdict import NOT_TESTED, Fact, Verdict, has_learned
from mechicl.statistics import Interval, interval
from mechicl.text import TEXT_TASKS, text_shots, topic_tokenizer

TEXTS_SEED = 2_000_003
N_CHOOSING = 25  # queries of each task to choose fine-tuning by
PICTURE = "What demonstrations do"
LEARNING_RATES = (0.03, 0.1, 0.3)
EPOCHS = (1, 8)
_WORDS = {
    "learning": "Each seed's cross entropy of the tokens that can be predicted, on held-out sequences.",
    "shots": "Accuracy among the labels of each task by the number of demonstrations before the query. Bands are 95% "
    "intervals over queries.",
    "settings": """Accuracy without demonstrations, after them, and without them after fine-tuning on them: of the
        model, of its first-order expansion, and layer by layer. Fine-tuning is SGD on the key and value projections, in
        the demonstrations' order; learning rate and epochs are the best on other queries. Bars are 95% intervals over
        queries. Dotted: one over the number of classes.""",
    "updates": """Cosine between the changes that demonstrations and fine-tuning make to each attention layer's output
        at the last token (SimAOU), all tasks together; random changes have 0. Bands are 95% intervals over queries.""",
    "maps": """Cosine of the scores that the last token gives to the query's own tokens, with demonstrations and without
        (SimAM), mean over heads.""",
    "heads": "The cosine between the two changes of each head's output, after plain fine-tuning.",
    "scores": """Scores of every head on random words that are repeated: shares of attention (0 to 1), and eigenvalue
        scores of the weights (-1 to 1).""",
}


def _demonstrations(kind: "Texts") -> Measured:
    model, first = kind.study.model, next(iter(kind.texts.values()))
    numbers = list(range(max(len(part.demonstrations) for part in kind.texts.values()) + 1))
    by_shots = {
        name: [interval(right) for right in measure_accuracy(model, topic_tokenizer(), part, numbers).accuracy[0, 0]]
        for name, part in kind.texts.items()
    }
    shots = text_shots(topic_tokenizer(), first.demonstrations, first.queries)
    n_demonstrations = len(shots.in_context[0]) - shots.query_lengths[0]
    form = [
        read_dual_form(model, shots.in_context[0][None], layer, n_demonstration_tokens=n_demonstrations)
        for layer in range(model.cfg.n_layers)
    ]
    errors = ", ".join(f"{layer.relative_error.median():.3g}" for layer in form)
    rows = _rows(kind)
    rows.append(Row("error of reading softmax attention as a weight update, by layer", None, errors, "",
                    "relative to what heads write, median over heads, one prompt; 0 for linear attention"))  # fmt: skip
    tunings = {
        name: {m: {"learning_rate": t.learning_rate, "epochs": t.epochs} for m, t in each.tunings.items()}
        for name, each in kind.studies.items()
    }
    accuracy = {name: [each.mean for each in line] for name, line in by_shots.items()}
    data = {"tunings": tunings, "accuracy_by_demonstrations": accuracy, "seed": TEXTS_SEED, "n_prompts": kind.n_prompts}
    return rows, _figures(kind, by_shots, numbers), data


def _rows(kind: "Texts") -> list[Row]:
    first, models = kind.together["fine-tuned"], kind.study.models
    gain = first.in_context_score - first.zero_shot_score
    rows = [
        Row("accuracy without demonstrations", None, interval(first.zero_shot_score), "queries", share=True),
        Row("accuracy after demonstrations", None, interval(first.in_context_score), "queries", share=True),
        Row("accuracy gained by demonstrations", None, interval(gain, within=(-1, 1)), "queries", share=True),
    ]
    if len(models) > 1:
        gains = torch.tensor([_gain(model, kind.texts) for model in models])
        gained = interval(gains, within=(-1, 1))
        rows.append(Row("accuracy gained by demonstrations, all seeds", None, gained, "seeds", share=True))
    for name, comparison in kind.together.items():
        words = "of the queries that fine-tuning gets right"
        rows += [
            Row(f"accuracy, {name}", None, interval(comparison.finetuned_score), "queries", share=True),
            Row(f"Rec2FTP, {name}", None, comparison.recall(), "queries", words, share=True),
            *metric_rows(comparison, name, "queries"),
        ]
    ranks = first.intervals()["random_rank_correlation"]
    rows.append(Row("rank correlation of attention to the context, random weights", None, ranks, "queries"))
    return rows


def _gain(model: Any, texts: dict[str, TaskTexts]) -> float:
    gains = []
    for part in texts.values():
        alone, after = measure_accuracy(model, topic_tokenizer(), part, (0, len(part.demonstrations))).accuracy[0, 0]
        gains.append((after - alone).mean())
    return torch.stack(gains).mean().item()


def _figures(kind: "Texts", by_shots: dict[str, list[Interval]], numbers: list[int]) -> list[Section]:
    checkpoint, studies, together = kind.study, kind.studies, kind.together
    plain = {name: each.comparisons["plain"] for name, each in studies.items()}
    scores = {
        "zero-shot": {name: interval(each.zero_shot_score) for name, each in plain.items()},
        "in context": {name: interval(each.in_context_score) for name, each in plain.items()},
    } | {
        METHOD_NAMES[m]: {name: interval(each.comparisons[m].finetuned_score) for name, each in studies.items()}
        for m in METHODS
    }
    chance = [1 / TEXT_TASKS[name].n_classes for name in studies]
    sections = []
    if "curve" in checkpoint.record:
        curve = checkpoint.record["curve"]
        by_seed = torch.tensor([[math.nan if x is None else x for x in row] for row in curve["eval_loss"]]).T
        lines = {f"seed {i}": [interval(loss) for loss in losses.split(1)] for i, losses in enumerate(by_seed)}
        drawn = viz.interval_lines("Cross entropy", "optimisation step", "nats", curve["eval_step"], lines)
        sections.append(Section("Learning", _WORDS["learning"], drawn))
    lines = viz.interval_lines("Accuracy by demonstrations", "demonstrations", "accuracy", numbers, by_shots)
    lines.update_yaxes(tickformat=".0%")
    heads = viz.head_table(score_heads(checkpoint.models[0], n_prompts=32, seed=TEXTS_SEED), "Scores of heads")
    return [
        *sections,
        Section(PICTURE, _WORDS["shots"], lines),
        Section("Three settings", _WORDS["settings"], viz.settings_figure(scores, chance=chance)),
        Section("Do they change the same?", _WORDS["updates"], viz.update_similarity_figure(together)),
        Section("Do they attend alike?", _WORDS["maps"], viz.map_similarity_figure(together)),
        Section("Head by head", _WORDS["heads"], viz.head_similarity_figure(together["fine-tuned"])),
        Section("What the heads do", _WORDS["scores"], heads),
    ]


class Texts(Kind):
    """Reading against fine-tuning on demonstrations, at most 200 queries per task (Dai et al. 2023)."""

    parts = (Part("demonstrations", _demonstrations),)
    heading = "Reading demonstrations and fine-tuning on them ({name})"
    remark = "Intervals over queries are for one set of demonstrations per task."
    n_held_out, prompt_seed, opens = 60, TEXTS_SEED, "demonstrations"

    def __init__(self, checkpoint: Models, **options: Any):
        super().__init__(checkpoint, **options)
        self.n_prompts = max(2, min(self.n_prompts, 200))

    @cached_property
    def texts(self) -> dict[str, TaskTexts]:
        """The texts of each task."""
        tasks = [task for task in TEXT_TASKS.values() if task.topics]
        draw = partial(draw_texts, n_queries=self.n_prompts, n_held_out=N_CHOOSING, seed=TEXTS_SEED)
        return {task.name: draw(task) for task in tasks}

    @cached_property
    def studies(self) -> dict[str, TaskStudy]:
        """Reading compared with fine-tuning, by task."""
        search = {"learning_rates": LEARNING_RATES, "epochs": EPOCHS}
        opened = self.study.model, topic_tokenizer()
        return {name: study_task(*opened, texts, seed=TEXTS_SEED, search=search) for name, texts in self.texts.items()}

    @cached_property
    def together(self) -> dict[str, FineTuningComparison]:
        """The comparisons of all tasks, by the name of the kind of fine-tuning."""
        studies = self.studies.values()
        return {
            METHOD_NAMES[method]: FineTuningComparison.concatenate([each.comparisons[method] for each in studies])
            for method in METHODS
        }

    @property
    def learned(self) -> tuple[str, str, Fact]:
        """The share of wrong answers after demonstrations compared with that of guessing."""
        if not self.chosen(self.sections):
            return NOT_COMPARED
        queries = [texts.queries for texts in self.texts.values()]
        n_classes = torch.tensor([part.task.n_classes for part in queries for _ in part.labels]).double()
        wrong = 1 - self.together["fine-tuned"].in_context_score
        return has_learned(wrong, {"guessing": 1 - 1 / n_classes}, "share of wrong answers after demonstrations")

    def verdict(self, comparison: Comparison) -> Verdict:
        """Compare reading with fine-tuning by the changes that both make and the queries that both get right."""
        rows, study = {row.quantity: row for row in comparison.rows}, self.study
        alike, random = rows["SimAOU, fine-tuned"], rows["SimAOU, random change, fine-tuned"]
        learns, above = rows["accuracy gained by demonstrations"].ends[0] > 0, alike.ends[0] > random.ends[2]
        kind = "hardly alike" if alike.ends[1] < 0.3 else "alike in part" if alike.ends[1] < 0.7 else "very similar"
        first = f"It {'learns' if learns else 'does not learn'} from demonstrations"
        sentences = {
            "Does it learn from demonstrations?": f"{first}: they change its accuracy from "
            f"{rows['accuracy without demonstrations']} to {rows['accuracy after demonstrations']}. Fine-tuned on them "
            f"instead, without reading them, it reaches {rows['accuracy, fine-tuned']}.",
            "Is reading like fine-tuning?": f"The changes that both make to the attention layers' outputs are "
            f"{kind if above else 'no more alike than by chance'}: their cosine is {alike}, and {random} for random "
            f"changes. Reading gets {rows['Rec2FTP, fine-tuned']} of the queries right that "
            "fine-tuning gets right. Such similarity is not evidence that reading runs gradient descent.",
            NOT_TESTED: "No activation was patched or ablated. "
            + ("No snapshots were saved." if study.snapshots is None else "Earlier snapshots were not fine-tuned."),
        }  # fmt: skip
        picture = next(part for section in comparison.sections if section.title == PICTURE for part in section.parts)
        numbers = {"learns": learns, "likeness": [*alike.ends], "random": [*random.ends]}
        headline = f"{first}; what reading and fine-tuning change inside it is {kind if above else 'not alike'}"
        facts = [
            (str(rows["accuracy after demonstrations"]), "accuracy after demonstrations; "
             f"{rows['accuracy without demonstrations']} without them"),
            (str(rows["accuracy, fine-tuned"]), "accuracy if it is fine-tuned on them instead of reading them"),
            (str(alike), f"cosine between the changes inside that reading and fine-tuning make; {random} for random "
             "changes"),
        ]  # fmt: skip
        return Verdict(headline, sentences, picture if isinstance(picture, go.Figure) else None, numbers, facts)
