"""Nertinger."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mechicl.statistics import Interval, interval

from .entry import CONSTRUCTIONS, Derived, Entry, Row, Sources, at_most, rows

TABLE, ORDER = "nertinger_table", "nertinger_order"
KAPPAS, NOISES = (1, 10, 100), ("0.0", "0.1", "0.3")
LABELS = tuple(f"κ = {kappa}" for kappa in KAPPAS)
ACTIVATIONS = ("linear", "leaky_relu_0.75", "leaky_relu_0.5", "leaky_relu_0.25", "relu", "softmax")
EXACT = at_most(1e-12)
STUCK = "seeds in local minima (some for κ > 1) left out"


def _cells(name: str, noises: Sequence[str] = NOISES) -> Sources:
    return rows(TABLE, *(f"{name}, κ = {kappa}, ν² = {noise}" for kappa in KAPPAS for noise in noises))


def _aligned(activation: str, kappa: int, measure: str) -> Derived:
    """An alignment with PGD after training, mean over the seeds outside local minima."""

    def last(data: dict[str, Any]) -> Interval:
        return interval(torch.tensor(data["over_training"][f"κ = {kappa}, ν² = 0.0"][activation][measure][-1]))

    return Derived(f"{measure}, {activation}, κ = {kappa}", last, "seeds")


def _cosines(kappa: int, activations: Sequence[str] = ACTIVATIONS) -> Sources:
    return rows(TABLE, *(_aligned(name, kappa, "sensitivity_cosine") for name in activations))


def _highest_during_training(data: dict[str, Any]) -> float:
    found = torch.tensor(data["over_training"]["κ = 1, ν² = 0.0"]["softmax"]["sensitivity_cosine"])
    return found.mean(1).max().item()


def _halves(holds: Callable[[Row, Row], bool]) -> Callable[[Sequence[Row]], list[bool]]:
    """Compare the rows' first half with the second, one by one."""

    def each(found: Sequence[Row]) -> list[bool]:
        half = len(found) // 2
        return [holds(a, b) for a, b in zip(found[:half], found[half:], strict=True)]

    return each


def _within(share: float) -> Callable[[Sequence[Row]], list[bool]]:
    return _halves(lambda a, b: abs(a.measured.mean / b.measured.mean - 1) <= share)


def _near_the_printed(found: Sequence[Row]) -> list[bool]:
    """Bounds, then cells of the table: each bound within a tenth of what the cell's published."""
    half = len(found) // 2
    pairs = zip(found[:half], found[half:], strict=True)
    return [isinstance(b.published, (int, float)) and abs(a.measured.mean / b.published - 1) <= 0.1 for a, b in pairs]


def _order_of_means(found: Sequence[Row]) -> bool:
    means = [row.measured.mean for row in found]
    return means == sorted(means, reverse=True)


def _activation(name: str, what: str, differs: str = "", **cites: Sources) -> Entry:
    return Entry(
        "Table 1", f"{what}: best loss, noise 0, 0.1, 0.3", _cells(name), labels=LABELS,
        agrees="" if name == "PGD" else STUCK, differs="; ".join(filter(None, (differs, STUCK))), cites=cites,
    )  # fmt: skip


def _order(words: str, *names: str) -> Sources:
    return rows(ORDER, *(f"{name}: variance over orders / {words}" for name in names))


THEOREMS = (
    Entry(
        "Theorem 1", "linear attention as preconditioned gradient descent, 5 steps: largest relative error against a "
        "plain loop",
        rows(CONSTRUCTIONS, "004, Theorem 1: preconditioned_gd, exact"),
        holds=EXACT, agrees="rounding; section 2 prints PGD with + before the gradient, it is -", differs="not exact",
    ),
    Entry(
        "Theorem 2", "the best weights of one linear layer: the same error against the formula",
        rows(CONSTRUCTIONS, "004, Theorem 2: linear_optimum, exact"),
        holds=EXACT, agrees="rounding", differs="not exact",
    ),
    Entry(
        "Theorem 2", "loss of trained linear layers and the exact loss of these weights, κ = 1, 10, 100",
        _cells("linear", NOISES[:1]) + rows(TABLE, *(f"closed form (Theorem 2), κ = {k}, ν² = 0.0" for k in KAPPAS)),
        labels=("trained", "exact"), claim="optimal", compare=_within(0.01),
        agrees="training reaches the optimum to within 1%", differs="training does not reach it to within 1%",
    ),
    Entry(
        "Theorem 3", "variance of predictions over orders of the context, over their mean square: linear attention "
        "with 1, 2, "
        "5 layers, softmax attention, x and y in one token",
        _order("mean square of predictions", "lsa-1l", "lsa-2l-looped", "lsa-5l", "softmax-2h"),
        holds=at_most(1e-9), agrees="rounding: no order can be seen", differs="the order matters",
    ),
    Entry(
        "Theorem 3", "the same: GPT-2 style, with one head, ill-conditioned; LSTM",
        _order("mean square of predictions", "gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill", "lstm-4l"),
        holds=at_most(1e-9), agrees="they could run gradient descent on the whole context",
        differs="the theorem's condition fails, so these do not run gradient descent on the whole context: they see "
        "positions, earlier points only, and over their squared error the variance is {share}",
        cites={"share": _order("mean squared error", "gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill", "lstm-4l")},
    ),
    Entry(
        "Theorem 3", "the same: gradient descent itself",
        _order("mean square of predictions", "gradient descent"), agrees="on the whole context", differs="not 0",
        holds=at_most(0),
    ),
    Entry(
        "Theorem 4", "the best weights of one ReLU layer: loss as printed, loss of trained layers",
        rows(TABLE, "ReLU, Theorem 4 as printed", "relu, κ = 1, ν² = 0.0"),
        labels=("Theorem 4", "trained"), claim="optimal",
        compare=lambda found: found[0].measured.low <= 1.02 * found[1].measured.high,
        agrees="", differs="with the read-out -Z the sign of Q₀ must be negative, as in Theorem 2",
    ),
    Entry(
        "Theorem 4", "the same with Q₀ negative",
        rows(TABLE, "ReLU, Theorem 4 with Q₀ negative", "relu, κ = 1, ν² = 0.0"),
        labels=("Theorem 4", "trained"), claim="optimal",
        compare=lambda found: found[0].measured.low <= 1.02 * found[1].measured.high,
        agrees="training ends there", differs="training is better",
    ),
    Entry(
        "Theorem 4", "these weights: relative error against the formula",
        rows(CONSTRUCTIONS, "004, Theorem 4: relu_optimum, exact"),
        holds=EXACT, agrees="rounding; with the sign corrected", differs="not exact",
    ),
)  # fmt: skip

