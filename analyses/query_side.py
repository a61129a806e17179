"""Sources of the query's attention scores: exchanged patterns and addresses, and rebuilt scores, with controls.

python analyses/query_side.py --checkpoint gpt2-8l
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import Option, regression_checkpoint, script
from analyses.support.seeds import by_seed
from mechicl.analysis.causes import exchange_patterns, sample_sources
from mechicl.checkpoints import untrained
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.reports.rows import over_models
from mechicl.statistics import Interval, ratio_interval
from mechicl.tasks import LinearRegression

FIRST = 2
"""The layer in which the query starts to read the context."""
CUTS: Mapping[str, tuple[bool, bool]] = {
    "the query's MLPs at their means": (True, False),
    "context points cut off from each other": (False, True),
    "both: the query alone computes": (True, True),
}
Part = Literal["start", "reads", "MLPs"]
COMPONENTS: Mapping[Literal["pattern", "q"], str] = {"pattern": "patterns", "q": "addresses"}
EXACT: Mapping[str, tuple[tuple[Part, ...], tuple[Part, ...]]] = {
    "start and reads; start": (("start", "reads"), ("start",)),
    "start and reads; start and MLPs": (("start", "reads"), ("start", "MLPs")),
    "start and reads; start and reads": (("start", "reads"), ("start", "reads")),
    "start and reads; all": (("start", "reads"), ("start", "reads", "MLPs")),
    "all; start and MLPs": (("start", "reads", "MLPs"), ("start", "MLPs")),
}
"""Parts of the stream, at the query and at the keys, from which scores are computed; the others are at their means."""
FITTED: Mapping[str, tuple[bool, bool]] = {
    "x_q; x_i": (False, False),
    "address; x_i (H1)": (True, False),
    "x_q; moved keys": (False, True),
    "address; moved keys (H2)": (True, True),
}
"""Linear maps of inputs, and of what a token has read of inputs, fitted to query and key vectors."""


@script(
    checkpoint="gpt2-8l",
    n_prompts=Option(256, "prompts of exchanges, and held-out prompts of scores"),
    n_fitting=1536,
    seed=0,
)
def compare(args: Any) -> Comparison:
    """All parts on all seeds of the checkpoint, and on an untrained model."""
    checkpoint, task = regression_checkpoint(args.checkpoint)
    models = [*checkpoint.models, untrained(checkpoint.select([0])).models[0]]
    prompts = task.sample(args.n_prompts, seed=args.seed)
    fitting = task.sample(args.n_fitting + args.n_prompts, seed=args.seed + 1)
    others = task.sample(args.n_prompts, seed=args.seed + 10)
    found = [measure(model, task, prompts, others, fitting) for model in models]
    rows: list[Row] = []
    for name in found[0].values:
        *trained, control = [each.values[name] for each in found]
        rows.append(over_models(name, trained, checkpoint, note=f"untrained model {control.mean:.3f}"))
    for name in found[0].scores:
        for i in range(len(found[0].scores[name])):
            values = torch.tensor([each.scores[name][i] for each in found])
            note = f"{by_seed(values[:-1].mean(1), '.2f')}; weakest head {values[:-1].min():.2f}"
            note += f"; untrained model {values[-1].mean():.2f}"
            quantity = f"R² of scores from {name}, layer {FIRST + i}"
            rows.append(Row(quantity, None, values[:-1].mean().item(), "heads and seeds", note))
    lead = (
        f"{checkpoint.name}: squared distances of predictions, relative to that between the predictions on the prompt "
        f"and on its source, {args.n_prompts} prompts. R² of scores is on as many held-out prompts, of the tokens "
        f"(inputs or targets) that a head attends to most, of scores minus their mean over prompts at each position "
        f"and over points; layers are numbered from 0. Sources of scores: those at the query; those at the keys."
    )
    return Comparison(f"The query's side of {checkpoint.name}", lead, rows)


@dataclass(frozen=True)
class Measured:
    """Measurements of one model: intervals over prompts by the name of their row, R² of scores `[layer][head]`."""

    values: dict[str, Interval]
    scores: dict[str, list[list[float]]]


def measure(
    model: HookedTransformer, task: LinearRegression, prompts: Prompts, others: Prompts, fitting: Prompts
) -> Measured:
    """Make all exchanges, cuts and rebuilt patterns of one model."""
    sources = exchanged_sources(task, prompts, others, seed=11)
    targets = sources["y"]
    values: dict[str, Interval] = {}
    last = model.cfg.n_layers
    places = {f"layers {layer} to {last - 1}": range(layer, last) for layer in range(last - 1, FIRST - 1, -1)}
    whole = f"layers {FIRST} to {last - 1}"
    for kind, source in sources.items():
        for component, words in COMPONENTS.items():
            for place in places if kind == "query" else (whole,):
                moved = exchange_patterns(model, prompts, source, layers=list(places[place]), component=component)
                values[f"{words} from another {kind}, {place}: distance from its own"] = moved.from_own
                if place == whole:
                    values[f"{words} from another {kind}, {place}: distance from the other's"] = moved.from_other
    own, other = model.predict(prompts), model.predict(others)
    between = (other - own).square().sum(1)
    values["the model's error"] = ratio_interval((own - prompts.ys[:, -1]).square().sum(1), between)
    for name, cut in CUTS.items():
        moved = run_cut(model, prompts, *cut)
        values[f"{name}: distance from its own"] = ratio_interval((moved - own).square().sum(1), between)
        values[f"{name}: error"] = ratio_interval((moved - prompts.ys[:, -1]).square().sum(1), between)
    middle = model.predict(Prompts(prompts.xs, (prompts.ys + targets.ys) / 2))
    bent = ratio_interval((own + model.predict(targets) - 2 * middle).square().sum(1), own.square().sum(1))
    values["non-linear in y: |f(y) + f(y') - 2 f((y + y') / 2)|² over |f(y)|²"] = bent
    held_out = fitting[-len(prompts) :]
    scores, true, kinds = rebuild_scores(model, fitting, len(prompts))
    held_own = model.predict(held_out)
    held_between = (model.predict(others) - held_own).square().sum(1)
    tokens = model.encode(held_out)
    found: dict[str, list[list[float]]] = {}
    for name, each in scores.items():
        found[name] = [[round(r2_of(each[i, h], true[i, h], kind), 4) for h, kind in enumerate(kinds[i])]
                       for i in range(len(true))]  # fmt: skip
        moved = run_patterns(model, tokens, {FIRST + i: pattern for i, pattern in enumerate(each.softmax(-1))})
        distance = ratio_interval((moved - held_own).square().sum(1), held_between)
        values[f"patterns rebuilt from {name}: distance from its own"] = distance
    return Measured(values, found)


def exchanged_sources(task: LinearRegression, prompts: Prompts, others: Prompts, seed: int) -> dict[str, Prompts]:
    """The prompts with another query, with targets of another task, with one other point, and other prompts."""
    weights = torch.linalg.lstsq(others.xs.double(), others.ys.double()).solution.float()
    return {
        "query": prompts.with_query(others.query.xs), "y": Prompts(prompts.xs, prompts.xs @ weights),
        "X": sample_sources(task, prompts, seed=seed), "prompt": others,
    }  # fmt: skip


# ---- interventions ----


@torch.no_grad()
def run_cut(model: HookedTransformer, prompts: Prompts, mlps: bool, points: bool) -> Float[Tensor, "prompt y"]:
    """Predict with the query's MLPs from layer 2 on at their means, and with points that read only themselves there."""
    tokens, layers = model.encode(prompts), range(FIRST, model.cfg.n_layers)
    _, cache = model.run_with_cache(tokens)
    point = torch.arange(tokens.shape[1]) // 2
    hidden = point[:, None] != point
    hidden[-1] = False

    def put_mean(out: Tensor, hook: Any) -> Tensor:
        out = out.clone()
        out[:, -1] = cache[hook.name][:, -1].mean(0)
        return out

    def cut(scores: Tensor, hook: Any) -> Tensor:
        return scores.masked_fill(hidden, -torch.inf)

    hooks: list[tuple[str, Callable[..., Tensor]]] = []
    hooks += [(f"blocks.{layer}.hook_mlp_out", put_mean) for layer in layers if mlps]
    hooks += [(f"blocks.{layer}.attn.hook_attn_scores", cut) for layer in layers if points]
    with model.hooks(fwd_hooks=hooks):
        return model(tokens)[:, -1]


