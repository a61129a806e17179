"""Families of algorithms ranked by how well they predict a model's outputs, and how sure the answer is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.card import ROUNDING
from mechicl.analysis.behaviour.fingerprints import Fingerprint
from mechicl.analysis.behaviour.table_fingerprints import TableFingerprint
from mechicl.base.arguments import checked
from mechicl.learners import Learner
from mechicl.statistics import Interval, Result, interval, ratio_interval
from mechicl.statistics.intervals import resample_counts
from mechicl.statistics.results import COSINE

NONE = "none of these"
EVIDENCE, PRICE, ELSEWHERE = 16.0, 0.25, 2e-3
"""Independent observations that a distance counts for, their number that a fitted parameter costs, and the distance of
"none of these": about that of a copy with small errors.

More prompts do not make a nearer family likelier, since a model that runs an algorithm inexactly deviates in the same
way on all of them. The numbers were chosen on variations of known models and on learners of no family;
`analyses/known_families.py` tests them on others.
"""
HERE, AWAY = 0.01, 10.0  # a family within this distance on the task's prompts, and this many times farther on others
_N_RESAMPLES = 200


@dataclass(frozen=True, eq=False)
class FamilyMatch(Result):
    """The member of a family of algorithms that predicts most like the model, on held-out prompts.

    Attributes:
        learner: the member; None in a result that was loaded.
        squared_distances: squared distances of its predictions from the model's, `[prompt]`, averaged over the target's
            dimensions.
        sensitivity_cosine: cosine of d prediction / d query with the model's, `[prompt]`.
        changed_distances: squared distances relative to the model's squared predictions, `[prompt]`, averaged over the
            task's prompts and changed ones (see `Identification.changes`).
        n_given: how many numbers are given in addition to the fitted ones: 1 if the number of steps is.
        excluded: why it cannot be the answer: the model violates a property that the algorithm has by theorem, or it
            contains a simpler one that is as near; empty if it can.
        is_bound: True if it only bounds other families, since it fits any function of S.
    """

    name: str
    learner: Learner | None = field(metadata={"stored": False})
    hyperparameters: dict[str, float]
    n_fitted: int
    squared_distances: Float[Tensor, "prompt"]
    sensitivity_cosine: Float[Tensor, "prompt"] = field(metadata=COSINE)
    squared_errors: Float[Tensor, "prompt"]
    changed_distances: Float[Tensor, "prompt"]
    n_given: int = 0
    excluded: str = ""
    is_bound: bool = False

    @property
    def family(self) -> str:
        """The name without numbers of steps: "Newton" for "Newton, 3 iterations"."""
        return self.name.split(",")[0]


def family_weights(
    matches: Sequence[FamilyMatch], evidence: float = EVIDENCE, price: float = PRICE, elsewhere: float = ELSEWHERE
) -> Float[Tensor, "match"]:
    """Compute the probability of each match from its distances and its simplicity; the rest of 1 is "none of these".

    With D its mean distance on all changes (1e-10 is added for rounding) and k its fitted numbers, its weight is
    `D^(-(N - c k)/2)`: the likelihood of N (`evidence`) observations with an unknown variance, of which every fitted
    number takes c (`price`; 1 in Bayes' rule with a flat prior). Everything outside the families has the weight of a
    family at the distance `elsewhere`. Weights are averaged over resampled prompts; those of excluded matches are 0.
    Source: Schwarz 1978; Efron 1979.
    """
    rows = [torch.full_like(m.changed_distances, math.inf) if m.excluded else m.changed_distances for m in matches]
    values = torch.stack([*rows, torch.full_like(rows[0], elsewhere)]).double()
    finite, n = values.isfinite().all(1), values.shape[1]
    means = values.masked_fill(~finite[:, None], 1.0) @ resample_counts(n, _N_RESAMPLES).T / n + ROUNDING
    n_numbers = torch.tensor([*(match.n_fitted + match.n_given for match in matches), 0])
    scores = -0.5 * (evidence - price * n_numbers[:, None].double()) * means.log()
    return scores.masked_fill(~finite[:, None], -math.inf).softmax(0).mean(1)[:-1]


def totals(matches: Sequence[FamilyMatch], weights: Float[Tensor, "match"]) -> dict[str, float]:
    """Add up the weights of each family, the largest first; mere bounds count for "none of these"."""
    found = {NONE: 1 - weights.sum().item()}
    for match, weight in zip(matches, weights.tolist(), strict=True):
        name = NONE if match.is_bound else match.family
        found[name] = found.get(name, 0.0) + weight
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


@dataclass(frozen=True, eq=False)
class Identification(Result):
    """Families of algorithms, ranked by how well their best member predicts the model's outputs on held-out prompts.

    Attributes:
        matches: members fitted to the model's predictions, the nearest first; of those that predict the same up to
            rounding, the one with the fewest fitted numbers comes first.
        limits: the best learners of their order on the task, fitted to the targets: how far is the model from them?
        squared_predictions: the model's squared predictions, `[prompt]`, averaged over the target's dimensions.
        squared_errors: the model's squared errors, `[prompt]`, averaged likewise.
        eigenvalues: eigenvalues of the held-out contexts' `S = XᵀX`, `[x prompt]`.
        fingerprint: properties of the model, measured without a list of algorithms; None if the context is one point.
        changes: the prompts on which families were compared, the task's own ("plain") and changed ones, with the
            model's loss there relative to that of predicting 0; without those that take more than half of its gain.
        not_fitted: families that were not tried, with the property that the model has and all their members lack.
        calibrated: True if `confidence` was calibrated for learners of this kind.
        note: a caveat if the families are not made for the task, or the model looks untrained on it; else empty.
    """

    matches: list[FamilyMatch]
    limits: list[FamilyMatch]
    squared_predictions: Float[Tensor, "prompt"]
    squared_errors: Float[Tensor, "prompt"]
    eigenvalues: Float[Tensor, "x prompt"]
    fingerprint: Fingerprint | TableFingerprint | None = None
    changes: dict[str, float] = field(default_factory=dict)
    not_fitted: dict[str, str] = field(default_factory=dict)
    calibrated: bool = True
    note: str = ""

    @property
    def best(self) -> FamilyMatch:
        """The nearest family's member: the one with the smallest `distance`."""
        return self.matches[0]

    @property
    def likeliest(self) -> FamilyMatch:
        """The likeliest member of the likeliest family (see `weights`), which need not be the nearest."""
        family = next((name for name in self.weights if name != NONE), None)
        members = [i for i, match in enumerate(self.matches) if match.family == family and not match.is_bound]
        return self.matches[max(members, key=lambda i: self._weights[i].item())] if members else self.best

    @property
    def answer(self) -> FamilyMatch:
        """The `likeliest` member, or one without a learner that is named "none of these" if that is likelier."""
        if next(iter(self.weights)) != NONE:
            return self.likeliest
        nan = torch.full_like(self.squared_predictions, math.nan)
        return FamilyMatch(NONE, None, {}, 0, nan, nan, nan, nan)

    @property
    def confidence(self) -> float:
        """The probability that `answer` is right about the family, or that there is none in the list.

        NaN for learners of tables, for which it is not `calibrated`.

        It is calibrated on models whose algorithm is known, plain, hidden and noisy, and on learners of no family, in
        about equal parts (`analyses/known_families.py`), for the prompts in `changes`. It has not been tested for
        models that change their algorithm elsewhere.
        """
        return self.weights[self.answer.family] if self.calibrated else math.nan

    @property
    def weights(self) -> dict[str, float]:
        """The probability of each family (`family_weights`), over its numbers of steps, and of "none of these".

        Families that only bound others (such as any function of S) count for "none of these".
        """
        return totals(self.matches, self._weights)

    @cached_property
    def _weights(self) -> Tensor:
        return family_weights(self.matches)

    @property
    def verdict(self) -> str:
        """The answer in a sentence: a name where it is safe, and always the kind of learner."""
        kind = self.fingerprint.description if self.fingerprint else ""
        sure = f" (with a confidence of {self.confidence:.0%})" if self.calibrated else ""
        if self.answer.name != NONE:
            return f"{self.answer.name}{sure}" + (f"; {kind}" if kind else "")
        near = next((match for match in self.matches if not match.is_bound), self.best)
        distance = self.distance(near).mean
        words = f"the nearest is {near.name}, at a distance of {distance:.2g}"
        elsewhere = near.changed_distances.mean().item()
        if distance <= HERE and elsewhere > AWAY * distance:
            words = (
                f"{near.name} matches on the task's own prompts alone ({distance:.2g}; {elsewhere:.2g} on changed ones)"
            )
        return f"{NONE}{sure}: {kind + '; ' if kind else ''}{words}"

    @checked
    def distance(self, match: FamilyMatch) -> Interval:
        """Return E|member - model|² / E|model|², with a 95% interval: 0 if equal, 1 if the member predicts 0."""
        return ratio_interval(match.squared_distances, self.squared_predictions)

    @checked
    def gap(self, match: FamilyMatch) -> Interval:
        """Return the `distance` of a match minus that of `best`, with a 95% interval over the same prompts."""
        return ratio_interval(match.squared_distances - self.best.squared_distances, self.squared_predictions)

    @checked
    def tied(self, match: FamilyMatch) -> bool:
        """Return True if these prompts do not distinguish it from the best family.

        The gap is rounding, or its interval contains 0 and the match is not farther on the typical prompt either.
        """
        gap, distances, best = self.gap(match), match.squared_distances, self.best.squared_distances
        farther = interval((distances - best) / (distances + best).clamp(min=1e-300), within=(-1, 1))
        return match is self.best or gap.mean < ROUNDING or (0 in gap and farther.low <= 0)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per family, ranked, then the limits; distances with 95% intervals over prompts.

        `sensitivity_rank` is the place by mean sensitivity cosine, last where predictions have no derivative.
        """
        rows = []
        for kind, matches in (("family", self.matches), ("limit", self.limits)):
            cosines = [match.sensitivity_cosine.mean().nan_to_num(nan=-math.inf).item() for match in matches]
            for rank, match in enumerate(matches, start=1):
                distance, cosine, ratio = self._measured(match)
                rows.append({
                    "kind": kind, "rank": rank, "name": match.name, "fitted": match.n_fitted,
                    "sensitivity_rank": 1 + sum(other > cosines[rank - 1] for other in cosines),
                    **distance.columns("distance"),
                    "changed_distance": match.changed_distances.mean().item(), "excluded": match.excluded,
                    "tied": kind == "family" and self.tied(match),
                    **cosine.columns("sensitivity_cosine", "cosine_"), **ratio.columns("loss_over_model", "loss_"),
                    "hyperparameters": ", ".join(f"{k}={v:.4g}" for k, v in match.hyperparameters.items()),
                })  # fmt: skip
        return pd.DataFrame(rows)

    def _measured(self, match: FamilyMatch) -> tuple[Interval, Interval, Interval]:
        cosine = match.intervals()["sensitivity_cosine"]
        return self.distance(match), cosine, ratio_interval(match.squared_errors, self.squared_errors)

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("family", f"{'distance':>20} {'sensitivity cosine':>24} {'loss / model':>20}  fitted")]
        for title, matches in (("", self.matches), ("the best on the task itself", self.limits)):
            lines += [(title, "")] if title else []
            for match in matches:
                distance, cosine, ratio = map(str, self._measured(match))
                settings = ", ".join(f"{k}={v:.4g}" for k, v in list(match.hyperparameters.items())[:4])
                more = ", ..." if len(match.hyperparameters) > 4 else ""
                lines.append((match.name, f"{distance:>20} {cosine:>24} {ratio:>20}  {settings}{more}".rstrip()))
        lines.append(("answer", self.verdict))
        return [*lines, ("note", self.note)] if self.note else lines
