"""Where a training step's time goes, and how near it comes to what the processor can do."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.apart import Apart
from benchmarks.rows import Row, Settings, row, seconds
from mechicl.models import build
from mechicl.training import PRESETS, TrainingConfig
from mechicl.training.data import Batch, losses, make_generators, sample_batch
from mechicl.training.ensemble import Ensemble
from mechicl.training.optimizers import clip_each_seed, make_optimizer
from mechicl.training.routes import CPU, choose_route, use_route
from mechicl.training.speed import keep_freed_memory

NAMES = ("lsa-1l", "lsa-5l", "gpt2-8l")


class Counted(TorchDispatchMode):
    """Counts torch's operations, but for views, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations += 1
            tensors = (leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor))
            self.n_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out


def milliseconds(call: Callable[[], object], n: int = 40) -> float:
    return 1e3 * median(seconds(call) for _ in range(n))


class Step:
    """The training step of a run at its full size, by the route that its config chooses."""

    def __init__(self, config: TrainingConfig):
        keep_freed_memory()
        self.config = config
        self.ensemble = Ensemble([build(config.model, seed) for _, seed in config.members])
        self.optimizer = make_optimizer(config.optimizer, self.ensemble.flat, self.ensemble.shapes, 1e-6)
        self.generators = make_generators(config, CPU)
        self.route = choose_route(config, self.ensemble, CPU)
        use_route(self.ensemble, self.route)

    def draw(self) -> Batch:
        across = self.route.prompts_last
        return sample_batch(
            self.config, self.ensemble.template, self.generators, self.config.steps - 1, prompts_last=across
        )

    def passes(self, batch: Batch) -> None:
        self.ensemble.flat.grad = None
        losses(self.ensemble(batch.tokens, self.config.loss_at), batch.targets).sum().backward()

    def update(self) -> None:
        assert self.ensemble.flat.grad is not None
        clip_each_seed(self.ensemble.flat.grad, 1.0)
        self.optimizer.step()

    def measured(self) -> dict[str, float]:
        """Return times in ms, and operations, MFLOP of products and MB of the passes."""
        batch = self.draw()
        times = {"drawing": milliseconds(self.draw), "passes": milliseconds(lambda: self.passes(batch))}
        times["optimiser"] = milliseconds(self.update)
        with FlopCounterMode(display=False) as flops:
            self.passes(batch)
        with Counted() as counted:
            self.passes(batch)
        numbers = batch.tokens.numel() / 1e3
        counts = {"operations": counted.operations, "mb": counted.n_bytes / 1e6, "thousand numbers": numbers}
        return times | counts | {"mflop": flops.get_total_flops() / 1e6, "threads": self.route.threads}

    def peak(self) -> dict[str, float]:
        """Return GFLOP/s of a large product, GB/s of a large sum, and μs of a tiny sum."""
        matrix, vector, small = torch.randn(1024, 1024), torch.randn(2**25), torch.ones(1)
        return {
            "gflops": 2 * 1.024**3 / milliseconds(lambda: matrix @ matrix, 10) * 1e3,
            "gbs": 3 * vector.nbytes / milliseconds(lambda: vector + vector, 10) / 1e6,
            "overhead": 1e3 * milliseconds(lambda: small + small, 2000),
        }


class OfPreset(Step):
    """The training step of a preset with one seed, by the route that is fastest here."""

    def __init__(self, preset: str):
        super().__init__(PRESETS[preset].replace(seeds=(0,), cpu=True, routes="measured"))


def measure(settings: Settings) -> list[Row]:
    """Measure one core and all of them, each in a separate process."""
    rows = []
    for one_core in (True, False):
        where = "one core" if one_core else "all cores"
        for preset in NAMES:
            with Apart("roofline:OfPreset", ours=True, one_core=one_core, preset=preset) as process:
                rounds = [process.call("measured") for _ in range(min(settings.rounds, 3))]
                peak = process.call("peak")
            one = rounds[0]
            whole = [r["drawing"] + r["passes"] + r["optimiser"] for r in rounds]
            names = ("drawing", "passes", "optimiser")
            parts = ", ".join(f"{name} {median(r[name] for r in rounds):.3g}" for name in names)
            counts = (
                f"{one['operations']} operations, {one['mflop']:.3g} MFLOP in products, {one['mb']:.3g} MB, "
                f"{one['thousand numbers']:.3g} thousand random numbers; {one['threads']} threads"
            )
            rows.append(row(f"{preset}, {where}: milliseconds a step", whole, "shown", f"{parts}; {counts}"))
            least = {"products": one["mflop"] / peak["gflops"], "memory": one["mb"] / peak["gbs"],
                     "calls": one["operations"] * peak["overhead"] / 1e3}  # fmt: skip
            words = ", ".join(f"{name} {value:.3g}" for name, value in least.items())
            limits = f"{peak['gflops']:.0f} GFLOP/s, {peak['gbs']:.0f} GB/s, {peak['overhead']:.2f} μs a call"
            over, quantity = [r["passes"] / max(least.values()) for r in rounds], "passes over the largest bound"
            rows.append(row(f"{preset}, {where}: {quantity}", over, "shown", f"ms: {words}; {limits}"))
    return rows
