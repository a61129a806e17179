"""Does the query of a trained model run softmax address descent? Exchanged patterns, scores and fits, with controls.

python analyses/query_side.py --checkpoint gpt2-8l
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise import AddressDescent, fit_address_descent
from mechicl.analysis.causes import exchange_patterns, sample_sources
from mechicl.checkpoints import untrained
from mechicl.constructions import address_descent
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.reports.rows import over_models
from mechicl.statistics import ratio_interval
from mechicl.tasks import LinearRegression
from support.script import ScriptArgs, regression_checkpoint, run_script

FIRST = 2
"""The layer in which the query starts to read the context."""
HYPOTHESES: Mapping[str, dict[str, Any]] = {
    "H1, softmax": {"kernel": "softmax"},
    "linear kernels": {"kernel": "linear"},
    "H2, softmax and keys that move": {"kernel": "softmax", "moving_keys": True},
}
SIDES = {
    "x_q and x_i": (False, False),
    "address and x_i": (True, False),
    "x_q and moved keys": (False, True),
    "address and moved keys": (True, True),
}
"""What scores are computed from: inputs, or inputs and what a token has read, at the query and at the keys."""


@dataclass(frozen=True)
class Args(ScriptArgs):
    """What the query's attention patterns carry, and which hypothesis predicts them."""

    checkpoint: str = "gpt2-8l"
    """Name or folder of a model with softmax attention on interleaved prompts of linear regression."""
    n_prompts: int = 512
    """Prompts of exchanges, and held-out prompts of scores and fits."""
    n_fitting: int = 3072
    """Prompts that hypotheses are fitted to."""
    iterations: int = 600
    """Of each fit by Adam; 0 for no fits."""
    seed: int = 0
    """Seed of prompts and fits."""


def compare(args: Args) -> Comparison:
    """All parts on all seeds of the checkpoint, and on controls."""
    checkpoint, task = regression_checkpoint(args.checkpoint)
    models = [model.double() for model in checkpoint.models]
    without = untrained(checkpoint.select([0])).models[0].double()
    prompts = task.sample(args.n_prompts, seed=args.seed, dtype=torch.float64)
    rows: list[Row] = []
    for name, measure in _exchanges(task, prompts, args.seed).items():
        rows.append(over_models(name, [measure(model) for model in models], checkpoint))
        rows.append(Row(f"{name}, untrained model", None, measure(without), "prompts"))
    data: dict[str, Any] = {"scores": [], "fits": []}
    fitting = task.sample(args.n_fitting + args.n_prompts, seed=args.seed + 1, dtype=torch.float64)
    for label, model in [*((f"seed {i}", model) for i, model in enumerate(models)), ("untrained", without)]:
        found = explain_scores(model, fitting, args.n_prompts)
        data["scores"].append({"model": label, **{name: values.tolist() for name, values in found.items()}})
        rows += _score_rows(label, found)
    if args.iterations:
        few = [*((f"seed {i}", *_targets(model, fitting)) for i, model in enumerate(models))]
        few.append(("other prompts' scores (control)", few[0][1], few[0][2].roll(1, 2)))
        for label, targets, scores in few:
            fits = fit_all(args, fitting, targets, scores, causal=True)
            data["fits"].append({"model": label, **fits})
            rows += _fit_rows(label, fits)
        rows += _known(args, fitting, data)
    lead = (
        f"{checkpoint.name}: squared distances relative to that between predictions on prompts and sources, "
        f"{args.n_prompts} prompts. R² of scores is on as many held-out prompts, of scores minus their mean over "
        f"prompts at each position and over points; layers are numbered from 0."
    )
    return Comparison(f"The query's side of {checkpoint.name}", lead, rows, [], data)


def _exchanges(task: LinearRegression, prompts: Prompts, seed: int) -> dict[str, Callable[[HookedTransformer], Any]]:
    """The measures of exchanged patterns, averaged MLPs and linearity, by the name of their row."""
    others = task.sample(len(prompts), seed=seed + 10, dtype=torch.float64)
    query = prompts.with_query(others.query.xs)
    weights = torch.linalg.lstsq(others.xs, others.ys).solution
    targets = Prompts(prompts.xs, prompts.xs @ weights)
    context = sample_sources(task, prompts, seed=seed + 11)
    measures: dict[str, Callable[[HookedTransformer], Any]] = {}
    for kind, sources in (("query", query), ("y", targets), ("X", context), ("prompt", others)):
        start = f"patterns from another {kind}: distance from"
        measures[f"{start} the other's prediction"] = lambda m, s=sources: exchange_patterns(m, prompts, s).from_other
        measures[f"{start} its own"] = lambda m, s=sources: exchange_patterns(m, prompts, s).from_own
    for layer in range(8):
        measures[f"patterns from another query in layer {layer} alone: distance from its own"] = lambda m, i=layer: (
            exchange_patterns(m, prompts, query, layers=[i]).from_own
        )
    measures["the query's MLPs from layer 2 on at their means: distance from its own"] = lambda m: _averaged(
        m, prompts, query
    )
    measures["non-linear in y: |f(y) + f(y') - 2 f((y + y') / 2)|² over |f(y)|²"] = lambda m: ratio_interval(
        (m.predict(prompts) + m.predict(targets) - 2 * m.predict(Prompts(prompts.xs, (prompts.ys + targets.ys) / 2)))
        .square().sum(1),
        m.predict(prompts).square().sum(1),
    )  # fmt: skip
    return measures


