"""When models memorise a finite pool and when they generalise: strategies over pool size and training steps.

python analyses/strategy_phases.py                              # from the table in analyses/results/
python analyses/strategy_phases.py --folder runs/strategies     # train, or resume, and measure
"""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analyses.support.script import Option, script
from mechicl import viz
from mechicl.algorithms import dmmse, pool_bayes, references
from mechicl.analysis.dynamics import StrategyTracking, fit_strategy_odds, track_strategies
from mechicl.checkpoints import Checkpoint, Snapshots
from mechicl.learners import AlgorithmLearner, TokenAlgorithmLearner, squared_errors, token_losses
from mechicl.models import TransformerConfig
from mechicl.prompts import Prompts, TokenSequences
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import interval
from mechicl.sweeps import find_threshold
from mechicl.tasks import BallsAndUrns, MarkovChains, TaskPool
from mechicl.training import TrainingConfig, train

TABLE = Path(__file__).parent / "results" / "strategy_phases.csv"
SEEDS = (0, 1, 2)
FITTED = (2, 8, 32, 128)
HELD_OUT = (4, 16, 64)
"""Pool sizes that the boundary's model is fitted to, and those that it predicts."""
SIZES = tuple(sorted(FITTED + HELD_OUT))
MEMORISING, NOTHING = ("dmmse", "pool", "pool's unigrams"), ("zero", "uniform", "pool's average")
"""Learners that know the pool and use the context, and those that do not use it; the others generalise."""
EARLY = 0.25
"""Share of the steps that the law is fitted to where it predicts the others."""
HELD_OUT_SEED = 2**32
LEAST_KNOWN = 4  # pools that a boundary needs
N_PROMPTS = 150  # from the pool, and as many from new sources


def _tokens(d_vocab: int, n_layers: int, n_ctx: int = 16) -> TransformerConfig:
    return TransformerConfig(
        prompt_format="token_ids", d_vocab=d_vocab, n_ctx=n_ctx, n_layers=n_layers, n_heads=2, d_model=16, d_head=8,
        d_mlp=64, attention="softmax", normalization_type="LN", act_fn="gelu_new", initializer_range=0.1,
    )  # fmt: skip


_BASE: dict[str, Any] = {
    "seeds": SEEDS, "learning_rate": 5e-3, "schedule": "constant", "warmup_steps": 50, "gradient_clip": 1.0,
    "eval_every": 300, "eval_prompts": 100, "save_every": 100, "n_snapshots": 12, "batch_size": 48, "cpu": True,
}  # fmt: skip
SETTINGS = {
    "urns": TrainingConfig(
        task=BallsAndUrns(d_vocab=6, n_ctx=16, n_urns=2), model=_tokens(6, 1), steps=1500, **_BASE
    ),
    "regression": TrainingConfig(
        task=TaskPool(x_dim=3, n_context=5, noise_std=0.5),
        model=TransformerConfig(
            x_dim=3, n_context=5, n_layers=2, n_heads=2, d_model=16, d_head=8, d_mlp=64, attention="softmax",
            normalization_type="LN", act_fn="gelu_new", read_in="linear", read_out="linear",
        ),
        steps=10_000, **_BASE,
    ).replace(n_snapshots=14),
    "chains": TrainingConfig(
        task=MarkovChains(d_vocab=3, n_ctx=16, n_chains=2), model=_tokens(3, 2), steps=1500, **_BASE
    ),
    "second-order chains": TrainingConfig(
        task=MarkovChains(d_vocab=2, n_ctx=32, n_chains=2, order=2), model=_tokens(2, 2, 32), steps=2500, **_BASE
    ),
}  # fmt: skip
FIELD = {"regression": "n_tasks", "chains": "n_chains", "second-order chains": "n_chains", "urns": "n_urns"}


