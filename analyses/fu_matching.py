"""Fu et al. 2024, Figs. 2, 4, 5 and 7 (errors), 6 (weights), 10 to 13: which iteration does each layer match?

python analyses/fu_matching.py                              # the small isotropic model
python analyses/fu_matching.py --checkpoint gpt2-8l-1h      # one head (Figs. 12, 13)
python analyses/fu_matching.py --checkpoint gpt2-8l-ill     # ill-conditioned (B.3)
"""

from dataclasses import dataclass

import torch

from mechicl.analysis.behaviour.matching import Similarity
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Comparison, Row
from mechicl.reports.layers import Layers, match_layers
from mechicl.statistics import median_interval
from support.checks import above, at_least, at_most, by_value, equal, every, near, reads, together, within
from support.claims import Claim, Claims
from support.script import ScriptArgs, run_script


@dataclass(frozen=True)
class Args(ScriptArgs):
    """Which layer of a model matches which iteration of Newton's method and of gradient descent."""

    checkpoint: str = "gpt2-8l"
    """Name or folder of an interleaved model."""
    similarities: tuple[Similarity, ...] = ("errors", "normalised errors", "weights")
    """Similarities to match layers and iterations by."""
    n_prompts: int = 1024
    """Held-out prompts to compare on."""
    n_fitting: int = 4096
    """Prompts to fit readouts on."""
    seed: int = 0
    """Seed of the prompts."""


def compare(args: Args) -> Comparison:
    """Match every layer by every similarity."""
    checkpoint = load_checkpoint(args.checkpoint)
    kind = Layers(checkpoint, n_prompts=args.n_prompts, seed=args.seed)
    measured = match_layers(
        checkpoint, similarities=args.similarities, n_prompts=args.n_prompts, n_fitting=args.n_fitting, seed=args.seed
    )
    return Comparison(kind.title, kind.lead, *measured)


ITEMS = {  # of each checkpoint: the figures on growth and on nearness, for errors and for weights; words before them
    "gpt2-8l": {"errors": ("Figs. 2, 4", "Fig. 7"), "weights": ("Fig. 6", "Fig. 7")},
    "gpt2-8l-ill": {"errors": ("Fig. 10", "Fig. 10"), "weights": ("Fig. 11", "Fig. 11")},
    "gpt2-8l-1h": {"errors": ("Fig. 12", "Fig. 12"), "weights": ("Fig. 13", "Fig. 13")},
}
SETTINGS = {"gpt2-8l": "", "gpt2-8l-ill": "ill-conditioned, ", "gpt2-8l-1h": "one head, "}
UNTESTED = "unresolved: no run on a larger model"
PLACE = "a ridge path in the model's place"
PRINTED_NEARNESS = {  # the best of each column of its heatmaps
    "Fig. 10": "in the paper's own table .14 and .02 in layers 3 and 4, -.002 to .002 in layers 5 to 12",
    "Fig. 11": "in the paper's own table .04, .01, .004 in layers 3 to 5, -.006 to -.001 in layers 6 to 10, .002 after",
    "Fig. 12": "in the paper's own table .003 to .05 from layer 4 on, of a grid that would miss the best steps here",
    "Fig. 13": "in the paper's own table gradient descent is nearer, by .003 to .005, in layers 7 to 12",
}
PRINTED_RATIO = 1.93
"""Newton iterations for each doubling of gradient descent steps in the paper's own figures: best matches of layers 3 to
7 are 2, 5, 8, 10, 14 in Fig. 4 and 4, 8, 32, 64, 256 in Fig. 5 (least squares: 2.9 a layer over 1.5 a layer)."""


PRINTED_DESCENT, FEWEST = 0.988, 256
"""The last layer's similarity to gradient descent in Fig. 5, and the fewest steps that say that much was learned: its
layer 7 matches 256."""


