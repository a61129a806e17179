"""One linear layer beside gradient descent, in its weights: what they hold, and what lies between the two."""

from dataclasses import asdict

import torch

from mechicl import viz
from mechicl.analysis import interpolate
from mechicl.analysis.weights.paths import PathKind
from mechicl.analysis.weights.products import read_weight_products
from mechicl.reports.comparison import Part, Section
from mechicl.reports.one_layer_setting import SOURCE, Setting
from mechicl.reports.rows import Row
from mechicl.statistics import interval

WORDS = {
    "weights": """
        The two products that linear attention depends on, for the first seed, with the free scale between them fixed,
        beside the construction of Proposition 1. Only the rows of W_KQ that read x and the columns of W_PV that write y
        can act on the prediction; the rest keeps its small random initial values.""",
    "interpolation": """
        Loss along the straight line from the trained weight products to the construction's. After the rescaling of
        appendix A.3, which divides by β, the mean diagonal of W_KQ, the line is flat. Without it the middle can be far
        worse than either end: β is not 1, and the initial weights decide its sign.""",
}


def weights(setting: Setting) -> Part:
    """The step size in the weights, and the weights beside the construction's."""
    task, fit = setting.task, setting.fit
    step_sizes = fit.projected.parameters["step_size"]
    eta, tuned = interval(step_sizes[:, 0] * task.n_context), f"tuned: {setting.step_size * task.n_context:.4f}"
    rows = [
        Row("η read from the weights", None, eta, "seeds", tuned),
        Row("η read from the weights over tuned η", None, interval(step_sizes[:, 0] / setting.step_size), "seeds"),
    ]
    products = [read_weight_products(model).gauge_fixed() for model in setting.checkpoint.models]
    names = [f"x{i + 1}" for i in range(task.x_dim)] + [f"y{i + 1}" for i in range(task.y_dim)]
    drawn = viz.weight_products_figure(products[0], read_weight_products(setting.construction), names)
    tensors = {
        "beta": fit.beta,
        "step_size": step_sizes,
        "distance_KQ": fit.distance_KQ,
        "distance_PV": fit.distance_PV,
    }
    data = [
        {name: values[i].tolist() for name, values in tensors.items()}
        | {"W_KQ": product.W_KQ.tolist(), "W_PV": product.W_PV.tolist()}
        for i, product in enumerate(products)
    ]
    return rows, [Section("Weights", WORDS["weights"], drawn)], {"weights": data}


def paths(setting: Setting) -> Part:
    """The loss on straight lines between the trained weights and gradient descent's."""
    kinds: dict[str, PathKind] = {"rescaled": "rescaled", "not rescaled": "raw"}
    between = {
        name: [interpolate(model, setting.construction, setting.prompts, kind=kind) for model in setting.models]
        for name, kind in kinds.items()
    }
    excess = {name: interval(torch.tensor([p.midpoint_excess().mean for p in each])) for name, each in between.items()}
    claim = "none (Fig. 2)" if setting.standard else None
    rows = [
        Row("excess loss at the middle of the rescaled path", claim, excess["rescaled"], "seeds",
            "relative to the ends", "near 0", SOURCE),
        Row("excess loss at the middle of the path without rescaling", None, excess["not rescaled"], "seeds"),
    ]  # fmt: skip
    betas = ", ".join(f"{read_weight_products(model).gauge().item():.3f}" for model in setting.models)
    words = f"{WORDS['interpolation']} β of the seeds: {betas}."
    data = [
        {
            "kind": path.kind,
            "alpha": list(path.alphas),
            "mse": path.squared_errors.mean(-1).tolist(),
            "midpoint_excess": asdict(path.midpoint_excess()),
            "barrier": asdict(path.barrier()),
        }
        for each in between.values()
        for path in each
    ]
    return rows, [Section("Interpolation", words, viz.connectivity_paths(between))], {"interpolation": data}
