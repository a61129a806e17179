"""The same function by plainer weights: norms folded into what reads them, means taken out, value biases moved.

The steps are those of TransformerLens (`process_weights`), which its users take before they attribute logits to
components: afterwards the stream is a sum of parts whose products with the columns of `W_U` are their parts of the
logits. They are written out here, since TransformerLens' own tell a matrix from its transpose by its shape, and since a
model of points may lack what they count on: biases, norms, an embedding. Each step says why it would change a model's
outputs, where it would.

A step works on a state dict `{name: tensor}` with all biases present.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.models.transformer.config import TransformerConfig

State = dict[str, Tensor]
Model = TypeVar("Model", bound=Any)
CENTRING = ("LN", "LNPre")
WEIGHTED = ("LN", "RMS")


# ---- the steps, on state dicts ----


def fold_layer_norm(state: State, cfg: TransformerConfig) -> State:
    """Move the norms' weights and biases into the weights that read them, which are centred after layer norm."""
    state, centres = dict(state), cfg.normalization_type in CENTRING

    def fold(norm: str, weights: tuple[str, ...], biases: tuple[str | None, ...]) -> None:
        if f"{norm}.w" not in state:
            return
        w, b = state[f"{norm}.w"], state.get(f"{norm}.b")
        for weight, bias in zip(weights, biases, strict=True):
            matrix = state[weight]  # [... d_model out]
            if b is not None and bias is not None:
                state[bias] = state[bias] + (b[:, None] * matrix).sum(-2)
            matrix = w[:, None] * matrix
            state[weight] = matrix - matrix.mean(-2, keepdim=True) if centres else matrix
        state[f"{norm}.w"] = torch.ones_like(w)
        if b is not None:
            state[f"{norm}.b"] = torch.zeros_like(b)

    for layer in range(cfg.n_layers):
        attn, mlp = f"blocks.{layer}.attn", f"blocks.{layer}.mlp"
        fold(f"blocks.{layer}.ln1", *_pairs(attn, "QKV"))
        if cfg.gated_mlp:  # b_in is added after the product, so neither factor has a bias
            fold(f"blocks.{layer}.ln2", (f"{mlp}.W_in", f"{mlp}.W_gate"), (None, None))
        else:
            fold(f"blocks.{layer}.ln2", (f"{mlp}.W_in",), (f"{mlp}.b_in",))
    fold("ln_final", ("unembed.W_U",), ("unembed.b_U",))
    return state


def center_writing_weights(state: State, cfg: TransformerConfig) -> State:
    """Take the mean over the stream's dimensions out of all that is written to the stream."""
    writers = {"embed.W_E", "embed.b_E", "pos_embed.W_pos"}
    for layer in range(cfg.n_layers):
        writers |= {f"blocks.{layer}.{name}" for name in ("attn.W_O", "attn.b_O", "mlp.W_out", "mlp.b_out")}
    return {n: weight - weight.mean(-1, keepdim=True) if n in writers else weight for n, weight in state.items()}


def center_unembed(state: State, cfg: TransformerConfig) -> State:
    """Take the mean over the vocabulary out of the read-out: the logits change, their softmax does not."""
    ends = ("unembed.W_U", "unembed.b_U")
    return {n: weight - weight.mean(-1, keepdim=True) if n in ends else weight for n, weight in state.items()}


def fold_value_biases(state: State, cfg: TransformerConfig) -> State:
    """Move the value biases into the output bias of each layer, which they shift by a constant."""
    state = dict(state)
    for layer in range(cfg.n_layers):
        attn = f"blocks.{layer}.attn"
        b_V, W_O = state[f"{attn}.b_V"], state[f"{attn}.W_O"]
        state[f"{attn}.b_O"] = state[f"{attn}.b_O"] + (b_V[..., None] * W_O).sum((0, 1))
        state[f"{attn}.b_V"] = torch.zeros_like(b_V)
    return state


def refactor_factored_attn_matrices(state: State, cfg: TransformerConfig) -> State:
    """Factors of `W_Q W_Kᵀ` and `W_V W_O` with orthogonal columns, and value biases in the output bias."""
    from transformer_lens.weight_processing import ProcessWeights  # loads every architecture of transformers: seconds

    return ProcessWeights.refactor_factored_attn_matrices(dict(state), cfg)


