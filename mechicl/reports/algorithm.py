"""The part of reports on the algorithm that a model behaves like: the nearest families, and since which step."""

import warnings
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
from mechicl.checkpoints import Study
from mechicl.learners.learners import query_predictions
from mechicl.models import PromptedModel, build
from mechicl.reports.causes import facts_on_interventions, interventions_as_text
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.heads import heads_as_text
from mechicl.reports.rows import Row
from mechicl.reports.verdict import (
    NEAR,
    NOT_TESTED,
    Answer,
    Verdict,
    agreement_with_papers,
    capital,
    since_when,
    which_algorithm,
)
from mechicl.statistics import Interval, ratio_interval
from mechicl.viz.behaviour import identified_filters, verdict_figure

N_IDENTIFY = 1024  # prompts to fit families on, and to rank them on
N_UNTRAINED = 256  # prompts for the untrained network
N_SNAPSHOT = 256  # prompts at each snapshot
ALGORITHM_SEED = 5_000_003
CORRELATIONAL = "whether it runs the algorithm inside: only predictions were compared with the algorithm's"
IDENTIFICATION = """Every family of algorithms is fitted to the model's predictions of the query. Families are ranked by
    the squared distance of predictions on other prompts, relative to the model's squared predictions: 0% if they are
    equal, 100% for predicting 0."""
FILTERS = """All these learners multiply the component of the targets along each eigenvector of S by a function of its
    eigenvalue. The line of 'any function of S' is free: piecewise linear between 20 knots."""


@dataclass(frozen=True, eq=False)
class AlgorithmQuestion:
    """The algorithm that a study's opened model behaves like; everything is measured once, on first use.

    Families are fitted on `n_prompts` prompts of `seed`, and ranked on as many of the next seed.
    """

    study: Study
    n_prompts: int = N_IDENTIFY
    seed: int = ALGORITHM_SEED

    @cached_property
    def identified(self) -> Identification:
        """The families, ranked; the page shows the note that `identify` also warns with."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return identify(self.study.model, self.study.task, also=self.study.compare, n_prompts=self.n_prompts,
                            seed=self.seed)  # fmt: skip

    @cached_property
    def no_answer(self) -> str:
        """The reason why families of algorithms cannot be fitted to this model; empty if they can."""
        if self.study.task.n_context < 1:
            return "there is no context to learn from"
        try:
            identify(self.study.model, self.study.task, n_prompts=2, steps=1, seed=self.seed, progress=False)
        except (ValueError, RuntimeError, TypeError) as error:
            return f"families of algorithms cannot be fitted to its predictions: {' '.join(str(error).split())}"
        return ""

    @cached_property
    def untrained(self) -> float | None:
        """The least distance of any named algorithm from an untrained network of this shape."""
        model = self.study.model
        if not isinstance(model, PromptedModel):
            return None
        control = build(model.cfg).eval()
        task, n = self.study.task, min(self.n_prompts, N_UNTRAINED)
        fitting, held_out = (task.sample(n, seed=self.seed + i, dtype=torch.float64) for i in range(2))
        # one step leaves out families that take long to fit and that "any function of S" contains
        problem = FitProblem(fitting, query_predictions(control, fitting)[None], steps=1)
        ours = query_predictions(control, held_out)
        fits = (fit for card in cards() if card is not WITH_CONSTANT for fit in card.members(problem))
        return min(_distance(query_predictions(fit.learner, held_out), ours).mean for fit in fits)

    @cached_property
    def answer(self) -> Answer:
        """The algorithm, with its evidence."""
        return which_algorithm(self.identified, self.untrained)

    @cached_property
    def over_training(self) -> tuple[tuple[int, ...], Float[Tensor, "step seed"]] | None:
        """Steps of the snapshots, and the distance of every seed from the named algorithm there."""
        checkpoint, snapshots = self.study.checkpoint, self.study.snapshots
        if checkpoint is None or snapshots is None or self.study.is_own:
            return None
        prompts = self.study.task.sample(N_SNAPSHOT, seed=self.seed + 3, dtype=torch.float64)
        learner = self.answer.match.learner
        assert learner is not None
        predicted = query_predictions(learner, prompts)
        rows = [
            [_distance(predicted, query_predictions(model, prompts)).mean for model in models]
            for models in checkpoint.iterate_snapshots()
        ]
        return snapshots.steps, torch.tensor(rows, dtype=torch.float64)

    def part(self) -> Measured:
        """Return rows, pictures and numbers."""
        identified, rows = self.identified, []
        fitted = [(f"distance from {match.name}, fitted to the model", match) for match in identified.matches[:3]]
        for quantity, match in fitted:
            note = "share of the squared predictions" + ("; tied with the nearest" if identified.tied(match) else "")
            rows.append(Row(quantity, None, identified.distance(match), "prompts", note, share=True))
        rows += [
            Row(f"distance from the best of {match.name}", None, identified.distance(match), "prompts",
                "tuned on the task", share=True)
            for match in identified.limits
        ]  # fmt: skip
        for match in [match for match in identified.matches if match.name in self.study.compare]:
            ratio = ratio_interval(match.squared_errors, identified.squared_errors)
            rows += [
                Row(f"distance from {match.name}", None, identified.distance(match), "prompts",
                    "share of the squared predictions", share=True),
                Row(f"squared error of {match.name} over the model's", None, ratio, "prompts"),
            ]  # fmt: skip
        sections = [
            Section("Which algorithm is it?", IDENTIFICATION, viz.plot(identified, title="Distances of algorithms")),
            Section("Seen in the eigenbasis of the inputs", FILTERS, identified_filters(identified)),
        ]
        return rows, sections, {"families": identified.to_dataframe().to_dict("records")}

    def verdict(self, comparison: Comparison, weights: str = "") -> Verdict:
        """Make the sentences and the picture that the page opens with; `weights` is a sentence on the weights."""
        answer, since, sentences = self.answer, None, {"Which algorithm?": self.answer.words}
        gaps = []
        if answer.nearness != "none" and self.over_training is not None:
            steps, distances = self.over_training
            threshold = max(NEAR, 2 * self.identified.distance(answer.match).mean)
            sentences["Since when?"], since = since_when(steps, distances[:, 0].tolist(), answer, threshold)
        elif answer.nearness != "none":
            gaps.append("since which step it behaves so (no snapshots were saved)")
        interventions = interventions_as_text(comparison.rows)
        gaps += [] if interventions else [CORRELATIONAL]
        evidence = (weights, heads_as_text(comparison), interventions, agreement_with_papers(comparison.rows))
        sentences["Do weights, causal tests and papers agree?"] = " ".join(filter(None, evidence))
        if gaps:
            sentences[NOT_TESTED] = f"{capital('; '.join(gaps))}."
        untrained = answer.numbers["untrained"]
        picture = verdict_figure(self.identified, answer.match, answer.rivals, untrained=untrained, near=NEAR)
        numbers = {**answer.numbers, "since_step": since}
        sentences = {title: words for title, words in sentences.items() if words}
        facts = [*answer.facts, *facts_on_interventions(comparison.rows)]
        fingerprint = self.identified.fingerprint
        kind = "" if fingerprint is None else f"Kind: {fingerprint.description.partition(';')[0]}."
        return Verdict(answer.headline, sentences, picture, numbers, facts, kind)


def _distance(predicted: Any, ours: Any) -> Interval:
    return ratio_interval((predicted - ours).square().mean(-1), ours.square().mean(-1))
