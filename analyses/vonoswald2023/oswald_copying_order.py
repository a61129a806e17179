"""The order of copying and the fall of the loss (von Oswald et al. 2023, Fig. 5, right)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from analyses.support.script import Option, script
from analyses.support.token_sensitivity import TokenSensitivity, measure_token_sensitivity
from mechicl.analysis.behaviour import tuned_descent
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import squared_errors
from mechicl.models import build
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import median_interval
from mechicl.viz.elements import COLORS, add_line, on_log_axis, panel, panels

READS, FALLS = 3, 0.05
"""Ratio of derivatives above which a token counts as read, and share by which a loss must have fallen."""


@script(
    checkpoints=("copy-2l-dense", "copy-2l-linear-dense"),
    n_prompts=Option(16, "held-out prompts that derivatives are taken on"),
    seed=1_000_003,
)
def compare(args: Any) -> Comparison:
    """The step from which the next token is read, and the last one before the loss has fallen, of every seed."""
    rows: list[Row] = []
    figures: list[Section] = []
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        prompts = checkpoint.task.sample(args.n_prompts, seed=args.seed)
        more_rows, figure = _order(checkpoint, prompts)
        rows += more_rows
        figures.append(figure)
    lead = (
        f"Two layers of attention on alternate tokens, x ~ U(-1/2, 1/2), d = n = 10, trained at a constant rate. A "
        f"token is read from the first snapshot on after which the norm of d first layer / d token at the context's x "
        f"tokens stays above {READS} times that for others (mean over {args.n_prompts} prompts, seed {args.seed}); the "
        f"loss falls where it first is {FALLS:.0%} below that of predicting 0."
    )
    return Comparison("What comes first, copying or the fall (section 4, Fig. 5)", lead, rows, figures)


@dataclass(frozen=True)
class Order:
    """The order, in one seed, of reading the next token and the fall of the loss."""

    # first snapshot from which on the first layer's sensitivity to the next token is above READS times that to the
    # others; None where it never is
    reads: int | None
    previous: int | None  # the same of the token before, in the next one's place
    # last evaluation at which the loss has not fallen by FALLS of that of predicting 0; None if it never falls
    unfallen: int | None

    def first(self, reads: int | None) -> bool:
        """Whether a token is read before the loss falls."""
        return reads is not None and self.unfallen is not None and reads <= self.unfallen


def _order(checkpoint: Checkpoint, prompts: Prompts) -> tuple[list[Row], Section]:
    """Which comes first in every seed of a checkpoint with weights from around the fall, and by how much."""
    assert checkpoint.snapshots is not None
    steps, name = checkpoint.snapshots.steps, checkpoint.name
    sensitivities = [
        [measure_token_sensitivity(m, prompts) for m in checkpoint.models_at(i)] for i in range(len(steps))
    ]
    following = torch.tensor([[(s.next.mean() / s.other.mean()).item() for s in row] for row in sensitivities])
    previous = torch.tensor([[_previous_over_others(s) for s in row] for row in sensitivities])
    curve, training = checkpoint.record["curve"], checkpoint.record["training"]
    nothing = (
        checkpoint.task.sample(training["eval_prompts"], seed=training["eval_seed"]).query.ys.square().mean().item()
    )
    losses = torch.tensor(curve["eval_loss"])
    orders = []
    for seed in range(losses.shape[1]):
        fallen = (losses[:, seed] < (1 - FALLS) * nothing).tolist()
        unfallen = curve["eval_step"][fallen.index(True) - 1] if any(fallen) else None
        orders.append(Order(_last_rise(steps, following[:, seed]), _last_rise(steps, previous[:, seed]), unfallen))
    n = len(orders)
    fallen = [order for order in orders if order.unfallen is not None]
    words = "; ".join(f"{order.reads or 'never'} and {order.unfallen or 'never'}" for order in orders)
    leads = [order.unfallen - order.reads for order in orders if order.reads and order.unfallen]
    untrained = [build(checkpoint.models[0].cfg, 1000 + i).eval() for i in range(n)]
    above = sum((s.next.mean() > READS * s.other.mean()).item()
                for s in (measure_token_sensitivity(model, prompts) for model in untrained))  # fmt: skip
    before = f"before the loss has fallen by {FALLS:.0%}"
    rows = [
        Row(f"{name}: seeds that read the next token {READS} times more than others {before}", "all",
            f"{sum(order.first(order.reads) for order in orders)} of {n} seeds", "seeds",
            f"step of the one, last step before the other, by seed: {words}"),
        Row(f"{name}: seeds whose loss falls by {FALLS:.0%}", None, f"{len(fallen)} of {n} seeds", "seeds"),
        Row(f"{name}: seeds that read the token before {READS} times more than others {before}", None,
            f"{sum(order.first(order.previous) for order in orders)} of {n} seeds", "seeds"),
        Row(f"{name}: untrained models that read the next token {READS} times more than others", None,
            f"{above} of {n} models", "models"),
    ]  # fmt: skip
    if leads:
        rows.append(Row(f"{name}: steps from reading the next token to the fall", None,
                        median_interval(torch.tensor(leads, dtype=torch.float64)), "seeds"))  # fmt: skip
    return rows, _figure(checkpoint, [row[0] for row in sensitivities])


def _last_rise(steps: Sequence[int], ratios: torch.Tensor) -> int | None:
    """The first step from which on the ratio is above READS."""
    below = [i for i, ratio in enumerate(ratios.tolist()) if not ratio > READS]
    first = below[-1] + 1 if below else 0
    return steps[first] if first < len(steps) else None


def _previous_over_others(sensitivity: TokenSensitivity) -> float:
    """How much the context's x tokens, from the second on, depend on the token before them, over that on others."""
    norms = sensitivity.norms.mean(-1)
    at = torch.arange(2, norms.shape[0] - 1, 2)
    before = norms[at, at - 1].mean()
    others = (norms[at].sum() - norms[at, at].sum() - norms[at, at - 1].sum()) / (len(at) * (norms.shape[1] - 2))
    return (before / others).item()


