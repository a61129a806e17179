"""Bar Natan, Deutch and Magar."""

from collections.abc import Sequence

from .entry import Entry, Pattern, Row, Sources, at_most, rows

TEXTS, LINEAR, SOFTMAX = (
    "icl_against_finetuning_topics-3l", "finetuning_on_contexts_lsa-1l", "finetuning_on_contexts_gpt2-8l"
)  # fmt: skip
METRICS = ("SimAOU, random change", "SimAOU", "SimAM before", "SimAM after")
ERROR = "error of reading attention as a weight update"
OTHERS = (
    "averages over tasks: six data sets and a model of 1.3 billion weights there, four tasks of a made-up language and "
    "a model of 0.2 million here"
)


def _table(how: str) -> Sources:
    return rows(TEXTS, *(f"{metric}, {how}, average" for metric in METRICS))


def _below(found: Sequence[Row]) -> bool:
    """The first row's whole interval is below the second's, and that above the third's."""
    linearised, plain, random = (row.measured for row in found)
    return random.high < linearised.low and linearised.high < plain.low


def _above(found: Sequence[Row]) -> bool:
    """The first row's whole interval is above the second's."""
    return found[0].measured.low > found[1].measured.high


NATAN = (
    Entry(
        "Eq. 1 to 4", "attention over demonstrations as an update of the zero-shot weight, linear attention",
        rows(LINEAR, f"{ERROR}, layer 0"), claim="equal", holds=at_most(1e-4),
        agrees="exact but for rounding",
    ),
    Entry(
        "Section 2.2", "the same reading of softmax attention: error relative to what heads write",
        rows(TEXTS, Pattern("error of reading softmax attention as a weight update, layer *, average", 3))
        + rows(SOFTMAX, Pattern(f"{ERROR}, layer *", 8)),
        notes=True,
    ),
    Entry("Fig. 1", "per-layer training as a drawing: each layer has a loss of its own", measurable=False,
          remark='`FineTuning(how="per_layer")` does it'),
    Entry(
        "Table 1", "SimAOU of a random change and of fine-tuning, SimAM before and after: linearised model",
        _table("linearised"), labels=METRICS, in_part=OTHERS, differs=OTHERS,
    ),
    Entry(
        "Table 2a", "the same of the model itself", _table("fine-tuned"), labels=METRICS, in_part=OTHERS,
        differs=OTHERS,
    ),
    Entry(
        "Table 2b", "the same after training layer by layer", _table("layer by layer"), labels=METRICS, in_part=OTHERS,
        differs=OTHERS,
    ),
    Entry(
        "Section 4.1", "SimAOU of the linearised model, the model itself, a random change",
        rows(TEXTS, *(f"SimAOU, {of}, average" for of in ("linearised", "fine-tuned", "random change, linearised"))),
        claim="lower than the original's, significantly higher than a random vector's", compare=_below,
        labels=("linearised", "original", "random"), agrees="so also here", differs="not in that order here",
    ),
    Entry(
        "Section 4.1.1", "SimAOU after training layer by layer, and of the model itself",
        rows(TEXTS, "SimAOU, layer by layer, average", "SimAOU, fine-tuned, average"),
        claim="higher layer by layer", compare=_above, labels=("layer by layer", "original"),
        agrees="so also here", differs="not higher here",
    ),
)  # fmt: skip
