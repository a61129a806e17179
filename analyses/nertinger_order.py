"""Nertinger, Theorem 3: does a model's prediction depend on the order of its context?

python analyses/nertinger_order.py
"""

from dataclasses import dataclass

from mechicl import algorithms
from mechicl.analysis import measure_order_sensitivity
from mechicl.checkpoints import Checkpoint, load_checkpoint, untrained
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.reports.rows import over_models
from mechicl.statistics import Interval, ratio_interval
from support.checks import above, at_most, every
from support.claims import Claim, Claims
from support.script import ScriptArgs, run_script

UNORDERED = ("lsa-1l", "lsa-2l-looped", "lsa-5l", "softmax-2h")
CAUSAL = ("gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill", "lstm-4l")
SHARE = "variance over orders / mean square of predictions"


@dataclass(frozen=True)
class Args(ScriptArgs):
    """How much predictions vary when the context is permuted."""

    checkpoints: tuple[str, ...] = (*UNORDERED, *CAUSAL)
    """Names or folders of models that read points."""
    n_prompts: int = 512
    """Held-out prompts for each model."""
    n_orders: int = 16
    """Random orders of each context."""
    seed: int = 1
    """Seed of the prompts and the orders."""


def compare(args: Args) -> Comparison:
    """Variance over orders as a share of the predictions' mean square, and of the model's own loss."""
    rows: list[Row] = []
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        prompts = checkpoint.task.sample(args.n_prompts, seed=args.seed)
        for label, each in ((checkpoint.name, checkpoint), (f"{checkpoint.name}, untrained", untrained(checkpoint))):
            rows += _rows(label, each, prompts, args)
    prompts = load_checkpoint(args.checkpoints[0]).task.sample(args.n_prompts, seed=args.seed)
    step_size = algorithms.stable_step_size(prompts)
    learners = {
        "gradient descent": AlgorithmLearner(algorithms.gradient_descent, {"steps": [16], "step_size": step_size}),
        "online gradient descent": AlgorithmLearner(algorithms.online_gradient_descent),
    }
    for label, learner in learners.items():
        sensitivity = measure_order_sensitivity(learner, prompts, n_orders=args.n_orders, seed=args.seed)
        published = "0" if label == "gradient descent" else "not 0"
        rows.append(Row(f"{label}: {SHARE}", published, sensitivity.relative(), "prompts"))
    lead = (
        f"The context of {args.n_prompts} prompts in {args.n_orders} random orders (seed {args.seed}), the query last. "
        f"Gradient descent on the whole context predicts the same for every order. Intervals are over seeds and "
        f"prompts, of a single seed over prompts."
    )
    return Comparison("Order sensitivity", lead, rows)


def _rows(label: str, checkpoint: Checkpoint, prompts: Prompts, args: Args) -> list[Row]:
    """Both shares of one checkpoint, over its seeds."""
    shares: dict[str, list[Interval]] = {SHARE: [], "variance over orders / mean squared error": []}
    for model in checkpoint.models:
        sensitivity = measure_order_sensitivity(model, prompts, n_orders=args.n_orders, seed=args.seed)
        of_error = ratio_interval(sensitivity.variance, squared_errors(model, prompts)[:, 0])
        for values, share in zip(shares.values(), (sensitivity.relative(), of_error), strict=True):
            values.append(share)
    published = {SHARE: "0 if it ran GD (Theorem 3)"}
    return [over_models(f"{label}: {name}", each, checkpoint, published.get(name)) for name, each in shares.items()]


def claims(comparison: Comparison) -> list[Claim]:
    """Theorem 3: what runs gradient descent on its context predicts the same for every order."""
    paper = Claims("nertinger2025", comparison.rows)
    error = "variance over orders / mean squared error"
    paper.add(
        "Theorem 3", "variance of predictions over orders of the context, over their mean square: linear attention "
        "with 1, 2, 5 layers, softmax attention, x and y in one token",
        *(f"{name}: {SHARE}" for name in UNORDERED), check=every(at_most, 1e-9), published="0 if it ran GD",
        why="no order can be seen in these architectures, trained or not, so that it is not evidence of gradient "
        "descent", trained=False, controls={"untrained": [f"{name}, untrained: {SHARE}" for name in UNORDERED]},
    )  # fmt: skip
    paper.add(
        "Section 3.3, after Theorem 3", "variance of predictions over orders of the context, over their squared error: "
        "GPT-2 style, with one head, ill-conditioned; LSTM", *(f"{name}: {error}" for name in CAUSAL),
        check=every(above, 0.01),
        published="real transformers are sensitive to the order (Shen et al.)",
        why="so these do not run gradient descent on the whole context: they see positions, and earlier points only. "
        f"Over their mean square the variance is {', '.join(str(paper[f'{name}: {SHARE}']) for name in CAUSAL)}",
        controls={"untrained": [f"{name}, untrained: {error}" for name in CAUSAL]},
    )  # fmt: skip
    paper.add("Theorem 3", "variance of predictions over orders of the context: gradient descent itself",
              f"gradient descent: {SHARE}",
              check=every(at_most, 0), published="0", why="on the whole context", trained=False,
              controls={"online gradient descent": [f"online gradient descent: {SHARE}"]})  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "nertinger_order", claims)
