"""Softmax attention against one step of gradient descent: heads and sinks (von Oswald et al. 2023, Figs. 11, 12)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.resamples import over_resamples, over_seeds, resampled_means
from analyses.support.script import script
from analyses.support.seeds import in_float64, kept_seeds, query_errors
from mechicl.analysis import align, read_weight_products
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.weights import WeightProducts
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import squared_errors
from mechicl.reports import Comparison, Row
from mechicl.statistics import interval, median_interval

NOT_STUCK = "seeds that are not stuck"


CLAIMS = {"softmax-1h": "large (Fig. 12)", "softmax-2h": "smaller, not 0 (Fig. 12)", "lsa-1l": "0 (Fig. 2)"}


@script(checkpoints=("softmax-1h", "softmax-2h", "softmax-2h-sink", "lsa-1l"), n_prompts=20_000, seed=1_000_003)
def compare(args: Any) -> Comparison:
    """Loss gap to tuned gradient descent, alignment, and the cancellation of the heads' off-diagonals."""
    rows: list[Row] = []
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        task = checkpoint.task
        held_out = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
        descent = tuned_descent(task.sample(args.n_prompts, seed=args.seed + 1, dtype=torch.float64), 1)
        models = in_float64(checkpoint.models)
        reference, errors = squared_errors(descent, held_out)[:, 0], query_errors(models, held_out)
        if not rows:
            rows.append(Row("half-MSE, one tuned step of gradient descent", 0.2, interval(reference / 2), "prompts"))
        cosines = torch.stack([align(each, descent, held_out[:4096]).sensitivity_cosine for each in models])
        losses, n = resampled_means(torch.cat([errors, reference[None]])), len(held_out)
        rows += _resampled(checkpoint, f"half-MSE, {name}", losses[:, :-1] / 2, n)
        above = losses[:, :-1] / losses[:, -1:] - 1
        rows += _resampled(checkpoint, f"loss above gradient descent's, {name}", above, n, CLAIMS.get(name))
        finite = cosines.isfinite().all(0)
        alike = resampled_means(cosines[:, finite])
        rows += _resampled(checkpoint, f"sensitivity cosine, {name}", alike, int(finite.sum()))
        if models[0].cfg.n_heads > 1:
            alone, together = zip(*(_cancellation(read_weight_products(model)) for model in models), strict=True)
            words = "off-diagonal share of the x-block of"
            rows += _over_seeds(checkpoint, f"{words} a head's W_KQ η, {name}", torch.stack(alone))
            rows += _over_seeds(
                checkpoint, f"{words} the heads' sum, {name}", torch.stack(together), "near 0 (Fig. 11)"
            )
    lead = (
        f"One layer of attention on 10 points in 10 dimensions, x ~ U(-1/2, 1/2), on {args.n_prompts:,} held-out "
        f"prompts (seed {args.seed}); rows are over all seeds, and over those whose training is not stuck. Losses and "
        f"cosines are medians over seeds, with intervals over seeds and prompts and means in the notes. Erratum to "
        f"A.9: without a sink, two softmax heads can only reach the centred sum Σ y (s - mean s); with one (a key with "
        f"a constant score and value 0) the limit is gradient descent."
    )
    return Comparison("Softmax attention and gradient descent (A.9)", lead, rows)


# Two rows for each quantity: over all seeds, and over those that are not stuck; the same where none is.


def _over_seeds(
    checkpoint: Checkpoint, quantity: str, values: Float[Tensor, "seed"], published: str | None = None
) -> list[Row]:
    without = median_interval(values[kept_seeds(checkpoint)])
    return [Row(quantity, published, *over_seeds(values, checkpoint, median=True)),
            Row(f"{quantity}, {NOT_STUCK}", None, without, "seeds", _stuck(checkpoint))]  # fmt: skip


def _resampled(
    checkpoint: Checkpoint, quantity: str, values: Float[Tensor, "resample seed"], n_prompts: int,
    published: str | None = None,
) -> list[Row]:  # fmt: skip
    kept = kept_seeds(checkpoint)
    without = over_resamples(values[:, kept], checkpoint.select(kept), n_prompts, _stuck(checkpoint))
    return [Row(quantity, published, *over_resamples(values, checkpoint, n_prompts)),
            Row(f"{quantity}, {NOT_STUCK}", None, *without)]  # fmt: skip


def _stuck(checkpoint: Checkpoint) -> str:
    return f"{len(checkpoint.stuck)} of {len(checkpoint.models)} stuck"


def _cancellation(products: WeightProducts) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of the off-diagonal part of η W_KQ over that of the diagonal: mean of the heads, and of their sum."""
    d = products.x_dim
    weighted = products.W_KQ[0, :, :d, :d] * products.W_PV[0, :, d, d][:, None, None]

    def share(matrix: torch.Tensor) -> torch.Tensor:
        diagonal = matrix.diagonal().diag()
        return (matrix - diagonal).norm() / diagonal.norm()

    return torch.stack([share(matrix) for matrix in weighted]).mean(), share(weighted.sum(0))


if __name__ == "__main__":
    compare.run()