@script(
    folder=Option(None, "folder to train in; by default the saved table is read", kind=Path | None),
    settings=Option(tuple(SETTINGS), "settings to train; the others are read from the table"),
)
def compare(args: Any) -> Comparison:
    """The phase diagrams, their boundaries, and the fit of loss and complexity on some pool sizes."""
    if args.folder is not None:
        parts = [measured(name, args.folder / name) for name in args.settings]
        if TABLE.is_file():
            kept = pd.read_csv(TABLE)
            parts.append(kept[~kept["setting"].isin(args.settings)])
        pd.concat(parts, ignore_index=True).to_csv(TABLE, index=False, float_format="%.5g")
    frame = pd.read_csv(TABLE)
    rows, sections = [], []
    for setting, part in frame.groupby("setting", sort=False):
        found, pictures = _of_setting(str(setting), part)
        rows, sections = rows + found, sections + pictures
    lead = (
        f"Models of width 16 are trained on pools of {', '.join(map(str, SIZES))} sources, {len(SEEDS)} seeds each. "
        f"At each snapshot the mixture of reference learners nearest to a model's predictions is found, on "
        f"{N_PROMPTS} sequences from the pool and {N_PROMPTS} from new sources. The share of memorising is its weight "
        f"divided by that of all learners that use the context. It is unknown if these have less than half of the "
        f"weight, or if the residual exceeds 0.2."
    )
    return Comparison("Memorising and generalising: phases over pool size and steps", lead, rows, sections)


def config_of(setting: str) -> TrainingConfig:
    """Return the training of a setting: a model for each pool size and seed, all trained together."""
    config = SETTINGS[setting]
    first, *others = (config.task.replace(**{FIELD[setting]: size}) for size in SIZES)
    return config.replace(task=first, more_tasks=tuple(others))


def measured(setting: str, folder: Path) -> pd.DataFrame:
    """Train a setting, or load its training, and return the weights of all strategies at all snapshots."""
    result = train(config_of(setting), folder)
    snapshots = Snapshots(result.snapshot_steps, result.snapshots)
    tables = []
    for i, size in enumerate(SIZES):
        of_size = slice(len(SEEDS) * i, len(SEEDS) * (i + 1))
        checkpoint = Checkpoint(f"{setting}-{size}", result.models[of_size], {}, snapshots.select(of_size))
        task = config_of(setting).tasks[i]
        found = track_strategies(checkpoint, strategies(task), mixed(task, N_PROMPTS), progress=False)
        tables.append(_table(found, task).assign(size=size))
    return pd.concat(tables, ignore_index=True).assign(setting=setting)


def strategies(task: Any) -> dict[str, Any]:
    """The reference learners of a pool, and learners that do not use the context: a constant and the pool's average."""
    learners = references(task)
    if isinstance(task, TaskPool):
        average = {"pool": task.weights.mean(0, keepdim=True), "noise_std": task.noise_std}
        return {
            "dmmse": learners["dmmse"], "ridge": learners["ridge"],
            "pool's average": AlgorithmLearner(dmmse, average),
            "zero": AlgorithmLearner(lambda prompts: torch.zeros_like(prompts.ys)),
        }  # fmt: skip
    average = TokenAlgorithmLearner(pool_bayes, {"pool": task.pool.mean(0, keepdim=True)})
    return {**learners, "pool's average": average}


def mixed(task: Any, n: int) -> Any:
    """Prompts or sequences from the pool, and as many from new sources."""
    new = next(getattr(task, name) for name in ("new_tasks", "new_chains", "new_urns") if hasattr(task, name))
    kind: Any = Prompts if isinstance(task, TaskPool) else TokenSequences
    return kind.concatenate([task.sample(n, seed=HELD_OUT_SEED), new.sample(n, seed=HELD_OUT_SEED)])


def loss_gap(task: Any) -> float:
    """Loss of the best generalising learner minus that of the best memorising one on the pool, in nats."""
    learners, sample = strategies(task), task.sample(4000, seed=HELD_OUT_SEED + 1)
    loss, unit = (squared_errors, 2 * task.noise_std**2) if isinstance(task, TaskPool) else (token_losses, 1.0)
    losses = {name: loss(each, sample).nanmean() / unit for name, each in learners.items()}
    memorising = min(losses[name].item() for name in losses if name in MEMORISING)
    others = [losses[name].item() for name in losses if name not in (*MEMORISING, *NOTHING)]
    return max(min(others) - memorising, 0.0)


def _table(found: StrategyTracking, task: Any) -> pd.DataFrame:
    """A row for each snapshot and seed: the weights of memorising, of generalising, and of a constant."""
    members = [[i for i, name in enumerate(found.learners) if name in group] for group in (MEMORISING, NOTHING)]
    weights = [found.weights[group].sum(0) for group in members]
    gap, rows = loss_gap(task), []
    for i, step in enumerate(found.steps):
        for j, seed in enumerate(SEEDS):
            memorising, nothing = (float(each[i, j]) for each in weights)
            rows.append({
                "step": step, "seed": seed, "memorising": memorising, "nothing": nothing,
                "residual": float(found.residual[i, j]), "loss_gap": gap,
            })  # fmt: skip
    return pd.DataFrame(rows)


