"""Local learning coefficients: estimates where the value is known, their speed, and what they show along trainings.

python analyses/learning_coefficients.py --folder runs/coefficients   # 25 minutes on one core; keeps what it sampled
"""

import math
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from analyses.support.script import Option, script
from analyses.support.sweeps import over_seeds
from mechicl import viz
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.dynamics import (
    LearningCoefficient,
    OverTraining,
    Sampler,
    SamplingWarning,
    align_over_training,
    find_transitions,
    learning_coefficient,
    score_heads_over_training,
)  # fmt: skip
from mechicl.checkpoints import Checkpoint, load_checkpoint, save
from mechicl.models import PromptedModel, build
from mechicl.reports import Comparison, Row, Section
from mechicl.statistics import load_result, median_interval
from mechicl.training.data import examples

SEED = 1_000_003
WITHIN = 0.1
"""Relative error of an estimate that counts as right."""
REDUCED_RANK = (
    (2, 2, 1, 0), (3, 3, 1, 1), (3, 3, 2, 1), (4, 4, 2, 0), (4, 2, 3, 1), (2, 4, 1, 1), (5, 5, 3, 2), (2, 2, 5, 1)
)  # fmt: skip
"""Reduced-rank regressions: inputs M, outputs N, hidden units H, and the rank r of the true map."""
CHAINS: dict[str, dict[str, Any]] = {
    "lsa-1l": {"localization": 30.0, "burn_in": 1000, "n_draws": 3000, "n_prompts": 512},
    "lsa-2l-looped": {"localization": 30.0, "burn_in": 1000, "n_draws": 3000, "n_prompts": 512},
    "induction-2l": {"localization": 1000.0, "burn_in": 400, "n_draws": 600, "n_prompts": 512, "batch_size": 16},
    "gpt2-8l": {"localization": 1000.0, "burn_in": 100, "n_draws": 150, "n_prompts": 512, "batch_size": 16},
}
"""How each checkpoint is sampled."""
LOCALIZATIONS = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Values of γ at which the trained `lsa-1l` is measured."""
STEPS = (0, 50, 100, 153, 202, 266, 352, 535, 1420, 10_000)
"""Snapshots of the linear models; all of `induction-2l` are measured."""


@dataclass(frozen=True)
class Case:
    """A loss whose learning coefficient is known."""

    name: str
    known: float
    start: Tensor
    loss: Callable[[Tensor], Tensor]
    """Loss of the vector of weights."""
    note: str = ""


@script(
    folder=Option(Path("runs/coefficients"), "folder of the sampled chains, which are not sampled again"),
    checkpoints=tuple(CHAINS),
    record=Option(None, "folder of checkpoints, to write coefficients of linear models into records", kind=Path | None),
)
def compare(args: Any) -> Comparison:
    """The known cases, the speed of stacked chains, and the coefficients along trainings."""
    rows, sections, data = [*known_rows(), *speed_rows(), *localization_rows()], [], {}
    for name in args.checkpoints:
        found, pictures, data[name] = along_training(name, args.folder)
        rows, sections = rows + found, sections + pictures
        if args.record is not None and name.startswith("lsa"):
            record_coefficients(args.record / name, sampled(name, args.folder))
    lead = (
        "Estimates of the local learning coefficient by Langevin chains: with the Metropolis rule, or for induction-2l "
        "and gpt2-8l with minibatches and without the rule. Known cases, whose value is in the column of published "
        "ones: nβ = 1,000, γ = 1, 64 chains, intervals over chains. Checkpoints: two chains for each seed, intervals "
        "over seeds; R² and steps are medians with the range of the seeds."
    )
    return Comparison("Local learning coefficients", lead, rows, sections, data)


# ---- known cases ----


def known_cases() -> list[Case]:
    """Regular regressions, quadratics with flat directions, powers and products, and reduced-rank regressions."""
    cases = [regular(d) for d in (2, 8, 20)]
    for flat in (2, 5, 8):
        cases.append(Case(f"quadratic in 10 weights, {flat} of them flat", (10 - flat) / 2, torch.zeros(10),
                          lambda w, flat=flat: w[flat:].square().sum()))  # fmt: skip
    cases += [
        Case("w⁴", 1 / 4, torch.zeros(1), lambda w: w[0] ** 4),
        Case("w⁶", 1 / 6, torch.zeros(1), lambda w: w[0] ** 6),
        Case("v² + w⁴", 3 / 4, torch.zeros(2), lambda w: w[0] ** 2 + w[1] ** 4),
        Case("v²w²", 1 / 2, torch.zeros(2), lambda w: (w[0] * w[1]) ** 2, "multiplicity 2"),
    ]
    return cases + [reduced_rank(*sizes) for sizes in REDUCED_RANK]


def regular(d: int, n: int = 1000) -> Case:
    """Linear regression with noise at its least-squares solution."""
    generator = torch.Generator().manual_seed(d)
    xs = torch.randn(n, d, generator=generator, dtype=torch.float64)
    ys = xs.sum(1) + torch.randn(n, generator=generator, dtype=torch.float64)
    best = torch.linalg.lstsq(xs, ys[:, None]).solution[:, 0]
    return Case(f"linear regression, {d} weights", d / 2, best, lambda w: (xs @ w - ys).square().mean() / 2)


def reduced_rank(n_in: int, n_out: int, hidden: int, rank: int) -> Case:
    """A linear map through hidden units, at true weights with as many unused hidden units as possible.

    Inputs are white and outputs without noise, so that the mean loss is |BA - C|² / 2 for the true map C.
    """
    b, a = torch.zeros(n_out, hidden), torch.zeros(hidden, n_in)
    b[range(rank), range(rank)] = a[range(rank), range(rank)] = 1
    true = (b @ a).double()

    def loss(w: Tensor) -> Tensor:
        b, a = w[: n_out * hidden].view(n_out, hidden), w[n_out * hidden :].view(hidden, n_in)
        return (b @ a - true).square().sum() / 2

    known, multiplicity = aoyagi_watanabe(n_in, n_out, hidden, rank)
    name = f"reduced rank: {n_in} inputs, {n_out} outputs, {hidden} hidden, rank {rank}"
    return Case(name, known, torch.cat([b.flatten(), a.flatten()]), loss, f"multiplicity {multiplicity}")


def aoyagi_watanabe(n_in: int, n_out: int, hidden: int, rank: int) -> tuple[float, int]:
    """The learning coefficient of reduced-rank regression and its multiplicity (Aoyagi and Watanabe 2005)."""
    m, n, h, r = n_in, n_out, hidden, rank
    if m + h < n + r:
        return (h * m - h * r + n * r) / 2, 1
    if n + h < m + r:
        return (h * n - h * r + m * r) / 2, 1
    if m + n < h + r:
        return m * n / 2, 1
    odd = (m + n + h + r) % 2
    return (2 * (h + r) * (m + n) - (m - n) ** 2 - (h + r) ** 2 + odd) / 8, 1 + odd


def known_rows() -> list[Row]:
    """Each case's estimate, with the known value as the published one."""
    rows, right = [], 0
    for case in known_cases():
        found = coefficient(
            nn.ParameterList([case.start.double()]), torch.zeros(1),
            loss=lambda model, _, case=case: case.loss(model[0]),
            sampler=Sampler(n_beta=1000.0, n_chains=64, burn_in=1500, n_draws=4000),
        )  # fmt: skip
        ok = abs(found.estimate().mean / case.known - 1) <= WITHIN
        right += ok
        notes = [case.note, "within 10%" if ok else "not within 10%", *found.failures]
        rows.append(Row(case.name, case.known, found.estimate(), "chains", "; ".join(filter(None, notes))))
        print(case.name, rows[-1], flush=True)
    return [*rows, Row("known cases within 10%", None, f"{right} of {len(rows)}")]


