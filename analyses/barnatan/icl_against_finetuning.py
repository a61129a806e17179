"""Reading demonstrations against fine-tuning on them (Bar Natan, Deutch & Magar, Tables 1 and 2).

python analyses/barnatan/icl_against_finetuning.py --model EleutherAI/gpt-neo-1.3B --tasks sst2 mr agnews cb
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import mechicl
from analyses.support.script import Option, script
from mechicl import viz
from mechicl.analysis import read_dual_form
from mechicl.analysis.finetuning import (
    METHOD_NAMES,
    METHODS,
    FineTuning,
    FineTuningComparison,
    Method,
    TaskTexts,
    compare_with_finetuning,
    draw_texts,
    fine_tune,
    study_task,
)
from mechicl.base.files import read_json, write_json
from mechicl.base.progress import progress_bar
from mechicl.checkpoints import UnknownSeedError, are_weights_random
from mechicl.interop.language_models import LanguageModel, load_language_model
from mechicl.reports import Comparison, Row, Section, published
from mechicl.reports.comparison import finite
from mechicl.statistics import interval
from mechicl.text import TEXT_TASKS, Labels, text_shots

MADE = tuple(name for name, task in TEXT_TASKS.items() if task.topics)
PAPERS = {"sst2": "SST2", "sst5": "SST5", "mr": "MR", "subj": "Subj", "agnews": "AGNews", "cb": "CB"}
TABLES = {"plain": "barnatan_table2", "linearized": "barnatan_table1", "per_layer": "barnatan_table2_layer_by_layer"}
ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
FORMAT = 3  # of what is kept of a trial; another one is measured anew
METRICS = {  # of the tables: their key, and the field here
    "SimAOU, random change": ("SimAOU_random", "random_update_similarity"),
    "SimAOU": ("SimAOU_finetuned", "update_similarity"),
    "SimAM before": ("SimAM_before", "map_similarity_before"),
    "SimAM after": ("SimAM_after", "map_similarity_after"),
}
SWITCHED: tuple[Labels, ...] = ("flipped", "random")
SWITCHED_WORDS = {
    "in_context_score": "accuracy, in context", "finetuned_score": "accuracy, fine-tuned",
    "update_similarity": "SimAOU",
}  # fmt: skip
RANKS = {
    "rank_correlation": "fine-tuned", "rank_correlation_before": "before fine-tuning",
    "random_rank_correlation": "random weights",
}  # fmt: skip
SETTINGS = {  # of the first picture: method, and the field
    "zero-shot": ("plain", "zero_shot_score"),
    "in context": ("plain", "in_context_score"),
    "fine-tuned": ("plain", "finetuned_score"),
    "linearised": ("linearized", "finetuned_score"),
    "layer by layer": ("per_layer", "finetuned_score"),
}
CROSSED = "SimAOU, true labels in context, fine-tuned on"
INDEPENDENT = "Rec2FTP if gains were independent"
Value = Callable[[dict[str, Any]], float]


@script(
    model=Option(
        "topics-3l", "a checkpoint that reads texts, or a causal language model: a name on the hub, or a folder"
    ),
    tasks=Option(MADE, f"some of {', '.join(TEXT_TASKS)}; by default those made by rule", kind=tuple[str, ...]),
    seeds=Option((0, 1, 2), "each draws its own demonstrations and queries, and takes another seed of a checkpoint"),
    n_demonstrations=Option(None, "by default 32, 22 for agnews, 19 for cb, 8 for those made by rule", kind=int | None),
    n_queries=Option(100, "to measure on"),
    n_held_out=Option(50, "to choose learning rate and epochs by"),
    learning_rates=Option((0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0), "to choose from"),
    epochs=Option((1, 4, 12, 36), "numbers of epochs to choose from"),
    choose_by=Option("loss", "what decides on held-out queries; accuracies often tie", kind=Literal["score", "loss"]),
    widen=Option(1, "how often the learning rates and epochs grow while the best lies on an edge"),
    methods=Option(METHODS, "the model itself, linearised, layer by layer", kind=tuple[Method, ...]),
    data=Option(None, "folder with TASK_SPLIT.csv (or another of ENDINGS, or of save_to_disk)", kind=Path | None),
    device=Option("cpu", "where the model runs"),
    memory=Option(2**30, "bound in bytes on what a run takes: less for large models and long prompts"),
    quiet=False,
)
def compare(args: Any) -> Comparison:
    """Both tables, label switching, untrained weights and the dual form."""
    unknown = [name for name in args.tasks if name not in TEXT_TASKS]
    if unknown:
        raise ValueError(f"unknown tasks {unknown}: there are {', '.join(TEXT_TASKS)}")
    if not args.seeds or "plain" not in args.methods:
        raise ValueError(f"at least one seed and the plain kind are needed, got {args.seeds} and {args.methods}")
    tasks, by_task = args.tasks, {task: [] for task in args.tasks}
    with progress_bar(total=len(tasks) * len(args.seeds), unit="trial", progress=not args.quiet) as bar:
        for seed in args.seeds:  # one model in memory at a time
            language = language_model(args, seed)
            for task in tasks:
                by_task[task].append(trial(args, language, task, seed))
                bar.update()
    measured = Trials(args.methods, tasks, list(by_task.values()))
    rows = [*table_rows(measured), *layer_rows(measured), *accuracy_rows(measured), *further_rows(measured)]
    kinds = ", ".join(
        f"{name} ({trials[0]['n_demonstrations']} and {trials[0]['n_queries']})" for name, trials in by_task.items()
    )
    lead = (
        f"{args.model} on {kinds} (demonstrations and queries); fine-tuning is chosen on other queries; seeds "
        f"{', '.join(map(str, args.seeds))}. Published: GPT 1.3B on six data sets. Metrics are means over layers, "
        f"heads and queries; intervals are over seeds, each with its own demonstrations and queries, and weights if "
        f"there are several; averages are over tasks."
    )
    seconds = sum(each["cpu_time_s"] for trials in by_task.values() for each in trials)  # whenever it was measured
    data = {"tasks": list(tasks), "seeds": list(args.seeds), "trials": by_task, "wall_time_s": None,
            "cpu_time_s": round(seconds, 1)}  # fmt: skip
    return Comparison("Reading demonstrations against fine-tuning", lead, rows, figures(measured), data)


# ---- one task and seed, kept in a file ----


def trial(args: Any, language: LanguageModel, task: str, seed: int) -> dict[str, Any]:
    """Return the measurements of a task and seed, from their file if it was made in the same way."""
    texts = draw_texts(
        TEXT_TASKS[task], n_demonstrations=args.n_demonstrations, n_held_out=args.n_held_out,
        n_queries=args.n_queries, seed=seed, source=sources(args, task),
    )  # fmt: skip
    rates, epochs, widen = grid(args)
    settings = {
        "format": FORMAT, "methods": list(args.methods), "learning_rates": list(rates),
        "epochs": list(epochs), "choose_by": args.choose_by, "widen": widen,
        "weights": digest_of_weights(language.model), "texts": digest_of_texts(texts),
    }  # fmt: skip
    path = args.out / f"icl_against_finetuning_{Path(args.model).name}" / f"{task}-{seed}.json"
    if path.is_file():
        saved = read_json(path)
        if saved.get("settings") == settings:
            return saved
    start = time.process_time()
    with mechicl.settings(memory=args.memory):
        study = study_task(
            language.model, language.tokenizer, texts, methods=args.methods,
            search={"learning_rates": rates, "epochs": epochs, "choose_by": args.choose_by, "widen": widen},
            seed=seed, progress=not args.quiet,
        )  # fmt: skip
        kinds: dict[str, Any] = {"comparisons": study.comparisons, "switched": {}, "crossed": {}}
        for labels in SWITCHED:  # in fine-tuning and in the context, or in fine-tuning alone
            true, other = (
                text_shots(language.tokenizer, shown, texts.queries)
                for shown in (texts.demonstrations, texts.demonstrations.relabelled(labels, seed=seed))
            )
            best = study.tunings.get("plain", FineTuning())
            tuned = fine_tune(language.model, other, best, progress=not args.quiet)
            for kind, shots in (("switched", other), ("crossed", true)):
                kinds[kind][labels] = compare_with_finetuning(language.model, shots, tuned, seed=seed, progress=False)
    searches = study.searches.items()
    record: dict[str, Any] = {
        "settings": settings, "n_demonstrations": study.n_demonstrations, "n_queries": len(texts.queries),
        "tunings": {method: {**asdict(search.best), "at_edge": search.at_edge} for method, search in searches},
        **{kind: {name: summary(each) for name, each in compared.items()} for kind, compared in kinds.items()},
        "dual_form_error": dual_form_error(language, texts), "cpu_time_s": round(time.process_time() - start, 1),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    return record


def digest_of_weights(model: Any) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        values = weight.double()
        digest.update(f"{name}{tuple(weight.shape)}{values.sum().item()}{values.square().sum().item()}".encode())
    return digest.hexdigest()


def digest_of_texts(texts: TaskTexts) -> str:
    parts = (texts.demonstrations, texts.held_out, texts.queries)
    shown = [[part.task.demonstration(*pair) for pair in zip(part.texts, part.labels, strict=True)] for part in parts]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def language_model(args: Any, seed: int) -> LanguageModel:
    """Each seed takes a training seed of a checkpoint in turn, where it has that one."""
    try:
        return load_language_model(args.model, seed=seed, device=args.device)
    except UnknownSeedError:
        return load_language_model(args.model, device=args.device)


def sources(args: Any, task: str) -> list[Path] | None:
    """The files of a task's splits in the folder of data, if one was named."""
    if args.data is None or TEXT_TASKS[task].topics:
        return None
    paths = []
    for split in TEXT_TASKS[task].splits:
        names = [f"{task}_{split}{ending}" for ending in ("", *ENDINGS)]
        known = [args.data / name for name in names if (args.data / name).exists()]
        if not known:
            raise ValueError(f"{args.data} has no file {', '.join(names[1:])} and no folder {names[0]}")
        paths.append(known[0])
    return paths


