"""Fu et al. 2024."""

import itertools
from collections.abc import Sequence
from typing import Any

from .entry import (
    CONSTRUCTIONS,
    Derived,
    Entry,
    Measured,
    Pattern,
    Row,
    above,
    at_most,
    falls,
    near_0,
    near_1,
    rows,
    says,
)

PLAIN, ILL, ONE_HEAD = (f"fu_matching_{name}" for name in ("gpt2-8l", "gpt2-8l-ill", "gpt2-8l-1h"))
PROGRESSION, LSTM, WEIGHTS, PROBES = "fu_progression_gpt2-8l", "fu_lstm", "fu_weights_gpt2-8l", "fu_probes_gpt2-8l"
NEWTON, GD = (
    "Newton, growth of the best step with the layer",
    "gradient descent, growth of the best step with the layer",
)
EXACT = at_most(1e-12)


def _losses(kind: str) -> tuple[Derived, ...]:
    """Each layer's loss, the mean over numbers of points, over that of predicting 0."""

    def of(layer: int) -> Derived:
        def value(data: dict[str, Any]) -> float:
            by_points = data[kind][layer]
            return sum(by_points) / len(by_points) / data["signal"]

        return Derived(f"{kind}: mean loss of layer {layer} over E y²", value)

    return tuple(of(layer) for layer in range(1, 9))


def _best_of_last_layer(kind: str, algorithm: str) -> Derived:
    def value(data: dict[str, Any]) -> float:
        return float(data[kind][algorithm]["best"][-1]["step"])

    return Derived(f"{kind}: best number of {algorithm} steps, last layer", value)


def _linear(m: Measured) -> bool:
    return m.words == "linear"


def _growth(results: str, kind: str, item: str, words: str) -> tuple[Entry, ...]:
    """How the best matching iterations grow with the layer: in kind, and by how many."""
    return (
        Entry(
            item, f"{words}best Newton iteration by layer: growth", rows(results, f"{kind}: {NEWTON}"),
            holds=_linear, agrees="", differs="another model fits better", notes=True,
        ),
        Entry(
            item, f"{words}Newton iterations a layer", rows(results, f"{kind}: Newton, steps a layer (linear fit)"),
            agrees="", differs="a smaller model: 8 layers, 12 in the paper",
        ),
        Entry(
            item, f"{words}best number of gradient descent steps by layer: growth",
            rows(results, f"{kind}: {GD}"), holds=says("exponential"), agrees="", differs="not exponential", notes=True,
        ),
    )  # fmt: skip


def _nearer(results: str, kind: str, item: str, words: str) -> Entry:
    return Entry(
        item, f"{words}similarity to the best Newton iteration minus that to the best gradient descent step, by layer",
        rows(results, Pattern(f"{kind}: layer *, best Newton minus best gradient descent", 8)),
        claim="positive", holds=above(0),
        agrees="", in_part="in the other layers enough steps of gradient descent are as similar, or more",
        differs="enough steps of gradient descent are as similar, or more",
    )  # fmt: skip


def _dip(found: Sequence[Row]) -> bool:
    """OLS, then Newton."""
    return found[0].measured.high < found[1].measured.low


THEOREMS = (
    Entry(
        "Theorem 1", "5 iterations of Newton in weights, linear and ReLU attention: largest relative error against a "
        "plain loop",
        rows(CONSTRUCTIONS, "002, Theorem 1 (linear): newton, exact", "002, Theorem 1 (relu): newton, exact"),
        holds=EXACT, agrees="rounding; a shorter construction than the paper's. The printed α = 2 / ‖SSᵀ‖₂ does not "
        "converge, anything below it does", differs="not exact",
    ),
    Entry(
        "Proposition 1", "mov, aff, mul as one layer each: the same error",
        rows(CONSTRUCTIONS, *(f"002, Proposition 1 ({name}): {name}, exact" for name in ("mov", "aff", "mul"))),
        holds=EXACT, agrees="rounding", differs="not exact",
    ),
    Entry(
        "Proposition 1", "div: layers",
        rows(CONSTRUCTIONS, "002, Proposition 1 (div): div, layers"),
        claim="one", holds=at_most(1), agrees="error {error}",
        differs="by Newton's method, and three of them make the divisor; error {error}",
        cites={"error": rows(CONSTRUCTIONS, "002, Proposition 1 (div): div, O(0.8^(2^steps))")},
    ),
    Entry(
        "Lemma 1", "one layer that sums the hidden states: the same error",
        rows(CONSTRUCTIONS, "002, Lemma 1: total, exact"), holds=EXACT, agrees="rounding", differs="not exact",
    ),
)  # fmt: skip

