"""Simplify a transformer's weights without changing its outputs: fold norms, centre weights, move value biases.

TransformerLens' users take these steps (`process_weights`) before they attribute logits to components: afterwards the
stream is a sum of parts whose products with the columns of `W_U` are their parts of the logits. They are written out
here, since TransformerLens' own tell a matrix from its transpose by its shape, and since a model of points may lack the
biases, norms, or embedding that they need. A step that would change a model's outputs is refused, with the reason.

A step takes a state dict `{name: tensor}` and returns another one; biases that it needs are added if they are missing.
Sums are taken in float64, and each weight keeps its dtype.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.models.transformer.config import TransformerConfig

NamedWeights = dict[str, Tensor]
Processed = TypeVar("Processed", bound=Any)
CENTRING = ("LN", "LNPre")
WEIGHTED = {"LN": "LNPre", "RMS": "RMSPre"}  # norms with weights: the same without


# ---- the steps, on state dicts ----


def _centred(weight: Tensor, axis: int = -1) -> Tensor:
    precise = weight.double()
    return (precise - precise.mean(axis, keepdim=True)).to(weight)


def _untied(state: NamedWeights, cfg: TransformerConfig) -> NamedWeights:
    """A copy of a state dict with a separate matrix for a tied read-out, which steps change alone."""
    tied = cfg.tie_word_embeddings and "unembed.W_U" not in state
    return state | {"unembed.W_U": state["embed.W_E"].T / cfg.embedding_scale} if tied else dict(state)


def fold_layer_norm(
    state: NamedWeights, cfg: TransformerConfig, fold_biases: bool = True, center_weights: bool = True
) -> NamedWeights:
    """Move the norms' weights and biases into the weights that read them, which are centred after layer norm.

    Norms of a part's output (`norm_location` "both") have no reader, and stay.
    """
    state, layer_norm = _untied(state, cfg), cfg.normalization_type in CENTRING

    def fold(norm: str, *readers: tuple[str, str | None], centres: bool = layer_norm) -> None:
        if f"{norm}.w" not in state:
            return
        w, b = state[f"{norm}.w"], state.get(f"{norm}.b") if fold_biases else None
        for weight, bias in readers:
            matrix = state[weight].double()  # [... d_model out]
            if b is not None and bias is not None:
                folded = (b[:, None] * matrix).sum(-2)
                state[bias] = (state[bias].double() + folded if bias in state else folded).to(state[weight])
            matrix = (w[:, None] * matrix).to(state[weight])
            state[weight] = _centred(matrix, -2) if centres and center_weights else matrix
        state[f"{norm}.w"] = torch.ones_like(w)
        if b is not None:
            state[f"{norm}.b"] = torch.zeros_like(b)

    for layer in range(cfg.n_layers):
        block = f"blocks.{layer}"
        attn, mlp = f"{block}.attn", f"{block}.mlp"
        names = ("W_Q", "W_K", "W_V", "_W_K", "_W_V", "W_gate", "W_step")
        names = [name for name in names if f"{attn}.{name}" in state]
        by_attention = [(f"{attn}.{name}", f"{attn}.{name.replace('W_', 'b_')}") for name in names]
        # b_in of a gated MLP is added after the product, so neither factor has a bias
        names = [name for name in ("W_in", "W_gate") if f"{mlp}.{name}" in state]
        by_mlp = [(f"{mlp}.{name}", None if cfg.gated_mlp else f"{mlp}.b_in") for name in names]
        shared = cfg.parallel_attn_mlp and f"{block}.ln2.w" not in state
        fold(f"{block}.ln1", *by_attention, *(by_mlp if shared else ()))
        fold(f"{block}.ln2", *by_mlp)
        fold(f"{mlp}.ln", (f"{mlp}.W_out", f"{mlp}.b_out"))
    fold("ln_final", ("unembed.W_U", "unembed.b_U"), centres=layer_norm and not cfg.final_rms)
    return state


def center_writing_weights(state: NamedWeights, cfg: TransformerConfig) -> NamedWeights:
    """Subtract the mean over the stream's dimensions from everything that is written to the stream."""
    writers = {"embed.W_E", "embed.b_E", "pos_embed.W_pos"}
    for layer in range(cfg.n_layers):
        writers |= {f"blocks.{layer}.{name}" for name in ("attn.W_O", "attn.b_O", "mlp.W_out", "mlp.b_out")}
    return {n: _centred(weight) if n in writers else weight for n, weight in _untied(state, cfg).items()}