def summary(comparison: FineTuningComparison) -> dict[str, Any]:
    """Means over the queries for which a measure is defined: a number, or one a layer, with heads averaged."""
    means: dict[str, Any] = {
        "recall": comparison.recall().mean, "recall_if_independent": comparison.recall_if_independent().mean,
    }  # fmt: skip
    for name, value in comparison.samples().items():
        mean = value.nanmean(-1)
        means[name] = (mean.nanmean(-1) if mean.ndim == 2 else mean).tolist()
        if value.isnan().any():
            means[f"{name}_undefined"] = value.isnan().double().mean().item()
    return finite(means)


def grid(args: Any) -> tuple[tuple[float, ...], tuple[int, ...], int]:
    """Learning rates and epochs to search, and how often they may grow.

    The best tuning of a model that learned nothing lies on an edge of any grid: every other rate is tried, and up to
    the last number of epochs but one.
    """
    if are_weights_random():
        return args.learning_rates[1::2] or args.learning_rates, args.epochs[:-1] or args.epochs, 0
    return args.learning_rates, args.epochs, args.widen


def dual_form_error(language: LanguageModel, texts: TaskTexts) -> list[float] | None:
    """How wrong it is to read softmax attention as linear, by layer: median over heads and queries."""
    shots = text_shots(language.tokenizer, texts.demonstrations, texts.queries)
    n = len(shots.in_context[0]) - shots.query_lengths[0]
    tokens = [ids for ids in shots.in_context if len(ids) == len(shots.in_context[0])][:2]
    errors = []
    for layer in range(language.model.cfg.n_layers):
        try:
            form = read_dual_form(language.model, torch.stack(tokens), layer, n_demonstration_tokens=n)
        except ValueError:  # scores that are not products of queries and keys
            return None
        errors.append(form.relative_error.median().item())
    return errors


