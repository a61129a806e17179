"""Does address descent, fitted to a model, do what interventions do to the model? With rivals and known models.

python analyses/query_side_fits.py --checkpoint gpt2-8l
python analyses/query_side_fits.py --checkpoint known
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from query_side import FIRST, exchanged_sources
from torch import Tensor

from analyses.support.address_descent import AddressDescent, AddressFit, address_descent, centre, fit_address_descent
from analyses.support.script import Option, regression_checkpoint, script
from mechicl.algorithms.stepwise import AfterCopying, Hypothesis
from mechicl.analysis.causes import exchange_patterns
from mechicl.analysis.causes.interchange import Interchange, interchange_each
from mechicl.constructions import gradient_descent, newton
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.statistics import interval, ratio_interval
from mechicl.tasks import LinearRegression

HYPOTHESES: Mapping[str, dict[str, Any]] = {
    "H1": {"kernel": "softmax"},
    "linear kernels": {"kernel": "linear"},
    "H2": {"kernel": "softmax", "moving_keys": True},
}
TASK = LinearRegression(x_dim=5, n_context=20, inputs="gaussian")


@dataclass(frozen=True)
class Studied:
    """A model and what hypotheses are fitted to and tested on.

    The schedule counts copying as a step where the model has separate tokens for inputs and targets (`copies`).
    """

    name: str
    model: HookedTransformer
    schedule: tuple[tuple[int, int], ...]
    scores: Float[Tensor, "step head prompt point"] | None
    layers: Sequence[int]
    copies: bool

    @property
    def steps(self) -> int:
        """Number of steps of address descent."""
        return self.schedule[-1][1] - self.copies


@script(
    checkpoint=Option("gpt2-8l", 'name or folder of a model; "known" for hand-written models'),
    n_prompts=Option(96, "held-out prompts, of interventions too"),
    n_fitting=384,
    starts=Option(2, "random initial values of each fit"),
    iterations=Option(800, "of L-BFGS at most; half as many for H2, whose iterations cost more"),
    seed=Option(0, "seed of prompts and fits"),
)
def compare(args: Any) -> Comparison:
    """Fit all hypotheses to all seeds of a checkpoint, or to hand-written models, and intervene."""
    known = args.checkpoint == "known"
    checkpoint, task = (None, TASK) if known else regression_checkpoint(args.checkpoint)
    prompts = task.sample(args.n_fitting + args.n_prompts, seed=args.seed + 1)
    studied = known_models(prompts) if known else []
    if checkpoint is not None:
        for i, model in enumerate(checkpoint.models):
            layers = range(FIRST, model.cfg.n_layers)
            # the layers before the first are the copying
            schedule = ((0, 0), *((layer, layer - FIRST + 1) for layer in (*layers, model.cfg.n_layers)))
            studied.append(Studied(f"seed {i}", model, schedule, log_patterns(model, prompts), layers, copies=True))
    found = {each.name: study(args, task, each, prompts) for each in studied}
    rows = [
        Row(f"{name}: {words}, {hypothesis}", None, values[quantity], "", values["notes"].get(quantity, ""))
        for name, results in found.items()
        for hypothesis, values in results.items()
        for quantity, words in QUANTITIES.items()
        if quantity in values
    ]
    if checkpoint is not None and len(checkpoint.models) > 1:
        for hypothesis in HYPOTHESES:
            of_seeds = [results[hypothesis] for results in found.values()]
            for quantity, words in QUANTITIES.items():
                values = torch.tensor([each[quantity] for each in of_seeds], dtype=torch.float64)
                rows.append(Row(f"{words}, {hypothesis}", None, interval(values), "seeds"))
    lead = (
        f"Fits of address descent to {args.n_fitting} prompts from {args.starts} starts, by Adam and then L-BFGS until "
        f"the objective falls by less than 0.1% in 100 iterations; of the starts the one with the least objective; "
        f"measured on {args.n_prompts} other prompts. H1: softmax kernels of a moving address; linear kernels: the "
        f"rival with the same freedom; H2: H1 and keys that move."
    )
    return Comparison(f"Address descent fitted to {args.checkpoint}", lead, rows)


QUANTITIES = {
    "objective": "objective of the fit",
    "unexplained": "unexplained share of predictions",
    "weakest_score": "R² of scores of the weakest head",
    "effects": "effects of interventions explained",
    "weakest_intervention": "R² of the weakest intervention",
    "weakest_state": "R² of the weakest exchange of a state",
    "exchanges": "effects of exchanged patterns and addresses explained",
}


def study(args: Any, task: LinearRegression, studied: Studied, prompts: Prompts) -> dict[str, dict[str, Any]]:
    """Fit each hypothesis to predictions and scores, and compare what interventions do."""
    model, held_out = studied.model, prompts[-args.n_prompts :]
    dtype = model.W_Q.dtype
    with torch.no_grad():
        targets = model.predict(prompts.to(dtype=dtype)).float()
    heads = 2 if studied.scores is None else studied.scores.shape[1]
    fits: dict[str, list[AddressFit]] = {}
    for name, options in HYPOTHESES.items():
        fits[name] = fit_address_descent(
            prompts, targets, scores=studied.scores, steps=studied.steps, heads=heads, starts=args.starts,
            iterations=args.iterations // (2 if name == "H2" else 1), held_out=args.n_prompts, seed=args.seed,
            causal=studied.copies, **options,
        )  # fmt: skip
        print(studied.name, name, [(fit.objective, fit.iterations, fit.converged) for fit in fits[name]], flush=True)
    others = task.sample(len(held_out), seed=args.seed + 10)
    exchanged = exchanged_sources(task, held_out, others, args.seed + 11)
    sources = exchanged["X"]
    hypotheses = [
        Hypothesis(AfterCopying(fit.algorithm) if studied.copies else fit.algorithm, studied.schedule, name=name)
        for name, each in fits.items()
        for fit in each
    ]
    tests: dict[str, list[Interchange]] = {name: [] for name in fits}
    for test in interchange_each(model, hypotheses, held_out.to(dtype=dtype), sources.to(dtype=dtype),
                                 progress=False):  # fmt: skip
        tests[test.hypothesis].append(test)
        print(studied.name, test.hypothesis, test.effects, test.score, test.cells[test.weakest], flush=True)
    shares = exchange_effects(studied, {name: each[0].algorithm for name, each in fits.items()}, held_out, exchanged)
    return {name: _summary(studied, held_out, fits[name], tests[name], shares[name]) for name in fits}


def _summary(
    studied: Studied, held_out: Prompts, fits: Sequence[AddressFit], tests: Sequence[Interchange], exchanges: float
) -> dict[str, Any]:
    """Return the numbers of the best fit; notes have the range over all starts."""
    best, test = fits[0], tests[0]
    by_cell = zip(test.r2, test.cells, strict=True)
    states = [min(1.0, round(r2.mean, 3)) for r2, cell in by_cell if "exchanged" in cell.intervention]
    numbers: dict[str, Any] = {
        "objective": best.objective, "unexplained": best.unexplained, "effects": test.effects.mean,
        "weakest_intervention": test.score.mean, "weakest_state": min(states), "exchanges": exchanges,
    }  # fmt: skip
    if studied.scores is not None:
        true = centre(studied.scores[:, :, -len(held_out) :])
        made = centre(best.algorithm.run_query(held_out)[1])
        r2 = 1 - (made - true).square().mean((2, 3)) / true.square().mean((2, 3))
        numbers["weakest_score"] = r2.min().item()
    stopped = [f"{fit.iterations}{'' if fit.converged else ' (not converged)'}" for fit in fits]
    numbers["notes"] = {
        "objective": f"{_range([fit.objective for fit in fits])}; iterations: {', '.join(stopped)}",
        "unexplained": _range([fit.unexplained for fit in fits]),
        "effects": _range([each.effects.mean for each in tests]),
        "weakest_intervention": f"{test.cells[test.weakest]}; {_range([each.score.mean for each in tests])}",
    }
    return numbers


def _range(values: Sequence[float]) -> str:
    return f"starts: {min(values):.4g} to {max(values):.4g}"


def exchange_effects(
    studied: Studied, fits: Mapping[str, AddressDescent], prompts: Prompts, exchanged: Mapping[str, Prompts]
) -> dict[str, float]:
    """Compare what exchanged patterns and addresses do to model and algorithms, in all layers or in the last ones.

    The explained share of the effects is `1 - E|Δmodel - Δalgorithm|² / (E|Δmodel|² + E|Δalgorithm|²)`.
    """
    dtype, prompts64 = studied.model.W_Q.dtype, prompts.to(dtype=torch.float64)
    sums = {name: (torch.zeros(len(prompts)).double(), torch.zeros(len(prompts)).double()) for name in fits}
    for component in ("pattern", "q"):
        for source in exchanged.values():
            for start in range(0, len(studied.layers), 2):
                layers, steps = list(studied.layers)[start:], range(start, studied.steps)
                in_model = exchange_patterns(
                    studied.model, prompts.to(dtype=dtype), source.to(dtype=dtype), layers=layers, component=component
                )
                moved = (in_model.predictions - in_model.own).double().T
                for name, algorithm in fits.items():
                    made = algorithm.exchange(
                        prompts64, source.to(dtype=torch.float64), steps=steps, component=component
                    )
                    change = made - algorithm.predict(prompts64)
                    distance = (moved - change).square().sum(1)
                    power = moved.square().sum(1) + change.square().sum(1)
                    for total, each in zip(sums[name], (distance, power), strict=True):
                        total += each
    return {name: 1 - ratio_interval(*sums[name]).mean for name in fits}


@torch.no_grad()
def log_patterns(model: HookedTransformer, prompts: Prompts) -> Float[Tensor, "step head prompt point"]:
    """Return logarithms of the query's attention to each point, by its two tokens, from layer 2 on."""
    parts = []
    for start in range(0, len(prompts), 256):
        _, cache = model.run_with_cache(model.encode(prompts[start : start + 256]))
        rows = [cache[f"blocks.{layer}.attn.hook_pattern"][:, :, -1, :-1] for layer in range(FIRST, model.cfg.n_layers)]
        parts.append(torch.stack(rows).unflatten(-1, (-1, 2)).sum(-1).clamp(min=1e-12).log().transpose(1, 2))
    return centre(torch.cat(parts, 2))


