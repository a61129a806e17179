"""von Oswald et al. 2023: the main text."""

from collections.abc import Sequence
from typing import Any

from .entry import (
    CONSTRUCTIONS,
    Derived,
    Entry,
    Pattern,
    Row,
    all_of_them,
    at_most,
    below,
    equals,
    first_is_largest,
    near_0,
    near_1,
    rows,
)

ONE, LOOPED, FIVE = "oswald_one_layer_lsa-1l", "oswald_descent_lsa-2l-looped", "oswald_descent_lsa-5l"
COPYING, SINE = "oswald_copying", "oswald_sine"
EXACT = at_most(1e-12)


def _between_one_and_two_steps(found: Sequence[Row]) -> bool:
    """Loss over one step's; one step; two steps."""
    ratio, one, two = (row.measured for row in found)
    return ratio.low > two.mean / one.mean


def _loss_of_those_that_do_not_copy(data: dict[str, Any]) -> str:
    one = next(row for row in data["table"] if row["quantity"].startswith("half-MSE, one tuned step"))
    losses = zip(data["copy-2l"]["mse"], data["copy-2l"]["copies"], strict=True)
    return ", ".join(f"{mse / 2 / one['measured']['mean']:.2f}" for mse, copies in losses if not copies)


PROPOSITIONS = (
    Entry(
        "Prop. 1", "linear attention that is gradient descent by its weights: largest relative error against a plain "
        "loop",
        rows(CONSTRUCTIONS, "000, Proposition 1: gradient_descent, exact"),
        holds=EXACT, agrees="rounding; W_0 other than 0 too", differs="not exact",
    ),
    Entry(
        "Prop. 2", "an MLP before it, gradient descent on m(x): the same error",
        rows(CONSTRUCTIONS, "000, Proposition 2: kernel_gradient_descent, exact"),
        holds=EXACT, agrees="rounding", differs="not exact",
    ),
    Entry(
        "Prop. 3", "one layer that copies targets to their inputs' tokens: the same error, linear, softmax, and with "
        "gradient "
        "descent after it",
        rows(CONSTRUCTIONS, "000, Proposition 3 (linear): copy_targets, exact",
             "000, Proposition 3 (softmax): copy_targets, exact",
             "000, Propositions 3 and 1: copy_then_gradient_descent, exact"),
        holds=EXACT, agrees="rounding; softmax with a hard mask, or to O(n e^(-scale / 2)) with large scores",
        differs="not exact",
    ),
)  # fmt: skip

ONE_LAYER = (
    Entry(
        "Fig. 1", "one layer repeated 50 times, damping 0.75: loss after 50 over loss after one",
        rows(ONE, "loss after 50 repeats over after one, damping 0.75, trained",
             "loss after 50 repeats over after one, damping 0.75, gradient descent"),
        labels=("trained", "gradient descent"), holds=below(1),
        agrees="both are lower after 50 repeats", differs="not lower after 50 repeats",
    ),
    Entry(
        "Fig. 2, left", "half-MSE of one step and of one trained layer",
        rows(ONE, "half-MSE, tuned gradient descent", "half-MSE, trained, mean of the seeds"),
        labels=("gradient descent", "trained"),
        agrees="half the squared error of x ~ U(-1/2, 1/2); the printed U(-1, 1) would give four times this",
        differs="is it half the squared error of x ~ U(-1/2, 1/2)?",
    ),
    Entry(
        "Fig. 2, left", "loss, trained over gradient descent",
        rows(ONE, "loss, trained over tuned gradient descent"),
        holds=equals(1), agrees="the same loss on the same prompts", differs="another loss",
    ),
    Entry(
        "Fig. 2, centre left", "cosine of sensitivities, trained and gradient descent",
        rows(ONE, "sensitivity cosine, trained against gradient descent"),
        holds=near_1, agrees="the same linear model in every prompt", differs="other models of the prompts",
    ),
    Entry(
        "Fig. 2, centre left", "distance of predictions, of sensitivities",
        rows(ONE, "prediction distance, trained against gradient descent", "sensitivity distance"),
        claim="almost 0", holds=near_0, agrees="both within 0.05", differs="not within 0.05",
    ),
    Entry(
        "Fig. 2, centre right", "excess loss half-way between trained and constructed weights, rescaled",
        rows(ONE, "excess loss at the middle of the rescaled path"),
        holds=near_0, agrees="no barrier; without rescaling {raw}", differs="a barrier; without rescaling {raw}",
        cites={"raw": rows(ONE, "the same without rescaling")},
    ),
    Entry(
        "Figs. 2, right, and 6a", "largest |trained / gradient descent - 1| of the loss at scales 0.5 to 2 of inputs "
        "and "
        "of weights, the task's inputs and unseen ones",
        rows(ONE, Pattern("largest |trained / gradient descent - 1|, * 0.5 to 2", 4)),
        claim="equal", holds=near_0, agrees="within 5% at every scale", differs="more than 5% apart at some scale",
    ),
)  # fmt: skip

