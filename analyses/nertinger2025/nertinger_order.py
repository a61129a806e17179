"""Nertinger, Theorem 3: does a model's prediction depend on the order of its context?"""

from typing import Any

from analyses.support.script import Option, script
from analyses.support.seeds import over_orders
from mechicl import algorithms
from mechicl.checkpoints import Checkpoint, load_checkpoint, untrained
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.reports.rows import over_models
from mechicl.statistics import Interval, ratio_interval

UNORDERED = ("lsa-1l", "lsa-2l-looped", "lsa-5l", "softmax-2h")
CAUSAL = ("gpt2-8l", "gpt2-8l-1h", "gpt2-8l-ill", "lstm-4l")
SHARE = "variance over orders / mean square of predictions"


@script(checkpoints=(*UNORDERED, *CAUSAL), n_prompts=512, n_orders=Option(16, "random orders of each context"), seed=1)
def compare(args: Any) -> Comparison:
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
        share = ratio_interval(*over_orders(learner, prompts, n_orders=args.n_orders, seed=args.seed))
        published = "0" if label == "gradient descent" else "not 0"
        rows.append(Row(f"{label}: {SHARE}", published, share, "prompts"))
    lead = (
        f"The context of {args.n_prompts} prompts in {args.n_orders} random orders (seed {args.seed}), the query last. "
        f"Gradient descent on the whole context predicts the same for every order. Intervals are over seeds and "
        f"prompts, of a single seed over prompts."
    )
    return Comparison("Order sensitivity", lead, rows)


def _rows(label: str, checkpoint: Checkpoint, prompts: Prompts, args: Any) -> list[Row]:
    """Both shares of one checkpoint, over its seeds."""
    shares: dict[str, list[Interval]] = {SHARE: [], "variance over orders / mean squared error": []}
    for model in checkpoint.models:
        variance, signal = over_orders(model, prompts, n_orders=args.n_orders, seed=args.seed)
        for values, divisor in zip(shares.values(), (signal, squared_errors(model, prompts)[:, 0]), strict=True):
            values.append(ratio_interval(variance, divisor))
    published = {SHARE: "0 if it ran GD (Theorem 3)"}
    return [over_models(f"{label}: {name}", each, checkpoint, published.get(name)) for name, each in shares.items()]


if __name__ == "__main__":
    compare.run()
