"""Bounds on memory, as the operating system measures what is used."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mechicl.algorithms import gradient_descent
from mechicl.analysis import ablate, align, corrupt, fit_readouts, measure_order_sensitivity, patch, probe, score_heads
from mechicl.analysis.layers import ols_weights
from mechicl.base.memory import MEMORY, TooLittleMemory
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.models import TransformerConfig, build
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.faults.part import MIB, Outcome, Part, forget_highest, highest, resident

BOUNDS = (64 * MIB, 128 * MIB, 256 * MIB)
"""Smaller ones hold for tensors alone: see `mechicl.base.memory`."""
RATIO = 1.1
PREDICTED = 50
"""Times as many prompts are predicted."""
TASK = LinearRegression(x_dim=10, n_context=40)


class Memory(Part):
    """What a call takes beside its result, when the library is warm and when it is not."""

    name = "memory"
    bar = f"measured peak over the bound that was asked for: at most {RATIO}"
    n = 54
    sample = 3
    seconds = 120.0

    def prepare(self) -> None:
        config = TransformerConfig(
            x_dim=10, n_context=40, prompt_format="interleaved", attention="softmax", read_in="linear",
            read_out="linear", n_layers=4, n_heads=4, d_model=64, d_mlp=128, attn_only=False, initializer_range=0.1,
        )  # fmt: skip
        self.model = build(config).eval()
        self.prompts = TASK.sample(600, seed=0)

    def calls(self, memory: float) -> dict[str, Callable[[Any], object]]:
        """Each with its bound, of some prompts."""
        descent = AlgorithmLearner(gradient_descent, {"steps": [5], "step_size": 0.02})
        quiet: dict[str, Any] = {"memory": memory, "progress": False}
        model = self.model
        return {
            "squared_errors": lambda prompts: squared_errors(model, prompts, at="points", memory=memory),
            "align": lambda prompts: align(model, descent, prompts, memory=memory),
            "patch": lambda prompts: patch(model, prompts[:64], corrupt(prompts[:64], "labels"), "z", **quiet),
            "ablate": lambda prompts: ablate(model, prompts[:64], "z", **quiet),
            "fit_readouts": lambda prompts: fit_readouts(model, prompts, **quiet),
            "probe": lambda prompts: probe(model, {"ols": ols_weights}, prompts[:100], prompts[100:200], **quiet),
            "score_heads": lambda prompts: score_heads(model, prompts=prompts, memory=memory),
            "orders": lambda prompts: measure_order_sensitivity(model, prompts, n_orders=4, memory=memory),
            "predict": lambda prompts: model.predict(_repeated(prompts)),
        }

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        bound = BOUNDS[number // 9 % len(BOUNDS)]
        warm = number // (9 * len(BOUNDS)) % 2 == 0
        name = list(self.calls(bound))[number % 9]
        words = f"{name}, {bound // MIB} MiB, {'warm' if warm else 'cold'}"
        call = self.calls(bound)[name]
        bound = MEMORY if name == "predict" else bound  # it has a bound of its own
        try:
            if warm:
                call(self.prompts[: 2 if name not in ("probe", "fit_readouts", "patch", "ablate") else 300])
            forget_highest()
            begins = resident()
            call(self.prompts)
        except TooLittleMemory as error:
            return Outcome("a named error", True, f"{words}: {error}")
        grown = highest() - begins
        ratio = grown / bound
        return Outcome(
            "within the bound" if ratio <= RATIO else "over the bound", ratio <= RATIO,
            f"{words}: {grown / MIB:.0f} MiB, {ratio:.2f} of the bound", name, mebibytes=grown / MIB,
        )  # fmt: skip


def _repeated(prompts: Prompts) -> Prompts:
    return Prompts(prompts.xs.repeat(PREDICTED, 1, 1), prompts.ys.repeat(PREDICTED, 1, 1))
