"""The opening of a report: sentences made from the numbers, a picture, and explanations of the terms on the page."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import contains, is_for_scale, phrase
from mechicl.analysis import Identification
from mechicl.analysis.behaviour.families import NONE, FamilyMatch
from mechicl.reports.published import authors_and_year, read_sources
from mechicl.reports.rows import Row, percent
from mechicl.statistics import ratio_interval
from mechicl.viz.page import Section, text

NEAR = 0.05
"""Largest unexplained share at which a model is said to behave like an algorithm."""
FAR = 0.5
"""Unexplained share from which the nearest algorithm is not worth naming."""
SAME = 0.01
"""An algorithm that leaves at most this much is named instead of a more general one with more parameters."""
MOST_NAMED = 4
MOST_LETTERS = 24
"""Length of the names of tied algorithms from which the headline has their number."""
REFERENCES = {  # names of tasks' reference learners, as sentences have them
    "bayes": "the exact Bayes predictor", "ols": "least squares",
    "in context": "the exact in-context classifier",
    "in weights": "the exact in-weights classifier",
}  # fmt: skip
NOT_TESTED = "What was not tested?"
NO_GAPS = "Tasks and prompts of other distributions than those on this page."
N_FACTS = 3
Fact = tuple[str, str]
"""A value, and what it is the value of."""
Nearness = Literal["like", "nearest", "none"]

TERMS = {  # pattern in the page's text: the term and its explanation
    "unexplained": ("unexplained", "squared distance between the predictions of the model and of an algorithm, as a "
                    "share of the model's squared predictions: 0% if they are equal, 100% for predicting 0"),
    r"MSE|squared error": ("MSE", "mean squared error of the prediction; some papers print half of it; MSE / E y² is "
                           "relative to the mean square of the targets, so that predicting 0 has 1"),
    "held-out": ("held-out", "drawn with another seed than the prompts of training and fitting"),
    r"step size": ("step size", "factor of the gradient of the squared error, summed over the context's points"),
    "η": ("η", "the step size of papers that average the gradient: the step size times the number of context points"),
    r"GD\+\+": ("GD++", "gradient descent that also changes the inputs at each step, x ← (I − γ XᵀX) x"),
    "[Pp]reconditioned": ("preconditioned gradient descent", "a matrix takes the place of the step size"),
    "Newton": ("Newton's method", "iterates towards the inverse of XᵀX; each iteration squares the relative error"),
    "ridge path": ("ridge path", "ridge regression with smaller and smaller penalties: a control without iterations"),
    r"\bof S\b|X'X|eigenvector of S": ("S", "XᵀX, the matrix of second moments of the context's inputs"),
    "sensitivit": ("sensitivity", "derivative of the prediction with respect to the query"),
    "[Rr]eadout": ("readout", "linear map from the activations after a layer to predictions, fitted on other prompts"),
    "barrier": ("barrier", "how far the loss on a path between two models rises above the line between its ends"),
    "[Aa]blat|without .*head": ("ablation", "a head's output is replaced by its mean over prompts"),
    "restor": ("restoring", "on corrupted prompts, an activation is replaced by its value on the original prompts"),
    "counterfactual|[Ii]nterventions": ("intervention", "a change of an intermediate state, made in the model and in "
                                        "the algorithm; a counterfactual is the prediction that results"),
    "SimAOU": ("SimAOU", "cosine between the changes that reading and fine-tuning make to attention outputs"),
    "SimAM": ("SimAM", "cosine between attention scores with and without the context"),
    "Rec2FTP": ("Rec2FTP", "share of the queries improved by fine-tuning that reading the context improves too"),
    "induction": ("induction head", "attends from a token to the one that followed its earlier occurrence"),
    "faithful": ("faithfulness", "share of the loss's improvement by all heads that the circuit alone keeps"),
    "completeness": ("completeness", "share of the loss's improvement by all heads that is lost without the circuit"),
}  # fmt: skip


def explained_terms(words: str) -> Section:
    """Explain the terms of `TERMS` that a page uses."""
    used = [each for pattern, each in TERMS.items() if re.search(pattern, words)]
    items = "".join(f"<li><b>{text(term)}</b>: {text(meaning)}</li>" for term, meaning in used)
    return Section("Terms on this page", "", f"<ul>{items}</ul>")


@dataclass(frozen=True, eq=False)
class Verdict:
    """The opening of a report."""

    headline: str  # the answer in a few words
    sentences: dict[str, str]  # answers by question, such as "Which algorithm?"
    picture: go.Figure | None = None  # the figure that shows the first answer
    numbers: dict[str, Any] = field(default_factory=dict)  # the numbers behind the sentences, as plain data
    facts: Sequence[Fact] = ()  # the first three are next to the picture
    kind: str = ""  # a sentence on the kind of learner

    def named(self, name: str) -> "Verdict":
        """Name the model in the headline, which a reader sees alone."""
        return replace(self, headline=re.sub(r"\b[Ii]t\b", name, self.headline, count=1))

    def section(self) -> Section:
        """Return a page's first screen: the answer, a picture, three facts, what was not tested, and folded text."""
        words = "".join(f"<p><b>{text(title)}</b> {text(answer)}</p>" for title, answer in self.sentences.items())
        facts = "".join(
            f"<div><dt>{text(value)}</dt><dd>{text(meaning)}</dd></div>" for value, meaning in self.facts[:N_FACTS]
        )
        gaps = self.sentences.get(NOT_TESTED, NO_GAPS)
        rest = f'</div><dl class="facts">{facts}</dl></div><p class="note"><b>Not tested:</b> {text(gaps)}</p>'
        rest += f"<details><summary>The answer in full</summary>{words}</details>"
        picture = [] if self.picture is None else [self.picture]
        return Section(self.headline, self.kind, ['<div class="first"><div>', *picture, rest])


