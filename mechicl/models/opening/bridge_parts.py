"""The nodes of a `TransformerBridge` (embedding, heads, MLPs, read-out) as functions of the streams that they read."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.sites import has_mlp, is_parallel, list_key_heads
from mechicl.models.temporary_hooks import Direction, adding, in_this_thread

SPLITTING = ("use_split_qkv_input", "use_attn_in", "use_attn_result", "use_hook_mlp_in")

# A bridge calls the model's own code with arguments that are computed once per run: masks, rotations, position biases.
# So each sub-module is called with the arguments of a recorded run and another stream. Queries, keys and values are
# patched in at the outputs of the model's projections, each head's from a separate stream, and the attention's result
# is read before its output projection: nothing is assumed about its scores.


@dataclass
class RecordedCall:
    """The arguments of a module's call: the stream is the first one, or `hidden_states`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def stream(self) -> Tensor:
        """The stream among the arguments."""
        return self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.args[0]


@dataclass
class Recording:
    """A run: its tokens and outputs, the calls by part and layer, and the blocks' results."""

    tokens: Tensor
    outputs: Tensor
    calls: dict[str, list[RecordedCall]]
    returned: list[Any] = field(default_factory=list)

    @property
    def streams(self) -> list[Tensor]:
        """The streams before each layer and after the last."""
        return [*(call.stream for call in self.calls["block"]), _first_tensor(self.returned[-1])]


