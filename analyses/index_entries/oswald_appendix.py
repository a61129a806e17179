"""von Oswald et al. 2023: the appendix."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from .entry import (
    CONSTRUCTIONS,
    Derived,
    Entry,
    Measured,
    Row,
    above,
    below,
    equals,
    falls,
    near_0,
    near_1,
    rows,
)
from .oswald import EXACT, FIVE, LOOPED, ONE

TEN, TWELVE = "oswald_descent_lsa-10l-looped", "oswald_descent_lsa-12l-mlp"
NORM_1, NORM_2 = "oswald_descent_lsa-1l-ln", "oswald_descent_lsa-2l-ln"
SOFTMAX, PHASES, LIMITS = "oswald_softmax", "oswald_phases", "oswald_data_limits"
GAMMA, CONDITIONING = "oswald_gamma", "oswald_conditioning"
HELD_OUT = "held-out loss over gradient descent's, at the end"
POINTS = (10, 25, 50, 100)
BY_N = tuple(f"n = {n}" for n in POINTS)


def _by_n(name: str, quantity: str, points: Sequence[int] = POINTS):
    return rows(name, *(f"{quantity}, n = {n}" for n in points))


def _by_seed(reference: str) -> Derived:
    """Each seed's loss over that of a reference."""

    def listed(data: dict[str, Any]) -> str:
        per_seed = [sum(row) / len(row) if isinstance(row, list) else row for row in data["mse"]]
        return ", ".join(f"{mse / data['references'][reference]:.3g}" for mse in per_seed)

    return Derived(f"loss over {reference}, by seed", listed)


def _larger_by_less_than_half(found: Sequence[Row]) -> list[bool]:
    """The first half of the rows over the second."""
    half = len(found) // 2
    pairs = zip(found[:half], found[half:], strict=True)
    return [1 < best.measured.mean / trained.measured.mean < 1.5 for best, trained in pairs]


def _second_half_is_smaller(found: Sequence[Row]) -> list[bool]:
    half = len(found) // 2
    return [b.measured.low > a.measured.high for b, a in zip(found[:half], found[half:], strict=True)]


def _above_the_first(found: Sequence[Row]) -> list[bool]:
    return [row.measured.low > found[0].measured.high for row in found[1:]]


def _late_for_some(m: Measured) -> bool:
    """Words such as "7 of 10, from step 900 to later than 8000": not all, or the latest at twice the earliest."""
    left, seeds, earliest, latest = m.numbers
    return left < seeds or latest >= 2 * earliest


def _fast_in_all(found: Sequence[Row]) -> bool:
    """Two heads, then one."""
    (left, seeds, _, latest), (_, _, _, latest_of_one) = (row.measured.numbers for row in found)
    return left == seeds and latest < latest_of_one


DEEP = (
    Entry(
        "Fig. 7", "ten looped layers: loss over ten tuned steps of gradient descent",
        rows(TEN, "loss, trained over gradient descent, 10 steps"),
        holds=below(1), agrees="", cites={"seeds": rows(TEN, _by_seed("gradient descent, 10 steps"))},
        differs="not in every seed: {seeds}; those above 1 had not finished their descent when training stopped",
    ),
    Entry(
        "Fig. 7", "the same over ten tuned steps of GD++",
        rows(TEN, "loss, trained over GD++, 10 steps"),
        holds=equals(1), agrees="", cites={"seeds": rows(TEN, _by_seed("GD++, 10 "
        "steps")), "best": rows(TEN, "half-MSE, GD++, 10 steps, tuned")},
        differs="by seed {seeds}; tuned on the task GD++ reaches half-MSE {best}",
    ),
    Entry(
        "Fig. 7", "cosine of sensitivities with GD++",
        rows(TEN, "sensitivity cosine with GD++, 10 steps"),
        holds=near_1, agrees="", differs="not within 0.05 of 1; the GD++ nearest the first seed's predictions is at "
        "{near} "
        "of their mean square",
        cites={"near": rows(TEN, "distance from GD++, 10 steps, fitted to the first seed")},
    ),
    Entry(
        "Fig. 7", "barrier on the rescaled path to tuned GD++",
        rows(TEN, "barrier to the tuned member, rescaled"),
        holds=near_0, agrees="none", notes=True,
        cites={"near": rows(TEN, "barrier to the member nearest in weights, rescaled")},
        differs="not in every seed; to the GD++ nearest in weights {near}",
    ),
    Entry(
        "Fig. 7", "worse than five layers of their own: half-MSE of ten looped, of five layers",
        rows(TEN, "half-MSE, trained, mean of the seeds") + rows(FIVE, "half-MSE, trained, mean of the seeds"),
        labels=("ten looped", "five"), claim="five are better", compare=falls, agrees="", differs="five are not better",
    ),
    Entry(
        "Fig. 8", "twelve layers with MLPs, four heads: loss over twelve tuned steps of gradient descent",
        rows(TWELVE, "loss, trained over gradient descent, 12 steps"),
        holds=below(1), agrees="better than gradient descent", differs="not better",
    ),
    Entry(
        "Fig. 8", "the same over GD++ with one step size and γ",
        rows(TWELVE, "loss, trained over GD++, 12 steps"),
        holds=equals(1), agrees="", differs="half-MSE {trained} after a short training; tuned GD++ reaches {one}, and "
        "{each} with parameters for each step",
        cites={
            "trained": rows(TWELVE, "half-MSE, trained, mean of the seeds"),
            "one": rows(TWELVE, "half-MSE, GD++, 12 steps, tuned"),
            "each": rows(TWELVE, "half-MSE, GD++, 12 steps, each its own, tuned"),
        },
    ),
    Entry(
        "Fig. 8", "cosine of sensitivities with GD++",
        rows(TWELVE, "sensitivity cosine with GD++, 12 steps"),
        holds=near_1, agrees="close resemblance", differs="not within 0.05 of 1",
    ),
)  # fmt: skip