@dataclass(frozen=True, eq=False)
class Answer:
    """The algorithm that a model behaves like."""

    headline: str  # the answer in a few words
    nearness: Nearness  # "like" an algorithm; "nearest" to one, but not like it; or "none"
    match: FamilyMatch  # the algorithm that is named
    rivals: list[FamilyMatch]  # other algorithms that fit equally well on these prompts
    words: str  # the answer as sentences
    numbers: dict[str, Any]  # behind it
    facts: list[Fact]  # the distance from it, and the confidence


def learner_phrase(name: str) -> str:
    """Return the name of an algorithm or of a task's reference learner as it appears in a sentence."""
    return REFERENCES.get(name) or phrase(name)


def has_learned(
    errors: Float[Tensor, "prompt"], baselines: Mapping[str, Float[Tensor, "prompt"]], loss: str = "squared error"
) -> tuple[str, str, Fact]:
    """Compare a model's losses with those of baselines, the weakest first: a headline, a sentence, and a fact.

    The headline is empty if the model is better than all of them, by 95% intervals over prompts.
    """
    ratios = {name: ratio_interval(errors.double(), values.double()) for name, values in baselines.items()}
    words = " and ".join(f"{percent(ratio)} of that of {name}" for name, ratio in ratios.items())
    (name, first), *others = ratios.items()
    next_to = [
        f"its {loss} relative to that of {name}",
        *(f"{percent(ratio)} relative to that of {other}" for other, ratio in others),
    ]
    fact = percent(first), "; ".join(next_to)
    if len(errors) == 1:
        headline = "Not known whether it has learned"
        return headline, f"{headline}: one prompt has no interval. There its {loss} is {words}.", fact
    for name, ratio in ratios.items():
        if not ratio.high < 1:
            extent = "Not" if name == next(iter(ratios)) else "Barely"
            headline = f"{extent} learned: {'worse than' if ratio.low > 1 else 'not measurably better than'} {name}"
            return headline, f"{headline}. Its {loss} is {words}.", fact
    return "", f"It has learned the task: its {loss} is {words}.", fact


