"""Fu et al. 2024, Figs. 2, 4, 5 and 7 (errors), 6 (weights), 10 to 13: which iteration does each layer match?

python analyses/fu_matching.py                              # the small isotropic model
python analyses/fu_matching.py --checkpoint gpt2-8l-1h      # one head (Figs. 12, 13)
python analyses/fu_matching.py --checkpoint gpt2-8l-ill     # ill-conditioned (B.3)
"""

from dataclasses import dataclass
from typing import Literal

from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Claim, Claims, Comparison, Row
from mechicl.reports.layers import compare_layers
from mechicl.reports.script import ScriptArgs, run_script


@dataclass(frozen=True)
class Args(ScriptArgs):
    """Which layer of a model matches which iteration of Newton's method and of gradient descent."""

    checkpoint: str = "gpt2-8l"
    """Name or folder of an interleaved model."""
    similarities: tuple[Literal["errors", "weights"], ...] = ("errors", "weights")
    """Similarities to match layers and iterations by."""
    n_prompts: int = 1024
    """Held-out prompts to compare on."""
    n_fitting: int = 8192
    """Prompts to fit readouts on."""
    seed: int = 0
    """Seed of the prompts."""


def compare(args: Args) -> Comparison:
    """Match every layer by every similarity."""
    return compare_layers(
        load_checkpoint(args.checkpoint),
        similarities=args.similarities,
        n_prompts=args.n_prompts,
        n_fitting=args.n_fitting,
        seed=args.seed,
    )


ITEMS = {  # of each checkpoint: the figures on growth and on nearness, for errors and for weights; words before them
    "gpt2-8l": {"errors": ("Figs. 2, 4", "Fig. 7"), "weights": ("Fig. 6", "Fig. 7")},
    "gpt2-8l-ill": {"errors": ("Fig. 10", "Fig. 10"), "weights": ("Fig. 11", "Fig. 11")},
    "gpt2-8l-1h": {"errors": ("Fig. 12", "Fig. 12"), "weights": ("Fig. 13", None)},
}
SETTINGS = {"gpt2-8l": "", "gpt2-8l-ill": "ill-conditioned, ", "gpt2-8l-1h": "one head, "}


def claims(comparison: Comparison) -> list[Claim]:
    """What the paper says of the checkpoint's figures; nothing of a checkpoint that stands for none."""
    paper = Claims("fu2024", comparison.rows)
    name = comparison.data["checkpoint"]
    for similarity, (growth, nearness) in ITEMS.get(name, {}).items():
        _growth(paper, growth, similarity, SETTINGS[name], descent=similarity == "errors" or name == "gpt2-8l-1h")
        if nearness:
            paper.add(
                nearness, f"{SETTINGS[name]}{similarity}: similarity to the best Newton iteration minus that to the "
                "best gradient descent step, by layer",
                f"{similarity}: layer *, best Newton minus best gradient descent", check="> 0", published="positive",
                why="where it is not positive, enough steps of gradient descent are as similar, or more",
            )  # fmt: skip
    if name == "gpt2-8l":
        newton, descent = (
            paper[f"errors: last layer and its best {algorithm} step"] for algorithm in ("Newton", "gradient descent")
        )
        paper.add("Fig. 3b", "similarity of errors of the last layer and its best Newton iteration", newton,
                  why=newton.note)  # fmt: skip
        paper.add("Fig. 5", "similarity of errors of the last layer and its best gradient descent step", descent,
                  why=f"Newton's: {newton}; {descent.note}")  # fmt: skip
        paper.add("Fig. 7", "weights: last layer and least squares", "weights: last layer and its best OLS step",
                  check="near 1")  # fmt: skip
    if name == "gpt2-8l-ill":
        newton, descent = (_last(comparison, algorithm) for algorithm in ("Newton", "gradient descent"))
        paper.add("Figs. 9, 10", "ill-conditioned: Newton iterations that match the last layer", newton,
                  check="within 15% of 21", published="21, as on isotropic data")  # fmt: skip
        paper.add("Figs. 9, 10", "ill-conditioned: gradient descent steps that match the last layer", descent,
                  check=">= 800", published="800 or more", why="4096 is the most that was tried")  # fmt: skip
    return paper.stated


def _growth(paper: Claims, item: str, similarity: str, setting: str, *, descent: bool) -> None:
    """How the best matching iterations grow with the layer: in kind, and by how many."""
    kinds = {"Newton": ("Newton iteration", "is linear")}
    if descent:
        kinds["gradient descent"] = ("number of gradient descent steps", "is exponential")
    for algorithm, (words, check) in kinds.items():
        row = paper[f"{similarity}: {algorithm}, growth of the best step with the layer"]
        paper.add(item, f"{setting}{similarity}: best {words} by layer, growth", row, check=check, why=row.note)
    paper.add(item, f"{setting}{similarity}: Newton iterations a layer",
              f"{similarity}: Newton, steps a layer (linear fit)",
              why="a smaller model: 8 layers, 12 in the paper")  # fmt: skip


def _last(comparison: Comparison, algorithm: str) -> Row:
    """The step that matches the last layer best."""
    step = float(comparison.data["errors"][algorithm]["best"][-1]["step"])
    return Row(f"errors: best number of {algorithm} steps, last layer", None, step)


if __name__ == "__main__":
    run_script(Args, compare, "fu_matching", claims)
