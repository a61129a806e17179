"""Random configs, models and prompts for property tests."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from mechicl.models import HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.models.transformer.config_rules import ELEMENTWISE
from mechicl.prompts import Prompts

NORMS = (None, "LN", "LNPre", "RMS", "RMSPre")
KEYS = ("causal", "context", "full")
ATTENTIONS = ("softmax", "linear", "relu", "leaky_relu", *sorted(ELEMENTWISE))


@st.composite
def configs(
    draw: st.DrawFn,
    *,
    formats: tuple[str, ...] = ("paired", "interleaved", "token_ids"),
    language: bool = True,
    **fixed: object,
) -> TransformerConfig:
    """A valid config: every field is drawn but those in `fixed`, and those of language models if `language`."""

    def choose(name: str, *values: object) -> object:
        return fixed[name] if name in fixed else draw(st.sampled_from(values), label=name)

    fields: dict[str, object] = {"prompt_format": draw(st.sampled_from(formats))}
    tokens = fields["prompt_format"] == "token_ids"
    if tokens:
        fields |= {"d_vocab": draw(st.integers(2, 6)), "n_ctx": draw(st.integers(1, 7))}
        fields["positional_embedding_type"] = choose("positional_embedding_type", "none", "standard", "rotary")
        token_width = 0
    else:
        fields |= {name: draw(st.integers(1, 3)) for name in ("x_dim", "y_dim")}
        fields["n_context"] = draw(st.integers(0, 5))
        kinds = ("none", "standard", "rotary", "one_hot", "sinusoidal")
        fields["positional_embedding_type"] = choose("positional_embedding_type", *kinds)
        x, y, n = fields["x_dim"], fields["y_dim"], fields["n_context"]
        assert isinstance(x, int)
        assert isinstance(y, int)
        assert isinstance(n, int)
        paired = fields["prompt_format"] == "paired"
        token_width, n_ctx = (x + y, n + 1) if paired else (max(x, y) + y, 2 * n + 1)
        if fields["positional_embedding_type"] == "one_hot":
            fields["d_pos"] = n_ctx + draw(st.integers(0, 1))
        elif fields["positional_embedding_type"] == "sinusoidal":
            fields["d_pos"] = draw(st.integers(1, 4))
        token_width += int(str(fields.get("d_pos", 0)))
    fields["read_in"] = "linear" if tokens else choose("read_in", "identity", "linear")
    fields["read_out"] = "linear" if tokens else choose("read_out", "identity", "linear")
    least = token_width if fields["read_in"] == "identity" else 3
    fields["d_model"] = draw(st.integers(least, least + 6))
    fields |= {"n_heads": draw(st.integers(1, 3)), "d_head": draw(st.integers(1, 5))}
    if fields["positional_embedding_type"] == "rotary":
        fields["d_head"] = draw(st.integers(2, 5))
        fields["rotary_dim"] = draw(st.sampled_from([2, 4][: fields["d_head"] // 2]))
        fields["rotary_base"] = choose("rotary_base", 10000.0, 3.0)
        fields["rotary_adjacent_pairs"] = choose("rotary_adjacent_pairs", False, True)
    fields["n_layers"] = choose("n_layers", 0, 1, 2, 3)
    fields["recurrent"] = choose("recurrent", False, True)

    n_layers = fields["n_layers"]
    assert isinstance(n_layers, int)
    may_differ = n_layers > 1 and not fields["recurrent"] and "attention" not in fixed
    if not may_differ or draw(st.integers(0, 4), label="layers alike if 0") == 0:
        fields["attention"] = choose("attention", *ATTENTIONS)
    else:
        fields["attention"] = ",".join(draw(st.sampled_from(ATTENTIONS), label="attention") for _ in range(n_layers))
    kinds = set(str(fields["attention"]).split(","))
    fields["keys"] = choose("keys", *KEYS)
    if fields["keys"] == "causal":
        fields["momentum"] = choose("momentum", 0.0, 0.6)
        fields["momentum_over"] = choose("momentum_over", "outputs", "values")
    fields["score_scale"] = choose("score_scale", None, 0.3)
    if "softmax" in kinds:
        fields["sink"] = choose("sink", "none", "fixed", "learned")
        fields["sink_score"] = choose("sink_score", 0.0, -0.7)
    if kinds != {"softmax"}:
        fields["normalize_by_context"] = choose("normalize_by_context", False, True)
        fields["attention_slope"] = choose("attention_slope", 0.01, 0.5)

    fields["d_mlp"] = choose("d_mlp", None, 1, 5)
    if fields["d_mlp"] is not None:
        fields["mlp_location"] = choose("mlp_location", "blocks", "input")
        fields["act_fn"] = choose("act_fn", *sorted(ELEMENTWISE))
        fields["gated_mlp"] = choose("gated_mlp", False, True)
        if fields["mlp_location"] == "blocks" and not fields["recurrent"]:
            fields["share_mlp"] = choose("share_mlp", False, True)
    fields["attn_only"] = fields["d_mlp"] is None or fields["mlp_location"] == "input"
    fields["normalization_type"] = choose("normalization_type", *NORMS)
    fields["eps"] = choose("eps", 1e-5, 0.1)
    if fields["normalization_type"] is not None:
        fields["skip_first_norm"] = choose("skip_first_norm", False, True)
        fields["final_norm"] = choose("final_norm", False, True)
    fields["damping"] = choose("damping", 1.0, 0.6)
    if language and draw(st.booleans(), label="as in language models"):
        fields |= _language_features(draw, fields)
    fields["token_clip"] = choose("token_clip", None, 0.8)
    fields["attn_bias"] = choose("attn_bias", False, True)
    fields["read_bias"] = choose("read_bias", False, True)
    fields["use_attn_result"] = choose("use_attn_result", False, True)
    fields["dtype"] = choose("dtype", "float64", "float32")
    return TransformerConfig(**fields)  # pyright: ignore[reportArgumentType]


def _language_features(draw: st.DrawFn, fields: dict[str, object]) -> dict[str, object]:
    """Fields that pretrained language models need and others may have."""
    choices: dict[str, tuple[object, ...]] = {
        "n_key_value_heads": tuple(n for n in (None, 1, 2, 3) if n is None or int(str(fields["n_heads"])) % n == 0),
        "use_qk_norm": (False, True), "qk_norm_over": ("head", "all"), "clip_qkv": (None, 0.3),
        "attn_scores_soft_cap": (-1.0, 0.5), "scale_attn_by_inverse_layer_idx": (False, True),
    }  # fmt: skip
    if fields["normalization_type"] is not None and fields["damping"] == 1:
        choices["norm_location"] = ("before", "after", "both")
    if not fields["attn_only"]:
        choices["parallel_attn_mlp"] = (False, True)
    drawn = {name: draw(st.sampled_from(values), label=name) for name, values in choices.items()}
    if fields["keys"] == "causal" and draw(st.booleans(), label="use_local_attn"):
        drawn |= {"use_local_attn": True, "window_size": draw(st.integers(1, 4), label="window_size")}
    return drawn


def random_model(cfg: TransformerConfig, seed: int = 0, scale: float = 0.25) -> HookedTransformer:
    """A model none of whose weights is at its initial value: no bias 0, no norm weight 1."""
    generator = torch.Generator().manual_seed(seed)
    model = HookedTransformer(cfg)
    with torch.no_grad():
        # both ends first: small changes of the module's order leave the tests their models
        ends = ("embed.", "pos_embed.", "unembed.")
        for _, weight in sorted(model.named_parameters(), key=lambda named: not named[0].startswith(ends)):
            weight += scale * torch.randn(weight.shape, dtype=torch.float64, generator=generator)
        if cfg.prompt_format == "paired":
            model.initial_weights.normal_(generator=generator)
    return model


def random_tokens(cfg: TransformerConfig, batch: int = 2, seed: int = 0) -> Tensor:
    """Tokens of a model, at all its positions."""
    generator = torch.Generator().manual_seed(seed)
    if cfg.prompt_format == "token_ids":
        assert cfg.d_vocab is not None
        return torch.randint(cfg.d_vocab, (batch, cfg.n_ctx), generator=generator)
    tokens = torch.randn(batch, cfg.n_ctx, cfg.d_token, dtype=torch.float64, generator=generator)
    return tokens.to(cfg.torch_dtype)


def random_prompts(cfg: TransformerConfig | LSTMConfig, batch: int = 2, seed: int = 0) -> Prompts:
    """Prompts of a model's size."""
    generator = torch.Generator().manual_seed(seed)
    assert cfg.n_context is not None
    assert cfg.x_dim is not None
    values = torch.randn(batch, cfg.n_context + 1, cfg.x_dim + cfg.y_dim, dtype=torch.float64, generator=generator)
    values = values.to(cfg.torch_dtype)
    return Prompts(values[..., : cfg.x_dim], values[..., cfg.x_dim :])
