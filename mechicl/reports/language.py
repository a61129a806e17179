"""The report on a language model: does it learn in context, which heads carry that, and how stable is the answer?"""

import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import viz
from mechicl.analysis.heads import HeadScores, score_heads
from mechicl.analysis.language import (
    FewShotScores,
    FunctionVector,
    MatchedAblation,
    Stability,
    ablate_matched,
    function_vectors,
    icl_score,
    stability,
)
from mechicl.analysis.language.vectors import strongest_heads
from mechicl.base.precision import nan_last
from mechicl.base.progress import progress_bar
from mechicl.interop import LanguageModel
from mechicl.reports.comparison import Comparison, Section
from mechicl.reports.rows import Row, percent
from mechicl.reports.verdict import NOT_TESTED, Verdict
from mechicl.statistics import Interval, interval
from mechicl.statistics.results import largest
from mechicl.text import WORD_TASKS, word_prompts
from mechicl.viz.interventions import ablation_bars, curves_by_layer, few_shot_curves, in_context_figure

SHOTS, VECTOR = "Few-shot accuracy", "Function vector"  # titles of sections
FUNCTION, INDUCTION = "function-vector heads", "induction heads"
QUICK_TASKS = ("antonyms", "capitals", "past_tense", "plural", "english_french")
N_HEADS = 10
OTHERS = ", chosen on other prompts"
_SEED = 1_000_003


