"""Paths between seeds: mode connectivity where von Oswald et al. 2023 (section 3, A.3) left it open.

python analyses/oswald_connectivity.py
"""

import itertools
from dataclasses import dataclass

from mechicl import viz
from mechicl.analysis import connect_modes
from mechicl.analysis.weights import LossPath
from mechicl.reports import Claim, Claims, Comparison, Row, Section
from mechicl.reports.claims import numbers
from mechicl.reports.script import ScriptArgs, regression_checkpoint, run_script


@dataclass(frozen=True)
class Args(ScriptArgs):
    """Barriers between the seeds of one training, by kind of path."""

    checkpoint: str = "lsa-5l"
    """Name or folder of a checkpoint with two seeds or more."""
    n_prompts: int = 10_000
    """Held-out prompts."""
    n_pairs: int = 3
    """Pairs of seeds."""
    bending_steps: int = 1500
    """Optimisation steps for the curve."""
    seed: int = 0
    """Seed of the prompts that curves are bent on; the held-out ones have the next."""


def compare(args: Args) -> Comparison:
    """Raw, rescaled, aligned, lifted and curved paths between pairs of seeds."""
    checkpoint, task = regression_checkpoint(args.checkpoint)
    pairs = list(itertools.combinations(range(len(checkpoint.models)), 2))[: args.n_pairs]
    if not pairs:
        raise ValueError(f"{checkpoint.name} has one seed only: a path between seeds needs two")
    by_pair: list[dict[str, LossPath]] = []
    for i, j in pairs:
        a, b = checkpoint.models[i], checkpoint.models[j]
        result = connect_modes(a, b, task, n_prompts=args.n_prompts, bending_steps=args.bending_steps, seed=args.seed)
        by_pair.append(result.paths)
    rows = []
    for kind in by_pair[0]:
        barriers = [paths[kind].barrier() for paths in by_pair]
        means = [barrier.mean for barrier in barriers]
        each = "; ".join(f"{i}-{j}: {barrier}" for (i, j), barrier in zip(pairs, barriers, strict=True))
        barrier_range = f"{min(means):.3g} to {max(means):.3g}"
        rows.append(Row(f"barrier between seeds, {kind}", _claim(kind), barrier_range, "prompts", each))
    figures = [
        Section(f"Seeds {i} and {j}", "Loss on held-out prompts.", viz.connectivity_paths(paths))
        for (i, j), paths in zip(pairs, by_pair, strict=True)
    ]
    lead = (
        f"{checkpoint.name}: {len(pairs)} pairs of seeds, {args.n_prompts:,} held-out prompts. A barrier is the "
        f"largest excess of the loss over the line between the ends, relative to the ends' mean loss. Lifted models "
        f"have the heads of both ends; all others keep the architecture."
    )
    data = {kind: [paths[kind].squared_errors.mean(-1).tolist() for paths in by_pair] for kind in by_pair[0]}
    return Comparison(f"Paths between seeds ({checkpoint.name})", lead, rows, figures, {"losses": data})


def _claim(kind: str) -> str | None:
    return "a barrier for most seeds (A.4)" if kind == "rescaled" else None


def claims(comparison: Comparison) -> list[Claim]:
    """What the paper says of paths between seeds."""
    paper = Claims("vonoswald2023", comparison.rows)
    barrier = paper["barrier between seeds, rescaled"]
    paper.add(
        "Section 3, A.4", "paths between seeds of five layers, rescaled as in A.3", barrier,
        check=f"{numbers(str(barrier.measured))[0]:g} > 0.05",
        why=f"the range over pairs of seeds; a curved path leaves {paper['barrier between seeds, curved']}",
    )  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "oswald_connectivity", claims)
