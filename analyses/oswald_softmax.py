"""Softmax attention against one step of gradient descent: heads and sinks (von Oswald et al. 2023, Figs. 11, 12).

python analyses/oswald_softmax.py
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.analysis import align, read_weight_products
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.weights import WeightProducts
from mechicl.checkpoints import Checkpoint, load_checkpoint
from mechicl.learners import squared_errors
from mechicl.reports import Comparison, Row
from mechicl.reports.rows import over_resamples, over_seeds
from mechicl.statistics import interval, median_interval
from mechicl.statistics.intervals import resampled_means
from support.script import Option, script

NOT_STUCK = "seeds that are not stuck"


@script(
    checkpoints=Option(
        ("softmax-1h", "softmax-2h", "softmax-2h-sink", "lsa-1l"), "Names or folders of one-layer models on one task"
    ),
    n_prompts=20_000,
    seed=Option(1_000_003, "Seed of the held-out prompts"),
)
def compare(args: Any) -> Comparison:
    """Loss gap to tuned gradient descent, alignment, and the cancellation of the heads' off-diagonals."""
    rows: list[Row] = []
    data = {}
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        task = checkpoint.task
        held_out = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
        descent = tuned_descent(task.sample(args.n_prompts, seed=args.seed + 1, dtype=torch.float64), 1)
        models = [copy.deepcopy(model).double() for model in checkpoint.models]
        reference = squared_errors(descent, held_out)[:, 0]
        errors = torch.stack([squared_errors(model, held_out)[:, 0] for model in models])
        if not rows:
            rows.append(Row("half-MSE, one tuned step of gradient descent", 0.2, interval(reference / 2), "prompts"))
        data[name] = {"mse": errors.mean(-1).tolist(), "gd_mse": reference.mean().item()}
        cosines = torch.stack([align(each, descent, held_out[:4096]).sensitivity_cosine for each in models])
        seeds = BySeed(checkpoint)
        losses = resampled_means(torch.cat([errors, reference[None]]))
        rows += seeds.resampled(f"half-MSE, {name}", losses[:, :-1] / 2, len(held_out))
        above = losses[:, :-1] / losses[:, -1:] - 1
        rows += seeds.resampled(f"loss above gradient descent's, {name}", above, len(held_out), _claim(name))
        finite = cosines.isfinite().all(0)
        rows += seeds.resampled(f"sensitivity cosine, {name}", resampled_means(cosines[:, finite]), int(finite.sum()))
        if models[0].cfg.n_heads > 1:
            alone, together = zip(*(_cancellation(read_weight_products(model)) for model in models), strict=True)
            words = "off-diagonal share of the x-block of"
            rows += seeds.rows(f"{words} a head's W_KQ η, {name}", torch.stack(alone))
            rows += seeds.rows(f"{words} the heads' sum, {name}", torch.stack(together), "near 0 (Fig. 11)")
    lead = (
        f"One layer of attention on 10 points in 10 dimensions, x ~ U(-1/2, 1/2), on {args.n_prompts:,} held-out "
        f"prompts (seed {args.seed}); rows are over all seeds, and over those whose training is not stuck. Losses and "
        f"cosines are medians over seeds, with intervals over seeds and prompts and means in the notes. Erratum to "
        f"A.9: without a sink, two softmax heads can only reach the centred sum Σ y (s - mean s); with one (a key with "
        f"a constant score and value 0) the limit is gradient descent."
    )
    return Comparison("Softmax attention and gradient descent (A.9)", lead, rows, (), data)


@dataclass(frozen=True, eq=False)
class BySeed:
    """Rows of a checkpoint by the one rule for seeds: over all, and over those that are not stuck where some are."""

    checkpoint: Checkpoint

    @property
    def kept(self) -> list[int]:
        """The seeds that are not stuck."""
        return [i for i in range(len(self.checkpoint.models)) if i not in self.checkpoint.stuck]

    @property
    def words(self) -> str:
        """How many are stuck."""
        return f"{len(self.checkpoint.stuck)} of {len(self.checkpoint.models)} stuck"

    def rows(self, quantity: str, values: Float[Tensor, "seed"], published: str | None = None) -> list[Row]:
        """One row over all seeds, and a second, named so, without stuck ones: the same where there are none."""
        without = Row(f"{quantity}, {NOT_STUCK}", None, median_interval(values[self.kept]), "seeds", self.words)
        return [Row(quantity, published, *over_seeds(values, self.checkpoint, median=True)), without]

    def resampled(
        self, quantity: str, values: Float[Tensor, "resample seed"], n_prompts: int, published: str | None = None
    ) -> list[Row]:
        """The same two rows over seeds and prompts."""
        kept, words = self.checkpoint.select(self.kept), self.words
        without = Row(f"{quantity}, {NOT_STUCK}", None, *over_resamples(values[:, self.kept], kept, n_prompts, words))
        return [Row(quantity, published, *over_resamples(values, self.checkpoint, n_prompts)), without]


def _claim(name: str) -> str | None:
    return {"softmax-1h": "large (Fig. 12)", "softmax-2h": "smaller, not 0 (Fig. 12)", "lsa-1l": "0 (Fig. 2)"}.get(name)


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