def claims(comparison: Comparison) -> list[Claim]:
    """State the paper's claims on the checkpoint's figures, if it has any."""
    paper = Claims("fu2024", comparison.rows)
    name = comparison.data["checkpoint"]
    for similarity, (growth, nearness) in ITEMS.get(name, {}).items():
        _growth(paper, growth, similarity, SETTINGS[name])
        _nearness(paper, nearness, similarity, SETTINGS[name])
    if name == "gpt2-8l":
        _one_fact(paper)
        _last_layer(paper, comparison)
    if name == "gpt2-8l-ill":
        newton, descent = (_steps_of_last(comparison, algorithm) for algorithm in ("Newton", "gradient descent"))
        paper.add("Figs. 9, 10", "ill-conditioned: Newton iterations that match the last layer", newton,
                  check=every(within, 0.15, 21), published="21, as on isotropic data")  # fmt: skip
        paper.add("Figs. 9, 10", "ill-conditioned: gradient descent steps that match the last layer", descent,
                  check=every(at_least, 800), published="800 or more",
                  cause="unresolved: the step size adapts to each prefix here, and is one for all in the paper",
                  controls={"Newton": [newton]})  # fmt: skip
    return paper.stated


def _growth(paper: Claims, item: str, similarity: str, setting: str) -> None:
    """Measure how the best matching steps grow with the layer, compared with those of a ridge path."""
    kinds = {
        "Newton": ("Newton iteration", "linear"),
        "gradient descent": ("number of gradient descent steps", "exponential"),
    }
    for algorithm, (words, kind) in kinds.items():
        of = f"{algorithm}, growth of the best step with the layer"
        rows = paper.pick(f"{similarity}: {of}*")
        control = paper[f"{similarity}, {PLACE}: {of}"]
        controls = {PLACE: [control]}
        if algorithm == "Newton":
            controls["halvings of a ridge path"] = paper.pick(f"{similarity}: ridge path, growth of the best step*")
        other = "weights" if similarity == "errors" else "errors"
        controls[f"by {other}"] = paper.pick(f"{other}: {of}*")
        same = control.measured == kind
        paper.add(
            item, f"{setting}{similarity}: best {words} by layer, growth", *rows, check=every(reads, kind),
            controls=controls, cause="" if all(row.measured == kind for row in rows) else UNTESTED,
            why=f"{'; '.join(row.note for row in rows)}"
            + ("; no evidence for an algorithm: a ridge path, which has no iterations, grows so too" if same else ""),
        )  # fmt: skip


def _nearness(paper: Claims, item: str, similarity: str, setting: str) -> None:
    """Newton against gradient descent, as in the paper, and against what the paper does not try."""
    minus = f"{similarity}: layer *, best Newton minus best"
    limit = f"{similarity}: least similarity of Newton iterations 3 to 20 to their best gradient descent steps*"
    reversed_ = item == "Fig. 13"
    published, layers = ("not positive", "[3-8]") if reversed_ else ("positive", "*")
    paper.add(
        item, f"{setting}{similarity}: similarity to the best Newton iteration minus that to the best gradient descent "
        "step, by layer", f"{minus} gradient descent".replace("*", layers),
        check=every(at_most, 0.001) if reversed_ else every(above, 0), published=published,
        controls={"as published, one step size for all prefixes": [f"{minus} gradient descent, fixed"],
                  "on the paper's grid": [f"{minus} gradient descent on the paper's grid"],
                  **{f"both {freedom}": [f"{similarity}: layer *, best Newton, {freedom} minus best gradient descent, "
                                         f"{freedom}"] for freedom in ("fixed", "tuned per step")},
                  **({"every number of points counted equally": [f"normalised {minus} gradient descent"]}
                     if similarity == "errors" and paper.has(f"normalised {minus} gradient descent") else {}),
                  "ridge path": [f"{minus} ridge path"], "steepest descent": [f"{minus} steepest descent"],
                  "how alike Newton and gradient descent are, in this size and the paper's": [limit]},
        cause="" if reversed_ else _cause(paper, minus),
        why="; ".join(filter(None, ("Newton's α and the step size of gradient descent both adapt to each prefix",
                                    PRINTED_NEARNESS.get(item, "")))),
    )  # fmt: skip
    rivals = ("gradient descent", "ridge path", "steepest descent", "conjugate gradients", "Chebyshev")
    lines = {f"minus {rival}": paper.pick(f"{minus} {rival}") for rival in rivals}
    paper.add(
        item, f"{setting}{similarity}: Newton is the nearest of six families, by layer", lines=lines,
        check=by_value(lambda *rivals: all(above(rival, 0) for rival in rivals)), published="most similar to Newton",
        controls={"nearest": [f"{similarity}: layer *, nearest family"]},
        cause="measure: the paper compares Newton with gradient descent only",
        why="the paper tries gradient descent and online gradient descent only; steps chosen on other prompts",
    )  # fmt: skip


