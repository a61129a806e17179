"""A `TransformerBridge` taken apart: its embedding, heads, MLPs and read-out as functions of the streams they read."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers.pytorch_utils import Conv1D

from mechicl.analysis.circuits.bridge_calls import (
    Recording,
    Run,
    hooked,
    inputs_joined,
    listening,
    return_stream,
)
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edges import attends_beside_mlp, list_key_heads
from mechicl.models.opening.skipping import replacing_forwards

INSTEAD = "its nodes can be searched with edges=False"

# A bridge calls the model's own code with what that code works out once a run: masks, rotations, biases by position.
# So each sub-module is called as it was called in a recorded run, with another stream. Queries, keys and values are put
# in where the model's projections give them out, each head's from a stream of its own, and what the attention makes of
# them is read off before its output projection: nothing is assumed of how it computes scores.


class BridgeParts:
    """A `TransformerBridge` taken apart, for edges to be cut in it.

    Queries, keys and values, heads' outputs, MLPs and the read-out are computed by the model's own modules, and all is
    differentiable. When prompts of another length come first, all of it is tried on two of them: layer by layer, what
    the parts write must add up to the stream after it.

    A norm after the attention (Gemma 2) scales the sum of what heads write: a head's part of what is written is its
    share of that sum. A head's output then depends on other heads in its layer through the scale, as it does where
    queries or keys of all heads are normed together (OLMo 2).

    Args:
        adapter: of the bridge.

    Attributes:
        heads_meet: whether the latter is so; known after the first prompts.

    Raises:
        ValueError: layers without attention, or hooks attached to the model; later, a model whose stream is no sum of
            what its parts write, such as BERT, which norms the stream itself. The message names the layer.
    """

    def __init__(self, adapter: ModelAdapter):
        self.adapter, self.model = adapter, adapter.model
        name, blocks = (
            type(getattr(self.model, "original_model", self.model)).__name__,
            getattr(self.model, "blocks", None),
        )
        if blocks is None:
            raise ValueError(f"{name} has no one stack of layers to cut edges in: {INSTEAD}")
        without = [layer for layer, block in enumerate(blocks) if not hasattr(block, "attn")]
        if without:
            raise ValueError(f"layer {without[0]} of {name} has no attention to cut edges in: {INSTEAD}")
        # those that a bridge attaches itself (OPT) are permanent
        if any(point.has_hooks(including_permanent=False) for point in self.model.hook_dict.values()):
            raise ValueError(
                "edges are cut without the hooks attached to the model: take them off, model.reset_hooks()"
            )
        self._recorded: Recording | None = None
        self.heads_meet = False
        self._bytes: dict[int, float] = {}  # for each prompt, by its length

    # ---- parts ----

    def embed(self, tokens: Tensor) -> Float[Tensor, "prompt pos d_model"]:
        """What the embedding writes, positions included: the stream before the first layer."""
        self._record(tokens)
        inputs: list[Tensor] = []
        with self._skipping_blocks(None), listening(self.model.blocks[0], lambda call: inputs.append(call.stream)):
            self.adapter.run(tokens)
        return inputs[0]

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "head row pos d_model"],
        k: Float[Tensor, "key_head row pos d_model"],
        v: Float[Tensor, "key_head row pos d_model"],
    ) -> Float[Tensor, "head row pos d_model"]:
        """What each head writes, from a stream for each query, and one for each key and value (groups share them)."""
        block = self.model.blocks[layer]
        received = {}
        for by, streams in (("q", q), ("k", k), ("v", v)):
            normed = _norm(block, "ln1", streams.flatten(0, 1)).view_as(streams)
            weight, bias = _weight_of(getattr(block.attn, by), streams.shape[-1])
            weight = rearrange(weight, "model (head d) -> head model d", head=len(streams))
            received[by] = einsum(normed, weight, "head row pos model, head model d -> row pos head d")
            received[by] = received[by] + rearrange(bias, "(head d) -> head d", head=len(streams))
        z = self._attend(layer, received)
        weight, _ = _weight_of(block.attn.o, z.shape[-1])
        heads = rearrange(z, "row pos (head d) -> row pos head d", head=len(q))
        weight = rearrange(weight, "(head d) model -> head d model", head=len(q))
        written = einsum(heads, weight, "row pos head d, head d model -> head row pos model")
        return self._scale(layer) * _share(block, "ln1_post", written)

    def attention_bias(self, layer: int) -> Tensor | float:
        """What a layer's attention adds whatever its heads do."""
        block = self.model.blocks[layer]
        bias = getattr(block.attn.o.original_component, "bias", None)
        return 0.0 if bias is None else self._scale(layer) * bias.detach()

    def mlp(self, layer: int, stream: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        """What a layer's MLP writes."""
        block = self.model.blocks[layer]
        if block.mlp.name is None:  # its weights lie in the block itself (OPT): what the block adds without attention
            return self._run_block(layer, stream) - stream
        norm = "ln1" if attends_beside_mlp(self.model) and getattr(block, "ln2", None) is None else "ln2"
        out = self._recording().mlp[layer].repeat(block.mlp, _norm(block, norm, stream))
        return self._scale(layer) * _norm(block, "ln2_post", out)

    def read_out(self, stream: Float[Tensor, "row pos d_model"]) -> Tensor:
        """Predictions from the stream after the last layer."""
        with self._skipping_blocks(stream):
            return self.adapter.run(self._recording().tokens[:1].expand(len(stream), -1))

    def bytes_per_row(self, tokens: Tensor) -> float:
        """What a run of the model takes for each prompt, with a stream for each input of a layer's heads, normed."""
        n_pos, cfg = tokens.shape[1], self.model.cfg
        if n_pos not in self._bytes:
            stream = n_pos * cfg.d_model * next(self.model.parameters()).element_size()
            self._bytes[n_pos] = self.adapter.bytes_per_row(tokens) + 15 * cfg.n_heads * stream
        return self._bytes[n_pos]

    # ---- the model's own modules ----

    def _attend(self, layer: int, received: Mapping[str, Float[Tensor, "row pos head d_head"]]) -> Tensor:
        """What a layer's attention makes of queries, keys and values: `[row pos d]`, before its output projection."""
        attn = self.model.blocks[layer].attn
        seen: list[Tensor] = []

        def put(by: str) -> Callable[..., Tensor]:
            return lambda out, hook: received[by].reshape(out.shape)

        def keep(z: Tensor, hook: HookPoint) -> None:
            seen.append(z.flatten(2))

        hooks = [(getattr(attn, by).hook_out, put(by)) for by in received]
        nothing = received["q"].new_zeros(*received["q"].shape[:2], self.model.cfg.d_model)
        with hooked([*hooks, (attn.o.hook_in, keep)]), inputs_joined(self.model):
            self._recording().attn[layer].repeat(attn, nothing)
        return seen[0]

    def _run_block(self, layer: int, stream: Tensor) -> Tensor:
        """The stream after a layer whose attention adds nothing."""
        block = self.model.blocks[layer]
        with hooked([(block.attn.hook_out, lambda out, hook: torch.zeros_like(out))]):
            return self._recording().block[layer].repeat(block, stream)

    @contextmanager
    def _skipping_blocks(self, last: Tensor | None) -> Iterator[None]:
        """A context in which no block does anything, and the last gives out this stream."""
        blocks = list(self.model.blocks)
        forwards = []
        for block, returned in zip(blocks, self._recording().returned, strict=True):
            instead = last if block is blocks[-1] else None
            forwards.append((block, partial(return_stream, instead=instead, wrapped=returned)))
        with replacing_forwards(forwards), inputs_joined(self.model):
            yield

    def _scale(self, layer: int) -> float:
        """What a layer multiplies its attention's and its MLP's output by (Granite)."""
        return getattr(self.model.blocks[layer], "residual_contribution_scale", 1.0)

    # ---- how they are called, and whether they add up ----

    def _recording(self) -> "Recording":
        if self._recorded is None:
            raise RuntimeError("embed() comes first: the model is called as it was there")
        return self._recorded

    def _record(self, tokens: Tensor) -> None:
        """Record how the model calls its modules, and try that their outputs add up, for prompts of a new length."""
        if self._recorded is None or self._recorded.tokens.shape[1:] != tokens.shape[1:]:
            two = tokens[:2] if len(tokens) > 1 else tokens[:1].repeat(2, 1)
            with torch.no_grad(), inputs_joined(self.model):
                one, both = (Run.record(self.adapter, prompts) for prompts in (two[:1], two))
                self._recorded = Recording(two, one, both)
                self._check(both)
                self.heads_meet = self._try_to_meet(both)

    def _check(self, run: "Run") -> None:
        """Refuse (ValueError) a model in which what the parts write does not make up its stream."""
        name = type(self.model.original_model).__name__
        for layer, (stream, after) in enumerate(itertools.pairwise([*run.streams, run.last])):
            try:
                written = self._write_intact(layer, stream)
            except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
                raise ValueError(f"layer {layer} of {name} cannot be taken apart ({error}): {INSTEAD}") from error
            if not _add_up(written, after - stream, after):
                raise ValueError(
                    f"the stream of {name} is no sum of what its parts write: layer {layer} adds something else to it "
                    f"than its heads and its MLP write; {INSTEAD}"
                )
        if not _add_up(self.read_out(run.last), run.outputs, run.outputs):
            raise ValueError(f"{name} reads more than the stream after its last layer; {INSTEAD}")

    def _try_to_meet(self, run: Run) -> bool:
        """Whether a head writes something else once another reads another stream."""
        n_heads, stream = self.model.cfg.n_heads, run.streams[0]
        if n_heads == 1:
            return False
        n_key_heads = len(list_key_heads(self.model))
        q, k, v = (stream.expand(n, *stream.shape).clone() for n in (n_heads, n_key_heads, n_key_heads))
        before = self.attend(0, q, k, v)[1:]
        q[0] = stream.flip(0, 1)
        return not _add_up(self.attend(0, q, k, v)[1:], before, stream)

    def _write_intact(self, layer: int, stream: Tensor) -> Tensor:
        """What a layer adds to its stream, as the sum of what its parts write."""
        cfg, block = self.model.cfg, self.model.blocks[layer]
        n_key_heads = len(list_key_heads(self.model))
        q, k, v = (stream.expand(n, *stream.shape) for n in (cfg.n_heads, n_key_heads, n_key_heads))
        attended = self.attend(layer, q, k, v).sum(0) + self.attention_bias(layer)
        if getattr(block, "mlp", None) is None:
            return attended
        return attended + self.mlp(layer, stream if attends_beside_mlp(self.model) else stream + attended)


def _norm(block: Any, name: str, stream: Tensor) -> Tensor:
    """A stream after one of a block's norms, or as it is where the block has no such norm."""
    norm = getattr(block, name, None)
    return stream if norm is None else norm(stream)


def _share(block: Any, name: str, written: Float[Tensor, "head row pos d_model"]) -> Tensor:
    """Each head's part in the norm of the sum of what heads write."""
    norm = getattr(block, name, None)
    if norm is None:
        return written
    total = written.sum(0)
    weight = norm(torch.ones_like(total[:1, :1]))  # up to a factor, which the next line takes out again
    weighed = weight * total
    scale = (norm(total) * weighed).sum(-1, keepdim=True) / weighed.square().sum(-1, keepdim=True).clamp_min(1e-30)
    return scale * weight * written


def _weight_of(linear: Any, width: int) -> tuple[Float[Tensor, "d_in d_out"], Tensor]:
    """A linear module's weight and bias: read off where it is torch's or GPT-2's, else by what it makes of a basis."""
    module = linear.original_component
    bias = getattr(module, "bias", None)
    if isinstance(module, nn.Linear | Conv1D):
        weight = module.weight.T if isinstance(module, nn.Linear) else module.weight
    else:
        basis = torch.eye(width + 1, width, dtype=module.weight.dtype, device=module.weight.device)
        with torch.no_grad():
            *rows, bias = module(basis)
        weight = torch.stack(rows) - bias
    return weight.detach(), weight.new_zeros(weight.shape[1]) if bias is None else bias.detach()


def _add_up(parts: Tensor, whole: Tensor, stream: Tensor) -> bool:
    """Whether what parts write is what was added to a stream, up to rounding of either."""
    eps = max(torch.finfo(whole.dtype).eps, torch.finfo(torch.float32).eps)  # in float64, too, some scores are float32
    bound = 1e3 * eps * whole.abs().max() + 16 * eps * stream.abs().max()
    return parts.shape == whole.shape and bool((parts - whole).abs().max() <= bound)