# ---- tables ----


def value_of(*path: str | int) -> Value:
    """A number of a trial by its keys; NaN if it is not defined, and the mean of those that are for one a layer."""

    def value(trial: dict[str, Any]) -> float:
        found: Any = trial
        for key in path:
            found = found[key]
        known = [each for each in (found if isinstance(found, list) else [found]) if each is not None]
        return sum(known) / len(known) if known else math.nan

    return value


def minus(first: Value, second: Value) -> Value:
    return lambda trial: first(trial) - second(trial)


@dataclass(frozen=True)
class Trials:
    """Return all measurements, by task and seed."""

    methods: Sequence[Method]
    tasks: Sequence[str]
    by_task: Sequence[Sequence[dict[str, Any]]]

    def rows(self, quantity: str, value: Value, printed: dict[str, float] | None = None, note: str = "") -> list[Row]:
        """The average over tasks and each task, where there are several."""
        printed = printed or {}
        average = round(sum(printed.values()) / len(printed), 4) if printed else None
        rows = [self.row(f"{quantity}, average", average, self.averages(value), note)]
        for task, trials in zip(self.tasks, self.by_task, strict=True):
            known = printed.get(PAPERS.get(task, ""))
            rows.append(self.row(f"{quantity}, {task}", known, list(map(value, trials)), note))
        return rows if len(self.tasks) > 1 else rows[1:]

    def average(self, quantity: str, value: Value, note: str = "") -> Row:
        return self.row(f"{quantity}, average", None, self.averages(value), note)

    @property
    def n_layers(self) -> int:
        return len(self.by_task[0][0]["comparisons"]["plain"]["update_similarity"])

    def averages(self, value: Value) -> list[float]:
        """For each seed, the mean over tasks."""
        return [sum(map(value, trials)) / len(trials) for trials in zip(*self.by_task, strict=True)]

    def all_have(self, name: str) -> bool:
        return all(trial[name] is not None for trials in self.by_task for trial in trials)

    @staticmethod
    def row(quantity: str, printed: float | None, values: Sequence[float], note: str = "") -> Row:
        known = [value for value in values if math.isfinite(value)]
        if not known:
            return Row(quantity, printed, "not defined", "", note)
        if len(known) < len(values):
            note = "; ".join(filter(None, (note, f"not defined for {len(values) - len(known)} of {len(values)} seeds")))
        measured = interval(torch.tensor(known)) if len(known) > 1 else known[0]
        return Row(quantity, printed, measured, "seeds" if len(known) > 1 else "", note)