ISOTROPIC = (
    Entry(
        "Fig. 1", "how a transformer is trained to do linear regression in context",
        measurable=False, remark="a drawing",
    ),
    *_growth(PLAIN, "errors", "Figs. 2, 4", "errors: "),
    Entry(
        "Fig. 3a", "loss of layers 1 to 8, mean over numbers of points, over E y²",
        rows(PROGRESSION, *_losses("transformer")), claim="falls from layer to layer",
        compare=lambda found: [falls(pair) for pair in itertools.pairwise(found)],
        agrees="", in_part="the first layers have not learned anything", differs="does not fall",
    ),
    Entry(
        "Fig. 3b", "similarity of errors of the last layer and its best Newton iteration",
        rows(PLAIN, "errors: last layer and its best Newton step"),
        agrees="", differs="a smaller model", notes=True,
    ),
    Entry(
        "Fig. 3c", "LSTM: loss of the first layer over the last one's",
        rows(PROGRESSION, "LSTM: MSE of the first layer over that of the last, all points"),
        holds=lambda m: abs(m.mean - 1) <= 0.05, agrees="it does not improve",
        differs="it improves, but little: the transformer's is {transformer}",
        cites={"transformer": rows(PROGRESSION, "transformer: MSE of the first layer over that of the last, all "
        "points")},
    ),
    Entry(
        "Fig. 5", "similarity of errors of the last layer and its best gradient descent step",
        rows(PLAIN, "errors: last layer and its best gradient descent step"),
        agrees="Newton's: {newton}", differs="Newton's: {newton}", notes=True,
        cites={"newton": rows(PLAIN, "errors: last layer and its best Newton step")},
    ),
    *_growth(PLAIN, "weights", "Fig. 6", "weights: ")[:2],
    _nearer(PLAIN, "errors", "Fig. 7", "errors: "),
    _nearer(PLAIN, "weights", "Fig. 7", "weights: "),
    Entry(
        "Fig. 7", "weights: last layer and least squares",
        rows(PLAIN, "weights: last layer and its best OLS step"), holds=near_1, agrees="",
        differs="not within 0.05 of 1",
    ),
    Entry(
        "Fig. 8", "layer 2, n = d: cosine of weights with Newton, gradient descent, OLS",
        rows(WEIGHTS, *(f"cosine of weights at 5 points (n = d), layer 2 and {name}"
                        for name in ("Newton", "gradient descent", "OLS"))),
        claim="0", holds=near_0, agrees="", differs="this layer has learned something already",
    ),
    Entry(
        "Fig. 8", "layer 3, n = d: the same",
        rows(WEIGHTS, *(f"cosine of weights at 5 points (n = d), layer 3 and {name}"
                        for name in ("Newton", "gradient descent", "OLS"))),
        claim="most similar to Newton", compare=lambda found: all(
            found[0].measured.low > other.measured.high for other in found[1:]),
        agrees="", differs="Newton is not above the others",
    ),
    Entry(
        "Fig. 8", "layer 8, n = d: OLS, Newton",
        rows(WEIGHTS, "cosine of weights at 5 points (n = d), layer 8 and OLS",
             "cosine of weights at 5 points (n = d), layer 8 and Newton"),
        compare=_dip, agrees="OLS is less similar there", differs="no dip",
    ),
    Entry(
        "Fig. 15", "share of the last layer's weights outside the span of 1, 2, 3, 4 points",
        rows(WEIGHTS, Pattern("share outside the span of * points, last layer", 4)),
        holds=near_0, agrees="random weights would have 4/5, 3/5, 2/5, 1/5",
        differs="random weights would have 4/5, 3/5, 2/5, 1/5",
    ),
    Entry(
        "Section 3", "what layers carry: best R² after 5 points of XᵀY, S, the weights after 4 Newton iterations",
        rows(PROBES, "XᵀY: best R² after 5 points", "S = XᵀX: best R² after 5 points",
             "weights, 4 Newton iterations: best R² after 5 points"),
        labels=("XᵀY", "S", "weights"),
        remark="linear probes of one token, at the best layer and position",
    ),
)  # fmt: skip