def center_unembed(state: NamedWeights, cfg: TransformerConfig) -> NamedWeights:
    """Subtract the mean over the vocabulary from the read-out: the logits change, their softmax does not."""
    ends = ("unembed.W_U", "unembed.b_U")
    return {n: _centred(weight) if n in ends else weight for n, weight in _untied(state, cfg).items()}


def fold_value_biases(state: NamedWeights, cfg: TransformerConfig) -> NamedWeights:
    """Move the value biases into the output bias of each layer, which they shift by a constant."""
    state = dict(state)
    for layer in range(cfg.n_layers):
        attn = f"blocks.{layer}.attn"
        name = next((f"{attn}.{bias}" for bias in ("b_V", "_b_V") if f"{attn}.{bias}" in state), None)
        if name is None:
            continue
        b_V, W_O = state[name], state[f"{attn}.W_O"].double()
        folded = (b_V.repeat_interleave(len(W_O) // len(b_V), dim=0)[..., None] * W_O).sum((0, 1))
        b_O = state.get(f"{attn}.b_O")
        state[f"{attn}.b_O"] = (folded if b_O is None else b_O + folded).to(b_V)
        state[name] = torch.zeros_like(b_V)
    return state


def refactor_factored_attn_matrices(state: NamedWeights, cfg: TransformerConfig) -> NamedWeights:
    """Replace the factors of `W_Q W_Kᵀ` and `W_V W_O` by orthogonal ones; value biases move to the output bias."""
    from transformer_lens.weight_processing import ProcessWeights  # loads every architecture of transformers: seconds

    zeros = {name: zero for name, zero in zero_biases(state, cfg).items() if ".attn." in name}
    return ProcessWeights.refactor_factored_attn_matrices(zeros | dict(state), cfg)


STEPS: dict[str, Callable[[NamedWeights, TransformerConfig], NamedWeights]] = {  # in this order
    "fold_ln": fold_layer_norm,
    "center_writing_weights": center_writing_weights,
    "center_unembed": center_unembed,
    "fold_value_biases": fold_value_biases,
    "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
}


# ---- reasons for which they would change the outputs ----


def why_not(model: Any, step: str) -> str | None:
    """Return the reason why a step would change a model's outputs; None if it would not."""
    cfg: TransformerConfig = model.cfg
    gated = cfg.gated_mlp and cfg.block_mlp and cfg.normalization_type == "LN"
    after_the_norm = (cfg.positional_embedding_type == "shortformer",
                      "positional_embedding_type='shortformer': positions are added after the norm")  # fmt: skip
    outputs_only = (cfg.norm_location == "after", "norm_location='after': attention and MLP read the stream unchanged")
    fixed = (cfg.attention_weights != "learned", f"attention_weights={cfg.attention_weights!r}: the weights are fixed")
    values = [
        (set(cfg.attention.split(",")) != {"softmax"},
         f"attention={cfg.attention!r}: its weights do not sum to 1, so value biases are not a constant"),
        (cfg.sink != "none", f"sink={cfg.sink!r}: weights do not sum to 1, so value biases are not a constant"),
        (cfg.keys == "context", "keys='context': a query without context attends to nothing, and has no value bias"),
        (bool(cfg.momentum) and cfg.momentum_over == "values",
         "momentum_over='values': value biases pile up over positions"),
        (cfg.clip_qkv is not None, "clip_qkv: queries, keys and values are clipped with their biases"),
        fixed,
    ]  # fmt: skip
    reasons: dict[str, list[tuple[bool, str]]] = {
        "fold_ln": [
            (gated and any(bool(block.ln2.b.any()) for block in model.blocks),
             "gated_mlp=True: a gated MLP has no biases that could take up those of its layer norm"),
            after_the_norm, outputs_only, fixed,
        ],
        "center_writing_weights": [
            after_the_norm, outputs_only,
            (cfg.final_rms, "final_rms=True: the last norm sees the stream's mean"),
            (not cfg.final_norm, "final_norm=False: the read-out sees the stream's mean"),
            (cfg.skip_first_norm, "skip_first_norm=True: the first attention sees the stream's mean"),
            (cfg.token_clip is not None, "token_clip: the clipped values depend on the stream's mean"),
            (cfg.mlp_location == "input", "mlp_location='input': this MLP sees the stream's mean"),
            (cfg.read_in == "identity", "read_in='identity': it writes the tokens unchanged"),
        ],
        "center_unembed": [
            (cfg.prompt_format != "token_ids",
             "outputs are predictions: only a softmax is unchanged by a constant added to all"),
            (cfg.output_logits_soft_cap > 0, "output_logits_soft_cap: what is added to all logits is capped with them"),
        ],
        "fold_value_biases": values,
        "refactor_factored_attn_matrices": [
            (cfg.rotates, "positional_embedding_type='rotary': the product of queries and keys depends on positions"),
            (cfg.use_qk_norm, "use_qk_norm=True: queries and keys are normalized"),
            (cfg.n_key_value_heads is not None, "n_key_value_heads: heads share keys and values"),
            (cfg.d_head > cfg.d_model, f"d_head={cfg.d_head} exceeds d_model={cfg.d_model}: factors would be narrower"),
            *values,  # it does that too
        ],
    }  # fmt: skip
    return next((reason for holds, reason in reasons[step] if holds), None)


@checked
@torch.no_grad()
def process_weights(
    model: Processed,
    *,
    fold_ln: bool | None = None,
    center_writing_weights: bool | None = None,
    center_unembed: bool | None = None,
    fold_value_biases: bool | None = None,
    refactor_factored_attn_matrices: bool = False,
) -> Processed:
    """Simplify a model's weights without changing its outputs, like TransformerLens' weight processing.

    Each step is an argument: True applies it, False skips it, and None applies it if the outputs stay the same (up to
    a constant in the logits of a position, for `center_unembed`). As in TransformerLens, steps without an effect are
    skipped: folding if the model has no norm or its norm has no weights, and centring if the norm is not layer norm.
    Computed in float64.

    Args:
        model: a `HookedTransformer`, which is not changed.
        fold_ln: move the norms' weights and biases into the weights that read them: "LN" becomes "LNPre", "RMS"
            becomes "RMSPre". An identity read-out after a final norm becomes a linear one.
        center_writing_weights: subtract the mean over d_model from all weights that write to the residual stream.
        center_unembed: subtract the mean over the vocabulary from `W_U` and `b_U`. This adds the same constant to all
            logits of a position, which leaves their softmax unchanged.
        fold_value_biases: move the value biases `b_V` into the output bias `b_O`.
        refactor_factored_attn_matrices: replace `W_Q`, `W_K` and `W_V`, `W_O` by orthogonal factors of the same
            products `W_Q W_Kᵀ` and `W_V W_O`; never by default.

    Returns:
        A new `HookedTransformer` in the same mode, on the same device, with the same tokenizer.

    Raises:
        ValueError: a step set to True would change the outputs; the message gives the reason.

    Example:
        >>> cfg = TransformerConfig(prompt_format="token_ids", d_vocab=7, n_ctx=6, d_model=8, normalization_type="LN")
        >>> process_weights(HookedTransformer(cfg)).cfg.normalization_type
        'LNPre'
    """
    if not all(hasattr(model, name) for name in ("cfg", "W_U", "named_parameters")):
        raise TypeError(f"model must be a HookedTransformer, got {type(model).__name__}")
    wanted = {
        "fold_ln": fold_ln, "center_writing_weights": center_writing_weights, "center_unembed": center_unembed,
        "fold_value_biases": fold_value_biases, "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
    }  # fmt: skip
    cfg, steps = model.cfg, []
    makes_biases = fold_ln is not False and cfg.normalization_type == "LN"
    without_effect = {
        "fold_ln": cfg.normalization_type not in WEIGHTED,
        "center_writing_weights": cfg.normalization_type not in CENTRING,
        "fold_value_biases": not cfg.attn_bias and not makes_biases,
    }
    for name in STEPS:
        if wanted[name] is False or without_effect.get(name):
            continue
        reason = why_not(model, name)
        if reason is not None and wanted[name]:
            raise ValueError(f"{name} would change the outputs of this model ({reason}): leave it at None or False")
        if reason is None:
            steps.append(name)
    state = {"unembed.W_U": model.W_U.detach()} | {name: weight.detach() for name, weight in model.state_dict().items()}
    for name in steps:
        state = STEPS[name](state, cfg)
    if {"center_writing_weights", "fold_value_biases"} <= set(steps):  # b_O has new parts
        state = STEPS["center_writing_weights"](state, cfg)
    biased = bool({"fold_value_biases", "refactor_factored_attn_matrices"} & {*steps})
    new = type(model)(_config_after(cfg, steps, biased).replace(device="meta"))
    state = zero_biases(state, new.cfg) | state
    shared = {weight.data_ptr() for weight in model.state_dict().values()}
    kept = {name: state[name].clone() if state[name].data_ptr() in shared else state[name] for name in new.state_dict()}
    new.load_state_dict(kept, assign=True)
    new._replace_cfg(device=cfg.device)
    for name in ("stream_labels", "tokenizer", "_start"):
        setattr(new, name, getattr(model, name))
    return new.train(model.training)


def _config_after(cfg: TransformerConfig, steps: list[str], biased: bool) -> TransformerConfig:
    changes: dict[str, Any] = {}
    if "fold_ln" in steps:
        makes_biases = cfg.normalization_type == "LN"
        changes["normalization_type"] = WEIGHTED[str(cfg.normalization_type)]
        # without a shared MLP: each layer's MLP has taken up its own norm
        changes["share_mlp"] = False
        changes["attn_bias"] = cfg.attn_bias or makes_biases
        if cfg.final_norm:
            changes |= {"read_out": "linear", "read_bias": cfg.read_bias or makes_biases}
    if cfg.tie_word_embeddings and {"fold_ln", "center_writing_weights", "center_unembed"} & {*steps}:
        changes["tie_word_embeddings"] = False
    if biased:
        changes["attn_bias"] = True
    # fields that were filled in from the changed ones keep their values
    filled = ("n_heads", "d_mlp", "attn_only", "final_norm", "attn_bias", "read_bias", "read_in", "read_out")
    return cfg.replace(**({name: getattr(cfg, name) for name in filled} | changes))


def zero_biases(state: NamedWeights, cfg: TransformerConfig) -> NamedWeights:
    """Zeros for the biases of attention, read-in and read-out, for weights that have none."""
    ends = {"embed.W_E": "embed.b_E", "unembed.W_U": "unembed.b_U"}
    zeros = {bias: state[name].new_zeros(state[name].shape[-1]) for name, bias in ends.items() if name in state}
    for name, weight in state.items():
        if name.startswith("blocks.") and name.endswith(("W_Q", "W_K", "W_V")):
            zeros[name.replace("W_", "b_")] = weight.new_zeros(len(weight), weight.shape[-1])
        elif name.endswith("attn.W_O"):
            zeros[name.replace("W_O", "b_O")] = weight.new_zeros(cfg.d_model)
    return zeros
