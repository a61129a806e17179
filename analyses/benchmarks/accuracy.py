"""How closely trained models agree with the theory."""

from typing import Any

from benchmarks.rows import Row, Settings, row
from mechicl.analysis.weights import linear_attention_optimum
from mechicl.checkpoints import load_checkpoint
from mechicl.reports.one_layer import OneLayer


def measure(settings: Settings) -> list[Row]:
    """Everything that this part measures; one run, whatever `rounds` is."""
    kinds = (OneLayer(load_checkpoint(name), progress=False) for name in ("lsa-1l", "lsa-1l-gaussian"))
    one, gaussian = (kind.measure(kind.compared) for kind in kinds)
    measured: dict[str, Any] = {row.quantity: row.measured for row in one.rows}
    halves = [measured[f"half-MSE, {name}"].mean for name in ("trained, mean of the seeds", "tuned gradient descent")]
    half = " over ".join(f"{loss:.4f}" for loss in halves)
    worst = max(one.data["largest_difference"]["input scale"])
    optimum = linear_attention_optimum([1.0] * 5, 20)
    # the closed form is the loss of one tuned step: the ratio on common prompts has no sampling error of theirs
    of_gaussian: dict[str, Any] = {row.quantity: row.measured for row in gaussian.rows}
    relative = of_gaussian["loss, trained over tuned gradient descent"]
    plain_mse = 2 * of_gaussian["half-MSE, trained, mean of the seeds"].mean
    return [
        row("half-MSE, trained over tuned gradient descent", measured["loss, trained over tuned gradient descent"],
            "0.995 to 1.005", f"{half}, {one.data['n_prompts']} prompts"),
        row("sensitivity cosine, trained against gradient descent",
            measured["sensitivity cosine, trained against gradient descent"], ">= 0.999", ""),
        row("eta read from the weights over tuned eta", measured["η read from the weights over tuned η"],
            "0.99 to 1.01", f"tuned on 100,000 prompts: {one.data['tuned_eta']:.4f}"),
        row("half-MSE at the middle of the rescaled path, excess over the ends",
            measured["excess loss at the middle of the rescaled path"], "<= 0.005", ""),
        row("half-MSE at the middle of the path without rescaling, excess over the ends",
            measured["excess loss at the middle of the path without rescaling"], "shown", ""),
        row("largest |trained / gradient descent - 1|, input scale 0.5 to 2", [worst], "<= 0.02",
            "worst seed and scale"),
        row("Gaussian inputs, d = 5, n = 20: MSE, trained over optimum", relative, "0.99 to 1.01",
            f"MSE {relative.mean * optimum:.4f} of {optimum:.4f} on common prompts; {plain_mse:.4f} on 10,000 prompts"),
    ]  # fmt: skip