@torch.no_grad()
def run_patterns(
    model: HookedTransformer, tokens: Tensor, patterns: Mapping[int, Float[Tensor, "head prompt key"]]
) -> Float[Tensor, "prompt y"]:
    """Predict while the query attends by given patterns in some layers."""

    def put(pattern: Tensor, hook: Any, row: Tensor) -> Tensor:
        pattern = pattern.clone()
        pattern[:, :, -1] = row
        return pattern

    hooks = [
        (f"blocks.{layer}.attn.hook_pattern", partial(put, row=row.transpose(0, 1))) for layer, row in patterns.items()
    ]
    with model.hooks(fwd_hooks=hooks):
        return model(tokens)[:, -1]


# ---- sources of scores ----


@torch.no_grad()
def rebuild_scores(
    model: HookedTransformer, prompts: Prompts, held_out: int
) -> tuple[dict[str, Tensor], Float[Tensor, "layer head prompt key"], list[list[int]]]:
    """Compute the query's attention scores of held-out prompts from parts of what they depend on.

    `EXACT` are the model's own maps of some parts of the stream: the stream after two layers ("start"), and what
    attention ("reads") and MLPs have added since, each at its mean over prompts if it is left out; layer norms divide
    by the scale of the whole stream. `FITTED` are linear regressions of query and key vectors on x and on `Σ_i w_i x_i`
    of each earlier layer, head and kind of token, with the model's own patterns w: the addresses of the hypotheses,
    with any matrices. Keys have a free offset at each position.

    Returns:
        scores by the name of their sources, the model's own, and the kind of token (0 for inputs, 1 for targets) that
        each head attends to most.
    """
    last, n, fitted = model.cfg.n_layers, prompts.n_context, len(prompts) - held_out
    layers = range(FIRST, last)
    names = [f"blocks.{i}.{part}" for i in layers for part in ("hook_attn_out", "hook_mlp_out", "hook_resid_pre")]
    names += [f"blocks.{i}.ln1.hook_scale" for i in layers]
    names += [f"blocks.{i}.attn.hook_{part}" for i in layers for part in ("q", "k", "pattern")]
    stored = _record(model, prompts, names)
    start = stored[f"blocks.{FIRST}.hook_resid_pre"]
    sums: dict[Part, Tensor] = {"start": start, "reads": torch.zeros_like(start), "MLPs": torch.zeros_like(start)}
    inputs = torch.zeros(len(prompts), 2 * n + 1, prompts.x_dim)
    inputs[:, 0::2], inputs[:, 1::2] = prompts.xs, prompts.xs[:, :-1]
    reads: list[Tensor] = []
    scores: dict[str, list[Tensor]] = {name: [] for name in (*EXACT, *FITTED, "other prompts (control)")}
    true, kinds, scale = [], [], model.cfg.score_scale
    for layer in layers:
        block = model.blocks[layer]
        q, k, pattern = (stored[f"blocks.{layer}.attn.hook_{part}"] for part in ("q", "k", "pattern"))
        q, k = q[:, -1].transpose(0, 1), k.permute(2, 0, 1, 3)  # [head prompt d], [head prompt key d]
        norms = stored[f"blocks.{layer}.ln1.hook_scale"][fitted:]
        own = scale * torch.einsum("hpd,hpkd->hpk", q, k)
        true.append(own[:, fitted:])
        kinds.append([int(p[..., 1:-1:2].sum() > p[..., 0:-1:2].sum()) for p in pattern[:, :, -1].unbind(1)])
        for name, (at_query, at_keys) in EXACT.items():
            streams = [_with_means(sums, parts)[fitted:] for parts in (at_query, at_keys)]
            read, keys = ((each - each.mean(-1, keepdim=True)) / norms * block.ln1.w + block.ln1.b for each in streams)
            read = read[:, -1]
            made_q = torch.einsum("pm,hmd->hpd", read, block.attn.W_Q) + block.attn.b_Q[:, None]
            made_k = torch.einsum("pkm,hmd->hpkd", keys, block.attn.W_K) + block.attn.b_K[:, None, None]
            scores[name].append(scale * torch.einsum("hpd,hpkd->hpk", made_q, made_k))
        at_query = torch.cat([prompts.xs[:, -1], *(each[:, -1] for each in reads)], -1)
        at_keys = torch.cat([inputs[:, :-1], *(each[:, :-1] for each in reads)], -1)
        for name, sides in FITTED.items():
            features = [each if side else each[..., : prompts.x_dim]
                        for each, side in zip((at_query, at_keys), sides, strict=True)]  # fmt: skip
            scores[name].append(scale * _fitted_scores(features[0], features[1], q, k, fitted))
        scores["other prompts (control)"].append(own[:, fitted:].roll(1, 1))
        sums["reads"] = sums["reads"] + stored[f"blocks.{layer}.hook_attn_out"]
        sums["MLPs"] = sums["MLPs"] + stored[f"blocks.{layer}.hook_mlp_out"]
        for kind in (0, 1):
            weights = pattern.clone()
            weights[..., 1 - kind :: 2] = 0
            reads += (weights @ inputs[:, None]).unbind(1)
    return {name: torch.stack(each) for name, each in scores.items()}, torch.stack(true), kinds


