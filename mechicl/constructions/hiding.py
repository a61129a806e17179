"""Function-preserving changes of hand-written models: obfuscated weights, and compressed streams."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.base.arguments import Count, Natural, NonNegative, checked
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.transformer.config_rules import check_attends
from mechicl.models.transformer.recurrent import Recurrence
from mechicl.prompts import Prompts

_JUNK = 4
"""Dimensions that distractors write into."""
MOST_HALVINGS = 60


@dataclass(frozen=True, eq=False)
class HiddenModel:
    """An obfuscated model, and where the original's stream is in it; see `hide`."""

    model: HookedTransformer
    stream: Float[Tensor, "d_model new_d_model"]


@checked
@torch.no_grad()
def hide(
    model: HookedTransformer, *, seed: int = 0, distractors: Natural = 1,
    junk_prompts: Prompts | Int[Tensor, "prompt pos"] | None = None, noise: NonNegative = 0.0,
) -> HiddenModel:  # fmt: skip
    """Hide the structure of a model's weights without changing its function: a test for analyses that look at weights.

    The residual stream gets a random rotation, so that no single dimension is interpretable, and random invertible
    matrices (gauges) stand between W_Q and W_K, and between W_V and W_O, of each head.

    Args:
        model: a model without norms, clipping, gated MLPs, attention biases, rotary positions or gates of single
            dimensions, for example one of `mechicl.constructions`; the ridge of a Mesa head is one number.
        distractors: number of heads added to each layer, which read the stream with random weights and write into
            dimensions that the model does not read; each MLP also gets 4 * distractors random hidden units.
        junk_prompts: prompts, or token ids; with them, distractors also read the output of earlier distractors, scaled
            so that on these prompts it never exceeds the model's own stream.
        noise: standard deviation of noise added to the heads' and MLPs' weights, relative to the root mean square of
            each matrix; 0 keeps the model's function.

    Returns:
        `HiddenModel`: `model`, with linear read-in and read-out, and `stream` `[d_model new_d_model]` (original stream
        @ `stream` = the same content in the new one). Concatenated positions become learned ones, so such a model
        refuses prompts of more than n_context points.

    Example:
        >>> hidden = hide(constructions.gradient_descent(x_dim=5, n_context=20, step_size=0.1, steps=3), seed=1)
        >>> hidden.model.cfg.n_heads, hidden.stream.shape
        (2, torch.Size([6, 10]))
    """
    cfg = model.cfg
    if junk_prompts is not None and not distractors:
        raise ValueError("junk_prompts needs distractors, got distractors=0")
    check_basis_free(cfg)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    junk = _JUNK if distractors else 0
    width = cfg.d_model + junk
    turned = torch.linalg.qr(normal(width, width)).Q
    stream, rest = turned[: cfg.d_model], turned[cfg.d_model :]
    wide = in_another_stream(model, stream, distractors)
    layers = 1 if cfg.recurrent else cfg.n_layers
    read = stream if junk_prompts is None else turned  # by distractors
    for block, old in zip(list(wide.blocks)[:layers], model.blocks, strict=False):
        _hide_heads(block.attn, old.attn, stream, read, rest, normal)
        if cfg.block_mlp:
            _hide_units(block.mlp, old.mlp, stream, read, rest, normal)
    if cfg.mlp_location == "input" and cfg.d_mlp is not None:
        _hide_units(wide.input_mlp, model.input_mlp, stream, read, rest, normal)
    if junk_prompts is not None:
        _scale_down(wide, stream, rest, junk_prompts)
    for name, weight in wide.named_parameters() if noise else ():
        if name.rsplit(".", 1)[-1] in ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"):
            weight += noise * weight.square().mean().sqrt() * normal(*weight.shape)
    return HiddenModel(wide.eval(), stream)


def in_another_stream(
    model: HookedTransformer, stream: Float[Tensor, "d_model new_d_model"], distractors: int = 0
) -> HookedTransformer:
    """Return a float64 copy with zero blocks in a wider stream, with `distractors` more heads and wider MLPs."""
    cfg, width = model.cfg, stream.shape[1]
    concatenated = cfg.positional_embedding_type in ("one_hot", "sinusoidal")
    placed = {"positional_embedding_type": "standard"} if concatenated else {}
    wide = HookedTransformer(
        cfg.replace(**{
            "d_model": width, "n_heads": cfg.n_heads + distractors, "read_in": "linear", "read_out": "linear",
            "read_bias": False, "d_mlp": None if cfg.d_mlp is None else cfg.d_mlp + 4 * distractors,
            # their defaults depend on the width
            "d_head": cfg.d_head, "score_scale": cfg.score_scale, "attn_only": cfg.attn_only,
            "d_pos": 0 if placed else cfg.d_pos, **placed,
        }),
        initial_weights=model.initial_weights if cfg.prompt_format == "paired" else None,
    ).double()  # fmt: skip
    for name, weight in wide.named_parameters():
        if not name.endswith(".sink"):
            weight.zero_()
    wide.embed.W_E.copy_(model.W_E.double() @ stream)
    wide.unembed.W_U.copy_(stream.T @ model.W_U.double())
    if hasattr(model, "pos_embed"):
        wide.pos_embed.W_pos.copy_(model.W_pos.double() @ stream)
    return wide


