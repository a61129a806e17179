"""Members of families against plain loops; fits recover the parameters of disguised constructions."""

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mechicl import constructions
from mechicl.analysis import fit_construction
from mechicl.analysis.behaviour import tuned_descent
from mechicl.analysis.weights.construction_families import ConstructionFamily, family_for
from mechicl.analysis.weights.fits import ConstructionFit, match_predictions
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression
from tests.algorithms.reference import at_query, iterate, precondition, transform


# ---- families ----
def prompts_for(x_dim: int, y_dim: int, n_context: int, seed: int = 0) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    xs, ys = (torch.randn(4, n_context + 1, d, generator=generator, dtype=torch.float64) for d in (x_dim, y_dim))
    return Prompts(xs, ys)


def by_loops(family: ConstructionFamily, parameters: torch.Tensor, prompts: Prompts, n_layers: int) -> torch.Tensor:
    """The algorithm that the family is named after."""
    d = prompts.x_dim
    numbers = parameters.numpy()
    if family.name == "newton":
        return torch.from_numpy(at_query(prompts, iterate(n_layers - 2, numbers[0])))
    copies = n_layers if family.name.endswith("per layer") else 1

    def each(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values] * (n_layers // copies))

    if family.name.startswith("pgd"):
        return torch.from_numpy(at_query(prompts, precondition(list(each(numbers.reshape(copies, d, d))))))
    gammas = each(numbers[copies:]) if "++" in family.name else [0.0] * n_layers
    return torch.from_numpy(at_query(prompts, transform(list(each(numbers[:copies])), list(gammas))))


def config(name: str, x_dim: int, y_dim: int, n_context: int, n_layers: int, **fields) -> TransformerConfig:
    if name == "newton":
        return constructions.newton(x_dim=x_dim, y_dim=y_dim, n_context=n_context, steps=n_layers - 2, alpha=1.0).cfg
    cfg = TransformerConfig(x_dim=x_dim, y_dim=y_dim, n_context=n_context, n_layers=n_layers, dtype="float64")
    return cfg.replace(**fields)


NAMES = ("gd", "gd per layer", "gd++", "gd++ per layer", "pgd", "pgd per layer", "newton")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4)
@given(
    x_dim=st.integers(1, 3), y_dim=st.integers(1, 2), n_context=st.integers(1, 4), n_layers=st.integers(1, 3),
    normalize=st.booleans(), recurrent=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_every_member_is_the_algorithm(name, x_dim, y_dim, n_context, n_layers, normalize, recurrent, seed):
    assume(not (recurrent and name.endswith("per layer")))
    if name == "newton":
        n_layers += 2
    fields = {"normalize_by_context": normalize, "recurrent": recurrent}
    family = family_for(name, config(name, x_dim, y_dim, n_context, n_layers, **fields))
    generator = torch.Generator().manual_seed(seed)
    parameters = 0.2 * torch.randn(family.n_parameters, generator=generator, dtype=torch.float64)
    prompts = prompts_for(x_dim, y_dim, n_context, seed)
    member = family.member(parameters)
    expected = by_loops(family, parameters, prompts, n_layers)
    torch.testing.assert_close(member.predict(prompts), expected, rtol=1e-9, atol=1e-11)
    if name != "newton":
        assert (member.cfg.recurrent, member.cfg.normalize_by_context) == (recurrent, normalize)


# ---- fits ----
TASK = LinearRegression(x_dim=2, n_context=3, inputs="gaussian")
SIZES: dict[str, Any] = {"x_dim": 2, "n_context": 3}
A = torch.tensor([[0.5, -0.2], [0.1, 0.3]], dtype=torch.float64)
C = torch.tensor([[-0.3, 0.4], [0.2, 0.6]], dtype=torch.float64)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@torch.no_grad()
def hidden(model: HookedTransformer, n_heads: int = 1, seed: int = 0) -> HookedTransformer:
    """The same function: each head split into several by random shares, in random order, gauge and basis."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    cfg = model.cfg.replace(n_heads=n_heads, d_head=model.cfg.d_model)
    made = HookedTransformer(cfg)
    targets = dict(made.named_parameters())
    for name, weight in model.named_parameters():
        if ".attn." not in name:
            targets[name].copy_(weight)
    blocks = range(1) if cfg.recurrent else range(cfg.n_layers)
    for block, source in ((made.blocks[i].attn, model.blocks[i].attn) for i in blocks):
        W_KQ, W_PV = source.W_Q[0] @ source.W_K[0].T, source.W_V[0] @ source.W_O[0]
        shares = normal(n_heads).abs() + 0.2
        for head in torch.randperm(n_heads, generator=generator).tolist():
            scale = (1 if normal(1) > 0 else -1) * normal(1).exp()
            first, second = (torch.linalg.qr(normal(cfg.d_model, cfg.d_model)).Q for _ in range(2))
            block.W_Q[head] = scale * W_KQ @ first
            block.W_K[head] = first
            block.W_V[head] = shares[head] / shares.sum() * W_PV @ second
            block.W_O[head] = second.T / scale
    return made


def features(prompts) -> np.ndarray:
    """Each query's prediction for each entry of A in `x A Σ_j x_jᵀ y_j`, by loops: `[prompt x x]`."""
    result = np.zeros((len(prompts), prompts.x_dim, prompts.x_dim))
    for p, (xs, ys) in enumerate(zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True)):
        for x, y in zip(xs[:-1], ys[:-1], strict=True):
            result[p] += np.outer(xs[-1], x) * y[0]
    return result