def _figure(checkpoint: Checkpoint, sensitivities: Sequence[TokenSensitivity]) -> Section:
    """Derivatives above the loss, of the first seed."""
    assert checkpoint.snapshots is not None
    names = {"itself": "the token itself", "next": "the next token (its target)", "other": "other tokens"}
    lines = {words: [getattr(s, name).mean().item() for s in sensitivities] for name, words in names.items()}
    curve, task = checkpoint.record["curve"], checkpoint.task
    descent = tuned_descent(task.sample(8192, seed=2**31 + 1, dtype=torch.float64), 1)
    gd_mse = squared_errors(descent, task.sample(8192, seed=1, dtype=torch.float64)).mean().item()
    title = "What the first layer depends on during training"
    fig = panels(title, ["", ""], columns=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.6, 0.4])
    colors = (COLORS["trained"], COLORS["interpolated"], COLORS["other"])
    above, below = panel(0, 1), panel(1, 1)
    for (name, values), color in zip(lines.items(), colors, strict=True):  # step 0 is at half the next
        add_line(fig, on_log_axis(checkpoint.snapshots.steps), values, name, color, mode="lines+markers", place=above)
    later = [(step, loss[0] / 2) for step, loss in zip(curve["eval_step"], curve["eval_loss"], strict=True) if step > 0]
    add_line(fig, [step for step, _ in later], [value for _, value in later], "loss", COLORS["gradient descent"],
             place=below)  # fmt: skip
    fig.add_hline(y=gd_mse / 2, line={"color": "#888888", "dash": "dash", "width": 1}, **below,
                  annotation_text="one step of gradient descent", annotation_position="bottom left")  # fmt: skip
    fig.update_layout(height=520)
    fig.update_yaxes(title_text="norm of the derivative", rangemode="tozero", row=1)
    fig.update_yaxes(title_text="half mean squared error", rangemode="tozero", row=2)
    fig.update_xaxes(type="log", dtick=1)
    fig.update_xaxes(title_text="optimisation step", row=2)
    words = (
        f"Norm of the derivative of the first layer's output at the context's x tokens, seed "
        f"{checkpoint.record['seeds'][0]}, at the saved snapshots, above its loss."
    )
    return Section(f"{checkpoint.name}: what the first layer depends on", words, fig)


if __name__ == "__main__":
    compare.run()
