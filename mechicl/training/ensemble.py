"""Several seeds of one model as one module: stacked weights, one vectorised forward pass where the model has one."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import functional_call, vmap

from mechicl.models import PromptedModel
from mechicl.prompts import At
from mechicl.training.clamp import Clamp


class Ensemble(nn.Module):
    """Models with one config, trained together; each equals the run that it would have had alone.

    All weights of a seed are one row of one parameter `flat` `[seed weight]`, so that clipping and Adam touch one
    tensor for any number of matrices; no operation mixes rows. One thread may run it: passes put weights in a template.
    """

    def __init__(self, models: Sequence[PromptedModel]):
        super().__init__()
        # in a tuple, so that the template's own weights are not parameters of the ensemble.
        self._template = (copy.deepcopy(models[0]),)
        self._shapes = {name: weight.shape for name, weight in models[0].named_parameters()}
        rows = [torch.cat([weight.detach().flatten() for weight in model.parameters()]) for model in models]
        self.flat = nn.Parameter(torch.stack(rows))

    @property
    def n_seeds(self) -> int:
        """Number of models."""
        return self.flat.shape[0]

    @property
    def template(self) -> PromptedModel:
        """The model that runs the passes, with the weights of a row."""
        return self._template[0]

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the weights in a row of `flat`, in order."""
        return list(self._shapes.values())

    def forward(
        self,
        tokens: Float[Tensor, "seed prompt pos d_token"] | Int[Tensor, "seed prompt pos"],
        at: At,
        clamps: Sequence[tuple[Clamp, "Ensemble | None"]] = (),
    ) -> Float[Tensor, "seed prompt row d_out"]:
        """Each model's outputs on its own tokens, with clamped activations; a clamp may have models to copy from."""
        model = self._template[0]

        def run_one(flat: Tensor, tokens: Tensor, *sources: Tensor) -> Tensor:
            flats, hooks = iter(sources), []
            for clamp, source in clamps:
                copied = source and source.record(next(flats), tokens, clamp.source_hook_name)
                hooks.append((clamp.hook_name, clamp.hook(copied)))
            with model.hooks(fwd_hooks=hooks) if hooks else nullcontext():
                return functional_call(model, self._named(flat), (tokens,), {"at": at})

        rows = (self.flat, tokens, *(source.flat.detach() for _, source in clamps if source is not None))
        if self.n_seeds == 1:  # without vmap's overhead
            return run_one(*(each.squeeze(0) for each in rows)).unsqueeze(0)
        if not model.vectorizes:
            return torch.stack([run_one(*seed) for seed in zip(*rows, strict=True)])
        return vmap(run_one)(*rows)

    @torch.no_grad()
    def record(self, flat: Float[Tensor, "weight"], tokens: Tensor, name: str) -> Tensor:
        """The activation at a hook `[prompt ...]` of one model with the weights of a row."""
        kept: list[Tensor] = []
        stop = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else None  # later layers need not run
        with self.template.hooks([(name, lambda x, hook: kept.append(x))]):
            functional_call(self.template, self._named(flat), (tokens,), {"stop_at_layer": stop})
        return kept[0]

    def state(self) -> dict[str, Tensor]:
        """Name to stacked weights `[seed ...]`, a copy on the CPU."""
        return {name: weight.contiguous() for name, weight in self._named(self.flat.detach().cpu().clone()).items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Load the weights of `state()`."""
        self.flat.copy_(torch.cat([state[name].flatten(1) for name in self._shapes], dim=1))

    def buffers_state(self) -> dict[str, Tensor]:
        """Name to the models' shared buffers, `[seed ...]`."""
        buffers = dict(self._template[0].named_buffers())
        return {n: b.detach().cpu().expand(self.n_seeds, *b.shape).clone() for n, b in buffers.items()}

    def _named(self, flat: Float[Tensor, "*seed weight"]) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self._shapes.values()], dim=-1)
        return {
            name: part.unflatten(-1, shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
