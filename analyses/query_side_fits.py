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

from analyses.support.address_descent import AddressDescent, address_descent, fit_address_descent
from analyses.support.script import Option, regression_checkpoint, script
from mechicl.algorithms.stepwise import Hypothesis
from mechicl.analysis.causes import exchange_patterns
from mechicl.analysis.causes.interchange import interchange_each
from mechicl.constructions import gradient_descent, newton
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.statistics import ratio_interval
from mechicl.tasks import LinearRegression

HYPOTHESES: Mapping[str, dict[str, Any]] = {
    "H1": {"kernel": "softmax"},
    "linear kernels": {"kernel": "linear"},
    "H2": {"kernel": "softmax", "moving_keys": True},
}
TASK = LinearRegression(x_dim=5, n_context=20, inputs="gaussian")


@dataclass(frozen=True)
class Studied:
    """A model and what hypotheses are fitted to and tested on."""

    name: str
    model: HookedTransformer
    schedule: tuple[tuple[int, int], ...]
    scores: Float[Tensor, "step head prompt point"] | None
    layers: Sequence[int]
    causal: bool


@script(
    checkpoint=Option("gpt2-8l", 'name or folder of a model; "known" for hand-written models'),
    n_prompts=Option(96, "held-out prompts, of interventions too"),
    n_fitting=1536,
    iterations=Option(400, "of each fit by Adam"),
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
            schedule = ((0, 0), *((layer, layer - FIRST) for layer in (*layers, model.cfg.n_layers)))
            studied.append(Studied(f"seed {i}", model, schedule, log_patterns(model, prompts), layers, causal=True))
        first = studied[0]
        assert first.scores is not None
        other = first.scores.roll(1, 2)
        studied.append(Studied("other prompts' scores (control)", first.model, first.schedule, other, layers, True))
    rows: list[Row] = []
    for each in studied:
        results = study(args, task, each, prompts)
        for name, values in results.items():
            for quantity, words in QUANTITIES.items():
                if quantity in values:
                    rows.append(Row(f"{each.name}: {words}, {name}", None, values[quantity]))
    lead = (
        f"Fits of address descent by Adam to {args.n_fitting} prompts, {args.iterations} iterations; measured on "
        f"{args.n_prompts} other prompts. H1: softmax kernels of a moving address; linear kernels: the rival with the "
        f"same freedom; H2: H1 and keys that move."
    )
    return Comparison(f"Address descent fitted to {args.checkpoint}", lead, rows)


QUANTITIES = {
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
    steps = studied.schedule[-1][1]
    heads = 2 if studied.scores is None else studied.scores.shape[1]
    found: dict[str, dict[str, Any]] = {}
    fits: dict[str, AddressDescent] = {}
    for name, options in HYPOTHESES.items():
        algorithm, unexplained = fit_address_descent(
            prompts, targets, scores=studied.scores, steps=steps, heads=heads, batch_size=128, seed=args.seed,
            iterations=args.iterations, held_out=args.n_prompts, learning_rate=0.03, causal=studied.causal,
            progress=False, **options,
        )  # fmt: skip
        fits[name] = algorithm
        found[name] = {"unexplained": unexplained}
        if studied.scores is not None:
            true = _centred(studied.scores[:, :, -args.n_prompts :])
            made = _centred(algorithm.run_query(held_out)[1])
            r2 = 1 - (made - true).square().mean((2, 3)) / true.square().mean((2, 3))
            found[name]["weakest_score"] = r2.min().item()
        print(studied.name, name, found[name], flush=True)
    others = task.sample(len(held_out), seed=args.seed + 10)
    exchanged = exchanged_sources(task, held_out, others, args.seed + 11)
    sources = exchanged["X"]
    hypotheses = [Hypothesis(algorithm, studied.schedule, name=name) for name, algorithm in fits.items()]
    for test in interchange_each(model, hypotheses, held_out.to(dtype=dtype), sources.to(dtype=dtype),
                                 progress=False):  # fmt: skip
        by_cell = zip(test.r2, test.cells, strict=True)
        states = [min(1.0, round(r2.mean, 3)) for r2, cell in by_cell if "exchanged" in cell.intervention]
        found[test.hypothesis] |= {
            "effects": test.effects.mean, "weakest_intervention": test.score.mean, "weakest_state": min(states),
        }  # fmt: skip
        print(studied.name, test.hypothesis, test.effects, test.score, test.cells[test.weakest], flush=True)
    for name, share in exchange_effects(studied, fits, held_out, exchanged).items():
        found[name]["exchanges"] = share
    return found


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
                layers, steps = list(studied.layers)[start:], range(start, studied.schedule[-1][1])
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
    return _centred(torch.cat(parts, 2))


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
        studied.append(Studied(f"model that runs {name}", model, schedule, scores, range(1, 4), causal=False))
    sizes: dict[str, Any] = {"x_dim": prompts.x_dim, "n_context": prompts.n_context}
    for name, model in {
        "gradient descent, residuals in the context": gradient_descent(**sizes, step_size=0.02, steps=3),
        "Newton's method": newton(**sizes, steps=3, alpha=2e-4),
    }.items():
        n = model.cfg.n_layers
        schedule = tuple((k, k) for k in range(n + 1))
        studied.append(Studied(f"model that runs {name}", model, schedule, None, range(n), causal=False))
    return studied


def _centred(scores: Tensor) -> Tensor:
    return scores - scores.mean(-1, keepdim=True)


if __name__ == "__main__":
    compare.run()