@torch.no_grad()
def known_models(prompts: Prompts) -> list[Studied]:
    """Transformers that run H1, its linear rival and H2, and two that run other algorithms."""
    studied = []
    for name, options in HYPOTHESES.items():
        generator = torch.Generator().manual_seed(0)
        scale = 1.0 if options["kernel"] == "softmax" else 0.05
        noise = torch.randn(3, 2, prompts.x_dim, prompts.x_dim, generator=generator, dtype=torch.float64)
        rates = 0.4 + 0.2 * torch.rand(2, 3, 2, generator=generator, dtype=torch.float64)
        truth = AddressDescent(scale * (torch.eye(prompts.x_dim).double() + 0.2 * noise), *rates, **options)
        model = address_descent(truth, n_context=prompts.n_context)
        scores = truth.run_query(prompts.to(dtype=torch.float64))[1].float()
        schedule = ((0, 0), (1, 0), (2, 1), (3, 2), (4, 3))
        studied.append(Studied(f"model that runs {name}", model, schedule, scores, range(1, 4), copies=False))
    sizes: dict[str, Any] = {"x_dim": prompts.x_dim, "n_context": prompts.n_context}
    for name, model in {
        "gradient descent, residuals in the context": gradient_descent(**sizes, step_size=0.02, steps=3),
        "Newton's method": newton(**sizes, steps=3, alpha=2e-4),
    }.items():
        n = model.cfg.n_layers
        schedule = tuple((k, k) for k in range(n + 1))
        studied.append(Studied(f"model that runs {name}", model, schedule, None, range(n), copies=False))
    return studied


if __name__ == "__main__":
    compare.run()
