"""Which algorithm do layers with a state run? DeltaNet, gated linear attention, Mamba-2 and Mesa, after training."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.support.script import Option, script
from analyses.support.seeds import over_orders
from mechicl import algorithms
from mechicl.algorithms.card import FitProblem, FittedAlgorithm
from mechicl.algorithms.other_regressions import UNIT_LMS, UNIT_RIDGE
from mechicl.algorithms.recursive import discounted_moments, fit_discounted, fit_normalized, fit_recursive
from mechicl.analysis import identify
from mechicl.checkpoints import load_checkpoint, untrained
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.reports import Comparison, Row
from mechicl.statistics import crossed_interval, interval
from mechicl.tasks import DriftingRegression, LinearRegression

KINDS = ("delta", "mesa", "gated-linear", "mamba2")
CHECKPOINTS = (
    *(f"{kind}-1l" for kind in KINDS), "lsa-1l-gaussian", *(f"{kind}-4l" for kind in KINDS), "softmax-4l",
)  # fmt: skip
TASK = LinearRegression(x_dim=5, n_context=20, inputs="gaussian")
NOISY = TASK.replace(noise_std=0.5)
POINTS = (0, 1, 2, 3, 5, 7, 10, 15, 20)
AFTER = 10  # points after which states are exchanged
DRIFT = DriftingRegression(x_dim=5, n_context=20, renewed=0.05)
N_FITTING, N_TESTING = 1024, 512
N_STATES = 512  # prompts whose states are recorded, and as many whose states are exchanged: states take memory


@script(checkpoints=CHECKPOINTS, n_identify=Option(256, "prompts that families are fitted on"))
def compare(args: Any) -> Comparison:
    """Losses, families, order, forgetting and exchanged states of every checkpoint's seeds."""
    rows = _references()
    for name in args.checkpoints:
        checkpoint = load_checkpoint(name)
        for label, models in ((name, checkpoint.models[:3]), (f"{name}, untrained", untrained(checkpoint).models[:1])):
            found = [measured(model, args) for model in models]
            shown = [key for key in found[0] if label == name or not key.endswith(" points")]
            rows += [
                Row(f"{label}: {key}", None, _over_seeds([one[key] for one in found]),
                    "seeds and prompts" if isinstance(found[0][key], Tensor) else "seeds")
                for key in shown
            ]  # fmt: skip
    lead = (
        f"Up to three seeds of each model, on {N_TESTING} prompts of linear regression with d = 5 and 20 points that "
        f"neither the models nor the algorithms were fitted on. Intervals of losses and R² are over seeds and prompts, "
        f"others over seeds. Drifting prompts renew "
        f"{DRIFT.renewed:.0%} of the weights' variance at each point."
    )
    return Comparison("Beyond attention: layers with a state", lead, rows)


def _over_seeds(values: list[Any]) -> Any:
    if isinstance(values[0], str):
        return "; ".join(dict.fromkeys(values))
    if isinstance(values[0], Tensor):
        seeds = torch.stack(values)
        return crossed_interval(seeds) if seeds.ndim == 2 else 1 - crossed_interval(seeds[:, 0], seeds[:, 1])
    return interval(torch.tensor(values, dtype=torch.float64)) if len(values) > 1 else values[0]


def measured(model: Any, args: Any) -> dict[str, Any]:
    """All measurements of one model: numbers, names, errors `[prompt]`, or errors and deviations `[2 prompt]`."""
    model = model.to(torch.float64)
    fitting, base, source = (TASK.sample(n, seed=seed, dtype=torch.float64)
                             for n, seed in ((N_FITTING, 11), (N_TESTING, 12), (N_TESTING, 13)))  # fmt: skip
    found: dict[str, Any] = {f"loss, {t} points": value for t, value in _curve(model, base).items()}
    for name, task, seed in (("noise of 0.5", NOISY, 14), ("drift", DRIFT, 15)):
        found[f"loss, {name}"] = _loss(model, task.sample(N_TESTING, seed=seed, dtype=torch.float64))
    variance, signal = over_orders(model, base, n_orders=6)
    found["order sensitivity"] = (variance.mean() / signal.mean()).item()
    found["weight of the first 5 points over that of the last 5"] = forgetting(model, base)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # untrained models
        nearest = identify(model, TASK, n_prompts=args.n_identify, with_limits=False, with_references=False, steps=1,
                           progress=False)  # fmt: skip
    found["identify"] = nearest.answer.name
    found["distance of the nearest family"] = nearest.distance(nearest.best).mean
    return found | exchanges(model, fitting, base, source)


