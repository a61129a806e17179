"""The local learning coefficient of models: how fast the loss rises around their weights, sampled by Langevin dynamics.

Lau et al. 2023 (arXiv 2308.12108) estimate the coefficient λ of singular learning theory at weights w* by
λ = nβ (E[L(w)] - L(w*)). L is the mean loss over n examples. The mean E is over weights that are drawn near w* with the
density exp(-nβ L(w) - γ/2 |w - w*|²). A regular model with d parameters has λ = d/2; degenerate directions lower it.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mechicl.analysis.dynamics.training import Training, measure_snapshots
from mechicl.base.annotations import described
from mechicl.base.arguments import (
    Count,
    Natural,
    NonNegative,
    Positive,
    at_least,
    between,
    calling,
    check_fields,
    checked,
)
from mechicl.base.memory import Budget
from mechicl.base.precision import at_least_float32
from mechicl.base.progress import progress_bar
from mechicl.base.warning import warn
from mechicl.checkpoints import Checkpoint
from mechicl.models import PromptedModel
from mechicl.models.transformer.fast import put_prompts_last
from mechicl.prompts import Prompts, TokenSequences
from mechicl.statistics import UNBOUNDED, Interval, Result, interval
from mechicl.statistics.intervals import student_t_quantile
from mechicl.statistics.results import index_of
from mechicl.tasks import AnyTask
from mechicl.training.data import examples
from mechicl.training.ensemble import Ensemble

TARGET_ACCEPTANCE = 0.9  # with 0.57, the optimum for Gaussians, chains on quartic losses stay too near the centre
UNCORRECTED = 0.1  # times d^(1/3), at most 1: step size without that rule, as a share of the one with that acceptance
N_TRACE = 100  # stored points of each chain
LEAST_ACCEPTED, LARGEST_DRIFT, LARGEST_SPREAD, COLD, HOT = 0.3, 0.1, 1.1, 0.8, 1.2
"""Bounds of the diagnostics; drift is a share of the coefficient, or of 1/2 (one regular parameter) if that is more."""
STACKED_BYTES, MOST_STACKED = 2**22, 2**19
"""Memory of the chains that run in one stacked pass, as more does not fit into the processor's cache and is slower; and
of a chain that is stacked at all: beyond, the cost of a pass is its arithmetic, and stacks gain nothing."""


class SamplingWarning(UserWarning):
    """Chains whose diagnostics show that the estimated coefficient is not reliable."""


@dataclass(frozen=True)
class Sampler:
    """Settings of chains of Langevin dynamics.

    Attributes:
        batch_size: examples in a minibatch; by default gradients are those of all data.
        n_chains: chains for each model and part.
        n_draws: steps after the burn-in, each a draw.
        burn_in: steps before the first draw; the first half searches the step size if none is given.
        n_beta: n times the inverse temperature β; n / log(n) by default.
        localization: γ. Directions along which nβ L curves less than γ do not count; a smaller γ needs longer chains.
        step_size: ε of the sampler, by default searched for each model and part (90% of steps are accepted).
    """

    n_chains: Annotated[int, at_least(2)] = 4
    n_draws: Annotated[int, at_least(4)] = 1000
    burn_in: Natural = 500
    n_beta: Positive | None = None
    localization: NonNegative = 1.0
    step_size: Positive | None = None
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.step_size is None and self.burn_in < 50:
            raise ValueError(f"burn_in must be at least 50 to find a step size, got {self.burn_in}; or give step_size")


@dataclass(frozen=True, eq=False)
class LearningCoefficient(Result):
    """Local learning coefficients with the chains that they were estimated from; see `learning_coefficient`.

    Attributes:
        steps: training steps of the snapshots; 0 for a single model.
        parts: names of the parts of the model that moved, "all" for all parameters.
        coefficients: the estimate of each chain.
        losses: mean loss at the model's weights, L(w*).
        traces: nβ (L(w) - L(w*)) along each chain, burn-in included: means of blocks of `trace_every` steps.
        step_sizes: step size ε of the sampler.
        acceptance: share of steps that the Metropolis rule accepts; NaN with minibatches, where it is not applied.
        temperatures: mean of (w - w*)·∇U(w) per parameter, where exp(-U) is the density that is sampled. It is 1 for
            chains that sample this density, less for chains that are too short to reach its width, and more for step
            sizes that are too large or minibatches that are too small.
        drifts: estimate from the second half of each chain's draws, minus that from the first half.
        spreads: split R-hat, which compares the variance between halves of chains with that within them; 1 is ideal.
    """

    steps: tuple[int, ...]
    parts: tuple[str, ...]
    burn_in: int
    n_beta: float
    localization: float
    trace_every: int
    coefficients: Float[Tensor, "step part seed chain"]
    losses: Float[Tensor, "step seed"]
    traces: Float[Tensor, "step part seed chain block"]
    step_sizes: Float[Tensor, "step part seed"]
    acceptance: Float[Tensor, "step part seed chain"]
    temperatures: Float[Tensor, "step part seed chain"]
    drifts: Float[Tensor, "step part seed chain"]
    spreads: Float[Tensor, "step part seed"]

    def samples(self) -> dict[str, Tensor]:
        """Return the mean over chains for each seed `[step part seed]`, or with one seed the chains' own values."""
        named = {"coefficients": self.coefficients, "temperatures": self.temperatures, "drifts": self.drifts}
        return {name: each.mean(-1) if each.shape[2] > 1 else each[:, :, 0] for name, each in named.items()}

    def axis_names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the leading axes: step and part."""
        return dict.fromkeys(self.samples(), ("step", "part"))

    def estimate(self, step: int | None = None, part: str | None = None, level: float = 0.95) -> Interval:
        """Return the coefficient with its interval over seeds, or over chains if there is one seed.

        Args:
            step: training step of the snapshot; the last by default.
            part: name of the part; the first by default.
        """
        i = -1 if step is None else index_of("step", step, self.steps)
        j = 0 if part is None else index_of("part", part, self.parts)
        return interval(self.samples()["coefficients"][i, j], level, within=UNBOUNDED)

    @property
    def failures(self) -> tuple[str, ...]:
        """Each diagnostic that fails, with a remedy and the places; empty if the estimate can be relied on.

        The bias of minibatches is not among them (see `Sampler.batch_size`)."""
        mean, temperature = self.coefficients.mean(-1), self.temperatures.mean(-1)
        drift, n = self.drifts.mean(-1).abs(), self.drifts.shape[-1]
        noise = student_t_quantile(0.975, n - 1) * self.drifts.std(-1) / math.sqrt(n)
        drifts = (drift > noise) & (drift > LARGEST_DRIFT * mean.abs().clamp(min=0.5))
        checks = {
            "chains diverge: use a smaller step_size": ~mean.isfinite(),
            "the coefficient is negative, as chains find lower losses: use a larger localization or more data": mean
            < 0,
            "chains drift: use a larger burn_in and n_draws": drifts,
            f"chains disagree (R-hat above {LARGEST_SPREAD}): use more n_draws": self.spreads > LARGEST_SPREAD,
            "most steps are rejected: use a smaller step_size": self.acceptance.mean(-1) < LEAST_ACCEPTED,
            f"the temperature is below {COLD}, as chains are too short to spread as far as the localization allows: "
            "use more n_draws or a larger localization": temperature < COLD,
            f"the temperature is above {HOT}: use a smaller step_size or a larger batch_size": temperature > HOT,
        }
        found = []
        for text, failed in checks.items():
            for step, part, seed in failed.nonzero()[:1].tolist():
                first = f"first at step {self.steps[step]}, part {self.parts[part]!r}, seed {seed}"
                found.append(f"{text} ({int(failed.sum())} of {failed.numel()} estimates, {first})")
        return tuple(found)


@checked
def learning_coefficient(
    models: Training | nn.Module,
    data: AnyTask | Prompts | TokenSequences | Tensor | tuple[Tensor, ...],
    *,
    loss: Callable[..., Tensor] | None = None,
    parts: Sequence[str] = ("all",),
    steps: Sequence[int] | None = None,
    n_prompts: Count = 1024,
    sampler: Sampler = Sampler(),
    seed: Annotated[int, between(0, 2**40 - 1)] = 0,
    progress: bool | None = None,
) -> LearningCoefficient:
    """Estimate the local learning coefficient of models, from chains of Langevin dynamics around their weights.

    The coefficient measures how fast the loss rises around the weights: half the number of parameters in a regular
    model, less for simpler solutions. With the gradient of all data, steps are accepted or rejected by the Metropolis
    rule, so that their size does not bias the estimate; with minibatches (as in the source) they are not. Source: Lau
    et al. 2023, section 4 and algorithm 1.

    Args:
        models: a model; a checkpoint, measured at its snapshots (or its models, if it has none); or models by step. If
            `loss` is given, any torch modules.
        data: a task to sample prompts from; prompts; sequences of tokens; or, with `loss`, tensors with one entry per
            example.
        loss: function of a module and the tensors of `data`, or minibatches of them, that returns the mean loss. By
            default the mean squared error of the query (of all points for models that predict them in one pass), or
            the cross entropy of the next token.
        parts: parts of the model to measure, each by moving only its parameters: "all", "layer 0", "head 0.1", or the
            name of a parameter, in which `*` stands for any text. Frozen parameters (`requires_grad=False`) never move.
        steps: training steps of the snapshots to measure; all by default.
        n_prompts: number n of prompts to sample from a task.
        sampler: settings of the chains: a `Sampler`.
        seed: seed of the chains, and of prompts sampled from a task; below 2^40.

    Returns:
        A `LearningCoefficient`: `coefficients` λ `[step part seed chain]`; `estimate(step, part)` is their mean with
        its 95% interval; `failures` lists the diagnostics of the chains that fail (empty: reliable).

    Raises:
        ValueError: no data, an unknown part or step, a burn-in too short to find a step size, a loss that is not one
            finite number or not a function of the weights (dropout, batch norm in training mode), half precision.

    Warns:
        SamplingWarning: a diagnostic fails.

    Example:
        >>> checkpoint = load_checkpoint("lsa-1l")
        >>> sampler = Sampler(localization=10.0)
        >>> result = learning_coefficient(checkpoint, checkpoint.task, steps=[0, 10_000], sampler=sampler)
        >>> print(result.estimate(step=10_000))
    """
    if isinstance(models, Checkpoint):
        known = models.snapshots.steps if models.snapshots else (0,)
        rows = [models.models_at(i) for i in range(len(known))] if models.snapshots else [models.models]
    else:
        by_step = {0: models} if isinstance(models, nn.Module) else models
        known, rows = measure_snapshots(by_step, lambda model: model, False)
    if steps is not None:
        known, rows = tuple(steps), [rows[index_of("steps", step, known)] for step in steps]
    stacked = [model for row in rows for model in row]
    shapes = [[(name, w.shape) for name, w in model.named_parameters()] for model in stacked]
    if not shapes or not shapes[0] or any(each != shapes[0] for each in shapes):
        raise ValueError(f"models must be one or more with parameters of the same shapes, got {len(shapes)} models")
    if not parts or len(set(parts)) != len(parts):
        raise ValueError(f"parts must be one or more different names, got {list(parts)}")
    batch_size, n_chains = sampler.batch_size, sampler.n_chains
    batches = []  # models that run together, with the weights that move
    for alike in [stacked] if isinstance(models, Checkpoint) else [[model] for model in stacked]:
        its_loss, tensors = _examples(alike[0], data, loss, n_prompts, seed, batch_size is None)
        n, *others = map(len, tensors)
        if set(others) - {n} or n < max(batch_size or 1, 3 if sampler.n_beta is None else 1):
            raise ValueError(f"data must have one entry per example in each tensor, and at least "
                             f"batch_size={batch_size} examples (3 without n_beta), got {[n, *others]}")  # fmt: skip
        modules = [_WithLoss(model, its_loss, tensors) for model in alike]
        used = max(_check_loss(module, batch_size or n) for module in modules)
        at_once = Budget().rows(used * len(parts) * n_chains, at_most=len(modules))
        width = max(1, int(STACKED_BYTES / used)) if used < MOST_STACKED else 1
        masks = torch.stack([_mask(alike[0], part) for part in parts])
        batches += [(modules[i : i + at_once], masks, width) for i in range(0, len(modules), at_once)]
    n_beta = sampler.n_beta or n / math.log(n)
    burn_in, n_steps = sampler.burn_in, sampler.burn_in + sampler.n_draws
    # a generator on a CPU reads 32 bits of its seed, in which eight are left for this one
    numbers: Sequence[int] = range(seed << 24, (seed << 24) + len(stacked))
    if seed >= 256:
        numbers = np.random.SeedSequence(seed).generate_state(len(stacked)).tolist()
    seeds, found = iter(numbers), []
    with progress_bar(total=n_steps * len(batches), unit="step", progress=progress, desc="sampling") as bar:
        for modules, masks, width in batches:
            generators = [torch.Generator().manual_seed(next(seeds)) for _ in modules]
            chains = _Chains(modules, masks, n_chains, generators, n_beta, sampler.localization, batch_size, width)
            found.append(chains.sample(burn_in, sampler.n_draws, sampler.step_size, lambda: bar.update(1)))
    values = {name: torch.cat([each[name] for each in found]).unflatten(0, (len(rows), -1)) for name in found[0]}
    values |= {name: each.movedim(1, 2) for name, each in values.items() if name != "losses"}
    every = max(1, n_steps // N_TRACE)
    result = LearningCoefficient(tuple(known), tuple(parts), burn_in, n_beta, sampler.localization, every, **values)
    if result.failures:
        warn(f"the learning coefficient is not reliable: {'; '.join(result.failures)}", SamplingWarning)
    return result


def _mask(model: nn.Module, part: str) -> Bool[Tensor, "weight"]:
    """The parameters of a part, in the order of the flat weights."""
    head, layer = re.fullmatch(r"head (\d+)\.(\d+)", part), re.fullmatch(r"layer (\d+)", part)
    pattern = f"blocks.{layer[1]}.*" if layer else "*" if part == "all" else part
    found = {name: torch.zeros(weight.shape, dtype=torch.bool) for name, weight in model.named_parameters()}
    of_heads = r"(_?W_[QKVO]|_?b_[QKV]|sink|[Wb]_gate|[Wb]_step|W_conv|A_log|skip|ridge)"
    for name, mask in found.items():
        if head and (match := re.fullmatch(rf"blocks\.{head[1]}\.attn\.{of_heads}", name)):
            if match[1].startswith("_") and len(mask) < len(found[f"blocks.{head[1]}.attn.W_Q"]):
                raise ValueError(f"heads share {name}, so no head moves alone: got {part!r}, take 'layer {head[1]}'")
            by_head = mask.transpose(0, 1) if match[1] == "W_conv" else mask  # filters are [qkv head ...]
            by_head[int(head[2]) : int(head[2]) + 1] = True
        mask |= fnmatchcase(name, pattern)
    mask = torch.cat([mask.flatten() for mask in found.values()])
    if not mask.any():
        raise ValueError(f'parts must be "all", "layer 0", "head 0.1" or of {", ".join(found)}; got {part!r}')
    mask &= torch.cat([torch.full((w.numel(),), w.requires_grad) for w in model.parameters()])
    if not mask.any():
        raise ValueError(f"all weights of the part {part!r} are frozen: requires_grad_(True) lets them move")
    return mask


def _examples(
    model: nn.Module, data: Any, loss: Callable[..., Tensor] | None, n_prompts: int, seed: int, full: bool
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The loss of a model on tensors with one entry per example, and these tensors."""
    if isinstance(data, Tensor | tuple) and loss is not None and data != ():
        return loss, data if isinstance(data, tuple) else (data,)
    if isinstance(data, Tensor | tuple) or loss is not None or not isinstance(model, PromptedModel):
        raise ValueError("data must be tensors together with a loss, or a task or prompts for a mechicl model without")
    drawn = data if isinstance(data, Prompts | TokenSequences) else data.sample(n_prompts, seed=seed)
    at = "positions" if isinstance(drawn, TokenSequences) else "points" if model.cfg.one_pass else "query"
    tokens, targets = examples(model, drawn, at)
    if full and at == "query" and getattr(model.cfg, "prefers_prompts_last", False):
        tokens = put_prompts_last(tokens)

    def mean_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        outputs = at_least_float32(model(tokens, at=at))
        if targets.is_floating_point():
            return (outputs - targets).square().mean()
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())  # leaves out targets of -100

    return mean_loss, (tokens, targets)


