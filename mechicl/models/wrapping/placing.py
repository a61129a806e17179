"""`wrap`: how anybody's module is declared, part by part."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.nn as nn
from torch import Tensor
from transformer_lens import HookedRootModule

from mechicl.base.arguments import checked
from mechicl.base.checks import check_whole
from mechicl.models.wrapping.module_hooks import Fused, Names, Place, Side, Split, expand, unwrapped
from mechicl.models.wrapping.wrapped import Call, Decode, Encode, WrappedModel
from mechicl.prompts import PromptFormatName

Attention = Names | Mapping[str, Names | int | Split]
QKV = ("q", "k", "v")
PARTS_OF_ATTENTION: dict[str, tuple[str, Side]] = {  # key in `attention`: component, and on which side it is seen
    "out": ("attn_out", "output"),
    "q": ("q", "output"),
    "k": ("k", "output"),
    "v": ("v", "output"),
    "scores": ("attn_scores", "input"),
    "pattern": ("pattern", "output"),
    "z": ("z", "input"),
}


@checked
def wrap(
    module: Any,
    *,
    encode: Encode | str,
    decode: Decode | None = None,
    points: slice | None = None,
    layers: Names | None = None,
    attention: Attention | None = None,
    mlp: Names | None = None,
    resid_mid: Names | None = None,
    unembed: Names | None = None,
    call: Call | None = None,
    batch_first: bool = True,
    name: str | None = None,
) -> WrappedModel:
    """Any torch module as a learner, with TransformerLens' hooks where its parts are named.

    The result predicts (`predict`, `predict_prefixes`), so that `identify`, `align` and `match` compare it with
    algorithms. With `layers` it can be opened: `fit_readouts`, `probe`, `patch`, `ablate`, `attribute`,
    `PatchingSession` and everything else that needs hooks. The module keeps its weights and computes what it did:
    torch's forward hooks are attached during runs in which a hook listens, and removed after.

    Parts are named as in `module.named_modules()`: by a pattern with `{}` for the number of the layer, or by a list,
    one a layer. A part that runs several times in a pass (a looped block) is listed as often.

    Args:
        module: any torch module; call `module.eval()` first for what opens it. What `torch.compile` and `DataParallel`
            are put around is run as it is, without them.
        encode: what it reads: "interleaved" (x1, y1, x2, ..., query; `[prompt 2n+1 max(x, y)]`), "paired" (one token
            `(x, y)` a point, the query's y 0; `[prompt n+1 x+y]`), or a function of `Prompts` that returns its input
            `[prompt ...]`. Prompts come on the module's device and in its dtype. The query's target must not be in it.
        decode: a function of what the module returns, that gives predictions: `[prompt y]` of the query, or
            `[prompt point y]` of every point. By default the output itself, at `points` if it has positions.
        points: the positions at which points are predicted, in order, the query's last: in the output, where `decode`
            is not given, and in the stream, where readouts read it. By default every x token of interleaved prompts,
            and the last position of all others.
        layers: sub-modules that take the residual stream `[prompt pos d_model]` first and return it, or a tuple that
            begins with it: `blocks.{l}.hook_resid_pre` and `hook_resid_post`.
        attention: sub-modules that return what attention adds to the stream (`blocks.{l}.hook_attn_out`), or a mapping:

            - "out": these.
            - "q", "k", "v": that return queries, keys and values, heads side by side (`attn.hook_q`, ...,
              `[prompt pos head d_head]`, before any rotation).
            - "qkv": that return all three side by side; "split", a function of their output `[prompt pos width]` that
              returns the three `[prompt pos head d_head]`, says where they stand if it is another order.
            - "scores": that take the scores `[prompt head query key]`, say a softmax (`attn.hook_attn_scores`).
            - "pattern": that return the pattern `[prompt head query key]`, a softmax or the dropout after it
              (`attn.hook_pattern`).
            - "z": that take the heads' outputs side by side, the output projections (`attn.hook_z`).
            - "n_heads": their number, which q, k, v and z need; "n_key_value_heads" where keys and values have fewer.
        mlp: sub-modules that return what the MLP adds to the stream, or any other such part: `hook_mlp_out`.
        resid_mid: sub-modules that take the stream between attention and MLP, say a norm: `hook_resid_mid`.
        unembed: sub-modules that make the output from the stream after the last layer, in order (say a norm and a
            linear map), for the logit lens.
        call: how the module is run on what `encode` returned: a function of both; by default `module(tokens)`.
        batch_first: False for a module that reads, hands on and returns `[pos prompt ...]`, as torch's recurrent
            layers by default. `encode`, `decode` and hooks have prompts first all the same.
        name: for tables and pictures; by default the module's class.

    Raises:
        TypeError: no module, one that has hooks already, or layers of one that torch.jit has compiled.
        ValueError: a module that does not take one tensor, without `call`; a name that no sub-module has, another
            number of parts than of layers, parts without layers, heads without n_heads, or an unknown prompt format.
            When it reads prompts: a part that does not take or return what was said, or a prediction that depends on
            the query's target or on other prompts.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5 * 4, 64), torch.nn.ReLU(),
        ...                           torch.nn.Linear(64, 1))
        >>> learner = wrap(net, encode="paired")
        >>> learner.predict(LinearRegression(x_dim=3, n_context=4).sample(8, seed=0)).shape
        torch.Size([8, 1])
    """
    if isinstance(module, HookedRootModule):
        raise TypeError(f"{type(module).__name__} has TransformerLens' hooks already: use it as it is")
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"wrap() takes a torch.nn.Module, got {type(module).__name__}; for a function of prompts take "
            f"AlgorithmLearner"
        )
    if isinstance(encode, str) and encode not in get_args(PromptFormatName):
        raise ValueError(
            f"encode={encode!r} is not one of {list(get_args(PromptFormatName))}, nor a function of prompts"
        )
    module = unwrapped(module)
    if layers is not None and isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(module).__name__} is compiled by torch.jit, whose parts run no hooks: wrap the original"
        )
    if call is None and not _takes_one_tensor(module):
        raise ValueError(
            f"{type(module).__name__}.forward{inspect.signature(module.forward)} does not take one tensor: say how it "
            f"is run on what encode returns, for instance call=lambda module, tokens: module(inputs=tokens)"
        )
    heads = _Heads.of_attention(attention)
    declared = {"attention": heads.parts or None, "mlp": mlp, "resid_mid": resid_mid}
    if layers is None and (without := [keyword for keyword, names in declared.items() if names is not None]):
        raise ValueError(f"{without[0]}= names parts of layers: name the layers too, layers=")
    stack = [] if layers is None else expand(module, layers, "layers")
    parts: list[tuple[str, Place]] = []

    def add(names: Names, keyword: str, component: str, side: Side, **settings: Any) -> None:
        for layer, part in enumerate(expand(module, names, keyword, n_layers=len(stack))):
            parts.append((part, Place(component, layer, side, batch_first=batch_first, **settings)))

    if stack:
        add(stack, "layers", "resid_pre", "input")
        add(stack, "layers", "resid_post", "output")
    for key, names in heads.parts.items():
        keyword = f"attention[{key!r}]"
        if key == "qkv":
            for i, part in enumerate(QKV):
                add(names, keyword, part, "output", fused=Fused(i, heads.split))
        else:
            add(names, keyword, *PARTS_OF_ATTENTION[key], n_heads=heads.number(key))
    if resid_mid is not None:
        add(resid_mid, "resid_mid", "resid_mid", "input")
    if mlp is not None:
        add(mlp, "mlp", "mlp_out", "output")
    if points is None:
        points = slice(0, None, 2) if encode == "interleaved" else slice(-1, None)
    reading = [] if unembed is None else expand(module, unembed, "unembed")
    name = name or type(module).__name__
    return WrappedModel(
        module, parts, encode, decode, points, len(stack), heads.n_heads or 1, reading, name, call, batch_first
    )


def _takes_one_tensor(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError:
        return False
    except ValueError:  # no signature, as of what is compiled
        return True
    return True


@dataclass(frozen=True)
class _Heads:
    """What was declared as attention: its parts by key, and how heads stand in them."""

    parts: dict[str, Names]
    n_heads: int | None = None
    n_key_value_heads: int | None = None
    own_split: Split | None = None

    @classmethod
    def of_attention(cls, attention: Attention | None) -> "_Heads":
        if attention is None:
            return cls({})
        if not isinstance(attention, Mapping):
            return cls({"out": attention})
        parts: dict[str, Any] = dict(attention)
        numbers = {key: parts.pop(key, None) for key in ("n_heads", "n_key_value_heads")}
        check_whole(1, **{key: number for key, number in numbers.items() if number is not None})
        split = parts.pop("split", None)
        known = [*PARTS_OF_ATTENTION, "qkv"]
        if unknown := [key for key in parts if key not in known]:
            raise ValueError(
                f"attention={{{unknown[0]!r}: ...}} is not one of {[*known, *numbers, 'split']}: name sub-modules by "
                f"what they take or return"
            )
        if not parts:
            raise ValueError(f"attention={attention!r} names no sub-module: give at least one of {known}")
        if split is not None and ("qkv" not in parts or not isinstance(split, Callable)):
            raise ValueError("attention={'split': ...} is a function of what the sub-modules of 'qkv' return")
        if "qkv" in parts and (twice := [part for part in QKV if part in parts]):
            raise ValueError(f"attention= names {twice[0]!r} and 'qkv', which has it too: leave one out")
        needing = [part for part in parts if part in (*QKV, "z") or (part == "qkv" and split is None)]
        if needing and numbers["n_heads"] is None:
            raise ValueError(
                f"attention={{{needing[0]!r}: ...}} needs 'n_heads' beside it, the number of heads that stand in it"
            )
        return cls(parts, numbers["n_heads"], numbers["n_key_value_heads"] or numbers["n_heads"], split)

    def number(self, key: str) -> int | None:
        return self.n_key_value_heads if key in ("k", "v") else self.n_heads

    def split(self, fused: Tensor) -> list[Tensor]:
        """Queries, keys and values `[prompt pos head d_head]` in what a projection returns."""
        if self.own_split is not None:
            return list(self.own_split(fused))
        numbers = (self.n_heads or 1, self.n_key_value_heads or 1, self.n_key_value_heads or 1)
        d_head, rest = divmod(fused.shape[-1], sum(numbers))
        if rest:
            raise ValueError(f"{fused.shape[-1]} is no multiple of {sum(numbers)}, the heads of q, k and v")
        parts = fused.split([number * d_head for number in numbers], dim=-1)
        return [part.unflatten(-1, (number, d_head)) for part, number in zip(parts, numbers, strict=True)]