class BridgeParts:
    """The nodes of a `TransformerBridge`, differentiable and computed by the model's own modules.

    For the first prompts of each length they are checked: the outputs of a layer's nodes must sum to its update of the
    stream. A norm after the attention (Gemma 2) scales the sum of the heads' outputs: a head's output is its share of
    the scaled sum, which depends on other heads, as it does if all queries or keys are normed together (OLMo 2). The
    first prompts decide if `heads_interact` in this way.
    """

    def __init__(self, adapter: ModelAdapter):
        self.adapter, self.model = adapter, adapter.model
        self.name = type(getattr(self.model, "original_model", self.model)).__name__
        blocks = getattr(self.model, "blocks", None)
        if blocks is None:
            raise ValueError(f"{self.name} does not have a single stack of layers to cut edges in")
        without = [layer for layer, block in enumerate(blocks) if not hasattr(block, "attn")]
        if without:
            raise ValueError(f"layer {without[0]} of {self.name} has no attention to cut edges in")
        self.heads_interact = False
        self._recordings: list[Recording] = []  # of one prompt and of two

    # ---- parts ----

    def embed(self, tokens: Tensor) -> Float[Tensor, "prompt pos d_model"]:
        """Compute the stream before the first layer, positions included."""
        # hooks that a bridge attaches itself (OPT) are permanent
        if any(point.has_hooks(including_permanent=False) for point in self.model.hook_dict.values()):
            raise ValueError("heads and MLPs cannot be separated with hooks on the model: call model.reset_hooks()")
        if not self._recordings or self._recordings[0].tokens.shape[1:] != tokens.shape[1:]:
            two = tokens[:2] if len(tokens) > 1 else tokens[:1].repeat(2, 1)
            with torch.no_grad(), _inputs_joined(self.model):
                self._recordings = [_record(self.adapter, prompts) for prompts in (two[:1], two)]
                self._check(self._recordings[1])
                self.heads_interact = self._do_heads_interact(self._recordings[1])
        inputs: list[Tensor] = []
        with self._skipping_blocks(None), _calling(self.model.blocks[0], lambda call: inputs.append(call.stream)):
            self.adapter.run(tokens)
        return inputs[0]

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "head row pos d_model"],
        k: Float[Tensor, "key_head row pos d_model"],
        v: Float[Tensor, "key_head row pos d_model"],
    ) -> Float[Tensor, "head row pos d_model"]:
        """Compute each head's output from a stream for its query, and one for its group's key and value."""
        block = self.model.blocks[layer]
        received = {}
        for by, streams in (("q", q), ("k", k), ("v", v)):
            normed = _norm(block, "ln1", streams.flatten(0, 1)).view_as(streams)
            weight, bias = _weight_of(getattr(block.attn, by), streams.shape[-1])
            weight = rearrange(weight, "model (head d) -> head model d", head=len(streams))
            received[by] = einsum(normed, weight, "head row pos model, head model d -> row pos head d")
            received[by] = received[by] + rearrange(bias, "(head d) -> head d", head=len(streams))
        z = self._attend(layer, received)
        return self.write(layer, rearrange(z, "row pos (head d) -> row pos head d", head=len(q)))

    def write(self, layer: int, z: Float[Tensor, "row pos head d_head"]) -> Float[Tensor, "head row pos d_model"]:
        """Compute what each head adds to the stream, from the attention's result before its output projection."""
        block = self.model.blocks[layer]
        weight, _ = _weight_of(block.attn.o, z.shape[2] * z.shape[3])
        weight = rearrange(weight, "(head d) model -> head d model", head=z.shape[2])
        written = einsum(z, weight, "row pos head d, head d model -> head row pos model")
        return self._scale(layer) * share_of_norm(getattr(block, "ln1_post", None), written)

    def attention_bias(self, layer: int) -> Tensor | float:
        """Return the part of a layer's attention output that is independent of its heads."""
        bias = getattr(self.model.blocks[layer].attn.o.original_component, "bias", None)
        return 0.0 if bias is None else self._scale(layer) * bias.detach()

    def mlp(self, layer: int, stream: Float[Tensor, "row pos d_model"]) -> Float[Tensor, "row pos d_model"]:
        """Compute the output of a layer's MLP."""
        block = self.model.blocks[layer]
        if block.mlp.name is None:  # its weights are in the block itself (OPT): run the block without attention
            with adding([(block.attn.hook_out, lambda out, hook: torch.zeros_like(out), "fwd")]):
                return self._call("block", layer, block, stream) - stream
        norm = "ln1" if is_parallel(self.model) and getattr(block, "ln2", None) is None else "ln2"
        out = self._call("mlp", layer, block.mlp, _norm(block, norm, stream))
        return self._scale(layer) * _norm(block, "ln2_post", out)

    def read_out(self, stream: Float[Tensor, "row pos d_model"]) -> Tensor:
        """Compute predictions from the stream after the last layer."""
        with self._skipping_blocks(stream):
            return self.adapter.run(self._recordings[0].tokens.expand(len(stream), -1))

    def bytes_per_row(self, tokens: Tensor) -> float:
        """Bound the memory of a run per prompt, in bytes, with a normed stream for each input of a layer's heads."""
        cfg = self.model.cfg
        stream = tokens.shape[1] * cfg.d_model * next(self.model.parameters()).element_size()
        return self.adapter.bytes_per_row(tokens) + 15 * cfg.n_heads * stream

    # ---- the model's own modules ----

    def _call(self, part: str, layer: int, module: Callable[..., Any], stream: Tensor) -> Tensor:
        """Call a module with the arguments of the recorded runs and another stream, of any number of prompts."""
        one, two = (recording.calls[part][layer] for recording in self._recordings)
        args = [_resize(*pair, stream) for pair in zip(one.args, two.args, strict=True)]
        kwargs = {name: _resize(value, two.kwargs[name], stream) for name, value in one.kwargs.items()}
        if "hidden_states" in kwargs:
            return _first_tensor(module(*args, **kwargs | {"hidden_states": stream}))
        return _first_tensor(module(stream, *args[1:], **kwargs))

    def _attend(self, layer: int, received: Mapping[str, Float[Tensor, "row pos head d_head"]]) -> Tensor:
        """The attention's result `[row pos d]` for these queries, keys and values, before its output projection."""
        attn = self.model.blocks[layer].attn
        seen: list[Tensor] = []

        def put(by: str) -> Callable[..., Tensor]:
            return lambda out, hook: received[by].reshape(out.shape)

        def keep(z: Tensor, hook: HookPoint) -> None:
            seen.append(z.flatten(2))

        hooks: list[tuple[HookPoint, Callable[..., Any], Direction]] = [
            (attn.o.hook_in, keep, "fwd"),
            *((getattr(attn, by).hook_out, put(by), "fwd") for by in received),
        ]
        nothing = received["q"].new_zeros(*received["q"].shape[:2], self.model.cfg.d_model)
        with adding(hooks), _inputs_joined(self.model):
            self._call("attn", layer, attn, nothing)
        return seen[0]

    @contextmanager
    def _skipping_blocks(self, last: Tensor | None) -> Iterator[None]:
        """A context in which, in this thread, blocks return their input, and the last one this stream."""
        blocks = list(self.model.blocks)
        before = [vars(block).get("forward") for block in blocks]

        def skip(*args: Any, instead: Tensor | None, wrapped: bool, **kwargs: Any) -> Any:
            stream = RecordedCall(args, kwargs).stream if instead is None else instead
            return (stream,) if wrapped else stream

        try:
            for block, out in zip(blocks, self._recordings[1].returned, strict=True):
                instead = last if block is blocks[-1] else None
                forward = partial(skip, instead=instead, wrapped=isinstance(out, tuple | list))
                # setattr would reach the module that a bridge wraps
                vars(block)["forward"] = in_this_thread(forward, otherwise=block.forward)
            with _inputs_joined(self.model):
                yield
        finally:
            for block, forward in zip(blocks, before, strict=True):
                if forward is None:
                    vars(block).pop("forward", None)
                else:
                    vars(block)["forward"] = forward

    def _scale(self, layer: int) -> float:
        return getattr(self.model.blocks[layer], "residual_contribution_scale", 1.0)

    # ---- checks ----

    def _check(self, run: Recording) -> None:
        for layer, (stream, after) in enumerate(itertools.pairwise(run.streams)):
            try:
                _, computed = run_nodes(self, layer, stream)
            except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
                raise ValueError(f"layer {layer} of {self.name} cannot be taken apart ({error})") from error
            if not _add_up(computed - stream, after - stream, after):
                raise ValueError(f"the stream of {self.name} is not the sum of its parts: layer {layer} adds more")
        if not _add_up(self.read_out(run.streams[-1]), run.outputs, run.outputs):
            raise ValueError(f"{self.name} reads more than the stream after its last layer")

    def _do_heads_interact(self, run: Recording) -> bool:
        stream = run.streams[0]
        q, k, v = streams_of_heads(self.model, stream)
        changed = torch.cat([stream.flip(0, 1)[None], q[1:]])
        before, after = (self.attend(0, queries, k, v)[1:] for queries in (q, changed))
        return len(q) > 1 and not _add_up(after, before, stream)


