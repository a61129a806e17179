"""Runs with hooks that fail: nothing of them stays in the model."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mechicl.analysis import ablate, attribute, corrupt, corrupt_tokens, fit_readouts, patch
from mechicl.prompts import Prompts
from tests.faults.models import Opened, make_models
from tests.faults.part import Outcome, Part

RUNS = 20
"""Of one case."""

KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "fwd_hooks", "bwd_hooks")


class HookError(Exception):
    """What a hook raises."""


class Hooks(Part):
    """Exceptions of hooks and metrics, KeyboardInterrupt among them."""

    name = "hooks"
    bar = f"failing runs, {RUNS} a case: 0 hooks left, and the same predictions after"
    n = 250
    sample = 5

    def prepare(self) -> None:
        self.models = make_models()

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        opened = self.models[number % len(self.models)]
        prompts = opened.draw(4, number)
        with torch.no_grad():
            before, there = opened.ask(prompts), hooks_of(opened.model)
        stopped = 0
        for i in range(RUNS):
            name, works = self._works(opened, prompts, rng, rng.choice((1, 1, 2)))
            kind = rng.choice(list(works))
            words = f"{opened.name}, run {i}: {kind} with a hook at {name}"
            try:
                works[kind]()
            except (HookError, KeyboardInterrupt):
                stopped += 1
            except Exception as error:
                return Outcome("another error", False, f"{words}: {type(error).__name__}: {error}")
            left = hooks_of(opened.model) - there
            if left:
                return Outcome("hooks are left", False, f"{words}: {sorted(left)[:5]}")
            with torch.no_grad():
                if not torch.equal(opened.ask(prompts), before):
                    return Outcome("other predictions", False, words)
        return Outcome(f"no hooks left after {RUNS} runs", True, f"{opened.name}: {stopped} of {RUNS} stopped")

    def summary(self, outcomes: Any) -> list[str]:
        return [f"  {RUNS * len(outcomes)} runs"]

    def _works(
        self, opened: Opened, prompts: Any, rng: random.Random, fails: int
    ) -> tuple[str, dict[str, Callable[[], object]]]:
        """Where a hook is, which fails when it is called so often, and the runs that it or a metric is in."""
        model = opened.model
        name, count = rng.choice([name for name in model.hook_dict if "hook" in name]), 0
        error = rng.choice((HookError, KeyboardInterrupt))

        def hook(activation: Any, hook: Any) -> Any:
            nonlocal count
            count += 1
            if count >= fails:
                raise error(name)
            return activation * 2

        tokens = model.encode(prompts) if isinstance(prompts, Prompts) else prompts
        other = corrupt(prompts, "labels", seed=1) if isinstance(prompts, Prompts) else corrupt_tokens(prompts)
        quiet: dict[str, Any] = {"progress": False}

        def failing(predictions: torch.Tensor) -> torch.Tensor:
            raise error("a metric")

        def within() -> None:
            with model.hooks(fwd_hooks=[(name, hook)]):
                model(tokens)

        def with_gradient() -> None:
            with model.hooks(fwd_hooks=[(name, hook)], bwd_hooks=[(name, lambda gradient, hook: None)]):
                model(tokens).sum().backward()

        works: dict[str, Callable[[], object]] = {
            "run_with_hooks": lambda: model.run_with_hooks(tokens, fwd_hooks=[(name, hook)]),
            "hooks": within,
            "gradients": with_gradient,
            "run_with_cache": lambda: model.run_with_cache(tokens),
            "patch": lambda: patch(model, prompts, other, "resid_pre", metrics=failing, **quiet),
            "ablate": lambda: ablate(model, prompts, "attn_out", metrics=failing, **quiet),
            "attribute": lambda: attribute(model, prompts, other, "resid_pre", metrics=failing),
        }
        if opened.name == "LSTM":
            del works["ablate"]
        if isinstance(prompts, Prompts):
            works["fit_readouts"] = lambda: fit_readouts(model, prompts, folds=2, **quiet)
        return name, works


def hooks_of(model: torch.nn.Module) -> set[str]:
    """Everything that listens to a model, by name and number."""
    found = set()
    for name, module in model.named_modules():
        for kind in KINDS:
            n = len(getattr(module, kind, ()) or ())
            found |= {f"{name}.{kind} {i}" for i in range(n)}
        if getattr(module, "is_caching", False):
            found.add(f"{name} caches")
    return found