def table_rows(trials: Trials) -> list[Row]:
    rows = []
    for method in trials.methods:
        printed = published(TABLES[method])
        for metric, (key, name) in METRICS.items():
            known = dict(zip(printed["tasks"], printed[key], strict=True))
            rows += trials.rows(f"{metric}, {METHOD_NAMES[method]}", value_of("comparisons", method, name), known)
        rows.append(trials.average(f"SimAM, after minus before, {METHOD_NAMES[method]}", map_change(method)))
        for task, records in zip(trials.tasks, trials.by_task, strict=True):
            kept = [record["tunings"][method] for record in records]
            words = ", ".join(f"{t['learning_rate']:g} ({t['epochs']}){'*' * t['at_edge']}" for t in kept)
            quantity = f"learning rate (epochs), {METHOD_NAMES[method]}, {task}"
            note = "best on held-out queries, a seed after the other; * at the edge of what was tried"
            rows.append(Row(quantity, None, words, "", note))
    return rows


def layer_rows(trials: Trials) -> list[Row]:
    """The averages of the tables layer by layer: what means over three layers or twenty-four are made of."""
    rows = []
    for layer in range(trials.n_layers):
        for method in trials.methods:
            name, value = METHOD_NAMES[method], value_of("comparisons", method, "update_similarity", layer)
            rows.append(trials.average(f"SimAOU, {name}, layer {layer}", value))
            rows.append(trials.average(f"SimAM, after minus before, {name}, layer {layer}", map_change(method, layer)))
        value = value_of("comparisons", "plain", "map_similarity_before", layer)
        rows.append(trials.average(f"SimAM before, layer {layer}", value))
        value = value_of("comparisons", "plain", "random_update_similarity", layer)
        rows.append(trials.average(f"SimAOU, random change, layer {layer}", value))
    return rows