SEVERAL_LAYERS = (
    Entry(
        "Fig. 3a", "two looped layers: loss over two tuned steps of gradient descent",
        rows(LOOPED, "loss, trained over gradient descent, 2 steps"),
        holds=below(1), agrees="better than gradient descent", differs="not better than gradient descent",
    ),
    Entry(
        "Fig. 3a", "the same over two tuned steps of GD++",
        rows(LOOPED, "loss, trained over GD++, 2 steps"),
        holds=equals(1), agrees="the loss of GD++", differs="not the loss of GD++",
    ),
    Entry(
        "Fig. 3a", "cosine of sensitivities with gradient descent, with GD++",
        rows(LOOPED, "sensitivity cosine with gradient descent, 2 steps", "sensitivity cosine with GD++, 2 steps"),
        claim="near 1 with GD++, less with gradient descent",
        compare=lambda found: found[1].measured.low > found[0].measured.high and near_1(found[1].measured),
        agrees="GD++ is what it computes", differs="GD++ is no nearer than gradient descent",
    ),
    Entry(
        "Fig. 3a", "barrier on the rescaled path to tuned GD++",
        rows(LOOPED, "barrier to the tuned member, rescaled"),
        holds=near_0, agrees="none; on the raw path {raw}", differs="a barrier",
        cites={"raw": rows(LOOPED, "barrier to the tuned member, raw")},
    ),
    Entry(
        "Fig. 3b", "five layers: loss over five tuned steps of gradient descent",
        rows(FIVE, "loss, trained over gradient descent, 5 steps"),
        holds=below(1), agrees="better than gradient descent", differs="not better than gradient descent",
    ),
    Entry(
        "Fig. 3b", "the same over GD++ with its own step size and γ in each step",
        rows(FIVE, "loss, trained over GD++, 5 steps, each its own"),
        holds=equals(1), agrees="the loss of GD++",
        differs="tuned on the task, with step size and γ growing from step to step, GD++ reaches half-MSE {best}, "
        "and training "
        "{trained} (GD++ with one step size and γ: {one}); the GD++ nearest in weights has {nearest} of the model's "
        "loss",
        cites={
            "best": rows(FIVE, "half-MSE, GD++, 5 steps, each its own, tuned"),
            "trained": rows(FIVE, "half-MSE, trained, mean of the seeds"),
            "one": rows(FIVE, "half-MSE, GD++, 5 steps, tuned"),
            "nearest": rows(FIVE, "loss, projected member over trained"),
        },
    ),
    Entry(
        "Fig. 3b", "cosine of sensitivities with GD++, with such GD++",
        rows(FIVE, "sensitivity cosine with GD++, 5 steps", "sensitivity cosine with GD++, 5 steps, each its own"),
        holds=near_1, agrees="both", in_part="one of them", differs="neither",
    ),
    Entry(
        "Section 3", "five layers: barrier on the rescaled path to tuned GD++",
        rows(FIVE, "barrier to the tuned member, rescaled"),
        claim="a loss increase; better corrections are left open",
        holds=lambda m: not near_0(m), agrees="as printed; the next entry closes it", differs="no barrier",
    ),
    Entry(
        "Section 3", "what was left open: the same to the GD++ nearest in weights, to the one fitted layer by layer",
        rows(FIVE, "barrier to the member nearest in weights, rescaled",
             "barrier to the member fitted layer by layer, rescaled"),
        remark="it matters which GD++ one goes to: the one whose layers write what the model's layers write",
    ),
    Entry(
        "Section 3, A.4", "paths between seeds of five layers, rescaled as in A.3",
        rows("oswald_connectivity_lsa-5l", "barrier between seeds, rescaled"),
        holds=lambda m: m.numbers[0] > 0.05, agrees="in every pair; a curved path leaves {curved}",
        differs="not in every pair",
        cites={"curved": rows("oswald_connectivity_lsa-5l", "barrier between seeds, curved")},
    ),
    Entry(
        "Figs. 3, right, and 6b, c", "two and five layers out of distribution",
        published="like GD++; less so five layers far from the training range",
        remark="drawn on the pages of `oswald_descent.py`, not yet a number",
    ),
)  # fmt: skip

