"""The search for a subspace that carries a variable: runs, their expected changes, and the columns that fit best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, Runs
from mechicl.algorithms.stepwise.counterfactuals import Place
from mechicl.analysis.causes.interchange import MOST
from mechicl.base.memory import Budget
from mechicl.base.optimizers import LBFGS
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.stream_runs import StreamRuns, record_streams
from mechicl.prompts import Prompts

BATCH = 256  # prompts per run
PENALTY = 1e-9  # of a ridge regression, relative to the mean variance
NOTHING = 1e-9  # relative to the change by all variables: variables that change less have no effect


@dataclass(frozen=True, eq=False)
class _Part:
    """Runs on some prompts after some layer, and the expected changes: by the variables, and by all others."""

    runs: StreamRuns
    layer: int
    place: Place
    unchanged: Float[Tensor, "prompt y"]
    targets: tuple[Float[Tensor, "prompt y"], Float[Tensor, "prompt y"]]

    def changes(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Changes of the model's prediction by exchanging the basis, and by exchanging the rest of the stream."""
        exchanged = (self.runs.exchange(self.layer, self.place, basis, rest=rest).double() for rest in (False, True))
        inside, rest = (each - self.unchanged for each in exchanged)
        return inside, rest

    def residuals(self, basis: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
        """These changes, times a factor, minus the expected ones."""
        inside, rest = self.changes(basis)
        return factor * inside - self.targets[0], factor * rest - self.targets[1]


@dataclass(frozen=True, eq=False)
class VariableExchange:
    """The exchange of variables of an algorithm between sources and prompts, at the tokens of `place`."""

    hypothesis: Hypothesis
    names: Sequence[str]
    place: Place
    prompts: Prompts
    sources: Prompts
    runs: Runs

    def targets(self, step: int) -> tuple[Tensor, Tensor]:
        """Changes of the algorithm's prediction by the variables, and by all others, after some step."""
        others = [name for name in self.hypothesis.algorithm.variables if name not in self.names]
        unchanged = self.runs.exchange(0, self.place, ())
        changed, by_others, by_all = (
            self.runs.exchange(step, self.place, names) - unchanged for names in (self.names, others, None)
        )
        if not changed.square().mean() > NOTHING * by_all.square().mean():
            raise ValueError(
                f"{self.hypothesis.name}: exchanging {', '.join(self.names)} of the {self.place} after {step} steps "
                f"does not change the prediction, so every subspace fits: take another variable, place or layer"
            )
        return changed, by_others

    def run(self, adapter: ModelAdapter, *, shuffled: bool) -> Callable[[int, int], list[_Part]]:
        """Return a function that gives a run's parts after a layer and step; `shuffled` permutes the targets."""
        tokens = [adapter.encode(each) for each in (self.prompts, self.sources)]
        streams = 2 * sum(stream.nbytes for stream in record_streams(adapter, tokens[0][:1])) * len(self.prompts)
        budget = Budget().holding(adapter.bytes_of_products, streams)
        # a layer's activations stay for the derivatives
        rows = budget.rows(adapter.n_layers * adapter.bytes_per_row(tokens[0][:1]), at_most=BATCH)
        batches = []
        for each in zip(*(t.split(rows) for t in tokens), strict=True):
            runs = StreamRuns(adapter, each[0], *(record_streams(adapter, part) for part in each))
            with torch.no_grad():
                batches.append((runs, adapter.run(each[0]).double()))
        order = torch.arange(len(self.prompts))
        if shuffled:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))

        def parts(layer: int, step: int) -> list[_Part]:
            device = batches[0][1].device
            halves = [target[order].to(device).split(rows) for target in self.targets(step)]
            return [
                _Part(runs, layer, self.place, unchanged, (changed, by_others))
                for (runs, unchanged), changed, by_others in zip(batches, *halves, strict=True)
            ]

        return parts


def find_readers(parts: Sequence[_Part], exchange: VariableExchange, step: int) -> list[Float[Tensor, "d_model _"]]:
    """Directions that read the variables off the streams (ridge regression): one set in all, and one per token."""
    layer, where = parts[0].layer, slice(-1, None) if parts[0].place == "query" else slice(0, -1)
    pairs = [(part.runs.base[layer], part.runs.source[layer]) for part in parts]
    streams = torch.cat([source[:, where] - base[:, where] for base, source in pairs]).double().cpu()
    base, source = exchange.runs.base[step], exchange.runs.source[step]
    carried = torch.cat([(source[name] - base[name])[:, where].flatten(0, 1) for name in exchange.names], dim=1)
    d_model, by_point = streams.shape[-1], streams.reshape(len(carried), -1)  # a point's tokens concatenated
    alone = by_point.split(d_model, dim=1)
    return [_read_off(tokens, carried, d_model) for tokens in (by_point, *(alone if len(alone) > 1 else ()))]