class _WithLoss(nn.Module):
    """A model as a module from the indices of a minibatch (none for all data) to its loss, for `Ensemble`."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], data: tuple[Tensor, ...]):
        super().__init__()
        self.model, self.loss, self.data = model, loss, data
        self.vectorizes = getattr(model, "vectorizes", True)

    def forward(self, chosen: Int[Tensor, "example"], at: Any = None) -> Float[Tensor, ""]:
        """The mean loss."""
        return self.loss(self.model, *(each[chosen] if chosen.numel() else each for each in self.data))


@torch.enable_grad()
def _check_loss(module: _WithLoss, n_examples: int) -> float:
    """Refuse a loss that no chain can sample; return the bytes of a pass with gradients and of the sampler's state."""
    weights = list(module.model.parameters())
    kinds = sorted({f"{weight.dtype} on {weight.device}" for weight in weights})
    if len(kinds) > 1 or weights[0].dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the weights of a model must all be float32, or all float64, on one device, got {kinds}")
    if not all(weight.isfinite().all() for weight in weights):
        raise ValueError("the model has weights that are not finite")
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    module, chosen = deepcopy(module), torch.arange(n_examples)  # the user's buffers stay
    moving = [weight for weight in module.model.parameters() if weight.requires_grad]
    buffers = {name: buffer.clone() for name, buffer in module.model.named_buffers()}
    with calling("loss"):
        losses = [module(chosen)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses.append(module(chosen))
    for each in losses:
        if not isinstance(each, Tensor) or each.ndim or not each.is_floating_point() or not each.isfinite():
            got = described(each) if not isinstance(each, Tensor) or each.ndim else each
            raise ValueError(f"loss must return one finite number, a tensor without axes, got {got}")
    slopes = torch.autograd.grad(losses[0], moving, allow_unused=True) if moving and losses[0].requires_grad else ()
    if moving and all(each is None for each in slopes):
        raise ValueError("loss does not depend on the weights of the model that it is given: compute it from that "
                         "model's outputs, without detach(), item() or numpy()")  # fmt: skip
    changed = [name for name, buffer in module.model.named_buffers() if not torch.equal(buffer, buffers[name])]
    if changed or not torch.allclose(*losses):
        cause = f"it changes the model's buffers {changed}" if changed else "its value changes between two calls"
        raise ValueError(f"loss must be a function of the weights and the data, but {cause}: call eval() on the model")
    return 2 * sum(kept.values()) + 12 * sum(each.nbytes for each in weights)


class _Chains:
    """Chains `[model part chain]` that sample exp(-nβ L(w) - γ/2 |w - w*|²): w' = w - ε/2 ∇U(w) + sqrt(ε) η."""

    def __init__(
        self, models: Sequence[_WithLoss], masks: Bool[Tensor, "part weight"], n_chains: int,
        generators: Sequence[torch.Generator], n_beta: float, localization: float, batch_size: int | None, at_once: int,
    ):  # fmt: skip
        self.shape, self.generators, self.batch_size = (len(models), len(masks), n_chains), generators, batch_size
        self.n_examples, self.n_beta, self.localization = len(models[0].data[0]), n_beta, localization
        self.stack = Ensemble(models)  # pyright: ignore[reportArgumentType] - modules that return losses
        self.start = self.stack.flat.detach().repeat_interleave(len(masks) * n_chains, 0)
        self.at_once = at_once
        self.mask = masks.repeat_interleave(n_chains, 0).repeat(len(models), 1).to(self.start)
        self.weights = self.start
        self._take_batch()

    def sample(
        self, burn_in: int, n_draws: int, step_size: float | None, advance: Callable[[], object]
    ) -> dict[str, Tensor]:
        """Run the chains; return fields of `LearningCoefficient`, `[model part chain ...]`, by name."""
        losses, n_search = self.base.view(self.shape)[:, 0, 0].double().cpu(), 0 if step_size else burn_in // 2
        log_size = torch.full(self.shape[:2], math.log(step_size or 1 / (self.n_beta + self.localization)))
        records, searched = [], []
        for t in range(burn_in + n_draws):
            if self.batch_size and t >= n_search:
                self._take_batch()
            rise = self.n_beta * (self.losses - self.base)
            virial = ((self.weights - self.start) * self.force).sum(1) / self.mask.sum(1)
            accepted = self._step(log_size.exp().to(self.start), correct=not self.batch_size or t < n_search)
            records.append(torch.stack([rise, virial, accepted]).double().cpu())
            if t < n_search:  # Robbins and Monro: large changes first, then smaller ones; the last quarter is averaged
                gain = min(3.0, (2 * (t + 1) / n_search) ** -2)
                log_size = log_size + gain * (records[-1][2].view(self.shape).mean(-1) - TARGET_ACCEPTANCE)
                searched.append(log_size)
            if t == n_search - 1:
                log_size = torch.stack(searched[-(n_search // 4) :]).mean(0)
                if self.batch_size:
                    share = UNCORRECTED * self.mask.sum(1).view(self.shape)[..., 0].cpu() ** (1 / 3)
                    log_size, self.weights = log_size + share.clamp(max=1).log(), self.start
            advance()
        rises, virials, acceptance = torch.stack(records, -1).view(3, *self.shape, -1)
        every = max(1, rises.shape[-1] // N_TRACE)
        halves = rises[..., burn_in : burn_in + n_draws // 2 * 2].unflatten(-1, (2, -1))
        within, between = halves.var(-1).mean((-2, -1)), halves.mean(-1).flatten(-2).var(-1)
        return {
            "coefficients": rises[..., burn_in:].mean(-1),
            "losses": losses,
            "traces": rises.unfold(-1, every, every).mean(-1).float(),
            "step_sizes": log_size.exp().double(),
            "acceptance": acceptance[..., burn_in:].mean(-1),
            "temperatures": virials[..., burn_in:].mean(-1),
            "drifts": halves.mean(-1).diff(dim=-1)[..., 0],
            "spreads": (1 - 1 / halves.shape[-1] + between / within.clamp(min=1e-300)).sqrt(),
        }

    def _step(self, sizes: Float[Tensor, "model part"], *, correct: bool) -> Float[Tensor, "copy"]:
        """Move the chains; return the probability with which each step is accepted, NaN without that rule."""
        size = sizes[..., None].expand(self.shape).reshape(-1, 1)
        noise = self.mask * self._draw(torch.randn, self.start.shape[1])
        moved = self.weights - size / 2 * self.force + size.sqrt() * noise
        if not correct:
            self.weights = moved
            return torch.full_like(self.energy, math.nan)
        losses, energy, force = self._evaluate(moved)
        back = self.weights - moved + size / 2 * force
        log_ratio = self.energy - energy + noise.square().sum(1) / 2 - back.square().sum(1) / (2 * size[:, 0])
        probability = log_ratio.exp().nan_to_num(0.0, posinf=1.0).clamp(max=1)
        taken = self._draw(torch.rand, 1)[:, 0] < probability
        self.weights, self.force = (
            torch.where(taken[:, None], *pair) for pair in ((moved, self.weights), (force, self.force))
        )
        self.losses, self.energy = losses.where(taken, self.losses), energy.where(taken, self.energy)
        return probability

    def _take_batch(self) -> None:
        """Draw a minibatch for each chain (none for all data); evaluate the model's and the chain's weights on it."""
        below = partial(torch.randint, self.n_examples)
        self.chosen = self._draw(lambda *shape, generator: below(shape, generator=generator), self.batch_size or 0)
        with torch.no_grad():
            self.base = torch.cat([self._run(*rows)[0] for rows in self._in_parts(self.start)])
        self.losses, self.energy, self.force = self._evaluate(self.weights)

    def _draw(self, sampler: Callable[..., Tensor], width: int) -> Tensor:
        """Draw random numbers `[copy width]`, each model's from its own generator."""
        rows = len(self.start) // len(self.generators)
        return torch.cat([sampler(rows, width, generator=each) for each in self.generators]).to(self.start.device)

    @torch.enable_grad()
    def _evaluate(self, weights: Float[Tensor, "copy weight"]) -> tuple[Tensor, Tensor, Tensor]:
        """The losses L and energies U `[copy]`, and the gradients of U by the parameters that move."""
        found = []
        for rows in self._in_parts(weights):
            losses, flat = self._run(*rows)
            found.append((losses.detach(), *torch.autograd.grad(losses.sum(), flat)))
        losses, gradient = (torch.cat(each) for each in zip(*found, strict=True))
        distance = weights - self.start
        energy = self.n_beta * losses + self.localization / 2 * distance.square().sum(1)
        return losses, energy, self.mask * (self.n_beta * gradient + self.localization * distance)

    def _in_parts(self, weights: Float[Tensor, "copy weight"]) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(weights.split(self.at_once), self.chosen.split(self.at_once), strict=True)

    def _run(self, weights: Float[Tensor, "copy weight"], chosen: Tensor) -> tuple[Tensor, nn.Parameter]:
        """The losses of some copies, and the weights that they depend on."""
        self.stack.flat = nn.Parameter(weights.detach())
        return self.stack(chosen, None), self.stack.flat
