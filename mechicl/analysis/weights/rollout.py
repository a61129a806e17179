"""A trained layer applied again and again, as if it were one step of a learning algorithm."""

import torch

from mechicl.models import HookedTransformer


def repeat_layers(model: HookedTransformer, steps: int, damping: float = 1.0) -> HookedTransformer:
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
    sources = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*looped.named_parameters(), *looped.named_buffers()):
            tensor.copy_(sources[name])
    return looped.eval()
