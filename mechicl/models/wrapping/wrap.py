"""`wrap`: declare the parts of any PyTorch module."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from transformer_lens import HookedRootModule

from mechicl.base.arguments import Count, check_fields, checked
from mechicl.models.wrapping.fused_attention import COMPONENTS
from mechicl.models.wrapping.module_hooks import HookPlace, JointProjection, Side, Split
from mechicl.models.wrapping.wrapped import Decode, Encode, Reading, WrappedModel
from mechicl.prompts.formats import PromptFormatName

Names = str | Sequence[str]
AttentionNames = Names | Mapping[str, Names | int | Split]
QKV = ("q", "k", "v")
PARTS_OF_ATTENTION: dict[str, tuple[str, Side]] = {  # key in `attention`: component, and the side on which it is read
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
    module: nn.Module | Any,  # whatever it is, so also models of transformers
    *,
    encode: Encode | PromptFormatName | Reading,
    decode: Decode | None = None,
    layers: Names | None = None,
    attention: AttentionNames | None = None,
    mlp: Names | None = None,
    resid_mid: Names | None = None,
    unembed: Names | None = None,
    name: str | None = None,
) -> WrappedModel:
    """Make a learner (a model that predicts queries of prompts) from any PyTorch module, with TransformerLens' hooks.

    Without `layers`, `identify`, `align` and `match` can compare it with algorithms. With `layers` it can be opened:
    `fit_readouts`, `probe`, `patch`, `ablate`, `attribute`, `test_hypotheses`, `PatchingSession` and everything else
    that needs hooks. The module's weights and outputs are unchanged: torch's forward hooks are attached during runs
    with hooks only.

    Parts are sub-modules, given by name as in `module.named_modules()`: as a pattern with `{}` for the number of the
    layer, such as "blocks.{}.attn", or as a list with one name per layer. A part that runs several times in a pass (a
    looped block) is listed that often.

    Args:
        module: any torch module; analyses that open it need `module.eval()` first. Inside `torch.compile` and
            `DataParallel`, the original module is run.
        encode: the module's input: "interleaved" (x1, y1, x2, ..., query; `[prompt 2n+1 max(x, y)]`), "paired" (one
            token `(x, y)` a point, the query's y 0; `[prompt n+1 x+y]`), or a function of `Prompts` that returns the
            input `[prompt ...]` without the query's target. The function gets prompts on the module's device and in its
            dtype; `probe` and `test_hypotheses` then need its points too: `Reading(function, points)`. `Reading` also
            runs modules that take more than one tensor, and those that take positions first.
        decode: a function of the module's output that returns predictions: `[prompt y]` of the query, or
            `[prompt point y]` of every point. By default the output itself, at the points if it has positions.
        layers: sub-modules whose first input is the residual stream `[prompt pos d_model]` and whose output is the
            stream, or a tuple that begins with it. They get `blocks.{l}.hook_resid_pre` and `hook_resid_post`. A module
            of tables may have streams `[prompt row column d_model]`: positions are rows, and `patch` and `ablate` take
            the components "cell_pre" and "cell_post" of single columns.
        attention: sub-modules that return the attention's update of the stream (`blocks.{l}.hook_attn_out`), or a
            mapping with some of the following. `nn.MultiheadAttention` is opened entirely without further names.

            - "out": the sub-modules above.
            - "q", "k", "v": sub-modules that return queries, keys and values, heads side by side (`attn.hook_q`, ...,
              `[prompt pos head d_head]`, before any rotation).
            - "qkv": sub-modules that return all three side by side; for another order, "split" is a function of their
              output `[prompt pos width]` that returns the three `[prompt pos head d_head]`.
            - "scores": sub-modules that take the scores `[prompt head query key]`, such as a softmax
              (`attn.hook_attn_scores`).
            - "pattern": sub-modules that return the pattern `[prompt head query key]`, a softmax or the dropout after
              it (`attn.hook_pattern`).
            - "z": the output projections, which take the heads' outputs side by side (`attn.hook_z`).
            - "fused": sub-modules that call `F.scaled_dot_product_attention` once, or are `nn.MultiheadAttention`; they
              provide all of the above that is not named. Runs with hooks there compute the attention step by step; the
              first is compared with torch's own result. Its "q" and "k" are after any rotation.
            - "n_heads": number of heads, for q, k, v, z and fused; "n_key_value_heads" if keys and values have fewer.
        mlp: sub-modules that return the update of the stream by the MLP, or by the part in its place: `hook_mlp_out`.
        resid_mid: sub-modules that take the stream between attention and MLP, such as a norm: `hook_resid_mid`.
        unembed: sub-modules that compute the output from the stream after the last layer, in order (such as a norm and
            a linear map), for the logit lens.
        name: name in tables and pictures; by default the module's class.

    Returns:
        A `WrappedModel`: `predict(prompts)` `[prompt y]` predicts the query, `predict_prefixes(prompts)`
        `[prompt point y]` each point from those before it, and `run_with_cache` records the hooks.

    Raises:
        TypeError: not a module, one that has hooks already, or layers of one that torch.jit has compiled.
        ValueError: a name that no sub-module has, another number of parts than of layers, or a missing argument; the
            message names it. When the module reads prompts: a part with an unexpected input or output, or a prediction
            that depends on the query's target or on other prompts.

    Example:
        >>> prompts = LinearRegression(x_dim=3, n_context=4).sample(8, seed=0)
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5 * 4, 64), torch.nn.Linear(64, 1))
        >>> wrap(net, encode="paired").predict(prompts).shape
        torch.Size([8, 1])
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), *layers, torch.nn.Linear(16, 1)).eval()
        >>> opened = wrap(net, encode="paired", layers=["1", "2"], attention=["1.self_attn", "2.self_attn"])
        >>> ablate(opened, prompts, "z").effect().shape  # [layer head prompt]
        torch.Size([2, 2, 8])
    """
    if isinstance(module, HookedRootModule):
        raise TypeError(f"{type(module).__name__} has TransformerLens' hooks already: use it without wrap()")
    if not isinstance(module, nn.Module):
        raise TypeError(f"wrap() takes an nn.Module, got {type(module).__name__}: see AlgorithmLearner for functions")
    reading = encode if isinstance(encode, Reading) else Reading(encode)
    module = _unwrapped(module)
    if layers is not None and isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{type(module).__name__} is compiled by torch.jit and runs no hooks: wrap the original")
    if reading.call is None and not _takes_one_tensor(module):
        arguments = f"{type(module).__name__}.forward{inspect.signature(module.forward)}"
        raise ValueError(f"{arguments} does not take one tensor: give Reading(encode, call=lambda module, x: ...)")
    heads = _read_attention(module, attention)
    declared = {"attention": heads.parts or None, "mlp": mlp, "resid_mid": resid_mid}
    if layers is None and (without := [keyword for keyword, names in declared.items() if names is not None]):
        raise ValueError(f"{without[0]}= names parts of layers: name the layers too, layers=")
    stack = [] if layers is None else _expand(module, layers, "layers")
    parts: list[tuple[str, HookPlace]] = []

    def add(names: Names, keyword: str, component: str, side: Side, **settings: Any) -> None:
        for layer, part in enumerate(_expand(module, names, keyword, n_layers=len(stack))):
            parts.append((part, HookPlace(component, layer, side, batch_first=reading.batch_first, **settings)))

    if stack:
        add(stack, "layers", "resid_pre", "input")
        add(stack, "layers", "resid_post", "output")
    for key, names in heads.parts.items():
        keyword = f"attention[{key!r}]"
        if key == "qkv":
            for i, part in enumerate(QKV):
                add(names, keyword, part, "output", joint=JointProjection(i, heads.split))
        elif key == "fused":
            named = {component for other, (component, _) in PARTS_OF_ATTENTION.items() if other in heads.parts}
            for component in COMPONENTS:
                if component not in named and not ("qkv" in heads.parts and component in QKV):
                    add(names, keyword, component, "inside", n_heads=heads.number(component))
        else:
            add(names, keyword, *PARTS_OF_ATTENTION[key], n_heads=heads.number(key))
    if resid_mid is not None:
        add(resid_mid, "resid_mid", "resid_mid", "input")
    if mlp is not None:
        add(mlp, "mlp", "mlp_out", "output")
    read_out = [] if unembed is None else _expand(module, unembed, "unembed")
    name = name or type(module).__name__
    return WrappedModel(module, parts, reading, decode, len(stack), heads.n_heads or 1, read_out, name)


def _takes_one_tensor(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError:
        return False
    except ValueError:  # compiled code has no signature
        return True
    return True


@dataclass(frozen=True)
class _Heads:
    parts: dict[str, Any]
    n_heads: Count | None = None
    n_key_value_heads: Count | None = None
    own_split: Split | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def number(self, key: str) -> int | None:
        return self.n_key_value_heads or self.n_heads if key in ("k", "v") else self.n_heads

    def split(self, joint: Tensor) -> list[Tensor]:
        if self.own_split is not None:
            return list(self.own_split(joint))
        numbers = [self.number(part) or 1 for part in QKV]
        d_head, rest = divmod(joint.shape[-1], sum(numbers))
        if rest:
            raise ValueError(f"{joint.shape[-1]} is not a multiple of {sum(numbers)}, the heads of q, k and v")
        parts = joint.split([number * d_head for number in numbers], dim=-1)
        return [part.unflatten(-1, (number, d_head)) for part, number in zip(parts, numbers, strict=True)]


def _read_attention(module: nn.Module, attention: AttentionNames | None) -> _Heads:
    if attention is None:
        return _Heads({})
    parts: dict[str, Any] = dict(attention) if isinstance(attention, Mapping) else {"out": attention}
    n_heads, n_key_value_heads = (parts.pop(key, None) for key in ("n_heads", "n_key_value_heads"))
    split, known = parts.pop("split", None), [*PARTS_OF_ATTENTION, "qkv", "fused"]
    if unknown := [key for key in parts if key not in known]:
        others = [*known, "n_heads", "n_key_value_heads", "split"]
        raise ValueError(f"attention={{{unknown[0]!r}: ...}} is not one of {others}")
    if not parts:
        raise ValueError(f"attention={attention!r} names no sub-module: give at least one of {known}")
    if split is not None and ("qkv" not in parts or not isinstance(split, Callable)):
        raise ValueError("attention={'split': ...} is a function of the output of the sub-modules of 'qkv'")
    if "qkv" in parts and (twice := [part for part in QKV if part in parts]):
        raise ValueError(f"attention= names {twice[0]!r} and 'qkv', which has it too: leave one out")
    names = parts.get("fused", parts.get("out"))
    opened: list[Any] = [] if names is None else list(map(module.get_submodule, _expand(module, names, "attention")))
    if opened and all(isinstance(each, nn.MultiheadAttention) for each in opened):
        parts["fused"], n_heads = names, n_heads or opened[0].num_heads
    needing = [part for part in parts if part in (*QKV, "z", "fused") or (part == "qkv" and split is None)]
    if needing and n_heads is None:
        raise ValueError(f"attention={{{needing[0]!r}: ...}} needs 'n_heads' too, the number of heads")
    return _Heads(parts, n_heads, n_key_value_heads, split)


def _expand(module: nn.Module, names: Names, keyword: str, *, n_layers: int | None = None) -> list[str]:
    """Sub-modules of a pattern or list of names, in order (first name each); `keyword` is for messages."""
    every, known, first_names = dict(module.named_modules(remove_duplicate=False)), {}, {}
    for name, part in every.items():
        known.setdefault(name.replace("._orig_mod", ""), part)  # which torch.compile inserts
        first_names.setdefault(id(part), name)
    known = {**every, **known} if isinstance(names, str) and "_orig_mod" in names else known
    if isinstance(names, str) and names.count("{}") == 1:
        expanded, layer = [], 0
        while names.format(layer) in known:
            expanded.append(names.format(layer))
            layer += 1
        if not expanded:
            raise ValueError(f"{keyword}={names!r} names no sub-module: there is no {names.format(0)!r}{_hint(known)}")
    else:
        expanded = [names] if isinstance(names, str) else list(names)
        missing = [name for name in expanded if name not in known or not name]
        if missing or not expanded:
            what = f"no sub-module {missing[0]!r}" if missing else "no name at all"
            raise ValueError(f"{keyword}={names!r}: {what}{_hint(known)}")
    if n_layers is not None and len(expanded) != n_layers:
        raise ValueError(f"{keyword}={names!r} names {len(expanded)} sub-modules, and there are {n_layers} layers")
    return [first_names[id(known[name])] for name in expanded]  # a part with two names runs twice


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, `DataParallel` and the like, whose copies and traced code run no hooks."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _hint(known: Mapping[str, nn.Module]) -> str:
    numbered = {re.sub(r"\b0$", "{}", name): name for name in known if re.search(r"(^|\.)0$", name)}
    if numbered:
        return f"; it has {sorted(numbered, key=lambda name: (name.count('.'), name))[:6]}"
    return f"; it has {[name for name in known if name][:12]}"
