"""Folders of `transformers`: their weights are compared with their config before memory is allocated."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformer_lens.tools.model_registry.registry_io import load_model_aliases

from mechicl.base.files import check_file, read_json
from mechicl.base.tensor_files import read_outline, read_tensors

BUFFER_NAMES = re.compile(r"(attn|attention)\.(masked_)?bias$|\.inv_freq$|(^|\.)position_ids$")
"""Masks and tables of positions that older versions of transformers saved."""
EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.*)")
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
FETCHED = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "model*.safetensors"]
OPEN_INSTEAD = "open them with transformers, and give model= and tokenizer="


def official_name(name: str) -> str:
    """Return the name on the hub of a model that TransformerLens 3 names, in any case; others stay unchanged."""
    if (Path(name) / "config.json").is_file():
        return name
    table = {alias.lower(): official for official, aliases in load_model_aliases().items() for alias in aliases}
    table |= {official.lower(): official for official in load_model_aliases()}
    return table.get(name.lower(), name)


def download_model(name: str, revision: str | None) -> Path:
    """Download config, tokenizer and safetensors of a model on the hub, and return their folder in the hub's cache."""
    return Path(snapshot_download(official_name(name), revision=revision, allow_patterns=FETCHED))


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder has files of a tokenizer."""
    return any(path for pattern in TOKENIZERS for path in folder.glob(pattern))


class ModelFolder:
    """A folder of `transformers`, which loads models that fit the files.

    Only safetensors are read. The model is first made on torch's "meta" device and compared with the headers of the
    files, so that a config that does not fit them allocates nothing.
    """

    def __init__(self, folder: Path, *, needs_tokenizer: bool):
        for path in folder.iterdir():
            if not path.is_dir():
                check_file(path)
        self.folder = folder
        if (folder / "adapter_config.json").exists():
            raise ValueError(f"{folder} is an adapter (LoRA, PEFT) of another model: open that one with peft, call "
                             f"merge_and_unload(), and give the result as model=, with tokenizer=")  # fmt: skip
        if not (folder / "config.json").exists():
            quantized = sorted(path.name for path in folder.glob("*.gguf"))
            fix = f"give gguf_file=, one of {quantized}" if quantized else "model.save_pretrained(folder) saves a model"
            raise ValueError(f"{folder} has no config.json: {fix}")
        config = read_json(folder / "config.json")
        if config.get("quantization_config") is not None:
            raise ValueError(f"{folder} has quantized weights, not read here: {OPEN_INSTEAD} after model.dequantize()")
        self.files = self._find_weights()
        outlines = [(name, weight) for path in self.files for name, weight in read_outline(path)[0].items()]
        self.weights = dict(outlines)
        if len(self.weights) < len(outlines):
            raise ValueError(f"{folder}: weights are in more than one of {[path.name for path in self.files]}")
        n_layers = config.get("num_hidden_layers", config.get("n_layer", 0))
        if isinstance(n_layers, int) and n_layers > max(len(self.weights), 1000):  # before any of them is made
            raise ValueError(f"{folder}: config.json has {n_layers} layers, and the files {len(self.weights)} weights")
        if needs_tokenizer and not has_tokenizer(folder):
            raise ValueError(f"{folder} has no tokenizer: save one into it, by tokenizer.save_pretrained, or give "
                             f"tokenizer=")  # fmt: skip

    def _find_weights(self) -> list[Path]:
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if single.exists():
            return [single]
        if not index.exists():
            raise ValueError(f"{self.folder} has no safetensors (model.safetensors, or its parts and their index); "
                             f"weights in other formats are not read: if you trust them, {OPEN_INSTEAD}")  # fmt: skip
        places = read_json(index).get("weight_map")
        names = list(places.values()) if isinstance(places, dict) else []
        if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError(f"{index} must have a weight_map: names of weights, each with a file of the folder")
        if missing := sorted(name for name in set(names) if not (self.folder / name).exists()):
            raise ValueError(f"{self.folder} lacks {_some(missing)}, which its index lists: copy the missing files")
        return [self.folder / name for name in sorted(set(names))]

    def load(self, config: Any, dtype: Any, *, is_meta: bool = False, **options: Any) -> Any:
        """Load the model; with `is_meta` without its weights, on torch's device "meta"."""
        kind = self._check(config)
        if is_meta:
            with torch.device("meta"):
                return kind._from_config(config).to(config.dtype or torch.float32 if dtype == "auto" else dtype)
        weights = {key: weight for path in self.files for key, weight in read_tensors(path)[0].items()}
        return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **options)

    def _check(self, config: Any) -> Any:
        """Compare the weights that a config requires with those in the files, and return the model's class."""
        from transformer_lens.model_bridge.sources.transformers import (
            determine_architecture_from_hf_config,
            get_hf_model_class_for_architecture,
        )

        auto_class = get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))
        try:
            with torch.device("meta"):
                model = auto_class.from_config(config)
        except Exception as error:  # of any kind, from a config that is not one
            raise ValueError(f"{self.folder}: no model can be made from config.json ({error!r})") from error
        whole = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
        usable = {name: weight for name, weight in self.weights.items() if weight.is_floating_point() or name in whole}
        odd = _with_odd_prefixes(usable, f"{model.base_model_prefix}.")
        types = {name: self.weights[name].dtype for name in self.weights.keys() - usable.keys()}
        unused = odd | {f"{name} ({dtype})" for name, dtype in types.items() if not BUFFER_NAMES.search(name)}
        report: dict[str, Any] = {"missing_keys": _missing_experts(usable.keys() - odd)}
        if not unused and not report["missing_keys"]:
            try:
                _, report = type(model).from_pretrained(
                    None, config=config, state_dict=usable, device_map="meta", output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )  # fmt: skip
            except RuntimeError as error:
                raise ValueError(f"{self.folder}: the weights in the files do not fit the config ({error})") from error
        refuse_differences(str(self.folder), report, unused)
        return type(model)


