"""Several seeds of one model as one module: stacked weights, one vectorised forward pass where the model has one."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import vmap

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
        self._template_weights = list(self.template.parameters())
        self._places = [_places(self.template, weight) for weight in self._template_weights]
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
        model = self.template

        def run_one(flat: Tensor, tokens: Tensor, *sources: Tensor) -> Tensor:
            flats, hooks = iter(sources), []
            for clamp, source in clamps:
                copied = source and source.record(next(flats), tokens, clamp.source_hook_name)
                hooks.append((clamp.hook_name, clamp.hook(copied)))
            with self._using(self._named(flat).values()), model.hooks(fwd_hooks=hooks) if hooks else nullcontext():
                return model(tokens, at=at)

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
        with self._using(self._named(flat).values()), self.template.hooks([(name, lambda x, hook: kept.append(x))]):
            stop = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else None  # later layers need not run
            self.template(tokens, stop_at_layer=stop)
        return kept[0]

    @contextmanager
    def _using(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Give the template these weights for a while.

        `torch.func.functional_call` does the same, but searches all modules each time: a tenth of a small model's step.
        """
        try:
            self._put(weights)
            yield
        finally:
            self._put(self._template_weights)

    def _put(self, weights: Iterable[Tensor]) -> None:
        for places, weight in zip(self._places, weights, strict=True):
            for module, leaf in places:
                module._parameters[leaf] = weight  # pyright: ignore[reportArgumentType]

    def state(self) -> dict[str, Tensor]:
        """Name to stacked weights `[seed ...]`, a copy on the CPU."""
        return {name: weight.contiguous() for name, weight in self._named(self.flat.detach().cpu().clone()).items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Load the weights of `state()`."""
        self.flat.copy_(torch.cat([state[name].flatten(1) for name in self._shapes], dim=1))

    def buffers_state(self) -> dict[str, Tensor]:
        """Name to the models' shared buffers, `[seed ...]`."""
        buffers = dict(self.template.named_buffers())
        return {n: b.detach().cpu().expand(self.n_seeds, *b.shape).clone() for n, b in buffers.items()}

    def _named(self, flat: Float[Tensor, "*seed weight"]) -> dict[str, Tensor]:
        parts = zip(self._shapes.items(), flat.split([n.numel() for n in self._shapes.values()], dim=-1), strict=True)
        return {name: part.unflatten(-1, shape) for (name, shape), part in parts}


def _places(model: nn.Module, weight: Tensor) -> list[tuple[nn.Module, str]]:
    """The modules and names under which a model has a weight: several where blocks share it."""
    return [(module, name) for module in model.modules() for name, at in module._parameters.items() if at is weight]
