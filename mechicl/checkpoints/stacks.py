"""Models with one config as stacked tensors, a leading axis for seeds."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.models import Model, ModelConfig, TransformerConfig
from mechicl.models.architectures import build_unfilled, outline
from mechicl.models.holding import holding
from mechicl.models.transformer.lens_config import current_names

MOST_LAYERS = 10_000
"""Most layers of all models of a checkpoint: each takes tens of kilobytes even if its weights are small."""


@checked
def stack_models(models: Sequence[Model]) -> dict[str, Tensor]:
    """Stack the parameters and buffers of models with one config on a leading seed axis."""
    with holding(*models):
        states = [_named_tensors(model) for model in models]
        kinds = [
            {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in state.items()} for state in states
        ]
        configs = [model.cfg.to_dict() for model in models]
        if not kinds or any(each != kinds[0] for each in kinds) or any(each != configs[0] for each in configs):
            raise ValueError(f"models must be one or more with one config, dtype and device, got {len(models)} models")
        return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def models_from_stack(cfg: ModelConfig, stacked: Mapping[str, Tensor]) -> list[Model]:
    """Build models from weights with a leading seed axis, as `stack_models` returns; errors as for `check_stack`."""
    n_models = check_stack(cfg, stacked)
    models = [build_unfilled(cfg).eval() for _ in range(n_models)]
    fill_models(models, stacked)
    return models


@torch.no_grad()
def fill_models(models: Sequence[Model], stacked: Mapping[str, Tensor]) -> None:
    """Copy weights with a leading seed axis into models, and convert them to the models' dtype."""
    cfg = models[0].cfg
    if isinstance(cfg, TransformerConfig):
        stacked = current_names(cfg, stacked)
    for i, model in enumerate(models):
        tensors = _named_tensors(model)
        for name, tensor in stacked.items():
            tensors[name].copy_(tensor[i])


def check_stack(cfg: ModelConfig, stacked: Mapping[str, Tensor]) -> int:
    """Check a stack against an untrusted config, without memory of their size; return the number of models."""
    if isinstance(cfg, TransformerConfig):
        stacked = current_names(cfg, {name: tensor.to("meta") for name, tensor in stacked.items()})
    layers = {name.split(".")[1] for name in stacked if name.startswith("blocks.")}
    n_layers = min(cfg.n_layers, 1) if getattr(cfg, "recurrent", False) else cfg.n_layers
    if len(layers) != n_layers:
        raise ValueError(f"the weights are those of {len(layers)} layers, n_layers={cfg.n_layers} requires {n_layers}")
    n_models = {tensor.shape[0] for tensor in stacked.values() if tensor.ndim}
    if max(cfg.n_layers, 1) * max(n_models, default=1) > MOST_LAYERS:
        words = f"{max(n_models, default=1):,} models of n_layers={cfg.n_layers:,}"
        raise ValueError(f"{words} are more than the {MOST_LAYERS:,} layers that a checkpoint may have")
    try:
        expected = _named_tensors(outline(cfg))
    except (RuntimeError, OverflowError, TypeError) as error:  # the number of elements overflows
        raise ValueError(f"no model has the sizes in the config: {str(error).splitlines()[0]}") from error
    if set(stacked) != set(expected):
        missing, extra = sorted(set(expected) - set(stacked)), sorted(set(stacked) - set(expected))
        raise ValueError(f"the weights do not fit the config: missing {missing[:9]}, not expected {extra[:9]}")
    for name, tensor in stacked.items():
        if tensor.ndim == 0 or tensor.shape[1:] != expected[name].shape:
            raise ValueError(
                f"{name} must be [seed, {', '.join(map(str, expected[name].shape))}], got {list(tensor.shape)}"
            )
        if tensor.dtype != expected[name].dtype:
            raise ValueError(f"{name} must be {expected[name].dtype} as in the config, got {tensor.dtype}")
    if len(n_models) != 1 or n_models == {0}:
        raise ValueError(f"the weights need one leading axis for all, the seeds; theirs have sizes {sorted(n_models)}")
    return n_models.pop()


def _named_tensors(model: Model) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