@torch.no_grad()
def _loss(learner: Any, prompts: Prompts) -> Float[Tensor, "prompt"]:
    return (learner.predict(prompts).double() - prompts.query.ys).square().mean(-1)


@torch.no_grad()
def _curve(learner: Any, prompts: Prompts) -> dict[int, Float[Tensor, "prompt"]]:
    errors = (learner.predict_prefixes(prompts).double() - prompts.ys).square().mean(-1)
    return {t: errors[:, t] for t in POINTS}


@torch.no_grad()
def forgetting(learner: Any, prompts: Prompts) -> float:
    """Return how much the prediction changes with the labels of the first points, relative to the last.

    Medians over prompts: in some models a few prompts have very large changes.
    """
    before, sizes = learner.predict(prompts), []
    for t in (*range(5), *range(prompts.n_context - 5, prompts.n_context)):
        ys = prompts.ys.clone()
        ys[:, t] += 0.1
        sizes.append((learner.predict(Prompts(prompts.xs, ys)) - before).abs().median())
    return (torch.stack(sizes[:5]).sum() / torch.stack(sizes[5:]).sum()).item()


# ---- exchanged states ----


def exchanges(model: Any, fitting: Prompts, base: Prompts, source: Prompts) -> dict[str, Any]:
    """Fit algorithms, and exchange the state after some points, whole or only where it carries an algorithm's state.

    "distance": squared difference of an algorithm, fitted to the model on other prompts, over squared predictions.
    "counterfactual": R² of the change that an algorithm with its own state exchanged predicts, for the change that the
    exchange of the whole state makes. "carried": the same, of the change if only the image of the algorithm's state is
    exchanged, by a linear map from it to the model's state that was fitted to other prompts.
    """
    with torch.no_grad():
        problem = FitProblem(fitting, model.predict(fitting)[None].double(), 1)
        # what follows the first points is as if the states were exchanged
        pairs = (source.xs, base.xs), (source.ys, base.ys)
        spliced = Prompts(*(torch.cat([a[:, :AFTER], b[:, AFTER:]], dim=1) for a, b in pairs))
        before = model.predict(base)
        full = model.predict(spliced) - before
    online, recursive, averaged = fit_normalized(problem), fit_recursive(problem), fit_discounted(problem)
    on_units, ridge_on_units = (next(iter(card.members(problem))) for card in (UNIT_LMS, UNIT_RIDGE))
    discount, decay = recursive.hyperparameters["discount"], averaged.hyperparameters["discount"]
    lms = partial(algorithms.online_gradient_descent, offset=0.0)
    states: dict[str, tuple[Any, Callable[[Prompts], Tensor]]] = {
        "normalised LMS": (online.learner, lambda part: _weights(lms, part, online)),
        "recursive least squares": (recursive.learner, lambda part: _moments(part, discount)),
        "discounted sum": (averaged.learner, lambda part: discounted_moments(part, decay, "query")[1].flatten(1)),
        "LMS on unit inputs": (on_units.learner, lambda part: _weights(algorithms.on_unit_inputs, part, on_units)),
        "ridge on unit inputs": (ridge_on_units.learner, lambda part: _moments(_units(part), 1.0)),
    }
    found: dict[str, Any] = {"distance: one plain step": _distance(_one_step(problem, base), before)}
    for name, (learner, state_of) in states.items():
        unchanged = learner.predict(base)
        found[f"distance: {name}"] = _distance(unchanged, before)
        predicted = learner.predict(spliced) - unchanged
        found[f"counterfactual: {name}"] = _explained(predicted, full)
        if isinstance(model, HookedTransformer) and hasattr(model.blocks[0].attn, "update"):  # states with hooks
            few = fitting[:N_STATES], base[:N_STATES], source[:N_STATES]
            changed = exchange(model, few[0], few[1], [state_of(each.prefix(AFTER)) for each in few])
            found[f"carried: {name}"] = _explained(changed - before[:N_STATES], full[:N_STATES])
    return found


def _distance(predicted: Tensor, model: Tensor) -> float:
    return ((predicted - model).square().sum() / model.square().sum()).item()


def _one_step(problem: FitProblem, prompts: Prompts) -> Tensor:
    """One step of gradient descent, whose step size fits the problem's targets best."""
    fitting, predicted = (
        algorithms.gradient_descent(each, steps=1, step_size=1.0, at="query").query()[0]
        for each in (problem.prompts, prompts)
    )
    return predicted * (fitting * problem.targets).sum() / fitting.square().sum()