ILL_CONDITIONED = (
    Entry(
        "Fig. 9a", "ill-conditioned: loss of layers 1 to 8 over E y²",
        rows("fu_progression_gpt2-8l-ill", *_losses("transformer")), claim="falls from layer to layer",
        compare=lambda found: [falls(pair) for pair in itertools.pairwise(found)],
        agrees="", in_part="the first layers have not learned anything", differs="does not fall",
    ),
    Entry(
        "Figs. 9, 10", "Newton iterations that match the last layer",
        rows(ILL, _best_of_last_layer("errors", "Newton")),
        claim="21, as on isotropic data", holds=lambda m: abs(m.mean / 21 - 1) <= 0.15,
        agrees="within 15%; on isotropic data {isotropic}", differs="on isotropic data {isotropic}",
        cites={"isotropic": rows(PLAIN, _best_of_last_layer("errors", "Newton"))},
    ),
    Entry(
        "Figs. 9, 10", "gradient descent steps that match the last layer",
        rows(ILL, _best_of_last_layer("errors", "gradient descent")),
        claim="800 or more", holds=lambda m: m.mean >= 800, agrees="4096 is the most that was tried", differs="fewer",
    ),
    *_growth(ILL, "errors", "Fig. 10", "errors: "),
    _nearer(ILL, "errors", "Fig. 10", "errors: "),
    *_growth(ILL, "weights", "Fig. 11", "weights: ")[:2],
    _nearer(ILL, "weights", "Fig. 11", "weights: "),
)  # fmt: skip

ONE_HEADED = (
    *_growth(ONE_HEAD, "errors", "Fig. 12", "one head, errors: "),
    _nearer(ONE_HEAD, "errors", "Fig. 12", "one head, errors: "),
    *_growth(ONE_HEAD, "weights", "Fig. 13", "one head, weights: "),
)

_TABLE = {"transformer": "transformer", "lstm": "LSTM"}
_FAMILIES = {"newton": "Newton", "gd": "gradient descent", "ogd": "online gradient descent"}


def _similar(model: str, family: str) -> str:
    return f"similarity of errors, {model} and {family}"


LSTMS = (
    *(
        Entry(
            "Table 1", f"similarity of errors: transformer, LSTM and {name}",
            rows(LSTM, *(_similar(model, family) for model in _TABLE)), labels=tuple(_TABLE.values()), agrees="",
            differs="the best number of steps is taken here, up to 4096, and the paper does not say how many it took"
            if family == "gd" else "smaller models, fewer dimensions",
        )
        for family, name in _FAMILIES.items()
    ),
    Entry(
        "Table 1", "which of the two is nearer: transformer to Newton, transformer to gradient descent, LSTM to online "
        "gradient descent, and the other one",
        rows(LSTM, _similar("transformer", "newton"), _similar("transformer", "gd"), _similar("lstm", "ogd"),
             _similar("lstm", "newton"), _similar("lstm", "gd"), _similar("transformer", "ogd")),
        labels=("these", "the others"), claim="these",
        compare=lambda found: [a.measured.low > b.measured.high for a, b in zip(found[:3], found[3:], strict=True)],
        agrees="", differs="not these",
    ),
    Entry(
        "Fig. 14, left", "MSE over E y² after 10 points: LSTM, transformer",
        rows(PROGRESSION, "LSTM: MSE after 10 points, last layer, over E y²",
             "transformer: MSE after 10 points, last layer, over E y²"),
        claim="the LSTM's is much higher", compare=lambda found: found[0].measured.low > 2 * found[1].measured.high,
        agrees="more than twice", differs="not twice",
    ),
    Entry(
        "Fig. 14, centre", "forgetting, MSE of the first minus the last point asked again: LSTM, online gradient "
        "descent",
        rows(LSTM, "forgetting: first minus last point, LSTM", "forgetting: first minus last point, online GD"),
        claim="positive", holds=above(0), agrees="both forget", differs="no forgetting",
    ),
    Entry(
        "Fig. 14, centre", "the same: Newton after 5 iterations, transformer",
        rows(LSTM, "forgetting: first minus last point, Newton, 5 iterations",
             "forgetting: first minus last point, transformer"),
        claim="0", holds=lambda m: m.low <= 0 <= m.high, agrees="neither forgets", differs="they forget",
    ),
)  # fmt: skip

FU = (*THEOREMS, *ISOTROPIC, *ILL_CONDITIONED, *ONE_HEADED, *LSTMS)
