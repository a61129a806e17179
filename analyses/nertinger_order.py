"""Nertinger, Theorem 3: does a model's prediction depend on the order of its context?

python analyses/nertinger_order.py
"""

from dataclasses import dataclass

from mechicl import algorithms
from mechicl.analysis import measure_order_sensitivity
from mechicl.checkpoints import available, load_checkpoint
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.reports import Claim, Claims, Comparison, Row
from mechicl.reports.script import ScriptArgs, run_script
from mechicl.statistics import ratio_interval


@dataclass(frozen=True)
class Args(ScriptArgs):
    """How much predictions vary when the context is permuted."""

    checkpoints: tuple[str, ...] = ()
    """Names or folders; by default all that come with the package and read points."""
    n_prompts: int = 512
    """Held-out prompts for each model."""
    n_orders: int = 16
    """Random orders of each context."""
    seed: int = 1
    """Seed of the prompts and the orders."""


def compare(args: Args) -> Comparison:
    """Variance over orders as a share of the predictions' mean square, and of the model's own loss."""
    rows: list[Row] = []
    loaded = [load_checkpoint(name) for name in args.checkpoints or available()]
    if not args.checkpoints:
        loaded = [checkpoint for checkpoint in loaded if checkpoint.models[0].cfg.prompt_format != "token_ids"]
    for checkpoint in loaded:
        prompts = checkpoint.task.sample(args.n_prompts, seed=args.seed)
        learners = {checkpoint.name: checkpoint.models[0]}
        if checkpoint is loaded[-1]:
            learners |= {
                "gradient descent": AlgorithmLearner(
                    algorithms.gradient_descent, {"steps": [16], "step_size": algorithms.stable_step_size(prompts)}
                ),
                "online gradient descent": AlgorithmLearner(algorithms.online_gradient_descent),
            }
        for label, learner in learners.items():
            sensitivity = measure_order_sensitivity(learner, prompts, n_orders=args.n_orders, seed=args.seed)
            loss = squared_errors(learner, prompts)[:, 0]
            expected = {"gradient descent": "0", "online gradient descent": "not 0"}.get(label)
            rows += [
                Row(f"{label}: variance over orders / mean square of predictions",
                    expected or "0 if it ran GD (Theorem 3)", sensitivity.relative(), "prompts"),
                Row(f"{label}: variance over orders / mean squared error", None,
                    ratio_interval(sensitivity.variance, loss), "prompts"),
            ]  # fmt: skip
    lead = (
        f"The context of {args.n_prompts} prompts in {args.n_orders} random orders (seed {args.seed}), the query last. "
        f"Gradient descent on the whole context predicts the same for every order."
    )
    return Comparison("Order sensitivity", lead, rows)


def claims(comparison: Comparison) -> list[Claim]:
    """Theorem 3: what runs gradient descent on its context predicts the same for every order."""
    paper = Claims("nertinger2025", comparison.rows)
    variance, error = (
        f"variance over orders / {scale}" for scale in ("mean square of predictions", "mean squared error")
    )
    paper.add(
        "Theorem 3", "variance of predictions over orders of the context, over their mean square: linear attention "
        "with 1, 2, 5 layers, softmax attention, x and y in one token",
        *(f"{name}: {variance}" for name in ("lsa-1l", "lsa-2l-looped", "lsa-5l", "softmax-2h")), check="<= 1e-9",
        why="rounding: no order can be seen",
    )  # fmt: skip
    causal = ("gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill", "lstm-4l")
    paper.add(
        "Theorem 3", "variance of predictions over orders of the context, over their mean square: GPT-2 style, with "
        "one head, ill-conditioned; LSTM", *(f"{name}: {variance}" for name in causal), check="<= 1e-9",
        why="the theorem's condition fails, so these do not run gradient descent on the whole context: they see "
        "positions, earlier points only, and over their squared error the variance is "
        f"{', '.join(str(paper[f'{name}: {error}']) for name in causal)}",
    )  # fmt: skip
    paper.add("Theorem 3", "variance of predictions over orders of the context: gradient descent itself",
              f"gradient descent: {variance}", check="<= 0", why="on the whole context")  # fmt: skip
    return paper.stated


if __name__ == "__main__":
    run_script(Args, compare, "nertinger_order", claims)