def check_basis_free(cfg: TransformerConfig, *, biases: bool = False) -> None:
    """Refuse (ValueError) a model whose function depends on the basis of its stream, or that has biases."""
    reasons = {
        f"normalization_type={cfg.normalization_type!r}": cfg.normalization_type is not None,
        f"token_clip={cfg.token_clip}": cfg.token_clip is not None,
        f"attention_weights={cfg.attention_weights!r}": cfg.attention_weights != "learned",
        "gated_mlp=True": cfg.gated_mlp and cfg.d_mlp is not None,
        "positional_embedding_type='rotary'": cfg.rotates,  # which would turn the gauges' axes too
        "attn_bias=True": cfg.attn_bias and not biases,
        "gate='key'": cfg.gate == "key",
        f"conv_width={cfg.conv_width}": cfg.conv_width > 0,
        "read_bias=True": cfg.read_bias and not biases,
    }
    broken = [name for name, broken in reasons.items() if broken]
    if broken:
        raise ValueError(
            f"model must have learned attention weights and no norms, clipping, gates, rotary positions"
            f"{'' if biases else ' or biases'}, got {', '.join(broken)}"
        )


def _hide_heads(attn: Any, old: Any, stream: Tensor, read: Tensor, rest: Tensor, normal: Any) -> None:
    """Write the old heads, rotated, each in its own gauge, and distractors that write into the rest of the stream."""
    n_heads, width = old.W_Q.shape[0], old.W_Q.shape[2]
    for head in range(n_heads):
        scores, values = (_well_conditioned(normal, width) for _ in range(2))
        if isinstance(old, Recurrence) and old.cfg.attention in ("delta", "mesa"):
            scores = torch.linalg.qr(scores).Q  # keys meet keys: only rotations cancel
        attn.W_Q[head] = stream.T @ old.W_Q[head].double() @ scores
        attn.W_K[head] = stream.T @ old.W_K[head].double() @ torch.linalg.inv(scores).T
        attn.W_V[head] = stream.T @ old.W_V[head].double() @ values
        attn.W_O[head] = torch.linalg.inv(values) @ old.W_O[head].double() @ stream
    if hasattr(attn, "sink"):
        attn.sink[:n_heads] = old.sink
    scale = read.shape[0] ** -0.5
    if isinstance(old, Recurrence):
        attn.reset_gates()
        for name in sorted(set(old._parameters) & {"W_gate", "W_step"}):
            getattr(attn, name)[:n_heads] = stream.T @ getattr(old, name).double()
            getattr(attn, name)[n_heads:] = scale * read.T @ normal(read.shape[0], getattr(old, name).shape[-1])
        for name in sorted(set(old._parameters) & {"b_gate", "b_step", "A_log", "skip", "ridge"}):
            getattr(attn, name)[:n_heads] = getattr(old, name)
    for head in range(n_heads, attn.W_Q.shape[0]):
        for weight in (attn.W_Q, attn.W_K, attn.W_V):
            weight[head] = scale * read.T @ normal(read.shape[0], width)
        attn.W_O[head] = normal(width, rest.shape[0]) @ rest


def _hide_units(mlp: Any, old: Any, stream: Tensor, read: Tensor, rest: Tensor, normal: Any) -> None:
    """Write the old hidden units, rotated and in another order, and distractors that write into the rest."""
    n_old, n_new = old.W_in.shape[1], mlp.W_in.shape[1]
    order = normal(n_new).argsort()
    units = torch.cat([stream.T @ old.W_in.double(), read.T @ normal(read.shape[0], n_new - n_old)], dim=1)
    extra = normal(n_new - n_old, rest.shape[0]) @ rest if n_new > n_old else units.new_zeros(0, stream.shape[1])
    write = torch.cat([old.W_out.double() @ stream, extra])
    bias = torch.cat([old.b_in.double(), normal(n_new - n_old)])
    mlp.W_in.copy_(units[:, order])
    mlp.W_out.copy_(write[order])
    mlp.b_in.copy_(bias[order])
    mlp.b_out.copy_(old.b_out.double() @ stream)