GD = constructions.gradient_descent(**SIZES, step_size=0.37, steps=2)
LOOPED = HookedTransformer(GD.cfg.replace(recurrent=True))
LOOPED.load_state_dict(GD.state_dict(), strict=False)
BY_LAYER: dict[str, Any] = {"step_size": [0.1, 0.2, 0.3], "gamma": [0.01, -0.02, 0.05], "steps": 3}
READ = {"step_size": double(0.1, 0.2, 0.3), "gamma": double(0.01, -0.02, 0.0)}  # the last γ moves nothing that is read


@pytest.mark.parametrize(("model", "family", "parameters"), [
    (GD, "gd", {"step_size": double(0.37)}),
    (LOOPED, "gd", {"step_size": double(0.37)}),
    (constructions.gd_plus_plus(**SIZES, **BY_LAYER), "gd++ per layer", READ),
    (constructions.gd_plus_plus(**SIZES, y_dim=2, **BY_LAYER), "gd++ per layer", READ),
    (constructions.preconditioned_gd(**SIZES, preconditioner=A, steps=2), "pgd", {"preconditioner": A[None]}),
    (constructions.preconditioned_gd(**SIZES, preconditioner=[A, C], steps=2), "pgd per layer",
     {"preconditioner": torch.stack([A, C])}),
])  # fmt: skip
@pytest.mark.parametrize("n_heads", [1, 3])
def test_parameters_are_read_off_disguised_weights(model, family, parameters, n_heads):
    task = TASK.replace(y_dim=model.cfg.y_dim)
    fit = fit_construction(hidden(model, n_heads, seed=n_heads), family, task, refine=False, n_prompts=20)
    for name, expected in parameters.items():
        torch.testing.assert_close(fit.projected.parameters[name], expected[None])
    assert fit.matched is None
    assert max(fit.distance_KQ.max(), fit.distance_PV.max()) < 1e-12
    assert fit.projected.squared_distances.max() < 1e-20


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_gd_plus_plus_of_looped_and_single_layers(steps: int, normalize: bool):
    made = constructions.gd_plus_plus(**SIZES, step_size=0.3, gamma=0.05, steps=steps)
    model = HookedTransformer(made.cfg.replace(normalize_by_context=normalize))
    model.load_state_dict(made.state_dict())
    if normalize:
        with torch.no_grad():
            model.blocks[0].attn.W_O.mul_(3)  # n
    fit = fit_construction(hidden(model, 2), "gd++", TASK, n_prompts=50)
    expected = {"step_size": 0.3, "gamma": 0.05 if steps > 1 else 0.0}  # one layer's x is never read
    for members in (fit.projected, fit.matched):
        assert members is not None
        assert {k: v.item() for k, v in members.parameters.items()} == pytest.approx(expected, abs=1e-9)