WEIGHTS = (
    Entry(
        "Fig. 9, left", "one layer: step size read from the weights over the tuned one",
        rows(ONE, "η read from the weights over tuned η"),
        claim="the construction, after a scalar correction", holds=equals(1),
        agrees="the construction's", differs="not the construction's",
    ),
    Entry(
        "Fig. 9, right", "looped layers: relative distance of W_KQ, W_PV from GD++ in the same gauge",
        rows(LOOPED, "relative distance of W_KQ from the projected member, mean of the layers",
             "relative distance of W_PV from the projected member, mean of the layers"),
        claim="the construction with a correction for curvature", holds=near_0,
        agrees="applied twice here, three times in the paper", differs="not GD++'s weights",
    ),
    Entry(
        "Fig. 10", "one layer repeated 50 times: loss after 50 over after one, damping 0.5, 0.75, 1",
        rows(ONE, *(f"loss after 50 repeats over after one, damping {damping}, {kind}"
                    for kind in ("trained", "gradient descent") for damping in ("0.5", "0.75", "1"))),
        labels=("trained", "gradient descent"), claim="falls at 0.75, diverges undamped; both alike",
        compare=lambda found: [
            *(row.measured.high < 1 for row in (found[1], found[4])),
            *(row.measured.words == "diverges" for row in (found[2], found[5])),
        ],
        agrees="", differs="not so",
    ),
)  # fmt: skip