def coefficient(*what: Any, **options: Any) -> LearningCoefficient:
    """An estimate without warnings: the rows list its failures."""
    with warnings.catch_warnings(action="ignore", category=SamplingWarning):
        return learning_coefficient(*what, progress=False, **options)


# ---- speed ----


def speed_rows(n_chains: int = 32, n_steps: int = 200) -> list[Row]:
    """How much CPU time stacked chains save, compared with a plain loop that runs them one after another."""
    rows, checkpoint = [], load_checkpoint("lsa-1l")
    model, prompts = checkpoint.models[0], checkpoint.task.sample(1024, seed=SEED)
    for batch_size in (16, 128, 1024):
        ratios = []
        for _ in range(3):
            start = time.process_time()
            sampler = Sampler(n_chains, n_steps, burn_in=0, step_size=1e-4, batch_size=batch_size)
            coefficient(model, prompts, sampler=sampler)
            middle = time.process_time()
            for _ in range(n_chains // 4):
                plain_chain(model, prompts, batch_size, n_steps)
            ratios.append(4 * (time.process_time() - middle) / (middle - start))
        name = f"{n_chains} chains of lsa-1l, minibatches of {batch_size} prompts: times faster when stacked"
        note = "CPU time; a quarter of the plain chains were timed"
        rows.append(Row(name, None, median_interval(torch.tensor(ratios)), "repeats", note))
        print(name, rows[-1], flush=True)
    return rows


def plain_chain(model: PromptedModel, prompts: Any, batch_size: int, n_steps: int) -> float:
    """Run one chain of stochastic-gradient Langevin dynamics without the library; return its coefficient.

    As in the library, each draw's loss is compared with that of the model itself on the same minibatch.
    """
    center, model, total = model, deepcopy(model), 0.0
    tokens, targets = examples(model, prompts, "query")
    n_beta = len(tokens) / math.log(len(tokens))
    for _ in range(n_steps):
        chosen = torch.randint(len(tokens), (batch_size,))
        loss = (model(tokens[chosen], at="query") - targets[chosen]).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            total += loss.item() - (center(tokens[chosen], at="query") - targets[chosen]).square().mean().item()
            for weight, start, gradient in zip(model.parameters(), center.parameters(), gradients, strict=True):
                force = n_beta * gradient + 10 * (weight - start)
                weight += -0.5e-4 * force + 1e-2 * torch.randn_like(weight)
    return n_beta * total / n_steps


# ---- how much the localization decides ----


def localization_rows(name: str = "lsa-1l") -> list[Row]:
    """The coefficient at the end of a training for several γ, which bound the distance that chains move."""
    checkpoint, options, rows = load_checkpoint(name), dict(CHAINS[name]), []
    prompts = checkpoint.task.sample(options.pop("n_prompts"), seed=SEED)
    for gamma in LOCALIZATIONS:
        settings: dict[str, Any] = {**options, "localization": gamma}
        sampler = Sampler(n_chains=2, **settings)
        found = coefficient(checkpoint, prompts, steps=[STEPS[-1]], sampler=sampler)
        rows.append(Row(f"{name}: coefficient at the end, γ = {gamma:g}", None, found.estimate(STEPS[-1]), "seeds",
                        "; ".join(found.failures)))  # fmt: skip
        print(rows[-1], flush=True)
    return rows


# ---- along trainings ----


def along_training(name: str, folder: Path) -> tuple[list[Row], list[Section], dict[str, Any]]:
    """The coefficients at a checkpoint's snapshots, and when they change compared with its loss and its algorithm."""
    checkpoint, result = load_checkpoint(name), sampled(name, folder)
    nearness = algorithm_curves(checkpoint, result.steps)
    curves = {"learning coefficient": result.coefficients[:, 0].mean(-1), "log loss": result.losses.log(), **nearness}
    rows = [
        Row(f"{name}: coefficient at step {step}", None, result.estimate(step), "seeds",
            f"loss {result.losses[i].mean():.3g}")
        for i, step in enumerate(result.steps)
    ]  # fmt: skip
    if len(result.steps) > 2:
        y, *others = curves.values()
        for words, columns in {"log loss": others[:1], "log loss and algorithm": others}.items():
            shares = torch.stack([r_squared(y[:, i], [x[:, i] for x in columns]) for i in range(y.shape[1])])
            rows.append(over_seeds(f"{name}: R² of the coefficient on {words}", pd.Series(shares.tolist())))
        for words, values in curves.items():
            half = find_transitions(result.steps, (values - values[-1]).abs()).steps
            if half.isfinite().all():
                rows.append(over_seeds(f"{name}: step of half of the change of {words}", pd.Series(half.tolist())))
    temperature, spread = result.temperatures, result.spreads
    rows += [
        Row(f"{name}: lowest temperature", None, temperature.mean(-1).min().item(), note="1 is ideal"),
        Row(f"{name}: median R-hat", None, spread.median().item(), note="1 is ideal"),
        Row(f"{name}: estimates with R-hat above 1.1", None, f"{int((spread > 1.1).sum())} of {spread.numel()}"),
    ]
    for row in rows:
        print(row.quantity, row, row.note, flush=True)
    traced = {
        words: OverTraining(result.steps, {words: values}) for words, values in curves.items() if words != "log loss"
    }
    figure = viz.training_history(checkpoint.record["curve"], traced, loss="loss")
    means = [result.estimate(step) for step in result.steps]
    numbers = {
        "steps": result.steps,
        "coefficient": [[round(v, 3) for v in (e.mean, e.low, e.high)] for e in means],
        "loss": [round(v, 5) for v in result.losses.mean(1).tolist()],
        "failures": result.failures,
        **{words: [round(v, 4) for v in values.mean(1).tolist()] for words, values in nearness.items()},
    }
    settings = ", ".join(f"{key} {value:g}" for key, value in CHAINS[name].items())
    return rows, [Section(name, f"{settings}. {'; '.join(result.failures)}", figure)], numbers


def record_coefficients(folder: Path, found: LearningCoefficient) -> None:
    """Write the coefficient of each seed at each step into a checkpoint's record, from which reports draw it."""
    checkpoint = load_checkpoint(folder)
    coefficients = found.samples()["coefficients"][:, 0].round(decimals=3).tolist()
    command = "python analyses/learning_coefficients.py --record checkpoints"
    kept = {"steps": list(found.steps), "coefficients": coefficients, "command": command}
    save(folder, checkpoint.models, {**checkpoint.record, "learning_coefficient": kept}, checkpoint.snapshots)


def sampled(name: str, folder: Path) -> LearningCoefficient:
    """The chains of a checkpoint, from the folder if they were sampled before; `gpt2-8l` has no snapshots."""
    path = folder / name
    if path.exists():
        found = load_result(path)
        assert isinstance(found, LearningCoefficient)
        return found
    checkpoint = load_checkpoint(name)
    models: Any = checkpoint
    if checkpoint.snapshots is None:
        seeds = checkpoint.record["seeds"]
        initial = [build(checkpoint.models[0].cfg, seed).eval() for seed in seeds]
        models = {0: initial, checkpoint.record["training"]["steps"]: checkpoint.models}
    steps, chains = STEPS if name.startswith("lsa") else None, dict(CHAINS[name])
    n_prompts, sampler = chains.pop("n_prompts"), Sampler(n_chains=2, **chains)
    found = coefficient(models, checkpoint.task, steps=steps, n_prompts=n_prompts, sampler=sampler, seed=1)
    folder.mkdir(parents=True, exist_ok=True)
    found.save(path)
    return found


def algorithm_curves(checkpoint: Checkpoint, steps: tuple[int, ...]) -> dict[str, Tensor]:
    """How near the models are to the algorithm that they learn, `[step seed]`, by the name of the measure."""
    if checkpoint.snapshots is None:
        return {}
    at = [checkpoint.snapshots.steps.index(step) for step in steps]
    if checkpoint.name == "induction-2l":
        scores = score_heads_over_training(checkpoint, ("induction",), progress=False).scores["induction"]
        return {"induction score": scores[at].double()}
    layers = checkpoint.models[0].cfg.n_layers
    learner = tuned_descent(checkpoint.task.sample(8192, seed=SEED), layers, gamma=layers > 1)
    name = "cosine with GD++" if layers > 1 else "cosine with gradient descent"
    prompts = checkpoint.task.sample(300, seed=SEED + 1)
    return {name: align_over_training(checkpoint, learner, prompts, progress=False).sensitivity_cosine[at]}


def r_squared(y: Tensor, columns: list[Tensor]) -> Tensor:
    """The share of the variance of y that a linear regression on the columns explains."""
    design = torch.stack([torch.ones_like(y), *columns], 1)
    residual = y - design @ torch.linalg.lstsq(design, y[:, None], driver="gelsd").solution[:, 0]
    return 1 - residual.square().sum() / (y - y.mean()).square().sum()


if __name__ == "__main__":
    compare.run()
