"""The report on models whose tokens see later ones (von Oswald et al. 2023, section 4): loss, copying, heads."""

from dataclasses import replace

import torch

from mechicl.analysis import measure_target_copying
from mechicl.analysis.behaviour import tuned_descent
from mechicl.learners import squared_errors
from mechicl.reports.comparison import Comparison, Measured
from mechicl.reports.heads import ATTENTION
from mechicl.reports.kind import ALGORITHM, HEADS, HISTORY, Kind, Part
from mechicl.reports.rows import Row, below, equal
from mechicl.reports.verdict import Verdict, percent
from mechicl.statistics import interval, ratio_interval
from mechicl.tasks import LinearRegression

N_COPIED = 512  # prompts to look for copied targets
_N_TUNING = 16_384  # prompts to tune the step of gradient descent on
_SOURCE = "vonoswald2023"
AFTER = "error of reading targets at their inputs' tokens after the first layer"
BEFORE = "error of reading them before the first layer"
WITHOUT = "loss without what the first layer writes at inputs' tokens, over the loss"


def _losses(kind: "Copying") -> Measured:
    study, errors = kind.study, kind.squared_errors
    rows = [
        Row(f"squared error (MSE), seed {seed}", None, interval(each), "prompts", "" if i else "the opened seed")
        for i, (seed, each) in enumerate(zip(study.seeds, errors, strict=True))
    ]
    tuned = tuned_descent(study.task.sample(_N_TUNING, seed=kind.seed + 1, dtype=torch.float64), 1)
    reference = squared_errors(tuned, kind.held_out)[:, 0]
    ratio = ratio_interval(errors[0], reference)
    claim = "about 1 (Fig. 5)" if study.task == LinearRegression() and study.model.cfg.n_layers == 2 else None
    rows.append(Row("loss over that of one tuned step of gradient descent", claim, ratio, "prompts", "the opened seed",
                    equal(ratio, 1), _SOURCE))  # fmt: skip
    words = "Squared error of each seed on held-out prompts."
    drawn = kind.learning(words, {"gradient descent, one tuned step": reference.mean().item()})
    return rows, drawn, {"mse": errors.mean(-1).tolist()}


def _copying(kind: "Copying") -> Measured:
    """Test if the first layer copies each target onto its input's token, and measure the loss without the copy."""
    study = kind.study
    copied = measure_target_copying(study.model, study.task.sample(N_COPIED, seed=kind.seed + 2))
    means = copied.intervals()
    error = means["decoding_errors"]
    rows = [
        Row(AFTER, "copied (section 4)", error, "prompts", "0 is perfect, 1 is useless; below a half counts as copied",
            below(error, 0.5), _SOURCE),
        Row(BEFORE, None, means["decoding_errors_before"], "prompts"),
        Row(WITHOUT, None, ratio_interval(copied.errors_without, copied.errors), "prompts"),
        *(
            Row(f"share of attention from inputs to their own targets, head 0.{head}", None, interval(share), "prompts")
            for head, share in enumerate(copied.attention)
        ),
    ]  # fmt: skip
    return [replace(row, section=ATTENTION) for row in rows], [], {"copying": {n: m.mean for n, m in means.items()}}


class Copying(Kind):
    """Loss, copying and components of models on interleaved prompts whose tokens see later ones."""

    parts = (Part("loss", _losses), ALGORITHM, Part("copying", _copying), HEADS, HISTORY)
    heading = "Loss and heads ({name})"
    n_held_out, prompt_seed = 4096, 2_000_003
    no_weights = "No construction with this prompt format is fitted to its weights."

    def verdict(self, comparison: Comparison) -> Verdict:
        """Report whether the first layer copies targets next to the usual sentences."""
        rows = {row.quantity: row for row in comparison.rows if row.quantity in (AFTER, BEFORE, WITHOUT)}
        if not rows:
            return self.question.verdict(comparison, self.no_weights)
        after, before, without = (rows[name].ends[1] for name in (AFTER, BEFORE, WITHOUT))
        copies = rows[AFTER].verdict == "agrees"
        found = f"Its first layer {'copies' if copies else 'does not copy'} targets onto their inputs' tokens"
        words = (
            f"{found}: the relative error of a linear readout is {percent(after)} after the layer and "
            f"{percent(before)} before. "
            + (f"Without the copies the squared error is {without:.2g} times as large. " if copies else "")
            + self.no_weights
        )
        made = self.question.verdict(comparison, words)
        return replace(made, kind=f"{made.kind} {found}.".lstrip())