SINE_WAVES = (
    Entry(
        "Fig. 4, centre", "loss, MLP and linear attention over MLP and a step of gradient descent",
        rows(SINE, "loss, attention over gradient descent"),
        agrees="half-MSE {attention} and {descent}; Nadaraya-Watson smoothing {smoothing}",
        differs="half-MSE {attention} and {descent}; Nadaraya-Watson smoothing {smoothing}",
        cites={
            "attention": rows(SINE, "half-MSE, MLP and linear attention"),
            "descent": rows(SINE, "half-MSE, MLP and a step of gradient descent"),
            "smoothing": rows(SINE, "half-MSE, Nadaraya-Watson smoothing, tuned"),
        },
    ),
    Entry(
        "Fig. 4, right", "distance of predictions over rms target",
        rows(SINE, "prediction distance over rms target, attention and gradient descent"),
        holds=near_0, agrees="two seeds of attention: {seeds}",
        differs="not within 0.05; two seeds of attention differ by {seeds}, attention and smoothing by {smoothing}",
        cites={
            "seeds": rows(SINE, "prediction distance over rms target, two seeds of attention"),
            "smoothing": rows(SINE, "prediction distance over rms target, attention and Nadaraya-Watson smoothing"),
        },
    ),
    Entry(
        "Fig. 4, right", "cosine of sensitivities",
        rows(SINE, "sensitivity cosine, attention and gradient descent"),
        holds=near_1, agrees="two seeds of attention: {seeds}",
        differs="not within 0.05 of 1; two seeds of attention: {seeds}",
        cites={"seeds": rows(SINE, "sensitivity cosine, two seeds of attention")},
    ),
    Entry(
        "Fig. 4, left", "rms distance of the two initial functions over rms target",
        rows(SINE, "rms distance of the two initial functions over rms target"),
        holds=near_0, agrees="the functions themselves have {size}",
        differs="not within 0.05; the functions themselves have {size}",
        cites={"size": rows(SINE, "rms of the initial functions over rms target")},
    ),
)  # fmt: skip

COPIES = (
    Entry(
        "Fig. 5, left", "softmax, then linear attention on alternate tokens: loss over one step of gradient descent, "
        "seeds that copy",
        rows(COPYING, "copy-2l: loss over one step of gradient descent"),
        agrees="one step", differs="not one step", notes=True,
    ),
    Entry(
        "Fig. 5, left", "the same, half-MSE of one step and of two",
        rows(COPYING, "copy-2l: loss over one step of gradient descent", "half-MSE, one tuned step of gradient descent",
             "half-MSE, two tuned steps"),
        labels=("loss over one step", "one step", "two steps"),
        claim="one step, not two", compare=_between_one_and_two_steps,
        agrees="above the loss of two steps", differs="as good as two steps",
    ),
    Entry(
        "Fig. 5, left", "the same with one-hot positions",
        rows(COPYING, "copy-2l-one-hot: loss over one step of gradient descent"),
        agrees="one step", notes=True,
        differs="not one step; the first layer also writes at other tokens, without which the loss is {elsewhere} "
        "times this",
        cites={"elsewhere": rows(COPYING, "copy-2l-one-hot: loss without it elsewhere over the model's")},
    ),
    Entry(
        "Fig. 5, left", "training speed differs between seeds: step of the transition",
        rows(COPYING, "copy-2l: step of the transition"),
        claim="highly variable", holds=lambda m: m.high > 1.5 * m.low,  # of the mean: seeds differ by more than that
        agrees="", differs="seeds are alike", notes=True,
    ),
    Entry(
        "Fig. 5, right", "|d first layer / d token| at inputs' tokens after training: by the target's token, by any "
        "other",
        rows(COPYING, "copy-2l: |d first layer / d token| at x tokens, the next token, its target",
             "copy-2l: |d first layer / d token| at x tokens, any other token"),
        compare=first_is_largest, agrees="it reads the next token", differs="it does not read the next token",
    ),
    Entry(
        "Fig. 5, right", "seeds in which the first layer reads the next token before the loss falls",
        rows(COPYING, "copy-2l: seeds that read the next token 3 times more than others before the loss falls"),
        holds=all_of_them, agrees="all", differs="both happen between the same two snapshots in most", notes=True,
    ),
    Entry(
        "Section 4", "seeds whose first layer copies, sinusoidal positions",
        rows(COPYING, "copy-2l: first layers that copy"),
        holds=all_of_them, agrees="all", differs="the others stay at a higher loss: {others} of one step's",
        cites={"others": rows(COPYING, Derived("loss over one step", _loss_of_those_that_do_not_copy))},
    ),
    Entry(
        "Section 4", "the same, one-hot positions",
        rows(COPYING, "copy-2l-one-hot: first layers that copy"),
        holds=all_of_them, agrees="all", differs="not all",
    ),
    Entry(
        "Section 4", "the same, linear attention in the first layer",
        rows(COPYING, "copy-2l-linear: first layers that copy"),
        holds=lambda m: m.numbers[0] == 0,
        agrees="none copies targets; inputs are partly readable at targets' tokens; loss {loss} of one step's",
        differs="some do",
        cites={"loss": rows(COPYING, "copy-2l-linear: loss over one step of gradient descent")},
    ),
)  # fmt: skip

OSWALD = (*PROPOSITIONS, *ONE_LAYER, *SEVERAL_LAYERS, *SINE_WAVES, *COPIES)