def _cause(paper: Claims, minus: str) -> str:
    """Why Newton is not nearer: the paper's steps and grid, if more layers are nearer with them; else unresolved."""
    nearer, on_grid = (
        sum(not isinstance(row.measured, str) and row.ends[0] > 0 for row in paper.pick(f"{minus} {descent}"))
        for descent in ("gradient descent", "gradient descent on the paper's grid")
    )
    if on_grid > nearer:
        return (
            "measure: the paper's gradient descent has one step size for all prefixes, and no number of steps between "
            "1 and 50"
        )
    return UNTESTED


def _one_fact(paper: Claims) -> None:
    ratio = "Newton iterations for each doubling of gradient descent steps"
    paper.add(
        "Figs. 4, 5", "errors: Newton iterations a layer over doublings of gradient descent steps a layer",
        f"errors: {ratio}", check=every(within, 0.15, PRINTED_RATIO), published=f"{PRINTED_RATIO}, from the best steps",
        controls={PLACE: [f"errors, {PLACE}: {ratio}"]},
        why="2 by algebra: Newton's residual is (1 - αλ²)^(2^k), gradient descent's (1 - aλ)^k, so that linear growth "
        "of the one and exponential growth of the other are one fact, in the paper's figures too",
    )  # fmt: skip


def _last_layer(paper: Claims, comparison: Comparison) -> None:
    rows = {
        family: paper[f"errors: last layer and its best {family} step"]
        for family in ("Newton", "gradient descent", "ridge path", "steepest descent")
    }
    newton, descent, path, search = rows.values()
    controls = {"ridge path": [path], "steepest descent": [search]}
    paper.add("Fig. 3b", "similarity of errors of the last layer and its best Newton iteration", newton,
              why=newton.note, controls=controls)  # fmt: skip
    paper.add(
        "Fig. 5", "similarity of errors of the last layer and its best gradient descent step, and this step",
        lines={"similarity": [descent], "step": [_steps_of_last(comparison, "gradient descent")]},
        check=together(lambda a, b: equal(a, PRINTED_DESCENT) and at_least(b, FEWEST)),
        published=f"{PRINTED_DESCENT}, at 4,096 steps",
        why=f"Newton's: {newton}; an untrained model is as similar to the first step, which hardly moves",
        controls=controls,
    )  # fmt: skip
    path_of_weights = {"ridge path": ["weights: last layer and its best ridge path step"]}
    paper.add("Fig. 7", "weights: last layer and least squares", "weights: last layer and its best OLS step",
              check=every(near, 1), controls=path_of_weights)  # fmt: skip


def _steps_of_last(comparison: Comparison, algorithm: str) -> Row:
    """The step that matches the last layer best, over seeds where there are several."""
    steps = torch.tensor([one["errors"][algorithm][-1] for one in comparison.data["by_seed"]], dtype=torch.float64)
    measured = median_interval(steps) if len(steps) > 1 else steps.item()
    return Row(f"errors: best number of {algorithm} steps, last layer", None, measured, "seeds" * (len(steps) > 1))


if __name__ == "__main__":
    run_script(Args, compare, "fu_matching", claims)