def shares_of(frame: pd.DataFrame) -> pd.Series:
    """The share of memorising among strategies that use the context; NaN where the mixture leaves it open."""
    using = 1 - frame["nothing"]
    return (frame["memorising"] / using).clip(0, 1).where((using >= 0.5) & (frame["residual"] <= 0.2))


def _of_setting(setting: str, frame: pd.DataFrame) -> tuple[list[Row], list[Section]]:
    frame = frame.assign(share=shares_of(frame))
    frame = frame[frame["step"] > 0]
    steps, sizes = (sorted(frame[name].unique().tolist()) for name in ("step", "size"))
    rows = []
    for step in steps:
        part = frame[frame["step"] == step]
        known = part.groupby("size")["share"].apply(lambda values: values.notna().all())
        if known.sum() >= LEAST_KNOWN:  # pools whose seeds all have a share
            found = find_threshold(part[part["size"].map(known)], "size", "share", level=0.5, rising=False)
            note = "" if known.all() else f"without {', '.join(map(str, known[~known].index))} sources"
            if not math.isfinite(found.half_width):
                note = f"{note}; the interval reaches beyond the pools".strip("; ")
            shown = found if 0 < found.mean < math.inf else "beyond the pools"
            rows.append(Row(f"{setting}: boundary after {step} steps", None, shown, "seeds", note))
    last = frame[frame["step"] == steps[-1]]
    for size, part in last.groupby("size"):
        values = torch.tensor(part["share"].dropna().to_numpy())
        note = f"residual {part['residual'].mean():.3f}, loss gap {part['loss_gap'].iloc[0]:.3f} nats"
        shown = interval(values) if len(values) else "none of these"
        rows.append(Row(f"{setting}, {size} sources: share of memorising at the end", None, shown, "seeds", note))
    wide = frame.pivot_table(index=["size", "step"], columns="seed", values="share", dropna=False)
    shares = torch.tensor(wide.to_numpy()).view(len(sizes), len(steps), -1)
    gaps = frame.groupby("size")["loss_gap"].first().tolist()
    fit = fit_strategy_odds(shares, sizes, steps, gaps, held_out=HELD_OUT)
    note = f"{int(shares.isfinite().sum())} of {shares.numel()} shares are known"
    for name, scores in fit.scores.items():
        rows.append(Row(f"{setting}: error of {name} on held-out sizes (nats)", None, interval(scores), "seeds", note))
        rows.append(Row(f"{setting}: error of {name} on fitted sizes (nats)", None, interval(fit.fitted_scores[name]),
                        "seeds"))  # fmt: skip
    for name in ("logistic", "constant"):
        better = interval(fit.scores[name] - fit.scores["loss and complexity"])
        rows.append(Row(f"{setting}: {name} minus loss and complexity (nats)", None, better, "seeds"))
    rows += _later(setting, shares, sizes, steps, gaps)
    sections = []
    for column, threshold, title, words in (
        ("share", 0.5, "share of memorising", "Medians of three seeds."),
        ("residual", 0.2, "residual", "Above the line no mixture explains the model."),
    ):
        diagram = viz.phase_diagram(frame, "size", "step", column, threshold=threshold, log=False, title=title)
        sections.append(Section(f"{setting}: {title}", words, diagram))
    return rows, sections


def _later(setting: str, shares: torch.Tensor, sizes: list[int], steps: list[int], gaps: list[float]) -> list[Row]:
    """The law's errors on held-out sizes at the end, where it is fitted to the other sizes early in training."""
    late = torch.tensor(steps) > EARLY * steps[-1]
    held_out = torch.tensor([size in HELD_OUT for size in sizes])
    known = shares.where((held_out[:, None] == late)[..., None], torch.nan)  # others are neither fitted nor predicted
    words = f"on held-out sizes after more than {EARLY * steps[-1]:g} steps, fitted to others before (nats)"
    try:
        scores = fit_strategy_odds(known, sizes, steps, gaps, held_out=HELD_OUT).scores
    except ValueError:  # early in training, few models are mixtures of strategies
        return [Row(f"{setting}: error {words}", None, "too few shares are known")]
    rows = [Row(f"{setting}: error of {name} {words}", None, interval(each), "seeds") for name, each in scores.items()]
    better = scores["logistic"] - scores["loss and complexity"]
    return [*rows, Row(f"{setting}: logistic minus loss and complexity, {words}", None, interval(better), "seeds")]


if __name__ == "__main__":
    compare.run()