def refuse_differences(name: str, report: Mapping[str, Any], unused: Set[str] = frozenset()) -> None:
    """Refuse (ValueError) a model if `output_loading_info` of transformers reports a difference."""
    shapes = report.get("mismatched_keys", ())
    found = named_differences({
        "missing": report["missing_keys"],
        "not used": unused | {key for key in report.get("unexpected_keys", ()) if not BUFFER_NAMES.search(key)},
        "of another shape": {f"{key} {list(there)} instead of {list(right)}" for key, there, right in shapes},
        "errors": report.get("error_msgs"),
    })  # fmt: skip
    if found:
        raise ValueError(f"{name}: the weights in the files do not fit the config; {found}")


def named_differences(parts: Mapping[str, Iterable[str] | None]) -> str:
    """Return the names of weights by what is wrong with them, as text; empty if nothing is."""
    return "; ".join(f"{words}: {_some(sorted(names))}" for words, names in parts.items() if names)


def _with_odd_prefixes(names: Iterable[str], prefix: str) -> set[str]:
    """Names that repeat the base model's prefix, or lack it where others have it; transformers sorts them wrongly."""
    doubled = {name for name in names if name.startswith(2 * prefix)}
    parts = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
    return doubled | {name for name in names if name.split(".")[0] in parts - {prefix[:-1]}}


def _missing_experts(names: Iterable[str]) -> set[str]:
    """Weights of experts, numbered from 0, that are missing; transformers would stack the others in their places."""
    found = [match.groups() for name in names if (match := EXPERT.fullmatch(name))]
    numbers: dict[str, set[str]] = defaultdict(set)
    for parent, number, _ in found:
        numbers[parent].add(number)
    expected = {
        f"{parent}.{number}.{part}" for parent, part in {(parent, part) for parent, _, part in found}
        for number in numbers[parent] | {str(i) for i in range(len(numbers[parent]))}
    }  # fmt: skip
    return expected - {".".join(groups) for groups in found}


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