FIGURE_1 = (
    Entry(
        "Fig. 1, top", "cosine of sensitivities with PGD after training, κ = 1: linear, leaky ReLU 0.75, 0.5, 0.25",
        _cosines(1, ACTIVATIONS[:4]), claim="high", holds=lambda m: m.mean >= 0.95,
        agrees="near 1", differs="below 0.95",
    ),
    Entry(
        "Fig. 1, top", "the same: leaky ReLU 0.25, ReLU",
        _cosines(1, ACTIVATIONS[3:5]), claim="a noticeable drop to ReLU", compare=_order_of_means,
        agrees="", differs="no drop",
    ),
    Entry(
        "Fig. 1, top", "the same for all six activations, κ = 1 and 100",
        _cosines(1) + _cosines(100), labels=("κ = 1", "κ = 100"), claim="significantly less when ill-conditioned",
        compare=_halves(lambda a, b: b.measured.high < a.measured.low), agrees="", differs="not less",
    ),
    Entry(
        "Fig. 1, top", "softmax, κ = 1: highest cosine during training, and at the end",
        rows(TABLE, Derived("highest sensitivity_cosine, softmax", _highest_during_training))
        + _cosines(1, ("softmax",)),
        labels=("highest", "at the end"), claim="a spike that quickly diminishes",
        compare=lambda found: found[1].measured.high < 0.9 * found[0].measured.mean,
        agrees="", differs="it does not fall again: these heads' outputs are free to grow, see softmax in Table 1",
    ),
    Entry(
        "Fig. 1, bottom", "distance of predictions from PGD after training, κ = 1: linear, leaky ReLU 0.75, 0.5, "
        "0.25, ReLU",
        rows(TABLE, *(_aligned(name, 1, "prediction_distance") for name in ACTIVATIONS[:5])),
        claim="low; larger for ReLU", compare=lambda found: _order_of_means(found[::-1]),
        agrees="grows with the bend of the activation", differs="not in this order",
    ),
)  # fmt: skip

HELD = rows(
    TABLE, *(f"softmax, κ = {k}: least loss with its output held at 1/n, as in eq. 1 with P = 1" for k in KAPPAS)
)

TABLE_1 = (
    _activation("PGD", "one step of PGD, η tuned"),
    _activation(
        "linear", "linear", "ours reach the closed form, {exact} without noise, and the printed are above it for κ = "
        "100",
        exact=rows(TABLE, *(f"closed form (Theorem 2), κ = {k}, ν² = 0.0" for k in KAPPAS)),
    ),
    _activation("leaky_relu_0.75", "leaky ReLU, 0.75"),
    _activation("leaky_relu_0.5", "leaky ReLU, 0.5"),
    _activation("leaky_relu_0.25", "leaky ReLU, 0.25"),
    _activation("relu", "ReLU"),
    _activation("softmax", "softmax", "ours are lower: see the next entry"),
    Entry(
        "Table 1", "softmax: least loss of a head whose output is held at 1/n, κ = 1, 10, 100, and the trained ones",
        HELD + _cells("softmax", NOISES[:1]), labels=("held at 1/n", "trained"),
        claim="the printed losses", compare=_near_the_printed,
        agrees="within a tenth of the printed: eq. 1 divides the normalised pattern by n once more, and with P = 1 a "
        "head "
        "cannot do better; free to grow, as here, or held at 1 ({one}), it does",
        differs="not what was printed; held at 1: {one}",
        cites={"one": rows(TABLE, *(f"softmax, κ = {k}: least loss with its output held at 1" for k in KAPPAS))},
    ),
    Entry(
        "Table 1", "linear and leaky ReLU 0.75 outperform PGD, κ = 100, noise 0, 0.1, 0.3",
        rows(TABLE, *(f"{name}, κ = 100, ν² = "
        f"{noise}" for name in ("linear", "leaky_relu_0.75", "PGD") for noise in NOISES)),
        labels=("linear", "leaky ReLU 0.75", "PGD"), claim="lower than PGD",
        compare=lambda found: [row.measured.high < pgd.measured.low for i in (0, 3)
                               for row, pgd in zip(found[i : i + 3], found[6:], strict=True)],
        agrees="Σ⁻¹ is not the best preconditioner for 20 points (Theorem 2)", differs="not lower",
    ),
    Entry(
        "Table 1", "noise has minimal impact: linear, with noise 0.3, without, κ = 1, 10, 100",
        _cells("linear", NOISES[2:]) + _cells("linear", NOISES[:1]), labels=("0.3", "0"),
        claim="minimal impact", compare=_within(0.05), agrees="within 5%", differs="more than 5%",
    ),
)  # fmt: skip

NERTINGER = (*THEOREMS, *FIGURE_1, *TABLE_1)
