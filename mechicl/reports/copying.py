"""The report on models whose tokens see later ones (von Oswald et al. 2023, section 4): loss, copying, heads."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import viz
from mechicl.analysis import measure_target_copying
from mechicl.analysis.behaviour import tuned_descent
from mechicl.learners import squared_errors
from mechicl.reports.algorithm import causes_in_words
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.heads import ATTENTION
from mechicl.reports.kind import ALGORITHM, HEADS, Kind, Part, plural
from mechicl.reports.rows import Row, below, equal
from mechicl.reports.verdict import Verdict, percent
from mechicl.statistics import interval, ratio_interval
from mechicl.tasks import LinearRegression

N_COPIED = 512  # prompts to look for copied targets
N_TUNING = 16_384  # prompts to tune the step of gradient descent on
SOURCE = "vonoswald2023"
AFTER = "error of reading targets at their inputs' tokens after the first layer"
BEFORE = "error of reading them before the first layer"
WITHOUT = "loss without what the first layer writes at inputs' tokens, over the loss"


def _losses(kind: "Copying") -> Measured:
    """Losses of the seeds, and of the opened one over that of a tuned step of gradient descent."""
    study, errors = kind.study, kind.squared_errors
    rows = [
        Row(f"half-MSE, seed {seed}", None, interval(each / 2), "prompts", "" if i else "the opened seed")
        for i, (seed, each) in enumerate(zip(study.seeds, errors, strict=True))
    ]
    tuned = tuned_descent(study.task.sample(N_TUNING, seed=kind.seed + 1, dtype=torch.float64), 1)
    reference = squared_errors(tuned, kind.held_out)[:, 0]
    ratio = ratio_interval(errors[0], reference)
    claim = "about 1 (Fig. 5)" if study.task == LinearRegression() and study.model.cfg.n_layers == 2 else None
    rows.append(Row("loss over that of one tuned step of gradient descent", claim, ratio, "prompts", "the opened seed",
                    equal(ratio, 1), SOURCE))  # fmt: skip
    data = {"mse": errors.mean(-1).tolist()}
    if "curve" not in study.record or study.is_own:
        return rows, [], data
    curve = study.record["curve"]
    drawn = viz.losses_over_training(
        curve["eval_step"], {"each seed": curve["eval_loss"]},
        references={"gradient descent, one tuned step": reference.mean().item()},
    )  # fmt: skip
    return rows, [Section("Learning", "Half the mean squared error of each seed on held-out prompts.", drawn)], data


def _copying(kind: "Copying") -> Measured:
    """Whether the first layer puts each target onto its input's token, and what is lost without that."""
    study = kind.study
    copied = measure_target_copying(study.model, study.task.sample(N_COPIED, seed=kind.seed + 2))
    means = copied.intervals()
    error = means["decoding_errors"]
    rows = [
        Row(AFTER, "copied (section 4)", error, "prompts", "0: all there, 1: nothing; below a half is called copied",
            below(error, 0.5), SOURCE),
        Row(BEFORE, None, means["decoding_errors_before"], "prompts"),
        Row(WITHOUT, None, ratio_interval(copied.errors_without, copied.errors), "prompts"),
        *(
            Row(f"share of attention from inputs to their own targets, head 0.{head}", None, interval(share), "prompts")
            for head, share in enumerate(copied.attention)
        ),
    ]  # fmt: skip
    return [replace(row, section=ATTENTION) for row in rows], [], {"copying": {n: m.mean for n, m in means.items()}}


class Copying(Kind):
    """The loss and the model's parts, for models on interleaved prompts whose tokens see later ones."""

    parts = (Part("loss", _losses), ALGORITHM, Part("copying", _copying), HEADS)
    n_held_out, prompt_seed = 4096, 2_000_003
    no_weights = (
        "No construction with this prompt format is fitted to its weights, which therefore decide nothing here."
    )

    @cached_property
    def squared_errors(self) -> Float[Tensor, "seed prompt"]:
        """Of the models."""
        return torch.stack([squared_errors(model, self.held_out)[:, 0] for model in self.study.models])

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Loss and heads ({self.study.name})"

    @property
    def lead(self) -> str:
        """What was measured, on what."""
        task = self.study.task
        return (
            f"{self.study.name}: {plural(len(self.study.models), 'seed')}, {self.study.model.cfg.n_layers} layers, on "
            f"{task.n_context} points in {task.x_dim} dimensions; {self.n_prompts:,} held-out prompts (seed "
            f"{self.seed}). {self.study.chosen}"
        )

    @property
    def data(self) -> dict[str, Any]:
        """The prompts."""
        return {"seed": self.seed, "n_prompts": self.n_prompts}

    def verdict(self, comparison: Comparison) -> Verdict:
        """Copying is what is known of the weights."""
        rows = {row.quantity: row.ends[1] for row in comparison.rows if row.quantity in (AFTER, BEFORE, WITHOUT)}
        words = ""
        if AFTER in rows:
            left = f"(a linear readout there leaves {percent(rows[AFTER])} of them, {percent(rows[BEFORE])} before the"
            words = (
                f"Its first layer copies targets onto their inputs' tokens {left} layer), and it needs this: without, "
                f"the squared error is {rows[WITHOUT]:.2g} times as large. "
            )
            if not any(row.quantity == AFTER and row.verdict == "agrees" for row in comparison.rows):
                words = (
                    f"Its first layer does not copy targets onto their inputs' tokens: a linear readout there leaves "
                    f"{percent(rows[AFTER])} of them. "
                )
        return self.question.verdict(comparison, words + self.no_weights, causes_in_words(comparison.rows))