@torch.no_grad()
def _averaged(model: HookedTransformer, prompts: Prompts, query: Prompts) -> Any:
    own, tokens = model.predict(prompts), model.encode(prompts)
    _, cache = model.run_with_cache(tokens)

    def put(out: Tensor, hook: Any) -> Tensor:
        out = out.clone()
        out[:, -1] = cache[hook.name][:, -1].mean(0)
        return out

    names = [f"blocks.{layer}.hook_mlp_out" for layer in range(FIRST, model.cfg.n_layers)]
    with model.hooks(fwd_hooks=[(name, put) for name in names]):
        moved = model(tokens)[:, -1] - own
    return ratio_interval(moved.square().sum(1), (model.predict(query) - own).square().sum(1))


@torch.no_grad()
def explain_scores(model: HookedTransformer, prompts: Prompts, held_out: int) -> dict[str, Float[Tensor, "layer head"]]:
    """Return how well the query's attention scores follow from linear maps of inputs and of what tokens have read.

    Query and key vectors are fitted by linear regression to x and, if wanted, to `Σ_i w_i x_i` of each earlier layer,
    head and kind of token, with the model's own patterns w: the addresses of the hypotheses, with any matrices. Keys
    have a free offset at each position. R² is of the tokens (inputs or targets) that a head attends to most.
    """
    n, first, last = prompts.n_context, FIRST, model.cfg.n_layers
    fitted = len(prompts) - held_out
    inputs = torch.zeros(len(prompts), 2 * n + 1, prompts.x_dim, dtype=torch.float64)
    inputs[:, 0::2], inputs[:, 1::2] = prompts.xs, prompts.xs[:, :-1]
    stored = _record(model, prompts, [f"{part}.{i}" for i in range(first, last) for part in ("q", "k", "pattern")])
    reads: list[Tensor] = []
    found = {name: torch.zeros(last - first, model.cfg.n_heads, dtype=torch.float64) for name in SIDES}
    positions = torch.eye(n, dtype=torch.float64).expand(len(prompts), n, n)
    for layer in range(first, last):
        pattern = stored[f"pattern.{layer}"]
        for head in range(model.cfg.n_heads):
            kind = max((0, 1), key=lambda k: pattern[:, head, -1, k:-1:2].sum().item())
            q, k = stored[f"q.{layer}"][:, -1, head], stored[f"k.{layer}"][:, kind:-1:2, head]
            true = _centred(torch.einsum("nd,nid->ni", q, k)[fitted:])
            read = {
                "query": torch.cat([prompts.xs[:, -1], *(each[:, -1] for each in reads)], -1),
                "key": torch.cat([prompts.xs[:, :-1], *(each[:, kind:-1:2] for each in reads)], -1),
            }
            sides = [
                (_regress(read["query"][:, :width], q, fitted),
                 _regress(torch.cat([read["key"][..., :width], positions], -1), k, fitted))
                for width in (prompts.x_dim, None)
            ]  # fmt: skip
            for name, (at_query, at_key) in SIDES.items():
                expected = _centred(torch.einsum("nd,nid->ni", sides[at_query][0], sides[at_key][1]))
                found[name][layer - first, head] = 1 - (expected - true).square().mean() / true.square().mean()
        for head in range(model.cfg.n_heads):
            for kind in (0, 1):
                weights = pattern[:, head].clone()
                weights[..., 1 - kind :: 2] = 0
                reads.append(weights @ inputs)
    return found


def _record(model: HookedTransformer, prompts: Prompts, names: Sequence[str]) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for start in range(0, len(prompts), 256):
        _, cache = model.run_with_cache(model.encode(prompts[start : start + 256]))
        for name in names:
            part, layer = name.split(".")
            parts.setdefault(name, []).append(cache[f"blocks.{layer}.attn.hook_{part}"])
    return {name: torch.cat(each) for name, each in parts.items()}


def _regress(features: Tensor, targets: Tensor, fitted: int) -> Tensor:
    """Predict targets of held-out prompts from features by least squares."""
    features = torch.cat([features, features.new_ones(*features.shape[:-1], 1)], -1)
    a, b = (each[:fitted].flatten(0, -2) for each in (features, targets))
    gram = a.T @ a
    ridge = 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return features[fitted:] @ torch.linalg.solve(gram + ridge, a.T @ b)