def _read_off(streams: Tensor, carried: Tensor, d_model: int) -> Float[Tensor, "d_model direction"]:
    gram = streams.mT @ streams
    ridge = (PENALTY * gram.diagonal().mean() + 1e-30) * torch.eye(len(gram)).to(gram)
    slopes = torch.linalg.solve(gram + ridge, streams.mT @ carried)  # [token * d_model, variable]
    readers = torch.cat(slopes.split(d_model), dim=1)
    left, values, _ = torch.linalg.svd(readers, full_matrices=False)
    return left[:, values > 1e-6 * values[0]]


def make_starts(
    readers: Sequence[Float[Tensor, "d_model _"]], dim: int, restarts: int, seed: int
) -> list[list[Float[Tensor, "d_model _"]]]:
    """Columns to start from: the readers, filled or cut to `dim` columns (the best is taken), and random ones."""
    generator = torch.Generator().manual_seed(seed)
    d_model = len(readers[0])
    drawn = [torch.randn(d_model, dim, dtype=torch.float64, generator=generator) for _ in range(1 + restarts)]
    return [[torch.cat([each, drawn[0]], dim=1)[:, :dim] for each in readers], *([each] for each in drawn[1:])]


def search_columns(
    parts: Sequence[_Part], starts: Sequence[Sequence[Float[Tensor, "d_model _"]]], iterations: int, *, favoured: bool
) -> tuple[float, Float[Tensor, "d_model dim"], float]:
    """Find the columns with the least loss by L-BFGS, from the best of each group; favoured changes are scaled.

    Returns the mean squared distance of both changes, the orthonormal columns, and the factor on what they change.
    """
    fits = []
    for alternatives in starts:
        bases = [torch.linalg.qr(start).Q for start in alternatives]
        factors = [_best_factor(parts, basis) if favoured else 1.0 for basis in bases]
        pairs = list(zip(bases, factors, strict=True))
        losses = [torch.stack(squared_distances(parts, *pair)).sum(0).log1p().mean().item() for pair in pairs]
        basis, factor = pairs[losses.index(min(losses))]
        free = basis.clone().requires_grad_(), torch.tensor(factor, dtype=torch.float64, requires_grad=favoured)
        if basis.shape[0] > basis.shape[1]:  # else the basis spans everything
            _descend(parts, *free, iterations)
        basis, factor = torch.linalg.qr(free[0].detach()).Q, free[1].item()
        inside, rest = squared_distances(parts, basis, factor)
        fits.append(((inside + rest).mean().item(), basis, factor))
    return min(fits, key=lambda fit: fit[0])


def _descend(parts: Sequence[_Part], free: Tensor, factor: Tensor, iterations: int) -> None:
    """Minimise the mean of log(1 + distance), which exploding prompts do not dominate, over columns (and factor)."""
    moved = [each for each in (free, factor) if each.requires_grad]
    optimizer = LBFGS(moved, max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")
    n = sum(len(part.unchanged) for part in parts)
    scale = torch.cat([part.targets[0] for part in parts]).square().mean()

    def closure() -> Tensor:
        basis = torch.linalg.qr(free).Q
        leaf, loss = basis.detach().requires_grad_(), torch.zeros((), dtype=torch.float64)
        slopes = [torch.zeros_like(leaf), torch.zeros_like(factor)]
        for part in parts:
            inside, rest = part.residuals(leaf, factor)
            logarithms = ((inside.square() + rest.square()).mean(1) / (2 * scale)).log1p().sum() / n
            slope = torch.autograd.grad(logarithms, [leaf, *moved[1:]])
            slopes = [a + b.nan_to_num(0.0, 0.0, 0.0) for a, b in zip(slopes, slope, strict=False)]
            loss = loss + logarithms.detach().cpu().nan_to_num(MOST, MOST)
        (free.grad,) = torch.autograd.grad(basis, free, slopes[0])
        free.grad = free.grad.contiguous()
        factor.grad = slopes[1] if factor.requires_grad else None
        return loss

    optimizer.step(closure)


@torch.no_grad()
def _best_factor(parts: Sequence[_Part], basis: Tensor) -> float:
    """The factor that brings the model's changes nearest to the targets; 0 if there are no changes."""
    changes = torch.cat([torch.cat(part.changes(basis)) for part in parts])
    targets = torch.cat([torch.cat(part.targets) for part in parts])
    return ((changes * targets).sum() / changes.square().sum()).nan_to_num(0.0, 0.0, 0.0).item()


@torch.no_grad()
def squared_distances(parts: Sequence[_Part], basis: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Squared distances `[prompt]` from the expected changes, of the subspace and of the rest."""
    pairs = zip(*(part.residuals(basis, factor) for part in parts), strict=True)
    inside, rest = (torch.cat(each).square().mean(1).cpu().nan_to_num(MOST, MOST) for each in pairs)
    return inside, rest