def _units(prompts: Prompts) -> Prompts:
    return Prompts(prompts.xs / prompts.xs.norm(dim=-1, keepdim=True), prompts.ys)


def _weights(algorithm: Callable[..., Any], prompts: Prompts, fit: FittedAlgorithm) -> Tensor:
    weights = algorithm(prompts, **fit.hyperparameters, at="query", with_weights=True).weights
    return weights[0, :, 0].flatten(1)


def _moments(prompts: Prompts, discount: float) -> Tensor:
    second, cross = discounted_moments(prompts, discount, "query")
    upper = torch.triu_indices(prompts.x_dim, prompts.x_dim)
    return torch.cat([second[:, 0, upper[0], upper[1]], cross[:, 0].flatten(1)], dim=1)


def _explained(predicted: Tensor, actual: Tensor) -> Float[Tensor, "2 prompt"]:
    return torch.stack([(predicted - actual).square().sum(-1), actual.square().sum(-1)])


@torch.no_grad()
def exchange(
    model: HookedTransformer, fitting: Prompts, base: Prompts, states: list[Float[Tensor, "prompt state"]]
) -> Float[Tensor, "prompt y"]:
    """Predict with the image of the algorithm's state exchanged in the states of all layers."""
    position = AFTER - 1 if model.cfg.prompt_format == "paired" else 2 * AFTER - 1
    names = [f"blocks.{layer}.attn.hook_state" for layer in range(model.cfg.n_layers)]
    model.set_use_attn_state(True)
    caught: dict[str, Tensor] = {}

    def catch(state: Tensor, hook: Any) -> None:
        caught[hook.name] = state[:, :, position].clone()

    model.run_with_hooks(model.encode(fitting), fwd_hooks=[(name, catch) for name in names])
    # of an unfitted algorithm, steps and so states may be tiny: next to ones, rounding would decide their rank
    size = states[0].abs().max().clamp_min(torch.finfo(states[0].dtype).tiny)
    of_fitting, of_base, of_source = (torch.cat([part / size, torch.ones_like(part[:, :1])], dim=1) for part in states)
    hooks = []
    for name in names:
        image = torch.linalg.lstsq(of_fitting, caught[name].flatten(1)).solution
        moved = ((of_source - of_base) @ image).unflatten(1, caught[name].shape[1:])

        def shift(state: Tensor, hook: Any, moved: Tensor = moved) -> Tensor:
            state = state.clone()
            state[:, :, position] += moved
            return state

        hooks.append((name, shift))
    outputs = model.run_with_hooks(model.encode(base), fwd_hooks=hooks)
    model.set_use_attn_state(False)
    return model.decode(outputs)[:, -1]


def _references() -> list[Row]:
    """Losses of tuned algorithms on the same prompts."""
    rows = []
    clean, tuning = (TASK.sample(n, seed=s, dtype=torch.float64) for n, s in ((N_TESTING, 12), (N_FITTING, 11)))
    for label, prompts, fitted in (
        ("no noise", clean, tuning),
        ("noise of 0.5", *(NOISY.sample(N_TESTING, seed=s, dtype=torch.float64) for s in (14, 16))),
        ("drift", *(DRIFT.sample(n, seed=s, dtype=torch.float64) for n, s in ((N_TESTING, 15), (N_FITTING, 17)))),
    ):
        problem = FitProblem(fitted, fitted.query.ys[None], 1)
        for fit in (fit_normalized, fit_recursive, fit_discounted):
            member = fit(problem)
            note = ", ".join(f"{key}={value:.3g}" for key, value in member.hyperparameters.items())
            loss = interval(_loss(member.learner, prompts))
            rows.append(Row(f"{member.name}, tuned: loss, {label}", None, loss, "prompts", note))
        ridge = AlgorithmLearner(algorithms.ridge, {"penalty": 0.25 if label == "noise of 0.5" else 1e-6})
        rows.append(Row(f"ridge: loss, {label}", None, interval(_loss(ridge, prompts)), "prompts"))
    online = fit_normalized(FitProblem(tuning, tuning.query.ys[None], 1)).learner
    for name, learner in (("ridge", AlgorithmLearner(algorithms.ols)), ("normalised LMS", online)):
        rows += [Row(f"{name}: loss, {t} points", None, interval(each), "prompts")
                 for t, each in _curve(learner, clean).items()]  # fmt: skip
    return rows


if __name__ == "__main__":
    compare.run()