def _pairs(attn: str, letters: str) -> tuple[tuple[str, ...], tuple[str | None, ...]]:
    return tuple(f"{attn}.W_{letter}" for letter in letters), tuple(f"{attn}.b_{letter}" for letter in letters)


# ---- where they change the outputs ----


def _derived_weights(model: Any) -> str | None:
    if model.cfg.attention_weights != "learned":
        return f"attention_weights={model.cfg.attention_weights!r}: the weights are not free to change"
    return None


def _cannot_fold_norms(model: Any) -> str | None:
    cfg = model.cfg
    gated = cfg.gated_mlp and cfg.block_mlp and cfg.normalization_type == "LN"
    if gated and any(block.ln2.b.any() for block in model.blocks):
        return "gated_mlp=True: a gated MLP has no biases that could take up those of its layer norm"
    return _derived_weights(model)


def _cannot_center_writing(model: Any) -> str | None:
    cfg = model.cfg
    reasons = {
        "final_norm=False: the read-out sees the stream's mean": not cfg.final_norm,
        "skip_first_norm=True: the first attention sees the stream's mean": cfg.skip_first_norm,
        "token_clip: what is clipped depends on the stream's mean": cfg.token_clip is not None,
        "mlp_location='input': this MLP sees the stream's mean": cfg.mlp_location == "input",
        "read_in='identity': it writes the tokens as they are": cfg.read_in == "identity",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _cannot_center_unembed(model: Any) -> str | None:
    if model.cfg.prompt_format != "token_ids":
        return "outputs are predictions: only a softmax forgets what is added to all of them"
    return None


def _cannot_fold_values(model: Any) -> str | None:
    cfg = model.cfg
    if set(cfg.attention.split(",")) != {"softmax"}:
        return f"attention={cfg.attention!r}: its weights do not sum to 1, so value biases are not a constant"
    if cfg.sink != "none":
        return f"sink={cfg.sink!r}: weights do not sum to 1, so value biases are not a constant"
    if cfg.keys == "context":
        return "keys='context': a query without context attends to nothing, and has no value bias"
    if cfg.momentum and cfg.momentum_over == "values":
        return "momentum_over='values': value biases pile up over positions"
    return _derived_weights(model)


def _cannot_refactor(model: Any) -> str | None:
    cfg = model.cfg
    if cfg.positional_embedding_type == "rotary":
        return "positional_embedding_type='rotary': the product of queries and keys depends on their positions"
    if cfg.d_head > cfg.d_model:
        return f"d_head={cfg.d_head} is larger than d_model={cfg.d_model}: the factors would be narrower"
    return _cannot_fold_values(model)  # it does that too


@dataclass(frozen=True)
class Step:
    """A step: what it does to a state dict, why it would change a model's outputs (or None), and its usual setting."""

    apply: Callable[[State, TransformerConfig], State]
    why_not: Callable[[Any], str | None]
    default: bool | None  # None: where outputs stay what they are


STEPS = {  # in this order
    "fold_ln": Step(fold_layer_norm, _cannot_fold_norms, None),
    "center_writing_weights": Step(center_writing_weights, _cannot_center_writing, None),
    "center_unembed": Step(center_unembed, _cannot_center_unembed, None),
    "fold_value_biases": Step(fold_value_biases, _cannot_fold_values, None),
    "refactor_factored_attn_matrices": Step(refactor_factored_attn_matrices, _cannot_refactor, False),
}


# ---- models ----


@checked
@torch.no_grad()
def process_weights(
    model: Model,
    *,
    fold_ln: bool | None = None,
    center_writing_weights: bool | None = None,
    center_unembed: bool | None = None,
    fold_value_biases: bool | None = None,
    refactor_factored_attn_matrices: bool = False,
) -> Model:
    """A model that computes the same by plainer weights, as TransformerLens' users know them.

    A step that is left at None is taken where it leaves the outputs what they are. As in TransformerLens, steps
    that have nothing to do are passed over: folding without a norm or with one without weights, and centring what is
    written to the stream where the norm is not layer norm. Computed in float64.

    Args:
        model: a `HookedTransformer`, which is left as it is.
        fold_ln: move the norms' weights and biases into the weights that read them: "LN" becomes "LNPre", "RMS"
            becomes "RMSPre". An identity read-out after a final norm becomes a linear one.
        center_writing_weights: take the mean over d_model out of all that writes to the stream.
        center_unembed: take the mean over the vocabulary out of `W_U` and `b_U`. Logits change by one number for each
            position, their softmax does not.
        fold_value_biases: move `b_V` into `b_O`.
        refactor_factored_attn_matrices: make the factors of `W_Q W_Kᵀ` and of `W_V W_O` orthogonal.

    Returns:
        A model in the same mode, on the same device, with the same tokenizer.

    Raises:
        ValueError: a step that is asked for would change the outputs; the message says why.

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
    has_nothing_to_do = {
        "fold_ln": cfg.normalization_type not in WEIGHTED,
        "center_writing_weights": cfg.normalization_type not in CENTRING,
        "fold_value_biases": not cfg.attn_bias and not _makes_biases(cfg, wanted["fold_ln"]),
    }
    for name, step in STEPS.items():
        if wanted[name] is False or has_nothing_to_do.get(name):
            continue
        reason = step.why_not(model)
        if reason is not None and wanted[name]:
            raise ValueError(f"{name} would change the outputs of this model ({reason}): leave it at None or False")
        if reason is None:
            steps.append(name)

    folded = "fold_ln" in steps
    biased = bool({"fold_value_biases", "refactor_factored_attn_matrices"} & {*steps})
    new_cfg = _config_after(cfg, folded, biased)
    state = _with_all_weights(model)
    for name in steps:
        state = STEPS[name].apply(state, cfg)
    if {"center_writing_weights", "fold_value_biases"} <= set(steps):  # what came into b_O
        state = STEPS["center_writing_weights"].apply(state, cfg)
    new = type(model)(new_cfg)
    kept = {name: state[name] for name in new.state_dict()}
    new.load_state_dict(kept)
    for name in ("stream_labels", "tokenizer", "_tokenizer_prepends_bos"):
        setattr(new, name, getattr(model, name))
    return new.train(model.training)


def _makes_biases(cfg: TransformerConfig, fold_ln: bool | None) -> bool:
    return fold_ln is not False and cfg.normalization_type == "LN"


def _config_after(cfg: TransformerConfig, folded: bool, biased: bool) -> TransformerConfig:
    """The config of the processed model: norms without weights, and biases where a step made them."""
    changes: dict[str, Any] = {}
    if folded:
        changes["normalization_type"] = {"LN": "LNPre", "RMS": "RMSPre"}[str(cfg.normalization_type)]
        made_biases = cfg.normalization_type == "LN"
        if cfg.final_norm:
            changes |= {"read_out": "linear", "read_bias": cfg.read_bias or made_biases}
        changes["attn_bias"] = cfg.attn_bias or made_biases
        changes["share_mlp"] = False  # each layer's MLP has taken up a norm of its own
    if biased:
        changes["attn_bias"] = True
    # what was filled in from these fields stays what it is
    filled = ("n_heads", "d_mlp", "attn_only", "final_norm", "attn_bias", "read_bias", "read_in", "read_out")
    return cfg.replace(**({name: getattr(cfg, name) for name in filled} | changes))


def _with_all_weights(model: Any) -> State:
    """The state dict in float64, with biases 0 where the model has none, and an identity read-out as a matrix."""
    cfg, state = model.cfg, {name: weight.detach().double() for name, weight in model.state_dict().items()}
    zeros: dict[str, tuple[int, ...]] = {"unembed.b_U": (cfg.d_out,), "embed.b_E": (cfg.d_model,)}
    for layer in range(cfg.n_layers):
        attn = f"blocks.{layer}.attn"
        zeros |= {f"{attn}.b_{letter}": (cfg.n_heads, cfg.d_head) for letter in "QKV"}
        zeros[f"{attn}.b_O"] = (cfg.d_model,)
    device = model.W_U.device
    missing = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in zeros.items()}
    return {"unembed.W_U": model.W_U.detach().double()} | missing | state
