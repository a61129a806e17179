"""The one configuration of `HookedTransformer`, and the elementwise functions that it names."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from mechicl.prompts import PromptFormat, prompt_format

AttentionKeys = Literal["causal", "context", "full"]
MomentumOver = Literal["outputs", "values"]
# Fields that may be left out and are filled in on construction: never None afterwards, which is what readers of a
# config should see, while a command line has to know that None is allowed.
if TYPE_CHECKING:
    FilledInt, FilledFloat, FilledBool = int, float, bool
    FilledKeys = AttentionKeys
    FilledMap = Literal["identity", "linear"]
    FilledPositions = Literal["none", "standard", "one_hot", "sinusoidal"]
else:
    FilledInt, FilledFloat, FilledBool = int | None, float | None, bool | None
    FilledKeys = AttentionKeys | None
    FilledMap = Literal["identity", "linear"] | None
    FilledPositions = Literal["none", "standard", "one_hot", "sinusoidal"] | None

FORMATS = ("paired", "interleaved", "token_ids")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def relu_squared(x: Tensor) -> Tensor:
    """`max(x, 0)²`."""
    return F.relu(x).square()


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "cos": torch.cos,
    "elu": F.elu,
    "exp": torch.exp,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "identity": torch.clone,  # a copy, so that patching mlp.hook_post in place leaves mlp.hook_pre as it was
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "relu_squared": relu_squared,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "square": torch.square,
    "tanh": torch.tanh,
}
"""Functions that `act_fn` and `attention` may name, none of them a lambda: models pickle. Add your own:
`ELEMENTWISE["mine"] = function`."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Every choice that makes a `HookedTransformer`. Field names are TransformerLens' where it has the field.

    Fields left at None get a default that depends on the others; after construction they hold that value.

    Attributes:
        x_dim: dimension of the inputs (continuous formats).
        y_dim: dimension of the targets.
        n_context: largest number of context points that the model is meant for; fixes n_ctx. Models without
            learned or concatenated positions take longer prompts too.
        prompt_format: "paired" (one token a point), "interleaved" (x and y in alternate tokens) or "token_ids" (a
            vocabulary; the model maps ids `[batch pos]` to logits).
        d_vocab: size of the vocabulary for "token_ids".
        n_ctx: number of positions; needed for "token_ids", derived otherwise.
        n_layers: number of blocks.
        n_heads: number of heads a block.
        d_model: width of the residual stream; by default the width of a token (and its concatenated position).
        d_head: width of a head; by default d_model for linear and elementwise attention (as in von Oswald et al.
            2023, whose matrices are square), d_model / n_heads for softmax.
        d_mlp: hidden width of the MLPs; None for no MLP.
        mlp_location: "blocks" (after the attention of each block) or "input" (one residual MLP on the embedded
            tokens, before the blocks; von Oswald et al. 2023, A.7).
        act_fn: activation of the MLPs, a name in `ELEMENTWISE`.
        attention: "softmax", "linear", "relu", "leaky_relu", or any name in `ELEMENTWISE`, which is then applied to
            each score; or one for each layer, with commas between: "softmax,linear".
        attention_weights: "learned", or "gradient_descent": those of a step of gradient descent that fits the
            y-dimensions of the stream to its others, of which only the step size of each layer is learned (the
            control of von Oswald et al. 2023, section 3 and A.7). That takes one linear head, no biases, and an
            identity read-out.
        attention_slope: slope of "leaky_relu" attention for negative scores.
        score_scale: factor on the scores; by default `1/sqrt(d_head)` where all layers are softmax and 1 otherwise.
        normalize_by_context: divide elementwise attention by the number of keys that the position sees (the 1/n of
            Nertinger, eq. 1).
        keys: which positions a position attends to: "causal" (itself and those before), "context" (all but the
            last, which is the query) or "full".
        momentum: η of momentum attention, in [0, 1); 0 for plain attention. Needs causal keys. Scores and pattern are
            those of plain attention, and z is what the momentum makes of its outputs.
        momentum_over: "outputs" (z'_t = η z'_{t-1} + (1 - η) z_t, from z'_0 = z_0 on: each head's output is an
            exponential average over positions) or "values" (z'_t = z_t + Σ_{i<t} η^(t-i) v_i; Dai et al. 2023,
            section 5, eq. 11).
        sink: an extra key per head with value zero and a constant score, softmax only: "none", "fixed" (score
            `sink_score`) or "learned" (a parameter per head that starts at `sink_score`).
        sink_score: see sink.
        normalization_type: None, "LN" (layer norm before attention and MLP, with weights), "LNPre" (without).
        skip_first_norm: leave out the norm before the first attention layer (von Oswald et al. 2023, A.9); with
            `recurrent`, where every layer is the first one, before all of them.
        final_norm: a norm before the read-out; by default where there is normalization and a linear read-out.
        eps: added to the variance in layer norm.
        recurrent: all blocks share the weights of the first ("looped").
        damping: factor on every update of the residual stream by a block (von Oswald et al. 2023, A.6).
        token_clip: bound on the absolute values of the stream after each block (von Oswald et al. 2023, A.12).
        read_in: "identity" (tokens are placed in the first dimensions of the stream) or "linear".
        read_out: "identity" (minus the stream's y-dimensions, von Oswald et al. 2023, section 2: those of the token
            or, where the read-in is linear or prompts are interleaved, the last ones) or "linear".
        positional_embedding_type: "none", "standard" (learned, added), "one_hot" or "sinusoidal" (both
            concatenated to the tokens). By default "none" for paired prompts and "standard" for the others.
        d_pos: width of concatenated positions: n_ctx for one_hot, 20 by default for sinusoidal.
        attn_bias: biases in q, k, v and the output of attention; by default where there is normalization.
        read_bias: biases in a linear read-in and read-out; by default where there is normalization.
        initializer_range: standard deviation of the initial weights of the blocks (normal, cut at two deviations); by
            default 0.02 for softmax, and otherwise `sqrt(0.002 / n_layers / d_model)`: the fan-in scaling of
            von Oswald et al. 2023, A.12. A linear read-in and read-out always have `1 / sqrt(fan_in)`.
        dtype: "float32", "float64", "bfloat16" or "float16".
        device: where the model is made; the model keeps it up to date.
        use_attn_result: compute each head's output `attn.hook_result` (costs memory); without it there is no such
            hook.

    Raises:
        ValueError: a value is out of range or unknown, or two fields exclude each other; the message names them.

    Example:
        >>> TransformerConfig(x_dim=10, n_context=10, n_layers=1).d_model
        11
    """

    x_dim: int | None = None
    y_dim: int = 1
    n_context: int | None = None
    prompt_format: Literal["paired", "interleaved", "token_ids"] = "paired"
    d_vocab: int | None = None
    n_ctx: FilledInt = None  # type: ignore[assignment]

    n_layers: int = 1
    n_heads: int = 1
    d_model: FilledInt = None  # type: ignore[assignment]
    d_head: FilledInt = None  # type: ignore[assignment]
    d_mlp: int | None = None
    mlp_location: Literal["blocks", "input"] = "blocks"
    act_fn: str = "gelu"

    attention: str = "linear"
    attention_weights: Literal["learned", "gradient_descent"] = "learned"
    attention_slope: float = 0.01
    score_scale: FilledFloat = None  # type: ignore[assignment]
    normalize_by_context: bool = False
    keys: FilledKeys = None  # type: ignore[assignment]
    momentum: float = 0.0
    momentum_over: MomentumOver = "outputs"
    sink: Literal["none", "fixed", "learned"] = "none"
    sink_score: float = 0.0

    normalization_type: Literal["LN", "LNPre"] | None = None
    skip_first_norm: bool = False
    final_norm: FilledBool = None  # type: ignore[assignment]
    eps: float = 1e-5
    recurrent: bool = False
    damping: float = 1.0
    token_clip: float | None = None

    read_in: FilledMap = None  # type: ignore[assignment]
    read_out: FilledMap = None  # type: ignore[assignment]
    positional_embedding_type: FilledPositions = None  # type: ignore[assignment]
    d_pos: FilledInt = None  # type: ignore[assignment]
    attn_bias: FilledBool = None  # type: ignore[assignment]
    read_bias: FilledBool = None  # type: ignore[assignment]
    initializer_range: FilledFloat = None  # type: ignore[assignment]

    dtype: str = "float32"
    device: str = "cpu"
    use_attn_result: bool = False

    def __post_init__(self):
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        object.__setattr__(self, "_given", given)
        _check_choices(self)
        if self.prompt_format == "token_ids":
            _require(self.d_vocab is not None and self.n_ctx is not None, "token_ids need d_vocab and n_ctx")
            _require(self.x_dim is None, f"token_ids have no x_dim, got {self.x_dim}")
        else:
            _require(self.x_dim is not None, f"prompt_format {self.prompt_format!r} needs x_dim")
            _require(self.n_context is not None, f"prompt_format {self.prompt_format!r} needs n_context")
            _require(self.d_vocab is None, "d_vocab is for prompt_format='token_ids'")
        _check_ranges(self)
        names = self.attention.split(",")
        if len(names) == self.n_layers and len(set(names)) == 1:  # all layers alike: the same config as by one name
            object.__setattr__(self, "attention", names[0])
        self._fill_format()
        self._fill_d_model()
        self._fill_d_head()
        self._fill_rest()
        self._check_combinations()

    # -- defaults that depend on other fields --

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _fill_format(self) -> None:
        tokens = self.prompt_format == "token_ids"
        if not tokens:
            assert self.n_context is not None
            n_tokens = self.format.n_tokens(self.n_context)
            _require(self.n_ctx in (None, n_tokens), f"n_ctx is {n_tokens} for this prompt format, got {self.n_ctx}")
            self._fill(n_ctx=n_tokens)
        continuous_identity = self.prompt_format == "paired" and self.d_model in (None, self._d_token_or_none())
        self._fill(
            keys="context" if self.prompt_format == "paired" else "causal",
            positional_embedding_type="none" if self.prompt_format == "paired" else "standard",
            read_in="identity" if continuous_identity else "linear",
        )
        self._fill(read_out="identity" if self.read_in == "identity" and self.prompt_format == "paired" else "linear")
        widths = {"one_hot": self.n_ctx, "sinusoidal": 20}
        _require(
            not self.d_pos or self.positional_embedding_type in widths,
            f"d_pos is the width of concatenated positions, and positional_embedding_type is "
            f"{self.positional_embedding_type!r}",
        )
        self._fill(d_pos=widths.get(self.positional_embedding_type, 0))
        _require(
            self.d_pos > 0 or self.positional_embedding_type not in widths,
            f"concatenated positions ({self.positional_embedding_type}) need d_pos >= 1, got {self.d_pos}",
        )
        _require(
            self.positional_embedding_type != "one_hot" or self.d_pos >= self.n_ctx,
            f"one-hot positions need d_pos >= n_ctx={self.n_ctx}, got {self.d_pos}",
        )

    def _fill_d_model(self) -> None:
        if self.d_model is None:
            _require(self.read_in == "identity", "d_model is needed with a linear read-in or a vocabulary")
            self._fill(d_model=self.d_token + self.d_pos + (self.y_dim if self._separate_y_slot() else 0))

    def _fill_d_head(self) -> None:
        if self.d_head is None and self.attention == "softmax":
            _require(
                self.d_model % self.n_heads == 0,
                f"d_model={self.d_model} is not divisible by n_heads={self.n_heads}: give d_head",
            )
            self._fill(d_head=self.d_model // self.n_heads)
        self._fill(d_head=self.d_model)

    def _fill_rest(self) -> None:
        softmax, normed = self.attention == "softmax", self.normalization_type is not None
        self._fill(
            score_scale=1 / math.sqrt(self.d_head) if softmax else 1.0,
            final_norm=normed and self.read_out == "linear",
            attn_bias=normed,
            read_bias=normed,
            initializer_range=0.02 if softmax else math.sqrt(0.002 / max(self.n_layers, 1) / self.d_model),
        )

    def _check_combinations(self) -> None:
        names = self.attention.split(",")
        softmax = "softmax" in names
        _require(
            len(names) in (1, self.n_layers),
            f"attention={self.attention!r} is for {len(names)} layers, not {self.n_layers}",
        )
        _require(
            len(names) == 1 or not self.recurrent,
            "the layers of a recurrent model are one and have one kind of attention",
        )
        if self.attention_weights == "gradient_descent":
            plain = (self.attention, self.n_heads, self.attn_bias, self.read_out) == ("linear", 1, False, "identity")
            _require(
                plain and self.d_head == self.d_model,
                "attention_weights='gradient_descent' needs attention='linear', n_heads=1, attn_bias=False, "
                "d_head=d_model and read_out='identity'",
            )
        _require(
            self.momentum == 0 or self.keys == "causal",
            f"momentum={self.momentum} is over the positions before and needs keys='causal', got keys={self.keys!r}: "
            f"set keys='causal', or momentum=0",
        )
        _require(softmax or self.sink == "none", f"a sink needs softmax attention, got {self.attention!r}")
        _require(
            self.attention != "softmax" or not self.normalize_by_context, "softmax attention is normalised already"
        )
        _require(not (self.final_norm and not self.normalization_type), "final_norm needs a normalization_type")
        _require(not (self.skip_first_norm and not self.normalization_type), "skip_first_norm needs a norm to skip")
        _require(self.mlp_location == "blocks" or self.d_mlp is not None, "mlp_location='input' needs d_mlp")
        if self.prompt_format == "token_ids":
            _require(self.read_in == self.read_out == "linear", "a vocabulary needs a learned read-in and read-out")
            _require(self.d_pos == 0, "a vocabulary takes positional_embedding_type 'none' or 'standard'")
        if self.read_in == "identity":
            needed = self.d_token + self.d_pos
            _require(
                self.d_model >= needed,
                f"an identity read-in needs d_model >= {needed} (token and position), got {self.d_model}",
            )
        if self.read_out == "identity":
            _require(
                self.d_model >= self.y_dim,
                f"an identity read-out reads y_dim={self.y_dim} dimensions of the stream, but d_model={self.d_model}",
            )
        if self._separate_y_slot() and self.read_in == "identity":
            needed = self.d_token + self.d_pos + self.y_dim
            _require(
                self.d_model >= needed,
                f"an identity read-out of interleaved prompts reads the last y_dim dimensions, which must be "
                f"free: d_model >= {needed}, got {self.d_model}",
            )

    def _separate_y_slot(self) -> bool:
        return self.prompt_format == "interleaved" and self.read_out == "identity"

    def _d_token_or_none(self) -> int | None:
        return None if self.prompt_format == "token_ids" else self.d_token

    # -- what follows from the fields --

    @property
    def format(self) -> PromptFormat:
        """The prompt format object.

        Raises:
            ValueError: the model takes token ids, not prompts.
        """
        if self.prompt_format == "token_ids":
            raise ValueError("a token-id model takes ids [batch pos], not prompts")
        assert self.x_dim is not None
        return prompt_format(self.prompt_format, x_dim=self.x_dim, y_dim=self.y_dim)

    @property
    def one_pass(self) -> bool:
        """Whether one pass predicts every point from the points before it: no position sees later ones."""
        return self.prompt_format == "interleaved" and self.keys == "causal"

    @property
    def d_token(self) -> int:
        """Width of a continuous token."""
        return self.format.d_token

    @property
    def d_out(self) -> int:
        """Width of the model's outputs."""
        if self.prompt_format == "token_ids":
            assert self.d_vocab is not None
            return self.d_vocab
        return self.y_dim

    @property
    def y_slot(self) -> slice:
        """The dimensions of the stream that an identity read-out reads: the token's y if it has one, else the last."""
        if self.prompt_format == "paired" and self.read_in == "identity":
            assert self.x_dim is not None
            return slice(self.x_dim, self.x_dim + self.y_dim)
        return slice(self.d_model - self.y_dim, self.d_model)

    def of_layer(self, layer: int) -> "TransformerConfig":
        """The config that a layer's block goes by: this one, but with the attention of that layer."""
        names = self.attention.split(",")
        if len(names) == 1:
            return self
        changes = {name: getattr(self, name) for name in ("d_head", "score_scale", "initializer_range")}
        if names[layer] == "softmax":
            changes["normalize_by_context"] = False
        else:
            changes["sink"] = "none"
        return self.replace(attention=names[layer], **changes)

    @property
    def attn_only(self) -> bool:
        """No MLP inside the blocks (TransformerLens' name)."""
        return self.d_mlp is None or self.mlp_location == "input"

    @property
    def block_mlp(self) -> bool:
        """An MLP in each block."""
        return not self.attn_only

    @property
    def n_key_value_heads(self) -> None:
        """Always None: every head has keys and values of its own (read by TransformerLens' tools)."""
        return None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return DTYPES[self.dtype]

    def replace(self, **changes: Any) -> "TransformerConfig":
        """A copy with some fields changed; fields that were left to their default follow the change."""
        given = dict(self._given)
        if {"n_context", "prompt_format"} & set(changes):
            given["n_ctx"] = None
        return type(self)(**(given | changes))

    def as_given(self) -> "TransformerConfig":
        """The config before its defaults were filled in, for a command line to change fields of. Not for models."""
        blank = object.__new__(type(self))
        for name, value in self._given.items():
            object.__setattr__(blank, name, value)
        return blank

    if TYPE_CHECKING:
        _given: dict[str, Any] = dataclasses.field(init=False)

    def to_dict(self) -> dict[str, Any]:
        """All fields but the device, as plain JSON data."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "device"}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TransformerConfig":
        """The config that `to_dict` wrote.

        Raises:
            ValueError: an unknown field, a value of another type than the field's, or a value that the config refuses.
        """
        return read_config(cls, data)


Config = TypeVar("Config")


def read_config(kind: type[Config], data: dict[str, Any]) -> Config:
    """A config dataclass from plain JSON data, which may come from anybody.

    Raises:
        ValueError: an unknown field, a value of another type than the field's, or a value that the config refuses.
    """
    unknown = sorted(set(data) - {f.name for f in dataclasses.fields(cast(Any, kind))})
    _require(not unknown, f"{kind.__name__} has no field {unknown}")
    for name, value in data.items():
        _require(
            value is None or isinstance(value, (bool, int, float, str)),
            f"{name} must be a number, a string, true, false or null, got {type(value).__name__}",
        )
    try:
        return kind(**data)
    except (TypeError, OverflowError) as error:  # a string where a number belongs, and the like
        raise ValueError(f"a field has a value of the wrong type: {error}") from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_choices(cfg: TransformerConfig) -> None:
    choices: dict[str, tuple[Any, ...]] = {
        "prompt_format": FORMATS,
        "mlp_location": ("blocks", "input"),
        "act_fn": tuple(sorted(ELEMENTWISE)),
        "attention_weights": ("learned", "gradient_descent"),
        "keys": (None, *get_args(AttentionKeys)),
        "momentum_over": get_args(MomentumOver),
        "sink": ("none", "fixed", "learned"),
        "normalization_type": (None, "LN", "LNPre"),
        "read_in": (None, "identity", "linear"),
        "read_out": (None, "identity", "linear"),
        "positional_embedding_type": (None, "none", "standard", "one_hot", "sinusoidal"),
        "dtype": tuple(DTYPES),
    }
    for name, allowed in choices.items():
        value = getattr(cfg, name)
        _require(value in allowed, f"{name}={value!r} is not one of {[a for a in allowed if a is not None]}")
    known = ["softmax", "linear", *sorted(ELEMENTWISE)]
    _require(isinstance(cfg.attention, str), f"attention={cfg.attention!r} is no name, or names with commas between")
    for name in cfg.attention.split(","):
        _require(name in known, f"attention={name!r} is not one of {known}")


def _check_ranges(cfg: TransformerConfig) -> None:
    optional = {field.name for field in dataclasses.fields(cfg) if field.default is None}

    def require(name: str, fine: bool, what: str) -> None:
        value = getattr(cfg, name)
        _require(fine or (value is None and name in optional), f"{name} must be {what}, got {value!r}")

    integers = {"x_dim": 1, "y_dim": 1, "n_context": 0, "d_vocab": 1, "n_ctx": 1, "n_layers": 0, "n_heads": 1}
    integers |= {"d_model": 1, "d_head": 1, "d_mlp": 1, "d_pos": 1 if cfg.d_pos else 0}
    for name, least in integers.items():
        value = getattr(cfg, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(name, whole and value >= least, f"an integer >= {least}")
    numbers = ("attention_slope", "score_scale", "sink_score", "eps", "damping", "initializer_range", "token_clip")
    for name in (*numbers, "momentum"):
        value = getattr(cfg, name)
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        require(name, real and math.isfinite(value), "a finite number")
    for name in ("eps", "initializer_range"):
        value = getattr(cfg, name)
        _require(value is None or value >= 0, f"{name} must not be negative, got {value}")
    _require(0 <= cfg.momentum < 1, f"momentum must be at least 0 and below 1, got {cfg.momentum}")
    _require(cfg.token_clip is None or cfg.token_clip > 0, f"token_clip must be positive, got {cfg.token_clip}")
    flags = ("normalize_by_context", "skip_first_norm", "final_norm", "recurrent", "attn_bias", "read_bias")
    for name in (*flags, "use_attn_result"):
        require(name, isinstance(getattr(cfg, name), bool), "true or false")