def _with_means(sums: Mapping[Part, Tensor], parts: Sequence[Part]) -> Float[Tensor, "prompt pos d_model"]:
    return sum((sums[part] if part in parts else sums[part].mean(0, keepdim=True)) for part in sums)  # pyright: ignore


def _fitted_scores(at_query: Tensor, at_keys: Tensor, q: Tensor, k: Tensor, fitted: int) -> Tensor:
    """Scores of regressed query and key vectors at held-out prompts; the query's key to itself is its own."""
    made_q = _regress(at_query, q.transpose(0, 1).flatten(1), fitted).unflatten(-1, (len(q), -1))
    made_k = k[:, fitted:].permute(1, 2, 0, 3).clone()
    n = at_keys.shape[1] // 2
    positions = torch.eye(n).expand(len(at_keys), n, n)
    for kind in (0, 1):
        features = torch.cat([at_keys[:, kind::2], positions], -1)
        targets = k[:, :, kind:-1:2].permute(1, 2, 0, 3).flatten(2)
        made_k[:, kind:-1:2] = _regress(features, targets, fitted).unflatten(-1, (len(q), -1))
    return torch.einsum("phd,pkhd->hpk", made_q, made_k)


def _regress(features: Tensor, targets: Tensor, fitted: int) -> Tensor:
    """Predict targets of held-out prompts from features by least squares."""
    features = torch.cat([features, features.new_ones(*features.shape[:-1], 1)], -1)
    a, b = (each[:fitted].flatten(0, -2).double() for each in (features, targets))
    gram = a.T @ a
    gram.diagonal().add_(1e-6 * gram.diagonal().mean())
    return features[fitted:] @ torch.linalg.solve(gram, a.T @ b).float()


def _record(model: HookedTransformer, prompts: Prompts, names: Sequence[str]) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for start in range(0, len(prompts), 256):
        _, cache = model.run_with_cache(model.encode(prompts[start : start + 256]))
        for name in names:
            parts[name].append(cache[name])
    return {name: torch.cat(each) for name, each in parts.items()}


def r2_of(found: Float[Tensor, "prompt key"], true: Float[Tensor, "prompt key"], kind: int) -> float:
    """R² of the scores of one kind of token, without position effects, and without what softmax ignores."""
    found, true = (_centred(each[:, kind:-1:2]) for each in (found, true))
    return 1 - ((found - true).square().mean() / true.square().mean()).item()


def _centred(scores: Tensor) -> Tensor:
    scores = scores - scores.mean(0, keepdim=True)
    return scores - scores.mean(1, keepdim=True)


if __name__ == "__main__":
    compare.run()
