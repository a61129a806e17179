"""Models in TransformerLens' own format: a config.json of its fields, and a state dict that `torch.save` wrote.

These are the small models that TransformerLens' author trained ("attn-only-2l", "solu-1l", ...), "redwood_attn_2l" and
"othello-gpt". Source of the format: `transformer_lens.loading_from_pretrained` of TransformerLens 3.9.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from torch import Tensor

from mechicl.base.files import read_json
from mechicl.base.tensor_files import read_torch_file
from mechicl.models.pretrained.conversion import convert_weights
from mechicl.models.pretrained.families import Family
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.lens_config import HookedTransformerConfig, current_names, known_fields

OWNERS = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
"""Beginnings of these models' names on the hub."""
SAME_FIELDS = ("d_model", "n_layers", "d_mlp", "d_head", "n_heads", "n_ctx", "d_vocab", "act_fn", "attn_only")
MINGPT = Family(
    blocks="blocks",
    ends={"tok_emb": "embed.E", "pos_emb": "pos_embed.pos", "ln_f": "ln_final", "head": "unembed.U"},
    block={
        "ln1": "ln1", "ln2": "ln2", "attn.query": "attn.Q", "attn.key": "attn.K", "attn.value": "attn.V",
        "attn.proj": "attn.O", "mlp.0": "mlp.in", "mlp.2": "mlp.out",
    },
    fields=dict, biases={"U": None},
)  # fmt: skip
"""Othello-GPT, in the names of minGPT."""


@dataclass(frozen=True)
class LensFiles:
    """A config and a state dict in TransformerLens' format."""

    name: str  # on the hub, or of the folder
    config: Mapping[str, Any]  # the contents of config.json
    weights: Path  # of the state dict

    @property
    def tokenizer_name(self) -> str | None:
        """Name of the tokenizer on the hub."""
        return self.config.get("tokenizer_name")

    def config_of(self, **changes: Any) -> TransformerConfig:
        """Return the model's config, with some fields changed."""
        missing = sorted({*SAME_FIELDS} - self.config.keys())
        norm = self.config.get("normalization", self.config.get("normalization_type"))
        if missing:
            raise ValueError(f"config.json of {self.name} lacks {missing}")
        fields = known_fields(self.config)
        for decided_by_weights in ("dtype", "device"):
            fields.pop(decided_by_weights, None)
        positions = "shortformer" if self.config.get("shortformer_pos") else "standard"
        fields = {"positional_embedding_type": positions} | fields | {"normalization_type": norm}
        if kinds := fields.get("attn_types"):
            fields["attn_types"] = kinds[: changes.get("n_layers")]
        return HookedTransformerConfig(**fields | changes)  # type: ignore[return-value]

    def read(self, cfg: TransformerConfig, outline: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read the weights under our names; biases that the file lacks are 0."""
        weights = read_torch_file(self.weights)
        if not isinstance(weights, Mapping) or not all(isinstance(each, Tensor) for each in weights.values()):
            raise ValueError(f"{self.weights} is not a state dict")
        kind, n_layers = self.config.get("architecture"), int(self.config["n_layers"])
        if kind == "mingpt":
            weights = {name: each for name, each in weights.items() if not name.endswith("attn.mask")}
            weights["pos_emb.weight"] = weights.pop("pos_emb").squeeze(0)
            return convert_weights(MINGPT, cfg, weights, outline, n_layers=n_layers, lacks={"b_U"})
        if kind == "neel-solu-old" or (kind is None and "_old" in self.name):
            weights = _turn_old(weights, n_layers)
        weights = current_names(cfg, weights)
        beyond = tuple(f"blocks.{layer}." for layer in range(cfg.n_layers, n_layers))
        weights = {name: each for name, each in weights.items() if not name.startswith(beyond)}
        like = next(iter(weights.values()))
        biases = {name: each for name, each in outline.items() if "b_" in name and name not in weights}
        return weights | {name: like.new_zeros(each.shape) for name, each in biases.items()}


def _turn_old(weights: Mapping[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """Rename norms, and transpose: the first models multiplied from the left, in part up to 8 layers."""
    turned = {}
    for name, weight in weights.items():
        name = name.replace("norm", "ln")
        name = f"ln_final.{name[3:]}" if name.startswith("ln.") else name
        if ("W_pos" in name and n_layers <= 8) or ("W_" in name and "W_pos" not in name and n_layers <= 6):
            weight = weight.mT
        turned[name] = weight
    return turned


def find_lens_files(name: str, options: Mapping[str, Any], index: int | None, step: int | None) -> LensFiles | None:
    """Find a model in TransformerLens' format in a folder or on the hub; None for a folder or name of another kind."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            return None
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.pth")]
        config = read_json(folder / "config.json")
        if "model_type" in config or "n_layers" not in config or "d_model" not in config:
            return None
        return LensFiles(folder.resolve().name, config, folder / _choose(name, files, index, step))
    if not name.startswith(OWNERS):
        return None
    listing = {key: options[key] for key in ("revision", "token") if key in options}
    file = _choose(name, HfApi().list_repo_files(name, **listing), index, step)
    fetched = {key: value for key, value in options.items() if key != "trust_remote_code"}  # they have no code
    config = read_json(Path(hf_hub_download(name, "config.json", **fetched)))
    return LensFiles(name, config, Path(hf_hub_download(name, file, **fetched)))


def _choose(name: str, files: list[str], index: int | None, step: int | None) -> str:
    if index is not None or step is not None:
        found = {int(match[1]): file for file in files if (match := re.match(r"checkpoints/.*_(\d+)\.pth$", file))}
        return found[checkpoint_step(name, sorted(found), index, step)]
    last = [file for file in files if file.endswith("final.pth")]
    last = last or [file for file in files if file.endswith(".pth") and "/" not in file]
    if len(last) != 1:
        raise ValueError(f"{name} must have one state dict (final.pth), got {last}")
    return last[0]


def checkpoint_step(name: str, steps: Sequence[int], index: int | None, step: int | None) -> int:
    """Return the step of a model's checkpoint, by its index in the list of checkpoints or by its step."""
    if index is not None:
        if not -len(steps) <= index < len(steps):
            raise ValueError(f"checkpoint_index={index}, but {name} has {len(steps)} checkpoints")
        return steps[index]
    if step is None or step not in steps:
        shown = list(steps) if len(steps) < 10 else f"{steps[0]}, {steps[1]} ... {steps[-1]}"
        raise ValueError(f"checkpoint_value={step} is not one of {name}: {shown}")
    return step
