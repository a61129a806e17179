"""Several seeds of one model as one module: stacked weights, one vectorised forward pass."""

import copy
from collections.abc import Sequence

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, vmap

from mechicl.models import HookedTransformer
from mechicl.models.transformer import Rows


class Ensemble(nn.Module):
    """Models with one config, trained side by side; each is equal to the run that it would have had alone.

    Every parameter has a leading seed axis, and no operation mixes seeds.
    """

    def __init__(self, models: Sequence[HookedTransformer]):
        super().__init__()
        # Held in a tuple so that the template's own weights are not parameters of the ensemble.
        self._template = (copy.deepcopy(models[0]),)
        states = [dict(model.named_parameters()) for model in models]
        self.names = list(states[0])
        self.stacked = nn.ParameterList([torch.stack([s[n].detach() for s in states]) for n in self.names])

    @property
    def n_seeds(self) -> int:
        """Number of models."""
        return self.stacked[0].shape[0]

    def forward(
        self, tokens: Float[Tensor, "seed prompt pos d_token"], rows: Rows
    ) -> Float[Tensor, "seed prompt row d_out"]:
        """Each model's outputs on its own tokens."""
        model = self._template[0]

        def one(weights: list[Tensor], tokens: Tensor) -> Tensor:
            return functional_call(model, dict(zip(self.names, weights, strict=True)), (tokens,), {"rows": rows})

        weights = list(self.stacked)
        if self.n_seeds == 1:  # without vmap's overhead
            return one([w.squeeze(0) for w in weights], tokens.squeeze(0)).unsqueeze(0)
        return vmap(one)(weights, tokens)

    def state(self) -> dict[str, Tensor]:
        """Name to stacked weights `[seed ...]`, a copy on the CPU."""
        return {n: w.detach().cpu().clone() for n, w in zip(self.names, self.stacked, strict=True)}

    def buffers_state(self) -> dict[str, Tensor]:
        """Name to the models' common buffers, `[seed ...]`."""
        buffers = dict(self._template[0].named_buffers())
        return {n: b.detach().cpu().expand(self.n_seeds, *b.shape).clone() for n, b in buffers.items()}
