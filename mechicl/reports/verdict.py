"""What a report opens with: a few sentences that are made from the numbers, and one picture."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import plotly.graph_objects as go

from mechicl.algorithms.card import contains, is_for_scale, phrase
from mechicl.analysis import Identification
from mechicl.analysis.behaviour import FamilyMatch
from mechicl.reports.published import authors_and_year, read_sources
from mechicl.reports.rows import Row
from mechicl.statistics import Interval
from mechicl.viz.page import Section, text

NEAR = 0.05
"""Share of a model's squared predictions that an algorithm may leave unexplained for the model to behave like it."""
FAR = 0.5
"""From this share on the nearest algorithm is no nearer than what knows nothing of the model."""
SAME = 0.01
"""An algorithm that leaves no more than this is named in place of one that contains it, with parameters to spare."""
MOST_NAMED = 4
SPREAD = "\u00a0±\u00a0"  # an interval is not broken across lines
Nearness = Literal["like", "nearest", "none"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a report opens with.

    Attributes:
        headline: the answer in a few words.
        sentences: by question, such as "Which algorithm?", the answer.
        picture: what shows the first answer.
        numbers: behind the sentences, as plain data.
    """

    headline: str
    sentences: dict[str, str]
    picture: go.Figure | None = None
    numbers: dict[str, Any] = field(default_factory=dict)

    def section(self) -> Section:
        """The verdict as a page opens with it."""
        words = "".join(
            f"<p><b>{text(title)}</b> {text(answer.replace(' ± ', SPREAD))}</p>"
            for title, answer in self.sentences.items()
        )
        return Section(self.headline, "", [words] if self.picture is None else [words, self.picture])


@dataclass(frozen=True, eq=False)
class Answer:
    """Which algorithm a model behaves like.

    Attributes:
        headline: the answer in a few words.
        nearness: "like" an algorithm; "nearest" to one, but not like it; or "none".
        match: the algorithm that is named.
        rivals: other algorithms that these prompts do not tell from the nearest.
        words: the answer as sentences.
        numbers: behind it.
    """

    headline: str
    nearness: Nearness
    match: FamilyMatch
    rivals: list[FamilyMatch]
    words: str
    numbers: dict[str, Any]


def percent(value: Interval | float) -> str:
    """A share in percent, with half the width of its interval; what is only rounding says so."""
    mean = value.mean if isinstance(value, Interval) else value
    if abs(mean) < 1e-9:
        return "0% (to rounding)"
    if mean > 10:
        return "more than 1,000%"
    number = f"{100 * mean:.0f}%" if mean >= 0.1 else f"{100 * mean:.2g}%"
    half = value.half_width if isinstance(value, Interval) else 0.0
    if not half > 0 or (mean >= 0.1 and half < 0.005):
        return number
    return f"{number} ± {100 * half:.0f}%" if mean >= 0.1 else f"{number} ± {100 * half:.1g}%"


def which_algorithm(identified: Identification, untrained: float | None = None) -> Answer:
    """The algorithm that a model behaves like, what is tied with it, and how sure that is, in words.

    Families for scale (any polynomial, any function of S) are named only as what even they leave. Where an algorithm
    leaves no more than 1% and the nearest one contains it, the simpler one is named.

    Args:
        identified: of `identify`.
        untrained: the least distance of any algorithm from an untrained network, for scale.
    """
    named = [match for match in identified.matches if not is_for_scale(match.name)]
    tied = [match for match in named if identified.tied(match)] or named[:1]
    match = min(tied, key=lambda each: each.n_fitted)
    simpler = [m for m in named if contains(match.name, m.name) and identified.distance(m).mean <= SAME]
    match = min(simpler, key=lambda each: each.n_fitted) if simpler else match
    rivals = [m for m in tied if m is not match and not contains(m.name, match.name)
              and not contains(match.name, m.name)]  # fmt: skip
    distance = identified.distance(match)
    nearness: Nearness = "none" if not distance.mean < FAR else "like" if distance.mean <= NEAR else "nearest"
    scale = "predicting 0 leaves 100%"
    if untrained is not None:
        scale += (
            f", and of an untrained network of this shape every algorithm leaves {percent(min(untrained, 1.0))} or more"
        )
    if nearness == "like":
        words = _like(identified, match, rivals, named, scale)
    elif nearness == "nearest":
        words = (
            f"It behaves like no algorithm that was tried. The nearest, {phrase(match.name)}, leaves "
            f"{percent(distance)} of its squared predictions unexplained ({scale}), where up to {NEAR:.0%} would be "
            f"called alike{_also(rivals, ' and as near are')}."
        )
    else:
        words = (
            f"It behaves like none of the {len(named)} algorithms that were tried: the nearest, {phrase(match.name)}, "
            f"leaves {percent(distance)} of its squared predictions unexplained ({scale})."
        )
    numbers = {
        "nearness": nearness,
        "algorithm": match.name,
        "hyperparameters": match.hyperparameters,
        "distance": [distance.mean, distance.low, distance.high],
        "tied": [each.name for each in rivals],
        "untrained": untrained,
        "n_prompts": distance.n,
    }
    return Answer(_headline(nearness, match, rivals), nearness, match, rivals, words, numbers)


def _headline(nearness: Nearness, match: FamilyMatch, rivals: Sequence[FamilyMatch]) -> str:
    name = phrase(match.name)
    if nearness == "none":
        return "It behaves like no algorithm that was tried"
    if nearness == "nearest":
        return f"It behaves like no algorithm that was tried; the nearest is {name}"
    if rivals:
        return f"It behaves like {name}, which is tied with {_listed(rivals)}"
    return f"It behaves like {name}"


def _like(identified: Identification, match: FamilyMatch, rivals: list[FamilyMatch], named: list[FamilyMatch],
          scale: str) -> str:  # fmt: skip
    distance = identified.distance(match)
    unexplained = f"{percent(distance)} of its squared predictions unexplained ({scale})"
    if rivals:
        words = (
            f"It behaves like {phrase(match.name)}, but this is a tie: these {distance.n:,} prompts do not tell it "
            f"from {_listed(rivals)}. {_capital(phrase(match.name))} leaves {unexplained}."
        )
    else:
        settings = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in match.hyperparameters.items())
        settings = f" ({settings})" if settings and len(match.hyperparameters) <= 2 else ""
        words = f"It behaves like {phrase(match.name)}{settings}: fitted to its predictions, this leaves {unexplained}."
    nearer = [m for m in named if contains(m.name, match.name) and identified.distance(m).high < distance.low]
    if nearer:
        words += (
            f" {_capital(phrase(nearer[0].name))}, which contains it, comes nearer still: "
            f"{percent(identified.distance(nearer[0]).mean)}."
        )
    others = [
        m for m in named
        if m is not match and m not in rivals and not contains(m.name, match.name) and not contains(match.name, m.name)
    ]  # fmt: skip
    if others and not rivals:
        words += f" The next algorithm, {phrase(others[0].name)}, leaves {percent(identified.distance(others[0]))}."
    return words


def since_when(
    steps: Sequence[int], distances: Sequence[float], answer: Answer, threshold: float
) -> tuple[str, int | None]:
    """The first snapshot from which on a model stays as near to its algorithm as at the end, in words.

    Args:
        steps: of the snapshots.
        distances: of the model from the algorithm at each.
        answer: the algorithm.
        threshold: what counts as near.

    Returns:
        The sentence, and the step (None where the last snapshot is not near).
    """
    far = [i for i, distance in enumerate(distances) if not distance <= threshold]
    first = far[-1] + 1 if far else 0
    name = phrase(answer.match.name)
    if first == len(steps):
        words = f"At no saved snapshot up to step {steps[-1]:,} did {name} leave less than {percent(threshold)}."
        return words, None
    start = f"at step {steps[0]:,} it left {percent(distances[0])}"
    words = (
        f"Since step {steps[first]:,} of {steps[-1]:,}: from this snapshot on {name} leaves less than "
        f"{percent(threshold)} ({start}, at the end {percent(distances[-1])}; {len(steps)} snapshots)."
    )
    return words, steps[first]


def beside_published(rows: Sequence[Row]) -> str:
    """How many of the published numbers and claims hold of what was measured, by paper."""
    outcomes = [(row, row.verdict) for row in rows]
    judged = [(row, verdict) for row, verdict in outcomes if verdict in ("agrees", "differs")]
    if not judged:
        return "No number was published for this model."
    papers, right = Counter(row.source for row, _ in judged), Counter(r.source for r, v in judged if v == "agrees")
    known = read_sources()
    counts = " and ".join(
        f"{right[source]} of {n} published numbers and claims of "
        f"{authors_and_year(known[source]) if source in known else 'the paper'}"
        for source, n in papers.items()
    )
    verb = "agrees" if sum(right.values()) == 1 else "agree"
    differing = [row.quantity for row, verdict in judged if verdict == "differs"]
    words = f"{counts} {verb} with what was measured (the table below)"
    if differing:
        shown = "; ".join(differing[:2]) + (f"; and {len(differing) - 2} more" if len(differing) > 2 else "")
        words += f". What differs: {shown}"
    return f"{_capital(words)}."


def _also(matches: Sequence[FamilyMatch], words: str) -> str:
    return f";{words} {_listed(matches)}" if matches else ""


def _listed(matches: Sequence[FamilyMatch]) -> str:
    names = [phrase(match.name) for match in matches]
    if len(names) > MOST_NAMED:
        names = [*names[: MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
