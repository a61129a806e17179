"""Models with one config as stacked tensors, a leading axis for seeds."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mechicl.models import Model, ModelConfig, TransformerConfig, build
from mechicl.models.transformer.state_names import current_names


def stack_models(models: Iterable[Model]) -> dict[str, Tensor]:
    """Parameters and buffers of models with one config, stacked on a leading seed axis."""
    states = [_named_tensors(model) for model in models]
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def models_from_stack(cfg: ModelConfig, stacked: dict[str, Tensor]) -> list[Model]:
    """Models from weights with a leading seed axis, as `stack_models` makes them.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape or type than the config asks for, or there is
            no model in the stack.
    """
    if isinstance(cfg, TransformerConfig):
        stacked = current_names(cfg, stacked)
    expected = _named_tensors(build(cfg))
    if set(stacked) != set(expected):
        missing, extra = sorted(set(expected) - set(stacked)), sorted(set(stacked) - set(expected))
        raise ValueError(f"the weights do not fit the config: missing {missing}, not expected {extra}")
    for name, tensor in stacked.items():
        if tensor.ndim == 0 or tensor.shape[1:] != expected[name].shape:
            raise ValueError(
                f"{name} must be [seed, {', '.join(map(str, expected[name].shape))}], got {list(tensor.shape)}"
            )
        if tensor.dtype != expected[name].dtype:
            raise ValueError(f"{name} must be {expected[name].dtype} as the config says, got {tensor.dtype}")
    n_models = {tensor.shape[0] for tensor in stacked.values()}
    if len(n_models) != 1 or n_models == {0}:
        raise ValueError(f"the weights need one leading axis for all, the seeds; theirs have sizes {sorted(n_models)}")
    models = []
    for i in range(n_models.pop()):
        model = build(cfg)
        tensors = _named_tensors(model)
        with torch.no_grad():
            for name, tensor in stacked.items():
                tensors[name].copy_(tensor[i])
        models.append(model.eval())
    return models


def _named_tensors(model: Model) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
