"""A training step as one compiled function: prompts from random numbers, losses, gradient, clipping and Adam.

The step is traced for each shape of its inputs by `make_fx`, which records torch's operations whatever Python code
calls them, and compiled by `torch.compile`. Compilers cannot draw from a `torch.Generator`, so random numbers are drawn
outside and are inputs. What cannot be traced stays outside, too: the sampling of tasks that draw other than uniform and
normal numbers, that change during the run or that several processes share; and optimisers other than Adam.

On a CPU the batch may be divided among threads. Compiled code has many short loops, after each of which torch's own
threads would await each other; threads that take whole passes await each other once a step.
"""

import getpass
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from mechicl.models import PromptedModel
from mechicl.tasks.sampling import QuickGenerator
from mechicl.training.config import TrainingConfig
from mechicl.training.data import losses, sample_batch
from mechicl.training.ensemble import Ensemble
from mechicl.training.optimizers import adam_state, adam_update, clip_each_seed

_Kind = Literal["uniform", "normal"]
_Compiled = Callable[..., tuple[Tensor, ...]]
_ONE_COMPILES = threading.RLock()  # torch's tracing and compiler change the state of the process
ALIGNED = 4  # numbers of float32 in 16 bytes


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of one step: random numbers; or tokens, targets and, with several processes, weights of the losses."""

    step: int
    tensors: tuple[Tensor, ...]
    generator_states: Tensor  # state of each model's generator after sampling, `[seed byte]`


class Redirected(QuickGenerator):
    """A generator whose uniform and normal numbers come from a function of their kind and count."""

    def __new__(cls, like: QuickGenerator, source: Callable[[_Kind, int], Tensor]) -> "Redirected":  # noqa: D102
        made = super().__new__(cls, device=like.device)
        assert isinstance(made, Redirected)
        return made

    def __init__(self, like: QuickGenerator, source: Callable[[_Kind, int], Tensor]):
        super().__init__(prompts_last=like.prompts_last)
        self.source = source

    def draw(self, kind: _Kind, n: int) -> Tensor:
        """Return the function's numbers."""
        return self.source(kind, n)


