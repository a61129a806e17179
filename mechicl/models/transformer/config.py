"""`TransformerConfig`: every choice that makes a `HookedTransformer`, with defaults that depend on other choices."""

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch

from mechicl.base.arguments import Count, Natural, NonNegative, Positive, check_fields, checked, strictly_between
from mechicl.models.config_checks import DTYPES, dtype_name, read_config
from mechicl.models.transformer.config_rules import (
    DESCRIPTIVE,
    RECURRENT,
    UNCOMPUTED,
    check_combinations,
    fill_defaults,
)
from mechicl.prompts import prompt_format
from mechicl.prompts.formats import PromptFormat

_T = TypeVar("_T")
# `Filled` fields may be left out and are filled in on construction, so that readers of a config never see None.
if TYPE_CHECKING:
    Filled = Annotated[_T, "filled"]
    Dtype = Any
else:
    Filled = _T | None
    Dtype = str | torch.dtype
Finite = Annotated[float, strictly_between(-1e300, 1e300)]
Norm = Literal["LN", "LNPre", "RMS", "RMSPre"]
Positions = Literal["none", "standard", "rotary", "alibi", "shortformer", "one_hot", "sinusoidal"]
SYNONYMS = {"keys": "attention_dir", "score_scale": "attn_scale"}
LEFT_OUT: Any = None
_format = functools.cache(prompt_format)  # models ask for it several times a call


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Every choice that makes a `HookedTransformer`. Field names are TransformerLens' where it has the field.

    Fields left out get a default that depends on the others. Models of token ids get TransformerLens' defaults
    (softmax, causal, layer norm, biases, an MLP); models of points (x, y) by default have linear attention and no norm,
    bias or MLP. `HookedTransformerConfig` takes all of TransformerLens' names.

    Attributes:
        x_dim: dimension of the inputs (continuous formats).
        y_dim: dimension of the targets.
        n_context: largest number of context points; determines n_ctx. Longer prompts fit if positions are neither
            learned nor concatenated.
        prompt_format: "paired" (one token a point), "interleaved" (x and y in alternate tokens) or "token_ids" (a
            vocabulary: ids `[batch pos]` to logits); by default "token_ids" with a d_vocab and no x_dim, else "paired".
        d_vocab: size of the vocabulary for "token_ids".
        d_vocab_out: number of logits; by default d_vocab.
        n_ctx: number of positions; needed for "token_ids", derived otherwise.
        n_layers: number of blocks.
        n_heads: number of heads a block; by default 1, or d_model / d_head for token ids.
        d_model: width of the residual stream; by default that of a token and its concatenated position.
        d_head: width of a head; by default d_model / n_heads for softmax, else d_model (von Oswald et al. 2023, whose
            matrices are square).
        d_mlp: hidden width of the MLPs; None for no MLP, or for 4 d_model if attn_only is False.
        attn_only: no MLP inside the blocks; by default False for token ids, else whether d_mlp is None; True if the MLP
            is on the input.
        gated_mlp: MLPs are `(act(x W_gate) * x W_in + b_in) W_out + b_out`.
        mlp_location: "blocks" (after each attention) or "input" (one residual MLP on the embedded tokens, before the
            blocks; von Oswald et al. 2023, A.7).
        act_fn: activation of the MLPs: a name in `ELEMENTWISE`, "solu" (`x · softmax(x)`), or "solu_ln", with a norm
            after it (Elhage et al. 2022).
        parallel_attn_mlp: the MLP reads the stream before the attention, as the attention does (GPT-J).
        attention: "softmax", "linear", or a name in `ELEMENTWISE`, which is applied to each score; a layer with a state
            ("delta", "gated_linear", "mamba2" or "mesa", see `transformer/recurrent.py`); or one for each layer, with
            commas between: "softmax,linear". By default "softmax" for token ids, else "linear".
        gate: decay of a recurrent layer's state: "none", "head" (one number a head) or "key" (one for each dimension of
            the keys; not in "mesa"); by default "head" for "gated_linear" and "mesa", "none" for "delta". The decay of
            "mamba2" follows from its step size.
        normalize_keys: divide a recurrent layer's keys by their length, so that states stay bounded in training; by
            default for "delta" and "mesa".
        conv_width: width of a causal convolution over positions of a recurrent layer's queries, keys and values, one
            filter a dimension, with which a token reads those just before it; 0 for none. Published layers have width
            4, and a SiLU after it that this one lacks (Dao & Gu 2024; Yang et al. 2024).
        attention_weights: "learned", or "gradient_descent": the weights of a step of gradient descent that fits the
            y-dimensions of the stream to its others, with one learned step size a layer (the control of von Oswald et
            al. 2023, A.7). It needs one linear head, no biases, and an identity read-out.
        attention_slope: slope of "leaky_relu" attention for negative scores.
        score_scale: factor on the scores; by default `1/sqrt(d_head)` if all layers are softmax, else 1.
        normalize_by_context: divide elementwise attention by the number of visible keys (Nertinger's 1/n, eq. 1).
        keys: positions that a position attends to: "causal" (itself and those before), "context" (all but the last,
            which is the query) or "full"; by default "context" for paired prompts, else "causal". Recurrent layers are
            always causal, and with "context" the query reads the state without writing to it; not "full".
        n_key_value_heads: number of groups of heads that share keys and values (Ainslie et al. 2023); None for none.
        use_qk_norm: divide queries and keys by their root mean square, with weights.
        qk_norm_over: what that is taken over: each "head" (Qwen 3, Gemma 3), or "all" heads together (OLMo 2).
        clip_qkv: bound on the absolute values of queries, keys and values (OLMo).
        attn_scores_soft_cap: c in `c · tanh(score / c)` (Gemma 2); -1 for none.
        use_local_attn: positions of "local" layers attend to the last `window_size` positions only, themselves
            included; all layers are local, or those of `attn_types`.
        window_size: number of these positions.
        attn_types: "global" or "local" for each layer.
        scale_attn_by_inverse_layer_idx: divide the scores of layer l by l + 1.
        momentum: η of momentum attention, in [0, 1); 0 for none. Needs causal keys. Scores and pattern are those of
            plain attention; z has the momentum.
        momentum_over: "outputs" (z'_t = η z'_{t-1} + (1 - η) z_t from z'_0 = z_0 on: an exponential average over
            positions) or "values" (z'_t = z_t + Σ_{i<t} η^(t-i) v_i; Dai et al. 2023, section 5, eq. 11).
        sink: an extra key per head with value zero and a constant score, softmax only: "none", "fixed" (score
            `sink_score`) or "learned" (starting there).
        sink_score: score of the extra key, at the start if it is learned.
        normalization_type: None, "LN" (layer norm before attention and MLP, with weights), "LNPre" (without), "RMS"
            (division by the root mean square, with weights) or "RMSPre" (without); by default ("default") "LN" for
            token ids, else None.
        norm_location: norms are applied to what attention and MLP read ("before"), to what they write ("after", OLMo
            2), or to "both" (Gemma 2; then `ln1_post` and `ln2_post` have weights).
        skip_first_norm: no norm before the first attention layer (von Oswald et al. 2023, A.9); with `recurrent`,
            which repeats the first layer, no norm before any attention.
        final_norm: a norm before the read-out; by default with normalization and a linear read-out.
        final_rms: the final norm is a root-mean-square norm whatever the others are.
        eps: added to the variance (or the mean square) in a norm.
        recurrent: all blocks share the weights of the first ("looped").
        share_mlp: all blocks share the MLP of the first, but not its attention and norms, as in the authors' code of
            von Oswald et al. 2023 (the paper has an MLP in each layer).
        damping: factor on every update of the residual stream by a block (von Oswald et al. 2023, A.6).
        token_clip: bound on the absolute values of the stream after each block (von Oswald et al. 2023, A.12).
        read_in: "identity" (tokens are the first dimensions of the stream) or "linear"; by default "identity" for
            paired prompts without a d_model wider than a token, else "linear".
        read_out: "linear", or "identity" (minus the y-dimensions of the stream, `y_slot`; von Oswald et al. 2023,
            section 2); by default "identity" for paired prompts with an identity read-in, else "linear".
        post_embedding_ln: a norm after the token embedding, `embed.ln` (Bloom).
        tie_word_embeddings: the read-out is the token embedding transposed, one matrix in memory.
        embedding_scale: factor that `W_E` contains and a tied read-out lacks (Gemma).
        output_logits_soft_cap: c in `c · tanh(logit / c)`; -1 for none.
        positional_embedding_type: "none", "standard" (learned, added), "rotary" (queries and keys are rotated; Su et
            al. 2021), "alibi" (scores fall linearly with the distance; Press et al. 2022), "shortformer" (learned,
            added to what queries and keys read; Press et al. 2021), "one_hot" or "sinusoidal" (concatenated to the
            tokens); by default "none" for paired prompts, else "standard".
        d_pos: width of concatenated positions: by default n_ctx for one_hot, 20 for sinusoidal.
        falcon_alibi: ALiBi as in Falcon, over `sqrt(d_head)` and rounded to bfloat16.
        rotary_dim: number of dimensions of a head that are rotated; by default d_head.
        rotary_base: base of the rotary wavelengths.
        rotary_adjacent_pairs: rotate neighbouring dimensions together, instead of i and i + rotary_dim / 2.
        rotary_base_local: base of the rotary wavelengths of local layers, whose frequencies are not scaled (Gemma 3).
        rotary_float32: compute rotary angles in float32 whatever the dtype, as transformers does.
        rope_scaling: change of the rotary frequencies for longer texts, as transformers has it:
            `{"rope_type": "llama3", "factor": 8.0, ...}`, or "linear", "dynamic", "yarn" or "longrope"; also with the
            `max_position_embeddings` that these scale from, by default n_ctx.
        attn_bias: biases in q, k, v and the output of attention; by default with normalization, and for token ids.
        read_bias: biases in a linear read-out, and in a linear read-in of points; by default as attn_bias.
        initializer_range: standard deviation of the blocks' initial weights (normal, cut at two deviations); by
            default `0.8 / sqrt(d_model)` for token ids, 0.02 for other softmax models, else
            `sqrt(0.002 / n_layers / d_model)`, the fan-in scaling of von Oswald et al. 2023, A.12. A linear read-in
            and read-out always have `1 / sqrt(fan_in)`.
        seed: seed of the initial weights, unless `HookedTransformer` is given another one.
        dtype: "float32", "float64", "bfloat16" or "float16", or torch's; read as torch's, as in TransformerLens.
        device: device of a new model; the model keeps it up to date.
        use_attn_result: compute each head's output `attn.hook_result`, which costs memory; False: no such hook.
        use_attn_state: compute `attn.hook_state`, recurrent layers' states after each position; False: no such hook.
        use_attn_in: each head reads a copy of the stream, `hook_attn_in` `[batch pos head d_model]`.
        use_split_qkv_input: each head's queries, keys and values read separate copies, `hook_q_input` ...
        ungroup_grouped_query_attention: `hook_k` and `hook_v` have the keys and values of each head, not of each group.
        use_hook_mlp_in: the MLP reads a copy of the stream, `hook_mlp_in`. Blocks without MLP get one without neurons:
            `hook_mlp_in` and `hook_mlp_out`, which is 0, for code that expects them in every block.
        default_prepend_bos: put the tokenizer's first token (BOS) before texts, unless a call does otherwise.
        attention_dir: TransformerLens' name for keys: "causal", or "bidirectional" for "full" and "context".
        attn_scale: TransformerLens' name for 1 / score_scale.

    Raises:
        ValueError: a value is out of range or unknown, or two fields exclude each other; the message names them.

    Example:
        >>> TransformerConfig(x_dim=10, n_context=10, n_layers=1).d_model
        11
    """

    x_dim: Count | None = None
    y_dim: Count = 1
    n_context: Natural | None = None
    prompt_format: Filled[Literal["paired", "interleaved", "token_ids"]] = LEFT_OUT
    d_vocab: Count | None = None
    d_vocab_out: Count | None = None
    n_ctx: Filled[Count] = LEFT_OUT

    n_layers: Natural = 1
    n_heads: Filled[Count] = LEFT_OUT
    d_model: Filled[Count] = LEFT_OUT
    d_head: Filled[Count] = LEFT_OUT
    d_mlp: Count | None = None
    attn_only: Filled[bool] = LEFT_OUT
    gated_mlp: bool = False
    mlp_location: Literal["blocks", "input"] = "blocks"
    act_fn: str = "gelu"
    parallel_attn_mlp: bool = False

    attention: Filled[str] = LEFT_OUT
    attention_weights: Literal["learned", "gradient_descent"] = "learned"
    attention_slope: Finite = 0.01
    gate: Filled[Literal["none", "head", "key"]] = LEFT_OUT
    normalize_keys: Filled[bool] = LEFT_OUT
    conv_width: Natural = 0
    score_scale: Filled[Finite] = LEFT_OUT
    normalize_by_context: bool = False
    keys: Filled[Literal["causal", "context", "full"]] = LEFT_OUT
    n_key_value_heads: Count | None = None
    use_qk_norm: bool = False
    qk_norm_over: Literal["head", "all"] = "head"
    clip_qkv: Positive | None = None
    attn_scores_soft_cap: Finite = -1.0
    use_local_attn: bool = False
    window_size: Count | None = None
    attn_types: Sequence[Literal["global", "local"]] | None = None
    scale_attn_by_inverse_layer_idx: bool = False
    momentum: Finite = 0.0
    momentum_over: Literal["outputs", "values"] = "outputs"
    sink: Literal["none", "fixed", "learned"] = "none"
    sink_score: Finite = 0.0

    normalization_type: Norm | Literal["default"] | None = "default"
    norm_location: Literal["before", "after", "both"] = "before"
    skip_first_norm: bool = False
    final_norm: Filled[bool] = LEFT_OUT
    final_rms: bool = False
    eps: NonNegative = 1e-5
    recurrent: bool = False
    share_mlp: bool = False
    damping: Finite = 1.0
    token_clip: Positive | None = None

    read_in: Filled[Literal["identity", "linear"]] = LEFT_OUT
    read_out: Filled[Literal["identity", "linear"]] = LEFT_OUT
    post_embedding_ln: bool = False
    tie_word_embeddings: bool = False
    embedding_scale: Positive = 1.0
    output_logits_soft_cap: Finite = -1.0
    positional_embedding_type: Filled[Positions] = LEFT_OUT
    d_pos: Filled[Natural] = LEFT_OUT
    falcon_alibi: bool = False
    rotary_dim: Filled[Natural] = LEFT_OUT
    rotary_base: Positive = 10000.0
    rotary_adjacent_pairs: bool = False
    rotary_base_local: Positive | None = None
    rotary_float32: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    attn_bias: Filled[bool] = LEFT_OUT
    read_bias: Filled[bool] = LEFT_OUT
    initializer_range: Filled[NonNegative] = LEFT_OUT
    seed: Natural | None = None

    dtype: Dtype = "float32"
    device: str = "cpu"
    use_attn_result: bool = False
    use_attn_state: bool = False
    use_attn_in: bool = False
    use_split_qkv_input: bool = False
    use_hook_mlp_in: bool = False
    ungroup_grouped_query_attention: bool = False
    default_prepend_bos: bool = True

    attention_dir: Filled[Literal["causal", "bidirectional"]] = LEFT_OUT
    attn_scale: Filled[Positive] = LEFT_OUT

    if TYPE_CHECKING:
        _arguments: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self):
        check_fields(self)
        self._set(dtype=dtype_name(self.dtype))
        # the arguments: `replace` starts from them, so that defaults follow the fields that they depend on
        self._set(_arguments={field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        fill_defaults(self)
        check_combinations(self)
        self._set(attention_dir="causal" if self.keys == "causal" else "bidirectional")
        self._set(attn_scale=1 / self.score_scale if self.score_scale else math.inf)
        self._set(dtype=DTYPES[str(self.dtype)])

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self):
        """The fields that differ from their defaults; those of a model of token ids in TransformerLens' names."""
        ids = self.prompt_format == "token_ids"
        left_out = (*SYNONYMS, "prompt_format") if ids else SYNONYMS.values()
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default and field.name not in left_out
        ]
        return f"{'HookedTransformerConfig' if ids else type(self).__name__}({', '.join(given)})"

    @property
    def format(self) -> PromptFormat:
        """The prompt format object."""
        if self.prompt_format == "token_ids":
            raise ValueError("a token-id model takes ids [batch pos], not prompts")
        assert self.x_dim is not None
        return _format(self.prompt_format, x_dim=self.x_dim, y_dim=self.y_dim)

    @property
    def one_pass(self) -> bool:
        """True if one pass predicts every point from the points before it: no position sees later ones."""
        return self.prompt_format == "interleaved" and self.keys == "causal"

    @property
    def d_token(self) -> int:
        """Width of a continuous token."""
        return self.format.d_token

    @property
    def d_in(self) -> int:
        """Rows of a linear read-in: width of a continuous token, or size of the vocabulary."""
        return self.d_token if self.d_vocab is None else self.d_vocab

    @property
    def d_out(self) -> int:
        """Width of the model's outputs."""
        return self.y_dim if self.d_vocab_out is None else self.d_vocab_out

    @property
    def use_normalization_before_and_after(self) -> bool:
        """TransformerLens' name for norms before and after attention and MLP."""
        return self.norm_location == "both"

    @property
    def rotates(self) -> bool:
        """True if queries and keys are rotated by their positions."""
        return self.positional_embedding_type == "rotary"

    @property
    def rotates_by_length(self) -> bool:
        """True if rotary frequencies depend on the length of the text, so that a token sees those after it."""
        return (self.rope_scaling or {}).get("rope_type") in ("dynamic", "longrope")

    @property
    def n_params(self) -> int:
        """Number of weights in the matrices of the blocks, no biases, norms or embeddings (as TransformerLens)."""
        attention = 4 * self.d_model * self.d_head * self.n_heads
        mlp = (3 if self.gated_mlp else 2) * self.d_model * (self.d_mlp or 0) if self.block_mlp else 0
        return self.n_layers * (attention + mlp)

    @property
    def identity_width(self) -> int:
        """Least width of the stream with an identity read-in: token, concatenated position, and y if it is separate."""
        # an x token has no y-dimensions for an identity read-out to read
        separate = self.prompt_format == "interleaved" and self.read_out == "identity"
        return self.d_token + self.d_pos + (self.y_dim if separate else 0)

    @property
    def y_slot(self) -> slice:
        """The dimensions of the stream that an identity read-out reads: the token's y if it has one, else the last."""
        if self.prompt_format == "paired" and self.read_in == "identity":
            assert self.x_dim is not None
            return slice(self.x_dim, self.x_dim + self.y_dim)
        return slice(self.d_model - self.y_dim, self.d_model)

    @checked
    def for_layer(self, layer: int) -> "TransformerConfig":
        """Return the config of one layer's block: its kind of attention, its window, its rotary base, its scale."""
        kinds, cfg = self.attention.split(","), self
        if len(kinds) > 1:
            # the mixture's defaults stay, and fields for the other kinds go
            changes = {name: getattr(self, name) for name in ("d_head", "score_scale", "initializer_range")}
            changes |= {"normalize_by_context": False} if kinds[layer] == "softmax" else {"sink": "none"}
            if kinds[layer] not in RECURRENT:
                changes |= {"gate": "none", "normalize_keys": False, "conv_width": 0, "use_attn_state": False}
            elif kinds[layer] == "mamba2":
                changes["gate"] = "none"
            cfg = self.replace(attention=kinds[layer], **changes)
        of_layer: dict[str, Any] = {}
        if self.use_local_attn:
            is_local = self.attn_types is None or self.attn_types[layer] == "local"
            of_layer["window_size"] = self.window_size if is_local else None
            if is_local and self.rotary_base_local is not None:
                of_layer |= {"rotary_base": self.rotary_base_local, "rope_scaling": None}
        if self.scale_attn_by_inverse_layer_idx:
            of_layer["score_scale"] = self.score_scale / (layer + 1)
        if of_layer:
            cfg = copy.copy(cfg)
            cfg._set(**of_layer)
        return cfg

    @property
    def n_groups(self) -> int:
        """Number of heads that `hook_k` and `hook_v` have."""
        return self.n_heads if self.ungroup_grouped_query_attention else self.n_key_value_heads or self.n_heads

    def is_layer_norm_activation(self) -> bool:
        """Return True if a norm follows the MLPs' activation (`act_fn="solu_ln"`)."""
        return self.act_fn.endswith("_ln")

    @property
    def has_plain_scores(self) -> bool:
        """True if scores are products of each head's own queries and keys, rotated or not, times `score_scale`."""
        special = (self.n_key_value_heads, self.use_qk_norm, self.clip_qkv, self.window_size)
        capped = self.attn_scores_soft_cap > 0
        return not (any(special) or capped or self.positional_embedding_type in ("alibi", "shortformer"))

    @property
    def reads_only_y(self) -> bool:
        """True if outputs depend on the stream after the last attention by its y-dimensions only, as minus them."""
        mixes = self.final_norm or self.block_mlp or self.norm_location != "before" or self.output_logits_soft_cap > 0
        return self.read_out == "identity" and not mixes

    @property
    def prefers_prompts_last(self) -> bool:
        """True if the query's prediction is quicker from tokens with prompts along the last axis in memory.

        That is so for one layer without softmax that reads tokens unchanged and writes one dimension (see `fast.py`).
        """
        plain_tokens = self.read_in == "identity" and self.d_model == self.d_token
        extras = self.normalization_type or self.attn_bias or self.momentum or self.mlp_location == "input"
        other = self.attention == "softmax" or self.attention in RECURRENT
        plain = self.positional_embedding_type == "none" and not other and not extras
        return self.n_layers == self.y_dim == 1 and plain_tokens and plain and self.reads_only_y

    @property
    def block_mlp(self) -> bool:
        """True if each block has an MLP."""
        return not self.attn_only

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype, by the name that configs of all models have."""
        return self.dtype

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # readers of TransformerLens' configs find its other fields, too
            for fields in (UNCOMPUTED, DESCRIPTIVE):
                if name in fields:
                    return fields[name]
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def replace(self, **changes: Any) -> "TransformerConfig":
        """Return a copy with some fields changed; fields that were left out get their defaults anew."""
        arguments = dict(self._arguments)
        if {"n_context", "prompt_format"} & set(changes):
            arguments["n_ctx"] = None
        for name, synonym in SYNONYMS.items():  # the changed one counts
            if name in changes:
                arguments[synonym] = None
            elif synonym in changes:
                arguments[name] = None
        return type(self)(**(arguments | changes))

    def unfilled(self) -> "TransformerConfig":
        """Return the config before its defaults were filled in, for the command line to change. Not for models."""
        blank = object.__new__(type(self))
        blank._set(**self._arguments)
        return blank

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but the device and synonyms, as plain JSON data.

        Defaults are filled in, except gate and normalize_keys of a model whose layers differ in kind and
        keep states: None if left out.
        """
        left_out = {"device", *SYNONYMS.values()}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        kinds = self.attention.split(",")
        if len(kinds) > 1 and set(kinds) & set(RECURRENT):  # each layer has its own kind's defaults
            fields |= {name: self._arguments[name] for name in ("gate", "normalize_keys")}
        return fields | {"dtype": dtype_name(self.dtype)}

    @classmethod
    @checked
    def from_dict(cls, data: dict[str, Any]) -> "TransformerConfig":
        """Make the config that `to_dict` wrote."""
        # files from when a model of token ids had no MLP by default
        if isinstance(data, Mapping) and "d_mlp" in data and "attn_only" not in data:
            data = {**data, "attn_only": data["d_mlp"] is None or data.get("mlp_location") == "input"}
        return read_config(cls, data)


def _refuse(cfg: TransformerConfig, name: str, value: Any) -> None:
    requested = name.startswith(("use_attn_", "use_split", "use_hook", "ungroup")) and name in cfg._arguments
    instead = f"model.set_{name}({value!r})" if requested else f"cfg.replace({name}=...) for another model"
    raise dataclasses.FrozenInstanceError(f"{name}: configs do not change; call {instead}")


TransformerConfig.__setattr__ = _refuse  # with a message that names the alternative