def report_language(
    language: LanguageModel,
    folder: str | Path = "report",
    *,
    tasks: Sequence[str] | None = None,
    name: str = "report",
    quick: bool = False,
) -> Path:
    """Study how a language model learns in context, write NAME.html and NAME.json, and return the page's path.

    The `language` comes from `load_language_model`; `tasks` are names in `mechicl.text.WORD_TASKS`, by default all, or
    five with `quick`, which also takes fewer prompts and random heads.
    """
    chosen = tuple((QUICK_TASKS if quick else WORD_TASKS) if tasks is None else tasks)
    if (unknown := [name for name in chosen if name not in WORD_TASKS]) or not chosen:
        raise ValueError(f"tasks must be some of {list(WORD_TASKS)}, got {unknown}")
    chosen, most, left_out = _that_fit(language, chosen)
    shots = tuple(n for n in ((0, 2, 8, 16) if quick else (0, 2, 4, 8, 16)) if n <= most)
    n_prompts, n_effects, n_random = (16, 16, 6) if quick else (50, 32, 20)
    started = time.perf_counter()
    n_heads = min(N_HEADS, max(1, language.model.cfg.n_layers * language.model.cfg.n_heads // 4))
    with progress_bar(total=4, unit="part", desc="report") as bar:
        scores = icl_score(language, chosen, shots=shots, n_prompts=n_prompts, seed=_SEED)
        bar.update()
        task = max(scores.tasks, key=lambda each: scores.gain(each).mean)
        vector = function_vectors(
            language, task, n_heads=n_heads, n_prompts=n_effects, n_clean=2 * n_effects, seed=_SEED
        )
        resamples = [
            torch.randint(len(vector.shuffled), (len(vector.shuffled),), generator=torch.Generator().manual_seed(i))
            for i in range(10)
        ]
        stable = stability(
            lambda rows: vector.indirect_effects[..., rows].mean(-1), resamples, top=n_heads, progress=False
        )
        bar.update()
        heads = score_heads(language.model, seed=_SEED)
        others = heads.mean("induction").clone()  # of the heads that are not in the vector
        others[tuple(torch.tensor(vector.heads).T)] = -1.0
        induction = strongest_heads(others, n_heads)
        bar.update()
        draw = {"tokenizer": language.tokenizer, "task": task, "n_shots": 8}
        prompts = word_prompts(**draw, n_prompts=n_effects, seed=_SEED + 5)
        reference = word_prompts(**draw, n_prompts=2 * n_effects, labels="shuffled", seed=_SEED + 6)
        kinds = {FUNCTION: (vector.heads, induction), INDUCTION: (induction, vector.heads)}
        enough = 3 * n_heads <= language.model.cfg.n_layers * language.model.cfg.n_heads
        ablations = {
            name: ablate_matched(
                language.model, prompts, mine, reference=reference, exclude=rivals if enough else (),
                n_random=n_random, seed=_SEED,
            )
            for name, (mine, rivals) in kinds.items()
        }  # fmt: skip
        bar.update()
    file = language.dequantized_from
    origin = f"The weights were dequantized from {file}, so they are not quite the published ones. " if file else ""
    accuracies = {
        each: {label: scores.accuracy[t, k].mean(-1).tolist() for k, label in enumerate(scores.labels)}
        for t, each in enumerate(scores.tasks)
    }
    comparison = Comparison(
        f"In-context learning of {language.name}",
        f"{language.model.cfg.n_layers} layers of {language.model.cfg.n_heads} heads. Prompts show pairs of words "
        f"and end with a query; a prediction is right if the most probable next token is the first token of the "
        f"answer. Intervals are 95% over prompts. {left_out}{origin}"
        f"Measured in {time.perf_counter() - started:.0f} s.",
        _rows(scores, vector, stable, ablations),
        _sections(scores, vector, heads, ablations),
        {"few_shot": accuracies, "function_vector_heads": [list(head) for head in vector.heads]},
    )
    verdict = _verdict(scores, vector, stable, ablations, induction)
    return comparison.write(folder, name, opening=verdict.named(language.name).section())


def _that_fit(language: LanguageModel, tasks: tuple[str, ...]) -> tuple[tuple[str, ...], int, str]:
    """The tasks that the tokenizer and the model's context allow, the most demonstrations, and a text on the others."""
    errors: dict[str, str] = {}
    for n_shots in (16, 10):  # the function vector needs 10
        fitting = []
        for task in tasks:
            try:
                prompts = word_prompts(language.tokenizer, task, n_prompts=1, n_shots=n_shots, labels="random")
            except ValueError as error:
                errors[task] = str(error)
                continue
            n_ctx = getattr(language.model.cfg, "n_ctx", None) or math.inf
            if prompts.ids.shape[1] <= n_ctx:
                fitting.append(task)
            else:
                errors[task] = f"{prompts.ids.shape[1]} tokens are more than the model's context of {n_ctx}"
        if fitting:
            left_out = ", ".join(task.replace("_", " ") for task in tasks if task not in fitting)
            text = f"Left out, because too few pairs fit the tokenizer or the context: {left_out}. " if left_out else ""
            return tuple(fitting), n_shots, text
    task, reason = next(iter(errors.items()))
    raise ValueError(f"none of the tasks can be written for {language.name}; {task}: {reason}")


def _rows(
    scores: FewShotScores, vector: FunctionVector, stable: Stability, ablations: dict[str, MatchedAblation]
) -> list[Row]:
    shots, rows = scores.shots[-1], []
    for t, task in enumerate(scores.tasks):
        name = task.replace("_", " ")
        rows += [
            _row(f"{name}: accuracy after {shots} pairs, {label} labels", scores.accuracy[t, k, -1], SHOTS)
            for k, label in enumerate(scores.labels)
        ]
        gain = Row(f"{name}: true minus shuffled labels", None, scores.gain(task), "prompts", section=SHOTS, share=True)
        rows.append(gain)
    estimated, best = _chosen_on_half(vector.added)
    strongest, head = _chosen_on_half(vector.indirect_effects.flatten(0, 1))
    place = _named([divmod(head, vector.indirect_effects.shape[1])])
    rows += [
        _row(f"indirect effect of head {place} on the probability{OTHERS}", strongest, VECTOR, -1.0),
        _row("probability without demonstrations", vector.zero_shot, VECTOR),
        _row(f"the same with the vector added after layer {best}{OTHERS}", estimated, VECTOR),
        _row("the same with a random vector of that length", vector.random_added[best, 1::2], VECTOR),
        Row(f"Jaccard index of the {len(vector.heads)} strongest heads over resampled prompts", None, stable.mean(),
            "draws", section=VECTOR),
    ]  # fmt: skip
    for name, result in ablations.items():
        rows.append(_row(f"probability without the {name}", result.ablated, "Ablation"))
        rows.append(_row("without random heads of the same layers", result.matched.mean(0), "Ablation"))
    return rows


def _row(quantity: str, values: Tensor, section: str, least: float = 0.0) -> Row:
    return Row(quantity, None, interval(values, within=(least, 1.0)), "prompts", section=section, share=True)


def _chosen_on_half(values: Float[Tensor, "place prompt"]) -> tuple[Float[Tensor, "prompt"], int]:
    """Choose the place with the largest mean on one half of the prompts; return its values on the other half."""
    best = int(nan_last(values[:, ::2].mean(-1)).argmax())
    return values[best, 1::2], best


def _named(heads: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


def _verdict(
    scores: FewShotScores, vector: FunctionVector, stable: Stability, ablations: dict[str, MatchedAblation],
    induction: Sequence[tuple[int, int]],
) -> Verdict:  # fmt: skip
    together = 1 - 0.05 / len(scores.tasks)  # 95% that no interval of all tasks misses
    gains = {task: scores.gain(task, level=together) for task in scores.tasks}
    learned = [task.replace("_", " ") for task, gain in gains.items() if gain.low > 0]
    count = f"{len(learned)} of {len(gains)}"
    named = f": {', '.join(learned)}" if len(learned) < 4 else ""
    title = f"It learns in context on {count} tasks{named}"
    if not learned:
        title = f"It does not learn in context beyond what shuffled labels give, on any of {len(gains)} tasks"
    shots, n, task = scores.shots[-1], len(vector.heads), vector.task.replace("_", " ")
    first = f"After {shots} examples with true labels, the accuracy is higher than after the same words paired wrongly "
    first += f"(shuffled labels) on {count} tasks{': ' + ', '.join(learned) if learned else ''}. "
    first += "On these, the interval of the difference is above 0 also if widened for the number of tasks. "
    accuracy = scores.accuracy[scores.tasks.index(vector.task), :, -1]
    right = {label: interval(accuracy[k], together, within=(0, 1)) for k, label in enumerate(scores.labels)}
    tied = largest([gain.mean for gain in gains.values()], 1)[1]
    first += (
        f"The largest difference is for {task}{tied and ' (tied with others)'}: {percent(right['true'])} with true "
        f"labels, {percent(right['shuffled'])} with shuffled ones (intervals over {right['true'].n} prompts, widened "
        f"in the same way)."
    )
    values, best = _chosen_on_half(vector.added)
    gain = interval(values - vector.random_added[best, 1::2], within=(-1, 1))
    pairs = list(itertools.combinations(map(set, stable.selections), 2))
    shared = sum(len(one & other) for one, other in pairs) / len(pairs)
    found = "whose outputs carry the task" if gain.low > 0 else "with the largest effects on answers of the task"
    unclear = "" if gain.low > 0 else " The interval is not above 0, so this does not show that they carry the task."
    heads = (
        f"The {n} heads {found} {task}, strongest first: {_named(vector.heads)} (layer.head, counted from 0). "
        f"When the prompts are resampled, two lists of {n} heads have {shared:.1f} heads in common on average. "
        f"The sum of their outputs was added after layer {best}, to prompts without demonstrations. It changes the "
        f"probability of the right answer by {_points(gain)} compared with a random vector. The layer was chosen on "
        f"other prompts.{unclear} Of the other heads, these {n} have the highest induction scores on repeated random "
        f"tokens: {_named(induction)}."
    )
    lines, lost = [], {}
    for name, result in ablations.items():
        ablated = result.ablated, result.matched.mean(0)
        lost[name], matched = (interval(each - result.intact, within=(-1, 1)) for each in ablated)
        lines.append(
            f"Without these {n} {name} the probability of the right answer changes by {_points(lost[name])}; "
            f"without {n} random heads of the same layers, by {_points(matched)}."
        )
    sentences = {
        "Does it learn in context?": first, "Which heads carry it?": heads, "Does it need them?": " ".join(lines),
        NOT_TESTED: "Answers longer than one token, other templates, and other formats of prompts.",
    }  # fmt: skip
    facts = [
        (percent(right["true"]), f"accuracy on {task} after {shots} examples; {percent(right['shuffled'])} if their "
         "labels are shuffled"),
        (_points(gain), f"for the right answer, if the means of its {n} strongest heads are added to prompts without "
         "examples"),
        (_points(lost[FUNCTION]), f"for the right answer without these {n} heads"),
    ]  # fmt: skip
    return Verdict(title, sentences, in_context_figure(scores, vector), facts=facts)


def _points(change: Interval) -> str:
    """Format a change of a probability in percentage points."""
    return f"{100 * change.mean:+.0f} ± {100 * change.half_width:.0f} points".replace("-", "−")


def _sections(
    scores: FewShotScores, vector: FunctionVector, heads: HeadScores, ablations: dict[str, MatchedAblation]
) -> list[Section]:
    return [
        Section(
            SHOTS,
            "Accuracy by number of demonstrations. With shuffled labels the same words are shown, but paired wrongly; "
            "random labels are words of other tasks. Bands are 95% intervals over prompts.",
            [few_shot_curves(scores, task) for task in scores.tasks],
        ),
        Section(
            VECTOR,
            "Each head's mean output over prompts with true labels replaces its output in prompts with shuffled "
            "labels, at the last token. The picture shows how much that raises the probability of the right answer. "
            f"The outputs of the {len(vector.heads)} strongest heads are summed and added to prompts without "
            "demonstrations (Todd et al. 2024).",
            [viz.plot(vector), curves_by_layer(vector)],
        ),
        Section(
            "Ablation",
            "Heads are replaced, together, by their mean outputs over prompts with shuffled labels.",
            ablation_bars(ablations),
        ),
        Section("Head scores", "Scores of every head on repeated random tokens.", viz.plot(heads)),
    ]
