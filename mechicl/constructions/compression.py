"""Compression of a model into a stream of fewer dimensions, in superposition, by training it to imitate itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import mse_loss

from mechicl.base.arguments import checked
from mechicl.base.checks import check_positive, check_whole
from mechicl.base.progress import progress_bar
from mechicl.constructions.hiding import in_another_stream, refuse_what_would_break
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts

BATCH = 64


@dataclass(frozen=True, eq=False)
class CompressedModel:
    """A model in a narrower stream, and how well it imitates the original.

    Attributes:
        model: the narrow model, float64.
        stream: orthonormal columns `[d_model new_d_model]`: a vector `s` of the old stream is about `s @ stream` here.
        projected: mean squared error of the outputs on the prompts before training.
        trained: the error after training.
    """

    model: HookedTransformer
    stream: Float[Tensor, "d_model new_d_model"]
    projected: float
    trained: float


@checked
def compress(
    model: HookedTransformer, prompts: Prompts | Int[Tensor, "prompt pos"], *, d_model: int, steps: int = 600,
    learning_rate: float = 1e-3, seed: int = 0, progress: bool = True,
) -> CompressedModel:  # fmt: skip
    """Move a model into a stream of fewer dimensions, and train it to do the same.

    The stream is projected on its principal directions on the prompts, uncentred. With at least as many dimensions as
    the model uses, this is exact, and no training is needed: a compiled program uses fewer dimensions than it has. With
    fewer, unrelated directions share dimensions, and all weights are trained (Adam, a cosine from `learning_rate` to 0)
    to reproduce the outputs and the projected streams of the original. Nodes keep their roles, but everything now reads
    a little of everything: weights no longer show the circuit. If training makes it worse, the projected model is
    returned.

    Args:
        model: as `hide` takes it.
        prompts: for training, points or token ids.
        d_model: the new width, at most the model's.
        steps: of training; 0 for the projected model.
        learning_rate: the largest one, of Adam.
        seed: of the order of prompts.
        progress: show a bar.

    Raises:
        ValueError: a width larger than the model's, no prompts, or a model that `hide` refuses.

    Source: Lindner et al. 2023, section 5, who train the projection alone.

    Example:
        >>> model = constructions.induction(d_vocab=4, n_ctx=6)
        >>> ids = torch.randint(4, (64, 6), generator=torch.Generator().manual_seed(0))
        >>> narrow = compress(model, ids, d_model=14, steps=0, progress=False)
        >>> narrow.model.cfg.d_model, model.cfg.d_model
        (14, 18)
    """
    check_whole(1, d_model=d_model)
    check_whole(0, steps=steps)
    check_positive(learning_rate=learning_rate)
    refuse_what_would_break(model.cfg)
    if d_model > model.cfg.d_model:
        raise ValueError(f"d_model must be at most the model's {model.cfg.d_model}, got {d_model}")
    if not len(prompts):
        raise ValueError("there are no prompts to imitate the model on")
    tokens = model.encode(prompts) if isinstance(prompts, Prompts) else prompts
    with torch.no_grad():
        outputs, streams = _run(model, tokens)
        directions = torch.linalg.svd(torch.cat([s.flatten(0, 1).double() for s in streams]), full_matrices=False).Vh
        stream = directions[:d_model].T.contiguous()
        narrow = _projected(model, stream)
    tokens = tokens.double() if tokens.is_floating_point() else tokens
    targets = [outputs.double(), *(each.double() @ stream for each in streams)]
    before = _error(narrow, tokens, targets[0])
    projected = {name: weight.clone() for name, weight in narrow.state_dict().items()}
    _imitate(narrow, tokens, targets, steps, learning_rate, seed, progress)
    after = _error(narrow, tokens, targets[0])
    if not after < before:  # nor is a number that has overflowed
        narrow.load_state_dict(projected)
        after = before
    return CompressedModel(narrow.eval(), stream, before, after)


def _projected(model: HookedTransformer, stream: Tensor) -> HookedTransformer:
    """The model with everything that it reads and writes projected."""
    narrow = in_another_stream(model, stream)
    layers = 1 if model.cfg.recurrent else model.cfg.n_layers
    for block, old in zip(list(narrow.blocks)[:layers], model.blocks, strict=False):
        for name in ("W_Q", "W_K", "W_V"):
            getattr(block.attn, name).copy_(stream.T @ getattr(old.attn, name).double())
        block.attn.W_O.copy_(old.attn.W_O.double() @ stream)
        if model.cfg.sink == "learned":
            block.attn.sink.copy_(old.attn.sink)
        if model.cfg.block_mlp:
            _project_mlp(block.mlp, old.mlp, stream)
    if model.cfg.mlp_location == "input" and model.cfg.d_mlp is not None:
        _project_mlp(narrow.input_mlp, model.input_mlp, stream)
    return narrow


def _project_mlp(mlp: Any, old: Any, stream: Tensor) -> None:
    mlp.W_in.copy_(stream.T @ old.W_in.double())
    mlp.b_in.copy_(old.b_in)
    mlp.W_out.copy_(old.W_out.double() @ stream)
    mlp.b_out.copy_(old.b_out.double() @ stream)


def _run(model: HookedTransformer, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs at all positions, and the streams before the first layer and after every half of one."""
    streams: list[Tensor] = []
    after = {f"blocks.{layer}.hook_resid_{half}" for layer in range(model.cfg.n_layers) for half in ("mid", "post")}
    hooks: list[Any] = [
        (name, lambda stream, hook: streams.append(stream))
        for name in model.hook_dict
        if name in after | {"blocks.0.hook_resid_pre"}
    ]
    return model.run_with_hooks(tokens, fwd_hooks=hooks), streams


def _error(model: HookedTransformer, tokens: Tensor, outputs: Tensor) -> float:
    with torch.no_grad():
        return mse_loss(model(tokens), outputs).item()


def _imitate(
    model: HookedTransformer, tokens: Tensor, targets: Sequence[Tensor], steps: int, learning_rate: float, seed: int,
    progress: bool,
) -> None:  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    generator = torch.Generator().manual_seed(seed)
    for _ in progress_bar(range(steps), unit="step", progress=progress):
        batch = torch.randint(len(tokens), (min(BATCH, len(tokens)),), generator=generator)
        outputs, streams = _run(model, tokens[batch])
        losses = [mse_loss(value, target[batch]) for value, target in zip([outputs, *streams], targets, strict=True)]
        optimizer.zero_grad()
        (losses[0] + sum(losses[1:]) / len(streams)).backward()
        optimizer.step()
        schedule.step()