def test_newtons_alpha_is_read_off_and_found_again_from_elsewhere():
    model = constructions.newton(**SIZES, steps=2, alpha=0.002)
    fit = fit_construction(hidden(model), "newton", TASK, n_prompts=50)
    assert fit.projected.parameters["alpha"].item() == pytest.approx(0.002, rel=1e-10)
    assert fit.best.parameters["alpha"].item() == pytest.approx(0.002, rel=1e-6)
    assert fit.layerwise is None  # its layers have MLPs
    prompts = TASK.sample(50, seed=4, dtype=torch.float64)
    targets = torch.from_numpy(at_query(prompts, iterate(2, 0.002)))
    result = match_predictions(family_for("newton", model.cfg), double(0.0026), prompts, targets)
    assert result.item() == pytest.approx(0.002, rel=1e-6)


def test_the_matched_step_size_is_that_of_least_squares():
    model = HookedTransformer(TransformerConfig(**SIZES, initializer_range=0.4, dtype="float64"), seed=3)
    fit = fit_construction(model, "gd", TASK, n_prompts=80, seed=7)
    fitting = TASK.sample(80, seed=7, dtype=torch.float64)
    direction = np.trace(features(fitting), axis1=1, axis2=2)
    W_KQ, W_PV = ((left @ right).detach().numpy()[0, 0] for left, right in
                  ((model.W_Q, model.W_K.mT), (model.W_V, model.W_O)))  # fmt: skip

    def predict(prompts) -> np.ndarray:
        result = []
        for xs, ys in zip(prompts.xs.numpy(), prompts.ys.numpy(), strict=True):
            tokens, query = np.concatenate([xs, ys], axis=1)[:-1], np.append(xs[-1], 0)
            result.append(-((query @ W_KQ @ tokens.T) @ tokens @ W_PV)[2])
        return np.array(result)

    trained = predict(fitting)
    assert fit.matched is not None
    assert fit.best is fit.matched
    step_size = fit.matched.parameters["step_size"].item()
    assert step_size == pytest.approx(trained @ direction / (direction @ direction), rel=1e-6)

    # measurements on held-out prompts
    held_out = TASK.sample(80, seed=8, dtype=torch.float64)
    truth, trained = held_out.ys[:, -1, 0].numpy(), predict(held_out)
    theirs = step_size * np.trace(features(held_out), axis1=1, axis2=2)
    np.testing.assert_allclose(fit.squared_errors[0], (trained - truth) ** 2, rtol=1e-9)
    np.testing.assert_allclose(fit.squared_predictions[0], trained**2, rtol=1e-9)
    np.testing.assert_allclose(fit.matched.squared_errors[0], (theirs - truth) ** 2, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(fit.matched.squared_distances[0], (theirs - trained) ** 2, rtol=1e-6, atol=1e-12)
    row = fit.to_dataframe().iloc[2]
    distance = ((theirs - trained) ** 2).mean() / (trained**2).mean()
    assert (row["family"], row["member"], row["model"]) == ("gd", "matched", 0)
    assert row["mse"] == pytest.approx(((theirs - truth) ** 2).mean())
    assert row["loss_ratio"] == pytest.approx(((theirs - truth) ** 2).mean() / ((trained - truth) ** 2).mean())
    assert row["relative_distance"] == pytest.approx(distance)

    # the projection: mean diagonal times minus the y-entry of W_PV
    mean_diagonal = (W_KQ[0, 0] + W_KQ[1, 1]) / 2
    assert fit.beta.item() == pytest.approx(mean_diagonal)
    assert fit.projected.parameters["step_size"].item() == pytest.approx(-mean_diagonal * W_PV[2, 2])
    away = W_KQ[:2] / mean_diagonal - np.eye(2, 3)  # the y-row meets only the query's 0
    assert fit.distance_KQ.item() == pytest.approx(np.linalg.norm(away) / np.sqrt(2))
    assert fit.distance_PV.item() == pytest.approx(np.linalg.norm(W_PV[:2, 2]) / abs(W_PV[2, 2]))


def test_tuning_one_step_is_linear_least_squares():
    model = HookedTransformer(TransformerConfig(**SIZES, initializer_range=0.4, dtype="float64"), seed=3)
    prompts = TASK.sample(300, seed=2, dtype=torch.float64)
    moments, truth, targets = features(prompts), prompts.ys[:, -1, 0].numpy(), prompts.query.ys
    direction = np.trace(moments, axis1=1, axis2=2)
    for start in (0.0, -3.0):
        result = match_predictions(family_for("gd", model.cfg), double(start), prompts, targets).item()
        assert result == pytest.approx(truth @ direction / (direction @ direction), rel=1e-6)
        assert tuned_descent(prompts, 1).hyperparameters["step_size"] == pytest.approx(result, rel=1e-5)
    matrix = match_predictions(family_for("pgd", model.cfg), double(0, 0, 0, 0), prompts, targets)
    expected = np.linalg.lstsq(moments.reshape(300, 4) / 3, truth, rcond=None)[0]
    np.testing.assert_allclose(matrix, expected, rtol=1e-5, atol=1e-7)


def test_the_layerwise_member_is_the_weighted_least_squares_of_layer_outputs():
    cfg = TransformerConfig(**SIZES, n_layers=2, n_heads=2, initializer_range=0.4, dtype="float64")
    model = HookedTransformer(cfg, seed=5)
    fit = fit_construction(model, "gd++ per layer", TASK, refine=False, n_prompts=40, seed=9)
    prompts = TASK.sample(40, seed=9, dtype=torch.float64)
    streams = [stream.detach().numpy() for stream in model.layer_streams(prompts, at="positions")]
    expected: dict[str, list[float]] = {"step_size": [], "gamma": [0.0]}
    for layer in range(2):
        sums = {"step_size": [0.0, 0.0], "gamma": [0.0, 0.0]}
        for before, after in zip(streams[layer], streams[layer + 1], strict=True):
            xs, context = before[:, :2], before[:-1]
            for parameter, part in (("gamma", slice(0, 2)), ("step_size", slice(2, 3))):
                unit = np.zeros_like(before[:, part])
                for i, x in enumerate(xs):
                    for token in context:
                        unit[i] -= (x @ token[:2]) * token[part]
                change = (after - before)[:, part]
                sums[parameter][0] += (unit * change).sum() / (change**2).sum()
                sums[parameter][1] += (unit**2).sum() / (change**2).sum()
        expected["step_size"].append(sums["step_size"][0] / sums["step_size"][1])
        if layer == 0:
            expected["gamma"] = [sums["gamma"][0] / sums["gamma"][1], 0.0]
    assert fit.layerwise is not None
    for name, values in expected.items():
        np.testing.assert_allclose(fit.layerwise.parameters[name][0], values, rtol=1e-9, atol=1e-12)


def test_intervals_are_over_seeds(tmp_path):
    sizes = [0.1, 0.2, 0.4]
    models = [constructions.gradient_descent(**SIZES, step_size=a) for a in sizes]
    fit = fit_construction(models, "gd", TASK, refine=False, n_prompts=20)
    (result,) = fit.intervals().values()
    half = scipy.stats.t.ppf(0.975, 2) * np.std(sizes, ddof=1) / np.sqrt(3)
    assert (result.mean, result.half_width, result.n) == pytest.approx((np.mean(sizes), half, 3))
    loaded = ConstructionFit.load(fit.save(tmp_path / "fit"))
    assert loaded.to_dataframe().equals(fit.to_dataframe())
    assert (loaded.intervals(), loaded.projected.models) == (fit.intervals(), [])
    matrices = [constructions.preconditioned_gd(**SIZES, preconditioner=[m, C], steps=2) for m in (A, -A)]
    intervals = fit_construction(matrices, "pgd per layer", TASK, refine=False, n_prompts=20).intervals()
    assert len(intervals) == 8
    assert intervals["preconditioner[0,0,1]"].high == pytest.approx(0.2 * scipy.stats.t.ppf(0.975, 1))