def _scale_down(model: HookedTransformer, stream: Tensor, rest: Tensor, prompts: Prompts | Tensor) -> None:
    """Halve the distractors' output weights until what they write is nowhere larger than the stream."""
    prompts = prompts.to(torch.float64) if isinstance(prompts, Prompts) else prompts
    outputs = [(module, name) for module in model.modules() for name in ("W_O", "W_out") if name in module._parameters]
    for _ in range(MOST_HALVINGS):
        cache = model.run_with_cache(prompts, names_filter=lambda name: name.endswith("resid_post"))[1]
        sizes = [(value @ rest.T).square().mean() / (value @ stream.T).square().mean() for value in cache.values()]
        if all(size <= 1 for size in sizes):  # False for NaN
            return
        for module, name in outputs:
            weight = getattr(module, name)
            weight -= 0.5 * weight @ rest.T @ rest
    raise ValueError(f"junk_prompts must not make the distractors exceed the stream at every scale, got {prompts}")


def _well_conditioned(normal: Any, size: int) -> Tensor:
    left, right = (torch.linalg.qr(normal(size, size)).Q for _ in range(2))
    return left @ torch.diag(2 ** normal(size).clamp(-1, 1)) @ right


@dataclass(frozen=True, eq=False)
class CompressedModel:
    """A model in a narrower stream, and how well it imitates the original; see `compress`."""

    model: HookedTransformer
    stream: Float[Tensor, "d_model new_d_model"]
    projected: float


@checked
@torch.no_grad()
def compress(
    model: HookedTransformer, prompts: Prompts | Int[Tensor, "prompt pos"], *, d_model: Count
) -> CompressedModel:
    """Move a model into a stream of fewer dimensions (superposition), by a projection.

    The result tests analyses: each head and MLP keeps its role, but weights no longer show the circuit. The stream is
    projected onto the principal directions (uncentred) of its values on the prompts. If the model uses at most
    `d_model` dimensions, as many compiled programs do, this is exact. Otherwise unrelated directions share dimensions,
    and outputs change. Source: Lindner et al. 2023, section 5, who train the projection.

    Args:
        model: a mechicl model that `hide` accepts (no norms, gates, clipping, biases or rotary positions).
        prompts: `Prompts`, or token ids for a model of tokens.
        d_model: width of the new stream, at most the model's.

    Returns:
        `CompressedModel`: `model`; `stream` `[d_model new_d_model]` with orthonormal columns, the map into the new
        stream; `projected`, the mean squared difference of the model's outputs from the original's (absolute, over all
        positions and entries, on the given prompts).

    Example:
        >>> model = constructions.induction(d_vocab=4, n_ctx=6)
        >>> ids = torch.randint(4, (64, 6), generator=torch.Generator().manual_seed(0))
        >>> narrow = compress(model, ids, d_model=14)
        >>> narrow.model.cfg.d_model, model.cfg.d_model
        (14, 18)
    """
    check_basis_free(model.cfg)
    check_attends(model.cfg)
    if d_model > model.cfg.d_model:
        raise ValueError(f"d_model must be at most the model's {model.cfg.d_model}, got {d_model}")
    if not len(prompts):
        raise ValueError("prompts must not be empty")
    tokens = model.encode(prompts) if isinstance(prompts, Prompts) else prompts
    halves = {f"blocks.{layer}.hook_resid_{half}" for layer in range(model.cfg.n_layers) for half in ("mid", "post")}
    outputs, cache = model.run_with_cache(tokens, names_filter=(halves | {"blocks.0.hook_resid_pre"}).__contains__)
    streams = torch.cat([stream.flatten(0, 1).double() for stream in cache.values()])
    stream = torch.linalg.svd(streams, full_matrices=False).Vh[:d_model].T.contiguous()
    narrow, weights = in_another_stream(model, stream), dict(model.named_parameters())
    for name, weight in narrow.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in ("W_Q", "W_K", "W_V", "W_in"):
            weight.copy_(stream.T @ weights[name].double())
        elif kind in ("W_O", "W_out", "b_out"):
            weight.copy_(weights[name].double() @ stream)
        elif kind in ("b_in", "sink"):
            weight.copy_(weights[name])
    tokens = tokens.double() if tokens.is_floating_point() else tokens
    error = (narrow(tokens) - outputs.double()).square().mean().item()
    return CompressedModel(narrow.eval(), stream, error)
