"""The route that a training chooses, compared with every fixed route."""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.apart import Apart
from benchmarks.rows import Row, Settings, row
from mechicl.models import build
from mechicl.training import PRESETS
from mechicl.training.ensemble import Ensemble
from mechicl.training.routes import CPU, Passes, choose_route
from mechicl.training.speed import keep_freed_memory

SHAPES: dict[str, dict[str, Any]] = {
    "lsa-1l": {"seeds": (0,)},
    "lsa-1l-d40": {"seeds": (0,)},
    "nertinger-linear": {"seeds": (0, 1, 2, 3, 4), "batch_size": 64},
    "lsa-2l-looped": {"seeds": (0,)},
    "lsa-2l-looped-n50": {"seeds": (0,), "batch_size": 512},
    "lsa-5l": {"seeds": (0,), "batch_size": 2048},
    "gpt2-8l-1h": {},
}


class Routes:
    """The routes of a preset's training."""

    def __init__(self, preset: str):
        config = PRESETS[preset].replace(cpu=True, routes="measured", **SHAPES[preset])
        keep_freed_memory()
        self.config = config
        self.ensemble = Ensemble([build(config.model, seed) for _, seed in config.members])
        self.most = torch.get_num_threads()

    def compare(self, rounds: int) -> list[Any]:
        """Return the times of the chosen and the rule's route over the fastest fixed one's, and the chosen route."""
        torch.set_num_threads(self.most)
        chosen = choose_route(self.config, self.ensemble, CPU)
        torch.set_num_threads(self.most)
        passes = Passes(self.config, self.ensemble)
        fixed = [replace(route, threads=n) for route in passes.routes for n in {1, self.most}]
        times: dict[Any, list[float]] = {route: [] for route in {*fixed, passes.routes[0], chosen}}
        for _ in range(rounds):
            for route, seconds in times.items():
                seconds.append(passes.seconds(route))
        least = {route: min(seconds[1:]) for route, seconds in times.items()}
        layout = {None: None, True: "prompts last", False: "prompts first"}[chosen.prompts_last]
        words = [chosen.attention, layout, f"{chosen.threads} threads"]
        fastest = min(least.values())
        return [least[chosen] / fastest, least[passes.routes[0]] / fastest, ", ".join(filter(None, words))]


def measure(settings: Settings) -> list[Row]:
    """Measure passes forwards and backwards; a run keeps its route, so a single choice is judged, without a median."""
    rows = []
    for preset in SHAPES:
        with Apart("routes:Routes", ours=True, preset=preset) as process:
            chosen, rule, words = process.call("compare", 6)
        detail = f"chosen {words}; the rule's over the fastest {rule:.2f}"
        rows.append(row(f"{preset}: time of the chosen route over the fastest", [chosen], "<= 1.05", detail))
    return rows
