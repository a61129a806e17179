"""How a bridge calls its modules in a run, so that they can be called again with another stream."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformers.cache_utils import Cache

from mechicl.models import holding
from mechicl.models.opening.adapter import ModelAdapter

FLAGS = ("use_split_qkv_input", "use_attn_in", "use_attn_result", "use_hook_mlp_in")


@dataclass
class Call:
    """How a module was called: with the stream first, or as `hidden_states`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def stream(self) -> Tensor:
        """The stream that it was called with."""
        return self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.args[0]


@dataclass
class Run:
    """A run: streams before each layer and after the last, outputs, and by layer how modules were called."""

    streams: list[Tensor]
    last: Tensor
    outputs: Tensor
    calls: dict[str, list[Call]]
    returned: list[Any]

    @classmethod
    def record(cls, adapter: ModelAdapter, tokens: Tensor) -> "Run":
        """Run a bridge and record all that."""
        calls: dict[str, list[Call]] = {"block": [], "attn": [], "mlp": []}
        returned: list[Any] = []
        before, after = [], []
        for block in adapter.model.blocks:
            modules = {"block": block, "attn": block.attn, "mlp": getattr(block, "mlp", None)}
            before += [(each, _hearing(calls[part].append)) for part, each in modules.items() if each is not None]
            after.append((block, lambda module, args, out: returned.append(out)))
        with holding.listening(before, after):
            outputs = adapter.run(tokens)
        streams = [call.stream for call in calls["block"]]
        return cls(streams, first_tensor(returned[-1]), outputs, calls, returned)


class Recording:
    """How modules are called for any number of prompts, from runs on one and on two."""

    def __init__(self, tokens: Tensor, one: Run, two: Run):
        self.tokens = tokens
        self.returned = [isinstance(out, tuple | list) for out in two.returned]
        self.block, self.attn, self.mlp = (
            [Repeated(*calls) for calls in zip(one.calls[part], two.calls[part], strict=True)]
            for part in ("block", "attn", "mlp")
        )


@dataclass
class Repeated:
    """How a module is called for any number of prompts, from its calls for one and for two."""

    one: Call
    two: Call

    def repeat(self, module: Callable[..., Any], stream: Float[Tensor, "row pos d_model"]) -> Tensor:
        """What the module gives out when it is called as before, with another stream."""
        resize = partial(_resize, stream=stream)
        args = tuple(map(resize, self.one.args, self.two.args))
        kwargs = {name: resize(value, self.two.kwargs[name]) for name, value in self.one.kwargs.items()}
        if "hidden_states" in kwargs:
            return first_tensor(module(*args, **kwargs | {"hidden_states": stream}))
        return first_tensor(module(stream, *args[1:], **kwargs))


def _resize(one: Any, two: Any, stream: Tensor) -> Any:
    """What a module is given beside the stream, for as many prompts as the stream has."""
    if isinstance(one, Cache):
        return None
    if isinstance(one, tuple | list):
        return type(one)(_resize(*pair, stream) for pair in zip(one, two, strict=True))
    if isinstance(one, Tensor) and one.shape != two.shape:  # it has rows for each prompt
        if one.shape[1:] == stream.shape[1:]:
            return torch.zeros_like(stream)  # a stream that the module adds to what it gives out (BLOOM)
        return one.repeat(len(stream), *[1] * (one.ndim - 1))
    return one


def first_tensor(out: Any) -> Tensor:
    """What a module gives out, without what some give out beside it."""
    return out[0] if isinstance(out, tuple | list) else out


def return_stream(*args: Any, instead: Tensor | None, wrapped: bool, **kwargs: Any) -> Any:
    """What a block gives out that hands on its stream, or another instead."""
    stream = Call(args, kwargs).stream if instead is None else instead
    return (stream,) if wrapped else stream


def listening(module: nn.Module, listen: Callable[[Call], object]) -> AbstractContextManager[None]:
    """A context in which a function hears how a module is called."""
    return holding.listening([(module, _hearing(listen))])


def _hearing(listen: Callable[[Call], object]) -> Callable[..., None]:
    def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listen(Call(args, kwargs))

    return hear


def hooked(hooks: Sequence[tuple[HookPoint, Callable[..., Tensor | None]]]) -> AbstractContextManager[None]:
    """A context with hooks at some hook points."""
    return holding.adding([(point, hook, "fwd") for point, hook in hooks])


@contextmanager
def inputs_joined(model: Any) -> Iterator[None]:
    """A context in which a bridge's inputs are not split."""
    on = [flag for flag in FLAGS if getattr(model.cfg, flag, False)]
    try:
        for flag in on:
            getattr(model, f"set_{flag}")(False)
        yield
    finally:
        for flag in on:
            getattr(model, f"set_{flag}")(True)