class WholeStep:
    """The compiled step of a run.

    Attributes:
        drawn: kinds and counts of the random numbers of each model's prompts; None if sampling is not part of the step.
        updates: True if the step updates the weights and Adam's moments; otherwise it only computes the gradient.
        n_parts: number of equal parts of a batch, each on its own thread: at most `threads`, and a divisor of the batch
            size.
    """

    def __init__(
        self,
        config: TrainingConfig,
        encoder: PromptedModel,
        ensemble: Ensemble,
        optimizer: torch.optim.Optimizer,
        generators: Sequence[QuickGenerator],
        shard: tuple[int, int] = (0, 1),
        threads: int = 1,
    ):
        self.config, self.encoder, self.ensemble, self.shard = config, encoder, ensemble, shard
        self.generators, self.settings = list(generators), optimizer.param_groups[0]
        self.updates = config.optimizer == "adam" and shard[1] == 1
        self.moments = adam_state(optimizer) if self.updates else {}
        self.n_state = 3 + len(self.moments)  # the first inputs of a step: weights, learning rate, who runs, moments
        self.weights = ensemble.flat.detach()
        self.rate = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        if self.on_gpu:  # these tensors stay where they are, so CUDA graphs may change them in place
            for tensor in (self.weights, self.rate, *self.moments.values()):
                torch._dynamo.mark_static_address(tensor)
        self.compiled: dict[Any, _Compiled] = {}
        self.drawn = self._traceable_draws()
        numbers = range(1, 1 if self.on_gpu or shard[1] > 1 else threads + 1)
        self.n_parts = max((n for n in numbers if config.batch_size % n == 0), default=1)
        self.threads = ThreadPoolExecutor(self.n_parts, "mechicl-passes")  # one for all shapes; they start when needed

    @property
    def on_gpu(self) -> bool:
        """True if the weights are on a GPU; a step is then one CUDA graph."""
        return self.weights.device.type == "cuda"

    def sample(self, step: int) -> StepInputs:
        """Draw the inputs of a step."""
        if self.drawn is None:
            batch = sample_batch(self.config, self.encoder, self.generators, step, self.shard)
            weights = () if batch.weights is None else (batch.weights,)
            return StepInputs(step, (batch.tokens, batch.targets, *weights), batch.generator_states)
        each = zip(self.generators, self.drawn, strict=True)
        numbers = tuple(generator.draw(kind, n) for generator, drawn in each for kind, n in drawn)
        return StepInputs(step, numbers, torch.stack([generator.get_state() for generator in self.generators]))

    def __call__(self, inputs: StepInputs, running: Tensor) -> Float[Tensor, "seed"]:
        """Take a step; return the losses before it. Models that are not `running` `[seed]` keep their weights.

        Without `updates` the gradient is stored in `ensemble.flat.grad` instead.

        Raises:
            ValueError: torch cannot compile the step here.
        """
        self.rate.fill_(self.config.learning_rate_at(inputs.step))
        state = (self.weights, self.rate, running.to(self.weights.device), *self.moments.values())
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs.tensors)
        known = key in self.compiled
        if self.on_gpu:
            torch.compiler.cudagraph_mark_step_begin()  # what the step before returned is no longer used
        try:
            with nullcontext() if known else _ONE_COMPILES:
                if not known:
                    self.compiled[key] = self._compile(*state, *inputs.tensors)
                with torch.no_grad():
                    step_losses, *gradient = self.compiled[key](*state, *inputs.tensors)
        except (RuntimeError, OSError) as error:
            if known:
                raise
            words = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
            raise ValueError(f"compile=True: torch cannot compile this run here ({words}): leave it out") from error
        if not known:
            with suppress(OSError, KeyError):  # then torch keeps nothing, either
                mark_of_compiled(self.config).touch()
        self.ensemble.flat.grad = gradient[0] if gradient else None
        return step_losses

    def _compile(self, *inputs: Tensor) -> _Compiled:
        if self.n_parts == 1:
            return self._graph(self._step, inputs)
        numbers = inputs[self.n_state :]
        prompts: _Compiled = (lambda *batch: batch) if self.drawn is None else self._graph(self._prompts, numbers)

        def parts(tokens: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, ...]]:
            shares = self._shares_of_parts(targets)
            for *part, share in zip(*(each.chunk(self.n_parts, 1) for each in (tokens, targets)), shares, strict=True):
                yield *(each.clone() for each in part), share  # dense: a graph is of one layout in memory

        first = next(parts(*prompts(*numbers)))
        passes = self._graph(self._gradient, (self.weights, *first))
        results = passes(self.weights, *first)  # compiles it, before threads do
        update = self._graph(self._update, (*results, *inputs[: self.n_state])) if self.updates else None

        @torch.no_grad()  # holds for one thread
        def pass_of(part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return passes(self.weights, *part)

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            each = list(self.threads.map(pass_of, parts(*prompts(*inputs[self.n_state :]))))
            step_losses, gradient = (torch.stack(of_part).sum(0) for of_part in zip(*each, strict=True))
            if update is None:
                return step_losses, gradient
            return update(step_losses, gradient, *inputs[: self.n_state])

        return step

    def _graph(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> _Compiled:
        graph = traced(function, [tensor.clone() for tensor in inputs])  # tracing runs it
        # "reduce-overhead" is torch's name for CUDA graphs
        return torch.compile(graph, dynamic=False, fullgraph=True, mode="reduce-overhead" if self.on_gpu else None)

    def _shares_of_parts(self, targets: Tensor) -> tuple[Float[Tensor, "seed"], ...]:
        """Weight of each part's mean loss in that of the batch: its share of the targets that are scored."""
        dtype = torch.promote_types(self.weights.dtype, torch.float32)  # that of the losses
        scored = torch.ones_like(targets, dtype=dtype) if targets.is_floating_point() else (targets >= 0).to(dtype)
        by_part = scored.flatten(2).sum(2).unflatten(1, (self.n_parts, -1)).sum(2)
        return (by_part / by_part.sum(1, keepdim=True)).unbind(1)

    def _step(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        state, numbers = inputs[: self.n_state], inputs[self.n_state :]
        results = self._gradient(state[0], *(numbers if self.drawn is None else self._prompts(*numbers)))
        return self._update(*results, *state) if self.updates else results

    def _gradient(self, weights: Tensor, tokens: Tensor, targets: Tensor, *shares: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and their gradient; `shares` `[seed]` are factors, and what has the share 0 has no loss."""
        row = weights.detach().requires_grad_()
        # a GPU multiplies matrices faster if each seed's weights begin at a multiple of 16 bytes
        flat = pad(row, (0, -row.shape[1] % ALIGNED))[:, : row.shape[1]] if self.on_gpu else row
        step_losses = losses(functional_call(self.ensemble, {"flat": flat}, (tokens, self.config.loss_at)), targets)
        for share in shares:
            step_losses = torch.where(share == 0, 0, step_losses * share)
        (gradient,) = torch.autograd.grad(step_losses.sum(), row)
        return step_losses.detach(), gradient

    def _update(
        self, step_losses: Tensor, gradient: Tensor, weights: Tensor, rate: Tensor, running: Tensor, *moments: Tensor
    ) -> tuple[Tensor, ...]:
        kept = (running & step_losses.isfinite())[:, None]
        gradient = torch.where(kept, gradient, 0)
        if self.config.gradient_clip is not None:
            clip_each_seed(gradient, self.config.gradient_clip)
        decayed = weights * (1 - rate * self.config.weight_decay) if self.config.weight_decay else weights
        update = adam_update(gradient, dict(zip(self.moments, moments, strict=True)), self.settings, rate)
        weights.copy_(torch.where(kept, decayed - update, weights))
        return (step_losses,)

    def _prompts(self, *numbers: Tensor) -> tuple[Tensor, Tensor]:
        in_turn = iter(numbers)
        replaying: list[Any] = [Redirected(each, lambda kind, n: next(in_turn).clone()) for each in self.generators]
        batch = sample_batch(self.config, self.encoder, replaying, 0)
        return batch.tokens, batch.targets

    def _traceable_draws(self) -> list[list[tuple[_Kind, int]]] | None:
        """The draws of each model's prompts if the rest of sampling can be traced; generators stay unchanged."""
        if self.config.curriculum is not None or self.shard[1] > 1:
            return None
        before = [generator.get_state() for generator in self.generators]
        try:
            (drawn, numbers, _), (_, others, expected) = self._recorded(), self._recorded()
            graph = traced(self._prompts, numbers)
            targets: list[Any] = [node.target for node in graph.graph.nodes]
            if any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets):
                return None  # it draws other numbers, too
            torch.testing.assert_close(graph(*others), expected)  # unless it computed some without torch
        except (RuntimeError, TypeError, ValueError, AssertionError):  # it needs the values, or other code than torch's
            return None
        finally:
            for generator, state in zip(self.generators, before, strict=True):
                generator.set_state(state)
        return drawn

    def _recorded(self) -> tuple[list[list[tuple[_Kind, int]]], list[Tensor], tuple[Tensor, Tensor]]:
        """The draws of a batch, their numbers, and its tokens and targets."""
        drawn: list[list[tuple[_Kind, int]]] = []
        numbers: list[Tensor] = []

        def recorder(generator: QuickGenerator) -> Redirected:
            drawn.append(mine := [])

            def draw(kind: _Kind, n: int) -> Tensor:
                mine.append((kind, n))
                numbers.append(generator.draw(kind, n))
                return numbers[-1].clone()  # tasks may change theirs in place

            return Redirected(generator, draw)

        batch = sample_batch(self.config, self.encoder, [recorder(each) for each in self.generators], 0)
        return drawn, numbers, (batch.tokens, batch.targets)


def mark_of_compiled(config: TrainingConfig) -> Path:
    """A file in torch's cache of compiled code, there if a step like this run's was compiled with that cache."""
    like = ("task", "more_tasks", "model", "loss", "batch_size", "optimizer", "gradient_clip", "weight_decay")
    data = config.to_dict()
    what = [torch.__version__, len(config.seeds), *(data[name] for name in like)]
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch's own function takes a second to import
    folder = folder or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    return Path(folder) / f"mechicl-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}"


def was_compiled(config: TrainingConfig) -> bool:
    """True if torch's cache has a compiled step like this run's."""
    try:
        return mark_of_compiled(config).exists()
    except (OSError, KeyError):  # a folder that cannot be read, a user without a name
        return False


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """A function's operations on tensors of these shapes, as a graph; arguments are not checked meanwhile."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        return make_fx(function)(*inputs)
    finally:
        torch.compiler._is_compiling_flag = before
