"""Weights of other projects under our names, as views of their tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mechicl.models.pretrained.families import Family
from mechicl.models.pretrained.folders import BUFFER_NAMES, named_differences
from mechicl.models.transformer.config import TransformerConfig

SEVERAL = {"QKV": ("Q", "K", "V"), "gate_in": ("gate", "in")}


def convert_weights(
    family: Family,
    cfg: TransformerConfig,
    weights: Mapping[str, Tensor],
    outline: Mapping[str, Tensor],
    *,
    n_layers: int,
    lacks: set[str],
) -> dict[str, Tensor]:
    """Name and reshape a family's weights as ours; ValueError if some are missing, not used, or of another shape.

    Matrices are views; each tensor is used once; sums and products are computed in the config's dtype. `outline` has
    the shapes of our weights. Of the file's `n_layers` layers those beyond `cfg.n_layers` are left out; our biases that
    the family `lacks` become 0.
    """
    left, converted, missing, shapes = dict(weights), {}, set(), {}
    last = tuple(f"{family.blocks}.{layer}." for layer in range(cfg.n_layers, n_layers))
    for theirs, ours in family.modules(n_layers).items():
        beyond = theirs.startswith(last)
        for kind in ("weight", "bias"):
            name = f"{theirs}.{kind}"
            names = [_our_names(module, kind, outline) for module in ours]
            if beyond:
                left.pop(name, None)
            if beyond or not any(each in outline and _leaf(each) not in lacks for each in names[0]):
                continue
            if name not in left:
                missing.add(name)
                continue
            tensor = left.pop(name)
            for copy, targets in enumerate(names):
                try:
                    pieces = _reshape(family, cfg, ours[copy], kind, tensor)
                except (RuntimeError, IndexError):  # dimensions that cannot be split
                    pieces = [tensor] * len(targets)
                for target, piece in zip(targets, pieces, strict=True):
                    if piece.shape != outline[target].shape:
                        expected = list(outline[target].shape)
                        shapes[name] = f"{name} {list(tensor.shape)} does not fit {target} {expected}"
                    # a parameter for each of our modules that share one of theirs
                    converted[target] = piece.clone() if copy else piece
    if cfg.tie_word_embeddings:
        _drop_tied_head(family, left, weights)
    unused = {name for name in left if not BUFFER_NAMES.search(name)}
    for name, outlined in outline.items():
        if name not in converted and _leaf(name) in lacks:
            like = next(iter(converted.values()), outlined)
            converted[name] = like.new_zeros(outlined.shape)
    missing |= set() if missing else {f"{name} (ours)" for name in outline.keys() - converted.keys()}
    if differences := named_differences({"missing": missing, "not used": unused, "of another shape": shapes.values()}):
        raise ValueError(f"the weights do not fit the config; {differences}")
    return converted


def embedding_scale(d_model: int, dtype: torch.dtype) -> float:
    """Return the square root of d_model, rounded as Gemma's models in transformers do."""
    return float(torch.tensor(d_model**0.5, dtype=torch.float32).to(dtype))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].lstrip("_")


def _our_names(module: str, kind: str, outline: Mapping[str, Tensor]) -> list[str]:
    part, _, leaf = module.rpartition(".")
    part = f"{part}." if part else ""
    if leaf.startswith("ln") or leaf.endswith("norm"):
        return [f"{module}.{'w' if kind == 'weight' else 'b'}"]
    letter = "W" if kind == "weight" else "b"
    plain = [f"{letter}_{name}" for name in SEVERAL.get(leaf, (leaf,))]
    # keys and values of groups of heads have other names
    return [f"{part}_{name}" if f"{part}_{name}" in outline else f"{part}{name}" for name in plain]


def _reshape(family: Family, cfg: TransformerConfig, module: str, kind: str, tensor: Tensor) -> list[Tensor]:
    """Return the parameters that a tensor `[out in]` or `[out]` contains."""
    leaf, is_matrix, d_head = module.rpartition(".")[2], kind == "weight", cfg.d_head
    if leaf.startswith("ln") or leaf.endswith("norm"):
        return [tensor.to(cfg.torch_dtype) + family.norm_offset] if family.norm_offset else [tensor]
    if leaf == "E":
        if not family.scale_embedding:
            return [tensor]
        return [tensor.to(cfg.torch_dtype) * embedding_scale(cfg.d_model, cfg.torch_dtype)]
    if leaf == "pos":
        return [tensor[family.position_offset :][: cfg.n_ctx]]
    if is_matrix and family.transposed and leaf != "U":
        tensor = tensor.T
    if leaf in ("QKV", "Q", "K", "V"):
        heads = tensor.unflatten(0, (-1, d_head))
        groups = cfg.n_key_value_heads or cfg.n_heads
        if leaf == "QKV" and family.grouped:
            grouped = heads.unflatten(0, (groups, -1))
            pieces = [grouped[:, :-2].flatten(0, 1), grouped[:, -2], grouped[:, -1]]
        else:
            pieces = list(heads.split([cfg.n_heads, groups, groups])) if leaf == "QKV" else [heads]
        return [piece.mT if is_matrix else piece for piece in pieces]
    if not is_matrix:
        return [tensor]
    if leaf == "O":
        return [tensor.unflatten(1, (-1, d_head)).permute(1, 2, 0)]
    return [piece.T for piece in (tensor.chunk(2) if leaf in SEVERAL else (tensor,))]


def _drop_tied_head(family: Family, left: dict[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    theirs = {ours: f"{name}.weight" for name, ours in family.ends.items()}
    head, embedding = left.get(theirs["unembed.U"]), weights.get(theirs["embed.E"])
    if head is None or embedding is None or head.shape != embedding.shape:
        return
    if head.is_meta or head.data_ptr() == embedding.data_ptr() or head.equal(embedding):
        del left[theirs["unembed.U"]]