def map_change(method: Method, *layer: int) -> Value:
    """How much nearer fine-tuning brings the scores, on average or in one layer."""
    path = "comparisons", method
    return minus(value_of(*path, "map_similarity_after", *layer), value_of(*path, "map_similarity_before", *layer))


def accuracy_rows(trials: Trials) -> list[Row]:
    plain = partial(value_of, "comparisons", "plain")
    rows = trials.rows("accuracy, zero-shot", plain("zero_shot_score"))
    rows += trials.rows("accuracy, in context", plain("in_context_score"))
    rows += trials.rows("accuracy gained by demonstrations", minus(plain("in_context_score"), plain("zero_shot_score")))
    note = "share of the queries that are wrong without demonstrations which demonstrations put right"
    rows += trials.rows(INDEPENDENT, plain("recall_if_independent"), note=note)
    for method in trials.methods:
        of_kind, name = partial(value_of, "comparisons", method), METHOD_NAMES[method]
        rows += trials.rows(f"accuracy, {name}", of_kind("finetuned_score"))
        rows += trials.rows(f"Rec2FTP, {name}", of_kind("recall"))
        excess = minus(of_kind("recall"), of_kind("recall_if_independent"))
        rows += trials.rows(f"Rec2FTP above independence, {name}", excess)
    return rows


def further_rows(trials: Trials) -> list[Row]:
    quantity = "rank correlation of attention to demonstrations"
    rows = [trials.average(f"{quantity}, {words}", value_of("comparisons", "plain", name))
            for name, words in RANKS.items()]  # fmt: skip
    for labels in SWITCHED:
        for name, words in SWITCHED_WORDS.items():
            note = "by the true labels" if "accuracy" in words else ""
            rows.append(trials.average(f"{words}, {labels} labels", value_of("switched", labels, name), note))
        rows.append(trials.average(f"{CROSSED} {labels} ones", value_of("crossed", labels, "update_similarity")))
    if trials.all_have("dual_form_error"):
        note = "relative to what heads write; 0 for linear attention"
        for layer in range(len(trials.by_task[0][0]["dual_form_error"])):
            quantity = f"error of reading softmax attention as a weight update, layer {layer}"
            rows.append(trials.average(quantity, value_of("dual_form_error", layer), note))
    return rows


# ---- pictures ----


def figures(trials: Trials) -> list[Section]:
    scores = {
        setting: {
            task: interval(torch.tensor([value_of("comparisons", method, name)(record) for record in records]))
            for task, records in zip(trials.tasks, trials.by_task, strict=True)
        }
        for setting, (method, name) in SETTINGS.items()
        if method in trials.methods
    }
    chance = [1 / TEXT_TASKS[task].n_classes for task in trials.tasks]
    updates, maps = ({METHOD_NAMES[method]: (method, name) for method in trials.methods}
                     for name in ("update_similarity", "map_similarity_after"))  # fmt: skip
    return [
        Section("Accuracy", "Means over seeds with 95% intervals; dotted: one over the number of classes.",
                viz.settings_figure(scores, chance=chance)),
        by_layer(trials, "Attention outputs (SimAOU)", "Cosine between what demonstrations and what fine-tuning change"
                 " in each attention layer's output at the last token, mean over tasks; bands are 95% intervals over "
                 "seeds.", updates | {"random change": ("plain", "random_update_similarity")}),
        by_layer(trials, "Attention scores (SimAM)", "Cosine of the scores that the last token gives to the query's own"
                 " tokens, with demonstrations and without, mean over heads and tasks.",
                 {"before": ("plain", "map_similarity_before")} | maps),
    ]  # fmt: skip


def by_layer(trials: Trials, title: str, words: str, lines: dict[str, tuple[str, str]]) -> Section:
    layers = range(trials.n_layers)
    intervals = {
        label: [interval(torch.tensor(trials.averages(value_of("comparisons", *path, layer)))) for layer in layers]
        for label, path in lines.items()
    }
    figure = viz.interval_lines(title, "layer", "cosine", list(layers), intervals)
    figure.update_xaxes(dtick=1)
    return Section(title, words, figure)


if __name__ == "__main__":
    compare.run()