def _centred(scores: Float[Tensor, "*axes prompt point"]) -> Tensor:
    """Scores without position effects, and without what softmax ignores."""
    scores = scores - scores.mean(-2, keepdim=True)
    return scores - scores.mean(-1, keepdim=True)


def _score_rows(label: str, found: Mapping[str, Tensor]) -> list[Row]:
    rows = []
    for name, values in found.items():
        for i, heads in enumerate(values):
            least = f"by head {', '.join(f'{value:.2f}' for value in heads.tolist())}"
            quantity = f"{label}: R² of scores from {name}, layer {FIRST + i}, mean over heads"
            rows.append(Row(quantity, None, heads.mean().item(), "", least))
    return rows


# ---- fits ----


@torch.no_grad()
def _targets(model: HookedTransformer, prompts: Prompts) -> tuple[Tensor, Float[Tensor, "step head prompt point"]]:
    """The model's predictions, and logarithms of its attention to each point, by its two tokens, from layer 2 on."""
    layers = range(FIRST, model.cfg.n_layers)
    patterns = _record(model, prompts, [f"pattern.{layer}" for layer in layers])
    rows = torch.stack([patterns[f"pattern.{layer}"][:, :, -1, :-1] for layer in layers])
    points = rows.unflatten(-1, (-1, 2)).sum(-1).clamp(min=1e-12)
    return model.predict(prompts), _centred(points.log().transpose(1, 2))


def fit_all(args: Args, prompts: Prompts, targets: Tensor, scores: Tensor, *, causal: bool) -> dict[str, Any]:
    """Fit each hypothesis to predictions and scores, and the first two to predictions alone."""
    out: dict[str, Any] = {}
    steps, heads = scores.shape[:2]
    for name, options in HYPOTHESES.items():
        for inside in (True, False):
            if not inside and "moving_keys" in options:
                continue
            fit = fit_address_descent(
                prompts, targets, scores=scores if inside else None, steps=steps, heads=heads, batch_size=256,
                iterations=args.iterations, held_out=args.n_prompts, learning_rate=0.02, seed=args.seed, progress=False,
                causal=causal, **options,
            )  # fmt: skip
            values: dict[str, Any] = {"unexplained": fit.unexplained}
            if inside:
                held_out = prompts[-args.n_prompts :]
                true, found = _centred(scores[:, :, -args.n_prompts :]), _centred(fit.algorithm.run_query(held_out)[1])
                r2 = 1 - (found - true).square().mean((2, 3)) / true.square().mean((2, 3))
                values |= {"r2": r2.tolist(), "matrices": fit.algorithm.matrices.tolist()}
                values |= {part: getattr(fit.algorithm, part).tolist() for part in ("target_rates", "address_rates")}
            out[f"{name}, fitted to {'predictions and scores' if inside else 'predictions'}"] = values
            print(name, inside, fit.unexplained, values.get("r2"), flush=True)
    return out


def _fit_rows(label: str, fits: Mapping[str, Any]) -> list[Row]:
    rows = []
    for name, values in fits.items():
        rows.append(Row(f"{label}: unexplained predictions, {name}", None, values["unexplained"]))
        if "r2" in values:
            by_layer = [sum(heads) / len(heads) for heads in values["r2"]]
            words = f"mean over heads by step {', '.join(f'{value:.2f}' for value in by_layer)}"
            weakest = min(min(heads) for heads in values["r2"])
            rows.append(Row(f"{label}: weakest R² of scores, {name}", None, weakest, "", words))
    return rows


def _known(args: Args, prompts: Prompts, data: dict[str, Any]) -> list[Row]:
    """The fits on transformers that run H1, its linear rival and H2."""
    rows = []
    for name, options in HYPOTHESES.items():
        generator = torch.Generator().manual_seed(args.seed)
        scale = 1.0 if options["kernel"] == "softmax" else 0.05
        noise = torch.randn(3, 2, prompts.x_dim, prompts.x_dim, generator=generator, dtype=torch.float64)
        rates = 0.4 + 0.2 * torch.rand(2, 3, 2, generator=generator, dtype=torch.float64)
        truth = AddressDescent(scale * (torch.eye(prompts.x_dim).double() + 0.2 * noise), *rates, **options)
        model = address_descent(truth, n_context=prompts.n_context)
        with torch.no_grad():
            stored = [
                model.run_with_cache(model.encode(prompts))[1][f"blocks.{k + 1}.attn.hook_attn_scores"]
                for k in range(3)
            ]
        scores = torch.stack([each[:, :, -1, : prompts.n_context].transpose(0, 1) for each in stored])
        fits = fit_all(args, prompts, model.predict(prompts), scores, causal=False)
        label = f"transformer that runs {name}"
        data["fits"].append({"model": label, **fits})
        rows += _fit_rows(label, fits)
    return rows


if __name__ == "__main__":
    run_script(Args, compare, "query_side")