SOFTMAX_AND_NORM = (
    Entry(
        "A.9, eq. 16 to 21", "two softmax heads of opposite sign, small scores: relative distance from the *centred* "
        "sum "
        "Σ y (s - mean s)",
        rows(CONSTRUCTIONS, "000, A.9, to the centred sum: softmax_gradient_descent, O(score_scale²)"),
        claim="the plain sum, gradient descent", holds=above(1e-3),
        agrees="", differs="the argument drops the normaliser: the limit is the centred sum; with a sink it is "
        "gradient "
        "descent ({sink})",
        cites={"sink": rows(CONSTRUCTIONS, "000, A.9, with a sink: softmax_gradient_descent, O(score_scale²)")},
    ),
    Entry(
        "Fig. 11", "share of W_KQ η off its diagonal, sum of two heads",
        rows(SOFTMAX, "off-diagonal share of the x-block of the heads' sum, softmax-2h"),
        holds=near_0, agrees="they cancel; one head alone has {one}", differs="they do not cancel; one head has {one}",
        cites={"one": rows(SOFTMAX, "off-diagonal share of the x-block of a head's W_KQ η, softmax-2h")},
    ),
    Entry(
        "Fig. 12, left", "loss above gradient descent's, one head",
        rows(SOFTMAX, "loss above gradient descent's, softmax-1h"),
        holds=above(0.1), agrees="more than 10%", differs="less than 10%",
    ),
    Entry(
        "Fig. 12, left", "the same with two heads, and with one",
        rows(SOFTMAX, "loss above gradient descent's, softmax-2h", "loss above gradient descent's, softmax-1h"),
        labels=("two", "one"), claim="smaller, not 0",
        compare=lambda found: found[0].measured.low > 0 and found[0].measured.high < found[1].measured.low,
        agrees="with a sink, as the corrected limit asks for: {sink}",
        differs="not between the two; with a sink {sink}",
        cites={"sink": rows(SOFTMAX, "loss above gradient descent's, softmax-2h-sink")},
    ),
    Entry(
        "Fig. 12, centre", "cosine of sensitivities with gradient descent: one head, two heads, linear attention",
        rows(SOFTMAX, *(f"sensitivity cosine, {name}" for name in ("softmax-1h", "softmax-2h", "lsa-1l"))),
        claim="suffers with one head; good, not as precise, with two",
        compare=lambda found: all(a.measured.high < b.measured.low for a, b in itertools.pairwise(found)),
        agrees="in this order", differs="not in this order",
    ),
    Entry(
        "Fig. 12, right", "softmax heads out of distribution",
        published="as robust as gradient descent", remark="no script yet",
    ),
    Entry(
        "Fig. 14a", "one layer behind a layer norm: loss over gradient descent's",
        rows(NORM_1, "loss, trained over gradient descent, 1 step"),
        holds=above(1), agrees="worse than gradient descent", differs="not worse",
    ),
    Entry(
        "Fig. 14b", "two layers with a norm between them: loss over gradient descent's, over GD++'s",
        rows(NORM_2, "loss, trained over gradient descent, 2 steps", "loss, trained over GD++, 2 steps"),
        holds=above(1), agrees="worse than both", differs="the intervals reach below 1; by seed {descent}, and {gd}",
        cites={"descent": rows(NORM_2, _by_seed("gradient descent, 2 steps")),
               "gd": rows(NORM_2, _by_seed("GD++, 2 steps"))},
    ),
    Entry(
        "Fig. 14", "cosine of sensitivities with gradient descent: one layer, two layers",
        rows(NORM_1, "sensitivity cosine with gradient descent, 1 step")
        + rows(NORM_2, "sensitivity cosine with gradient descent, 2 steps"),
        claim="suffers, still reasonable", holds=lambda m: m.low > 0.5 and m.high < 0.95,
        agrees="between 0.5 and 0.95", differs="not between 0.5 and 0.95",
    ),
    Entry(
        "Fig. 14b", "the same, two layers, gradient descent and GD++",
        rows(NORM_2, "sensitivity cosine with gradient descent, 2 steps", "sensitivity cosine with GD++, 2 steps"),
        claim="slightly less with GD++", compare=falls, agrees="by the means", differs="not less by the means",
    ),
    Entry(
        "Fig. 14, right", "layer norm out of distribution",
        published="better than gradient descent on much larger inputs",
        remark="drawn on the pages of `oswald_descent.py`, not yet a number",
    ),
)  # fmt: skip

CURVATURE = (
    Entry(
        "A.10, eq. 23", "GD++ in one head: largest relative error against a plain loop, 5 steps",
        rows(CONSTRUCTIONS, "000, A.10: gd_plus_plus, exact"),
        holds=EXACT, agrees="rounding", differs="not exact",
    ),
    Entry(
        "A.10", "γ in the weights of two looped layers, n = 10, 25, 50, 100",
        _by_n(GAMMA, "γ in the weights"), agrees="also for x ~ U(-1/2, 1/2)", differs="other γ",
    ),
    Entry(
        "A.10", "γ of the GD++ that predicts alike, n = 10, 25, 50, 100",
        _by_n(GAMMA, "γ matched to predictions"), agrees="weights and predictions say the same", differs="other γ",
    ),
    Entry(
        "A.10", "largest eigenvalue of S in 10,000 tasks, n = 10, 25, 50, 100",
        _by_n(CONDITIONING, "largest eigenvalue"), agrees="those of U(-1/2, 1/2)",
        differs="an extreme of 10,000 tasks differs between draws, and one was printed", notes=True,
    ),
    Entry(
        "A.10", "smallest eigenvalue, n = 25, 50, 100",
        _by_n(CONDITIONING, "smallest eigenvalue", POINTS[1:]), agrees="those of U(-1/2, 1/2)",
        differs="an extreme of 10,000 tasks differs between draws, and one was printed", notes=True,
    ),
    Entry(
        "A.10", "the eigenvalues stay below 1/γ: γ times the largest, n = 10, 25, 50, 100",
        _by_n(CONDITIONING, "γ in the weights times the largest eigenvalue"),
        holds=below(1), agrees="in every task", differs="not in every task",
    ),
    Entry(
        "Fig. 13, left and centre", "median condition number before and after, γ in the weights, n = 10, 25, 50, 100",
        _by_n(CONDITIONING, "median condition number before") + _by_n(CONDITIONING, "the same after, γ in the weights"),
        labels=("before", "after"), compare=_second_half_is_smaller, claim="smaller",
        agrees="better conditioned", differs="not better conditioned",
    ),
    Entry(
        "Fig. 13, centre", "γ that conditions best by the paper's extremes, and γ in the weights, n = 10, 25, 50, 100",
        _by_n(CONDITIONING, "γ with the least condition number of all tasks' range") + _by_n(GAMMA, "γ in the weights"),
        labels=("best conditioned", "in the weights"), claim="slightly larger", compare=_larger_by_less_than_half,
        agrees="larger by less than half; the γ with the least loss is {loss}",
        differs="not larger, or by more than half; the γ with the least loss is {loss}",
        cites={"loss": _by_n(CONDITIONING, "γ with the least loss of two looped steps")},
    ),
    Entry(
        "Fig. 13, right", "n = 25: median condition number after γ = 0.099, then 0.11, 0.12, 0.13, 0.14, 0.15, 0.18",
        rows(CONDITIONING, *(f"median condition number after, γ = {gamma}, n = 25"
                             for gamma in ("0.099", "0.11", "0.12", "0.13", "0.14", "0.15", "0.18"))),
        claim="explodes above γ = 0.1", compare=_above_the_first,
        agrees="", differs="elsewhere the median is not above that at 0.099: 1/γ has to come below the largest "
        "eigenvalue of "
        "enough tasks",
    ),
)  # fmt: skip