def which_algorithm(
    identified: Identification, untrained: float | None = None, nouns: tuple[str, str] = ("algorithm", "algorithms")
) -> Answer:
    """Tell what kind of learner a model is and, where it is safe, name its algorithm, those tied with it, and evidence.

    Families for scale (any polynomial, any function of S) are never named. Where an algorithm leaves at most 1% and is
    a special case of the nearest one, the simpler one is named. `untrained` is the least unexplained share of an
    untrained network over all algorithms, for comparison. `nouns`: what the sentences call one candidate, and several.
    """
    one, many = nouns
    named = [match for match in identified.matches if not is_for_scale(match.name)]
    tied = [match for match in named if identified.tied(match)] or named[:1]
    match = min(tied, key=lambda each: each.n_fitted)
    simpler = [m for m in named if contains(match.name, m.name) and identified.distance(m).mean <= SAME]
    match = min(simpler, key=lambda each: each.n_fitted) if simpler else match

    def is_unrelated(other: FamilyMatch) -> bool:
        return other is not match and not contains(other.name, match.name) and not contains(match.name, other.name)

    rivals = [m for m in tied if is_unrelated(m)]
    distance, name = identified.distance(match), learner_phrase(match.name)
    nearness: Nearness = "none" if not distance.mean < FAR else "like" if distance.mean <= NEAR else "nearest"
    sure = f"{identified.confidence:.0%}" if identified.calibrated else ""
    is_named = identified.answer.name != NONE
    tie = _listed(rivals) if rivals else ""
    if len(tie) > MOST_LETTERS:
        tie = f"{len(rivals)} others" if rivals[1:] else "another"
    tie = tie and f", tied with {tie}"
    if nearness == "like":
        headline = f"It {'behaves' if is_named else 'predicts much'} like {name}{tie}"
        headline += "" if is_named else ", but is not a copy of it"
        words = [f"Fitted to the model's predictions, {name} leaves {percent(distance)} of them unexplained."]
        if is_named:
            words += [f"The confidence in the name of its family is {sure}."] if sure else []
        else:
            words.append(
                f"With changed prompts it is {percent(match.changed_distances.mean().item())}, more than a copy with "
                f"small errors would leave: {f'with a confidence of {sure} ' if sure else ''}it is none of the "
                f"{many} tried."
            )
        if match.hyperparameters and len(match.hyperparameters) <= 2:
            fitted = " and ".join(f"{n.replace('_', ' ')} {v:.3g}" for n, v in match.hyperparameters.items())
            words.append(f"The fit has {fitted}.")
        nearer = [m for m in named if contains(m.name, match.name) and identified.distance(m).high < distance.low]
        if nearer:
            verb = "contain it as a special case and fit" if len(nearer) > 1 else "contains it as a special case, fits"
            least = percent(identified.distance(nearer[0]).mean)
            words.append(f"{capital(_listed(nearer))}{', which' if len(nearer) == 1 else ''} {verb} better still "
                         f"({least}).")  # fmt: skip
        others = [m for m in named if is_unrelated(m) and m not in rivals]
        if others and not rivals:
            left = percent(identified.distance(others[0]))
            words.append(f"The next {one}, {learner_phrase(others[0].name)}, leaves {left}.")
    else:
        headline = f"It behaves like no {one} that was tried"
        headline += f"; the nearest is {name}{tie}" if nearness == "nearest" else ""
        words = [f"It behaves like none of the {len(named)} {many} that were tried.",
                 f"The nearest, {name}, leaves {percent(distance)} of its predictions unexplained."]  # fmt: skip
        if nearness == "nearest":
            words.append(f"Up to {NEAR:.0%} would count as alike.")
    if identified.fingerprint is not None:
        words.insert(0, f"Kind of learner, whatever its name: {identified.fingerprint.description}.")
    if rivals:
        words.append(f"This is a tie: these {distance.n:,} prompts do not distinguish it from {_listed(rivals)}.")
    if untrained is not None:
        least = f"at least {percent(untrained)}" if untrained < 0.9 else "about everything"
        words.append(f"For comparison, every {one} leaves {least} of an untrained network's predictions unexplained.")
    if identified.note:
        words.append(f"Note: {identified.note}.")
    numbers = {
        "nearness": nearness,
        "answer": identified.answer.name,
        "confidence": identified.confidence,
        "algorithm": match.name,
        "hyperparameters": match.hyperparameters,
        "distance": [distance.mean, distance.low, distance.high],
        "tied": [each.name for each in rivals],
        "untrained": untrained,
        "n_prompts": distance.n,
    }
    unlike = next((m for m in named if is_unrelated(m) and m not in rivals), None)
    more = ""
    if unlike:
        left = percent(identified.distance(unlike).mean)
        more = f"; {left} by the next of another kind, {learner_phrase(unlike.name)}"
    belief = "in the name of its family of algorithms" if is_named else f"that it is none of the {many} tried"
    if nearness == "like" and not is_named:
        changed = percent(match.changed_distances.mean().item())
        belief += f": on changed prompts, {changed} is unexplained, more than a copy would leave"
    share = f"of its predictions unexplained by {name}{more}"
    facts = [(percent(distance), share), *([(sure, f"confidence {belief}")] if sure else [])]
    return Answer(headline, nearness, match, rivals, " ".join(words), numbers, facts)


def since_when(
    steps: Sequence[int], distances: Sequence[float], answer: Answer, threshold: float
) -> tuple[str, int | None]:
    """Find the first snapshot from which on a model stays near its algorithm: sentences, and the step if any.

    Near is an unexplained share of at most `threshold`, at the training `steps` of the snapshots.
    """
    far = [i for i, distance in enumerate(distances) if not distance <= threshold]
    first = far[-1] + 1 if far else 0
    name = learner_phrase(answer.match.name)
    if first == len(steps):
        words = f"At no saved snapshot up to step {steps[-1]:,} did {name} leave less than {percent(threshold)}."
        return words, None
    words = (
        f"Since step {steps[first]:,} of {steps[-1]:,}. From this snapshot on, {name} leaves less than "
        f"{percent(threshold)} unexplained. At the first of {len(steps)} snapshots it left {percent(distances[0])}."
    )
    return words, steps[first]


def agreement_with_papers(rows: Sequence[Row]) -> str:
    """Count the published numbers and claims that the measured values confirm, by paper; empty if there are none."""
    judged = [(row, row.verdict) for row in rows if row.verdict != "not printed"]
    if not judged:
        return ""
    papers, right = Counter(row.source for row, _ in judged), Counter(r.source for r, v in judged if v == "agrees")
    known = read_sources()
    counts = " and ".join(
        f"{right[source]} of {n} published numbers and claims of "
        f"{authors_and_year(known[source]) if source in known else 'the paper'}"
        for source, n in papers.items()
    )
    verb = "agrees" if sum(right.values()) == 1 else "agree"
    words = f"{counts} {verb} with the measured values (table below)."
    if differing := [row.quantity for row, verdict in judged if verdict == "differs"]:
        more = f"; and {len(differing) - 2} more" if len(differing) > 2 else ""
        words += f" These differ: {'; '.join(differing[:2])}{more}."
    return words


def _listed(matches: Sequence[FamilyMatch]) -> str:
    names = [learner_phrase(match.name) for match in matches]
    if len(names) > MOST_NAMED:
        names = [*names[: MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def capital(words: str) -> str:
    """Return a text with a capital as its first letter."""
    return words[:1].upper() + words[1:]
