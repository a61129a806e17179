"""The part of reports that asks which algorithm a model behaves like: the nearest families, and since which step."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import viz
from mechicl.algorithms.card import FitProblem, cards
from mechicl.algorithms.preconditioned import WITH_CONSTANT
from mechicl.analysis import Identification, identify
from mechicl.learners import Learner
from mechicl.models import PromptedModel, build
from mechicl.prompts import Prompts
from mechicl.reports.causes import interventions_in_words
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.rows import Row
from mechicl.reports.study import Study
from mechicl.reports.verdict import NEAR, Answer, Verdict, beside_published, percent, since_when, which_algorithm
from mechicl.statistics import Interval, ratio_interval
from mechicl.viz.behaviour import identified_filters
from mechicl.viz.verdict import verdict_figure

N_IDENTIFY = 1024  # prompts to fit families on, and to rank them on
N_CONTROL = 256  # for the untrained network, which nothing comes near
N_SNAPSHOT = 256  # prompts at each snapshot
SEED = 5_000_003
LIKENESS = "Likeness is not cause: no test here interchanges what the model and the algorithm compute."
WORDS = {
    "families": """
        Every family of algorithms is fitted to the model's predictions of the query, and ranked by the squared distance
        of predictions on other prompts, relative to the model's squared predictions: 0 for the same, 1 for predicting
        0.""",
    "filters": """
        All these learners multiply the part of the targets along an eigenvector of S by a function of its eigenvalue.
        The line of 'any function of S' is free, piecewise linear between 20 knots.""",
}


@dataclass(frozen=True, eq=False)
class AlgorithmQuestion:
    """Which algorithm a study's opened model behaves like; everything is measured once, when it is first asked for.

    Attributes:
        study: what is opened.
        progress: show progress bars.
        n_prompts: to fit families on, and to rank them on.
        seed: of the prompts to fit on; those to rank on have the next.
    """

    study: Study
    progress: bool = True
    n_prompts: int = N_IDENTIFY
    seed: int = SEED

    @cached_property
    def identified(self) -> Identification:
        """The families, ranked."""
        options: dict[str, Any] = {"n_prompts": self.n_prompts, "seed": self.seed, "progress": self.progress}
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # the verdict tells of untrained models
            return identify(self.study.model, self.study.task, also=self.study.compare, **options)

    @cached_property
    def no_answer(self) -> str:
        """Why families of algorithms cannot be fitted to this model; empty if they can."""
        if self.study.task.n_context < 1:
            return "there is no context to learn from"
        try:
            identify(self.study.model, self.study.task, n_prompts=2, steps=1, seed=self.seed, progress=False)
        except (ValueError, RuntimeError, TypeError) as error:
            return f"families of algorithms cannot be fitted to its predictions: {' '.join(str(error).split())}"
        return ""

    @cached_property
    def untrained(self) -> float | None:
        """The least distance of any named algorithm from a network of this shape that was never trained."""
        model = self.study.model
        if not isinstance(model, PromptedModel):
            return None
        control = build(model.cfg).eval()
        task, n = self.study.task, min(self.n_prompts, N_CONTROL)
        fitting, held_out = (task.sample(n, seed=self.seed + i, dtype=torch.float64) for i in range(2))
        # one step leaves out families that take long to fit and that "any function of S" contains
        problem = FitProblem(fitting, predictions(control, fitting)[None], steps=1)
        ours = predictions(control, held_out)
        fits = (fit for card in cards() if card is not WITH_CONSTANT for fit in card.members(problem))
        return min(_distance(predictions(fit.learner, held_out), ours).mean for fit in fits)

    @cached_property
    def answer(self) -> Answer:
        """Which algorithm, in words and numbers."""
        return which_algorithm(self.identified, self.untrained)

    @cached_property
    def over_training(self) -> tuple[tuple[int, ...], Float[Tensor, "step seed"]] | None:
        """Steps of the snapshots, and the distance of every seed from the named algorithm there."""
        snapshots = self.study.snapshots
        if snapshots is None or self.study.is_own:
            return None
        prompts = self.study.task.sample(N_SNAPSHOT, seed=self.seed + 3, dtype=torch.float64)
        learner = self.answer.match.learner
        assert learner is not None
        predicted = learner.predict(prompts)
        rows = [
            [relative_distance(model, predicted, prompts) for model in self.study.models_at(i)]
            for i in range(len(snapshots.steps))
        ]
        return snapshots.steps, torch.tensor(rows, dtype=torch.float64)

    def part(self) -> Measured:
        """Rows, pictures and numbers."""
        identified = self.identified
        rows = [
            Row(f"distance from {match.name}, fitted to the model", None, identified.distance(match), "prompts",
                "of the squared predictions" + ("; tied with the nearest" if identified.tied(match) else ""))
            for match in identified.matches[:3]
        ]  # fmt: skip
        rows += [
            Row(f"distance from the best of {match.name}", None, identified.distance(match), "prompts",
                "tuned on the task")
            for match in identified.limits
        ]  # fmt: skip
        rows += self._baselines()
        sections = [
            Section("Which algorithm is it?", " ".join(WORDS["families"].split()), viz.plot(identified)),
            Section("Seen in the eigenbasis of the inputs", WORDS["filters"], identified_filters(identified)),
        ]
        return rows, sections, {"families": identified.to_dataframe().to_dict("records")}

    def verdict(self, comparison: Comparison, weights: str = "", causes: str = "") -> Verdict:
        """The sentences and the picture that the page opens with.

        Args:
            comparison: all that was measured.
            weights: what the weights say, in a sentence.
            causes: what ablation and patching say.
        """
        answer, since = self.answer, None
        threshold = max(NEAR, 2 * self.identified.distance(answer.match).mean)
        if answer.nearness == "none":
            words = "There is no algorithm that could have come at some step."
        elif self.over_training is None:
            words = "No snapshots were saved during training, so that this page cannot say since which step."
        else:
            steps, distances = self.over_training
            words, since = since_when(steps, distances[:, 0].tolist(), answer, threshold)
        published = beside_published(comparison.rows)
        sentences = {
            "Which algorithm?": answer.words,
            "Since when?": words,
            "Do weights, causes and papers agree?": " ".join(
                filter(None, (weights, causes, interventions_in_words(comparison.rows) or LIKENESS, published))
            ),
        }
        picture = verdict_figure(self.identified, answer.match, answer.rivals, untrained=answer.numbers["untrained"],
                                 over_training=self.over_training, near=NEAR)  # fmt: skip
        numbers = {**answer.numbers, "since_step": since, "seed": self.study.seeds[0], "chosen": self.study.chosen}
        return Verdict(answer.headline, sentences, picture, numbers)

    def _baselines(self) -> list[Row]:
        """Each of the learners that the user compares with, as it came."""
        rows = []
        for match in self.identified.matches:
            if match.name in self.study.compare:
                ratio = ratio_interval(match.squared_errors, self.identified.squared_errors)
                distance = self.identified.distance(match)
                rows += [
                    Row(f"distance from {match.name}", None, distance, "prompts", "of the squared predictions"),
                    Row(f"squared error of {match.name} over the model's", None, ratio, "prompts"),
                ]
        return rows


def predictions(learner: Learner, prompts: Prompts) -> Float[Tensor, "prompt y"]:
    """A learner's predictions of the queries, float64 on the CPU, whatever precision it computes in."""
    parts = []
    with torch.no_grad():
        for part in prompts.split(512):
            dtype = getattr(getattr(learner, "cfg", None), "torch_dtype", prompts.dtype)
            parts.append(learner.predict(part.to(dtype)).cpu().double())
    return torch.cat(parts)


def relative_distance(model: Learner, predicted: Float[Tensor, "prompt y"], prompts: Prompts) -> float:
    """Squared distance of a model's predictions from others, over its squared predictions."""
    return _distance(predicted, predictions(model, prompts)).mean


def causes_in_words(rows: Sequence[Row]) -> str:
    """What ablating and patching heads showed, from their rows; empty where they were not measured."""
    words = []
    for row in rows:
        if not isinstance(row.measured, Interval):
            continue
        where = row.note.partition(", chosen")[0]
        if row.quantity.startswith("change of the loss (MSE) without the head"):
            needed = "" if row.measured.low > 0 else ", which is nothing to speak of"
            words.append(f"without {where} the squared error changes by {row.measured}{needed}")
        if row.quantity.startswith("share of the loss recovered when one head's output"):
            words.append(f"{where}, put back alone, recovers {percent(row.measured)} of what exchanged labels cost")
    return f"By ablation and patching: {'; '.join(words)}. That says where, not what." if words else ""


def _distance(predicted: Any, ours: Any) -> Interval:
    return ratio_interval((predicted - ours).square().mean(-1), ours.square().mean(-1))
