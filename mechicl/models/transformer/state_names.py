"""State dicts of other times and places, under the names that a `HookedTransformer` has today."""

from collections.abc import Mapping

from torch import Tensor

from mechicl.models.transformer.config import TransformerConfig

# what mechicl called the two ends of a model before they were modules of TransformerLens' names
RENAMED = {
    "embed": "embed.W_E",
    "embed_bias": "embed.b_E",
    "pos_embed": "pos_embed.W_pos",
    "unembed": "unembed.W_U",
    "unembed_bias": "unembed.b_U",
}
# buffers of TransformerLens' attention, which follow from the config
DERIVED = ("attn.mask", "attn.IGNORE", "attn.rotary_sin", "attn.rotary_cos")


def current_names(cfg: TransformerConfig, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under today's names, without what follows from the config.

    A bias on the embeddings of token ids, which models had once, becomes part of each of them.

    Raises:
        ValueError: such a bias of another shape than the embeddings.
    """
    state = {RENAMED.get(name, name): weight for name, weight in state_dict.items() if not name.endswith(DERIVED)}
    if cfg.prompt_format == "token_ids" and "embed.b_E" in state:
        bias = state.pop("embed.b_E")
        weights = state.get("embed.W_E")
        if weights is None or weights.ndim < 2 or bias.shape != (*weights.shape[:-2], weights.shape[-1]):
            raise ValueError("embed.b_E does not fit embed.W_E, to whose rows it is to be added")
        state["embed.W_E"] = state["embed.W_E"] + bias[..., None, :]  # [seed token d_model] in a stack of models
    return state
