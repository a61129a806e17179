"""Choose how a training computes its steps: of several equivalent routes, the fastest on this machine for its shapes.

Routes differ by factors, and which one is fastest depends on the processor. They agree to float precision, not in the
last bit, so a run takes one route from its first step to its last and saves it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mechicl.base.threads import n_cores
from mechicl.models import HookedTransformer
from mechicl.models.transformer.fast import possible_routes, take_route
from mechicl.training.config import TrainingConfig
from mechicl.training.data import Batch, goes_across, losses, make_generators, sample_batch
from mechicl.training.ensemble import Ensemble
from mechicl.training.speed import threads_for
from mechicl.training.whole_steps import was_compiled

CPU = torch.device("cpu")
ROUTE_MARGIN = 1.05  # a route replaces the rule's if that takes this many times as long
SECONDS, ROUNDS = 1.5, (3, 15)  # of timing a choice, and bounds on the passes of each candidate
COMPILE_SECONDS = 4.0, 2.5  # about as long takes compiling a step on two cores: without layers, and for each layer
AGAIN = 0.3  # part of this time if torch's cache has the step
TO_TARGET = 0.125  # part of its steps that a run with a target loss is expected to need
SAVED = 0.5  # part of a step's time that is expected to be saved; the compiled step is timed before it is taken
STEPS_PER_CANDIDATE = 500  # of the shortest run that is measured: at least five passes of each candidate are timed


@dataclass(frozen=True)
class Route:
    """How a run computes its steps.

    Attributes:
        attention: route through all attention layers but the last (see `models.transformer.fast`); None for the one
            that a rule takes at each shape.
        prompts_last: True if tokens lie with prompts along the last axis in memory; None for the rule.
        threads: number of torch's threads; of compiled steps on a CPU, of Python's threads with one of torch's each.
        compiled: True if whole steps are compiled.
    """

    attention: str | None = None
    prompts_last: bool | None = None
    threads: int = 1
    compiled: bool = False


class Passes:
    """Passes of a run, forwards and backwards, on new batches of its full size; weights and its prompts are unchanged.

    Attributes:
        routes: the rule's route, and what else can be taken with the same number of threads.
    """

    def __init__(self, config: TrainingConfig, ensemble: Ensemble, clock: Callable[[], float] = time.perf_counter):
        self.config, self.ensemble, self.clock = config, ensemble, clock
        self.generators = make_generators(config, CPU)
        rule = Route(threads=threads_for(config, CPU))
        stream = torch.empty(*self._batch(rule).tokens.shape[1:3], config.model.d_model or 1)
        self.routes = [rule]
        self.routes += [replace(rule, attention=each) for each in possible_routes(_inner_blocks(ensemble), stream)]
        if getattr(config.model, "prefers_prompts_last", False) and config.loss_at == "query":
            self.routes.append(replace(rule, prompts_last=not goes_across(config, CPU)))

    def seconds(self, route: Route) -> float:
        """Return the time of one pass by a route."""
        use_route(self.ensemble, route)
        started = self.clock()
        batch = self._batch(route)
        losses(self.ensemble(batch.tokens, self.config.loss_at), batch.targets).sum().backward()
        self.ensemble.flat.grad = None
        return self.clock() - started

    def _batch(self, route: Route) -> Batch:
        last_step = max(self.config.steps - 1, 0)
        model = self.ensemble.template
        return sample_batch(self.config, model, self.generators, last_step, prompts_last=route.prompts_last)


def choose_route(
    config: TrainingConfig, ensemble: Ensemble, device: torch.device, clock: Callable[[], float] = time.perf_counter,
    compiled_seconds: Callable[[int], float] | None = None,
) -> Route:  # fmt: skip
    """Choose the route of a new run, by a rule or by timing passes; `clock` returns the time in seconds.

    `compiled_seconds` takes a compiled step, given its number of threads, and returns its time.
    """
    rule = Route(threads=threads_for(config, device), compiled=bool(config.compile))
    if config.routes == "rule" or device.type != "cpu" or config.compile or config.fused_attention:
        return rule
    passes, most = Passes(config, ensemble, clock), min(torch.get_num_threads(), n_cores())
    numbers = sorted({min(2**i, most) for i in range(most.bit_length() + 1)} - {rule.threads})
    # together: the best route by one thread need not be the best by two
    routes = [replace(route, threads=number) for number in (rule.threads, *numbers) for route in passes.routes]
    if config.routes is None and config.steps < STEPS_PER_CANDIDATE * len(routes):
        routes = [rule]
    changes = config.curriculum is not None or config.interventions
    changes = changes or config.mixed_precision != "no"  # accelerate prepares the model for it after the choice
    if config.compile is not None or changes or config.steps < STEPS_PER_CANDIDATE:
        compiled_seconds = None
    if len(routes) == 1 and compiled_seconds is None:
        return rule
    # before routes are timed, which sets torch's number of threads
    threads = threads_for(config.replace(compile=True), CPU) if compiled_seconds is not None else 1
    best, seconds = _fastest(routes, passes.seconds)
    at_start, per_layer = COMPILE_SECONDS
    compiling = at_start + per_layer * (getattr(config.model, "n_layers", None) or 1)
    compiling *= AGAIN if was_compiled(config) else 1
    steps = config.steps * (1 if config.target_loss is None else TO_TARGET)
    if compiled_seconds is None or SAVED * steps * seconds <= compiling:
        return best
    compiled = Route(threads=threads, compiled=True)

    def timed(route: Route) -> float:
        if not route.compiled:
            return passes.seconds(route)
        use_route(ensemble, route)
        return compiled_seconds(route.threads)

    try:
        return _fastest([best, compiled], timed)[0]
    except ValueError:  # torch cannot compile it here
        return best


def use_route(ensemble: Ensemble, route: Route) -> None:
    """Let the passes of an ensemble take a route; batches must be sampled with its `prompts_last`."""
    torch.set_num_threads(1 if route.compiled and ensemble.flat.device.type == "cpu" else route.threads)
    take_route(_inner_blocks(ensemble), route.attention)


def _inner_blocks(ensemble: Ensemble) -> list[Any]:
    model = ensemble.template
    return list(model.blocks)[:-1] if isinstance(model, HookedTransformer) else []


def _fastest(routes: Sequence[Route], timed: Callable[[Route], float]) -> tuple[Route, float]:
    """The first route, unless another is faster by the margin, and its time: the least of rounds that alternate."""
    for route in routes:  # allocates memory
        timed(route)
    first = [timed(route) for route in routes]
    fewest, most = ROUNDS
    more = max(fewest, min(most, int(SECONDS / max(sum(first), 1e-9)))) if len(routes) > 1 else fewest
    rounds = [first, *([timed(route) for route in routes] for _ in range(more))]
    times = [min(of_one) for of_one in zip(*rounds, strict=True)]
    best = min(range(len(routes)), key=times.__getitem__)
    best = best if times[0] > ROUTE_MARGIN * times[best] else 0
    return routes[best], times[best]
