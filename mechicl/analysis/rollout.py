"""A trained layer applied again and again, as if it were one step of a learning algorithm."""

from collections.abc import Sequence

import torch

from mechicl.learners import Trajectory
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts


def repeated(model: HookedTransformer, steps: int, damping: float = 1.0) -> HookedTransformer:
    """A one-layer model's layer, looped, with every update of the stream scaled by `damping`.

    Args:
        model: a model with one layer, or a looped one.
        steps: how often to apply it.
        damping: λ of von Oswald et al. 2023, A.6, on top of the model's own.

    Returns:
        A copy; the model stays as it is.

    Raises:
        ValueError: a model with several different layers, or steps < 1.
    """
    cfg = model.cfg
    if cfg.n_layers != 1 and not cfg.recurrent:
        raise ValueError(f"only one layer can be repeated; this model has {cfg.n_layers} different ones")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    looped = HookedTransformer(
        cfg.replace(n_layers=steps, recurrent=True, damping=cfg.damping * damping, initializer_range=0.0)
    )
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*looped.named_parameters(), *looped.named_buffers()):
            tensor.copy_(own[name])
    return looped.eval()


def layer_trajectory(model: HookedTransformer, prompts: Prompts, layers: Sequence[int] | None = None) -> Trajectory:
    """The query's prediction if it were read out after each number of layers, from 0 to all.

    Args:
        model: any model.
        prompts: what to predict.
        layers: after which numbers of layers to read; all of them by default.

    Returns:
        Trajectory whose steps are layers, with one point, the query: `[layer prompt 1 y]`.

    Raises:
        ValueError: a number of layers that the model does not have.
    """
    wanted = tuple(range(model.cfg.n_layers + 1)) if layers is None else tuple(layers)
    if not wanted or min(wanted) < 0 or max(wanted) > model.cfg.n_layers:
        raise ValueError(f"layers must be between 0 and {model.cfg.n_layers}, got {layers}")
    read: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        residual = model.forward(prompts, stop_at_layer=0)
        for layer in range(max(wanted) + 1):
            if layer:
                residual = model.forward(residual, start_at_layer=layer - 1, stop_at_layer=layer)
            if layer in wanted:
                read[layer] = model.read_out(residual[:, -1:])
    return Trajectory(wanted, torch.stack([read[layer] for layer in wanted]), "layers")