def streams_of_heads(model: Any, stream: Tensor) -> list[Float[Tensor, "head row pos d_model"]]:
    """Return a stream for each head's queries, and for each group's keys and values."""
    n_key_heads = len(list_key_heads(model))
    return [stream.expand(n, *stream.shape) for n in (model.cfg.n_heads, n_key_heads, n_key_heads)]


def run_nodes(parts: Any, layer: int, stream: Tensor) -> tuple[list[Float[Tensor, "node row pos d_model"]], Tensor]:
    """Compute the outputs of a layer's heads, and of its MLP if it has one, and the stream after the layer."""
    model = parts.model
    outputs = [parts.attend(layer, *streams_of_heads(model, stream))]
    after = stream + outputs[0].sum(0) + parts.attention_bias(layer)
    if has_mlp(model, layer):
        outputs.append(parts.mlp(layer, stream if is_parallel(model) else after)[None])
        after = after + outputs[1][0]
    return outputs, after


def _record(adapter: ModelAdapter, tokens: Tensor) -> Recording:
    calls: dict[str, list[RecordedCall]] = {"block": [], "attn": [], "mlp": []}
    returned: list[Any] = []
    with ExitStack() as stack:
        for block in adapter.model.blocks:
            for part, module in (("block", block), ("attn", block.attn), ("mlp", getattr(block, "mlp", None))):
                if module is not None:
                    stack.enter_context(_calling(module, calls[part].append))
            handle = block.register_forward_hook(lambda module, args, out: returned.append(out), prepend=True)
            stack.callback(handle.remove)
        return Recording(tokens, adapter.run(tokens), calls, returned)


@contextmanager
def _calling(module: nn.Module, listen: Callable[[RecordedCall], object]) -> Iterator[None]:
    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listen(RecordedCall(args, kwargs))

    handle = module.register_forward_pre_hook(record_call, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _inputs_joined(model: Any) -> Iterator[None]:
    on = [flag for flag in SPLITTING if getattr(model.cfg, flag, False)]
    try:
        for flag in on:
            getattr(model, f"set_{flag}")(False)
        yield
    finally:
        for flag in on:
            getattr(model, f"set_{flag}")(True)


def _resize(one: Any, two: Any, stream: Tensor) -> Any:
    """An argument resized to the stream's number of prompts, from its values in calls with one prompt and two."""
    if isinstance(one, Cache):
        return None
    if isinstance(one, tuple | list):
        return type(one)(_resize(*pair, stream) for pair in zip(one, two, strict=True))
    if isinstance(one, Tensor) and one.shape != two.shape:  # it has rows for each prompt
        if one.shape[1:] == stream.shape[1:]:
            return torch.zeros_like(stream)  # a stream that the module adds to its output (BLOOM)
        return one.repeat(len(stream), *[1] * (one.ndim - 1))
    return one


def _first_tensor(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple | list) else out


def _norm(block: Any, name: str, stream: Tensor) -> Tensor:
    norm = getattr(block, name, None)
    return stream if norm is None else norm(stream)


def share_of_norm(
    norm: nn.Module | None, written: Float[Tensor, "head row pos d_model"]
) -> Float[Tensor, "head row pos d_model"]:
    """Return what each head adds to the stream if a norm (which does not centre) follows the sum over heads."""
    if norm is None:
        return written
    total = written.sum(0)
    weight = norm(torch.ones_like(total[:1, :1]))  # up to a factor, which cancels in the scale
    weighed = weight * total
    scale = (norm(total) * weighed).sum(-1, keepdim=True) / weighed.square().sum(-1, keepdim=True).clamp_min(1e-30)
    return scale * weight * written


def _weight_of(linear: Any, width: int) -> tuple[Float[Tensor, "d_in d_out"], Tensor]:
    """A linear module's weight and bias: read directly from torch's and GPT-2's modules, else from a basis' images."""
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
    """True if the parts sum to the update of a stream, up to rounding of either."""
    eps = max(torch.finfo(whole.dtype).eps, torch.finfo(torch.float32).eps)  # some scores are float32 even in float64
    bound = 1e3 * eps * whole.abs().max() + 16 * eps * stream.abs().max()
    return parts.shape == whole.shape and bool((parts - whole).abs().max() <= bound)