TRAINING = (
    Entry(
        "Fig. 15, left", "one head: seeds that leave the plateau, and when",
        rows(PHASES, "seeds that leave the plateau, 1 head"),
        holds=_late_for_some, agrees="some late or not yet", differs="all at about the same time",
    ),
    Entry(
        "Fig. 15, centre", "the same with two heads, and with one",
        rows(PHASES, "seeds that leave the plateau, 2 heads", "seeds that leave the plateau, 1 head"),
        labels=("two", "one"), claim="fast in all", compare=_fast_in_all,
        agrees="all, the last before the last with one", differs="not all, or not before",
    ),
    Entry(
        "Fig. 15, left and centre", "half-MSE at the end where there is a transition: one head, two heads",
        rows(PHASES, *(f"half-MSE at the end where there is one, {heads}" for heads in ("1 head", "2 heads"))),
        agrees="gradient descent's; the best step has {best}", differs="not gradient descent's, {best}",
        cites={"best": rows(PHASES, "half-MSE, best single step of gradient descent")},
    ),
    Entry(
        "Fig. 15, right", "a block on 8192 tasks: highest test loss while memorising over that when it begins",
        rows(PHASES, "grokking: the same over the test loss when memorising begins"),
        claim="increases drastically", holds=above(1.2), agrees="half-MSE {peak}",
        differs="it rises little: half-MSE {peak}, 0.417 for predicting 0",
        cites={"peak": rows(PHASES, "grokking: highest test half-MSE while memorising")},
    ),
    Entry(
        "Fig. 15, right", "least training half-MSE before the fall",
        rows(PHASES, "grokking: least train half-MSE while memorising"),
        holds=below(0.2), agrees="it has memorised", differs="it has not memorised", notes=True,
    ),
    Entry(
        "Fig. 15, right", "step of the test loss' fall",
        rows(PHASES, "grokking: step of the test loss' fall"),
        holds=lambda m: math.isfinite(m.mean), agrees="there is one", differs="there is none", notes=True,
    ),
    Entry(
        "Fig. 15, right", "test half-MSE at the end",
        rows(PHASES, "grokking: test half-MSE at the end"),
        agrees="gradient descent's", differs="training half-MSE at the end: {train}",
        cites={"train": rows(PHASES, "grokking: train half-MSE at the end")},
    ),
    Entry(
        "Fig. 16a", "trained on 128 tasks: cosine of sensitivities",
        rows(LIMITS, "128 tasks: sensitivity cosine, at the end"),
        holds=below(0.95), agrees="held-out loss {loss} of gradient descent's: the layer has about as many free "
        "numbers (120) as tasks",
        differs="aligned", cites={"loss": rows(LIMITS, f"128 tasks: {HELD_OUT}")},
    ),
    Entry(
        "Fig. 16b, c", "512 and 2048 tasks",
        rows(LIMITS, "512 tasks: sensitivity cosine, at the end", "2048 tasks: sensitivity cosine, at the end"),
        labels=("512", "2048"), claim="better with more tasks", compare=lambda found: falls(found[::-1]),
        agrees="held-out loss over gradient descent's {loss}", differs="not better",
        cites={"loss": rows(LIMITS, *(f"{n} tasks: {HELD_OUT}" for n in (512, 2048)))},
    ),
    Entry(
        "Fig. 16d", "8192 tasks",
        rows(LIMITS, "8192 tasks: sensitivity cosine, at the end"),
        holds=near_1, agrees="held-out loss {loss} of gradient descent's",
        differs="not within 0.05 of 1; held-out loss {loss} of gradient descent's",
        cites={"loss": rows(LIMITS, f"8192 tasks: {HELD_OUT}")},
    ),
)  # fmt: skip

OSWALD_APPENDIX = (*DEEP, *WEIGHTS, *SOFTMAX_AND_NORM, *CURVATURE, *TRAINING)
