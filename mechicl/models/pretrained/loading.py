"""Open pretrained language models as `HookedTransformer`s: from folders, from the hub, or from models in memory."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mechicl.base.arguments import ArgumentError
from mechicl.models.config_checks import DTYPES, check_device
from mechicl.models.pretrained.conversion import convert_weights, embedding_scale
from mechicl.models.pretrained.families import config_fields, find_family
from mechicl.models.pretrained.folders import ModelFolder, has_tokenizer, official_name, refuse_differences
from mechicl.models.pretrained.lens_files import checkpoint_step, find_lens_files
from mechicl.models.transformer.config import TransformerConfig

Opened = TypeVar("Opened", bound=Any)
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token", "trust_remote_code")
"""Keywords of `from_pretrained` of transformers that also apply to configs and tokenizers."""
STEPS_ON_HUB = {
    "stanford-crfm/": ("checkpoint-{}", (
        *range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20_000, 100), *range(20_000, 400_001, 1000),
    )),
    "EleutherAI/pythia": ("step{}", (0, *(2**i for i in range(10)), *range(1000, 143_001, 1000))),
}  # fmt: skip
"""Models with checkpoints on the hub, by the beginnings of their names: names of the revisions, and the steps."""


def open_pretrained(
    model_class: Callable[..., Opened],
    model_name: str,
    *,
    hf_model: Any,
    checkpoint: tuple[int | None, int | None],
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    tokenizer: Any,
    fields: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Opened:
    """Open a pretrained model without processing of its weights; see `HookedTransformer.from_pretrained`."""
    options, dtype = dict(options), read_dtype(dtype)
    if quantized := sorted({"load_in_8bit", "load_in_4bit", "quantization_config"} & options.keys()):
        raise ValueError(f"{quantized[0]}: quantized weights are not read")
    check_device(device, may_be_meta=True)
    is_path = Path(model_name).is_absolute() or model_name.startswith((".", "~"))
    if is_path and hf_model is None and not Path(model_name).is_dir():
        raise ValueError(f"model_name={model_name!r} is not a folder")
    name, copies = official_name(model_name), hf_model is not None
    index, step = checkpoint
    fields = {key: value for key, value in fields.items() if value is not None}
    tokenizer_name: str | None = name
    files = None if copies else find_lens_files(name, options, index, step)
    if (others := sorted(options.keys() - set(HUB_OPTIONS))) and (files is not None or copies):
        raise ValueError(f"{others} are for weights that transformers loads")
    if files is not None:
        model = open_weights(model_class, files.config_of(**fields, device="meta"), files.read, dtype)
        tokenizer_name = files.tokenizer_name
    else:
        if (index, step) != (None, None):
            if "revision" in options or copies:
                raise ValueError("checkpoint_index and checkpoint_value choose a revision: no revision=, no hf_model=")
            options["revision"] = checkpoint_revision(name, index, step)
        if hf_model is None:
            hf_model = _load(name, dtype, options, is_meta=str(device) == "meta")
        elif not isinstance(hf_model, transformers.PreTrainedModel):
            raise ArgumentError(f"hf_model must be a model of transformers, got {type(hf_model).__name__}")
        model = from_transformers(model_class, hf_model, dtype=dtype, fields=fields, copies=copies)
    if device is not None:
        model.to(device)
    if tokenizer is None and tokenizer_name is not None:
        tokenizer = _load_tokenizer(tokenizer_name, options, is_needed=not copies)
    if tokenizer is not None:
        model.set_tokenizer(tokenizer)
    return model


def from_transformers(
    model_class: Callable[..., Opened],
    hf_model: Any,
    *,
    dtype: torch.dtype | None = None,
    fields: Mapping[str, Any] | None = None,
    copies: bool = True,
) -> Opened:
    """Make a model of ours from one of `transformers`; with `copies=False` their weights share memory."""
    check_float_weights(hf_model)
    config = hf_model.config
    family, translated = find_family(config), config_fields(config)
    kept: torch.dtype = dtype or hf_model.dtype
    if "embedding_scale" in translated:
        translated["embedding_scale"] = embedding_scale(config.hidden_size, kept)
    n_layers, fields = translated["n_layers"], dict(fields or {})
    if fields.get("n_layers", 0) > n_layers:
        raise ValueError(f"first_n_layers={fields['n_layers']}, but the model has {n_layers} layers")
    if kinds := translated.get("attn_types"):
        translated["attn_types"] = kinds[: fields.get("n_layers")]
    cfg = TransformerConfig(**translated | fields | {"dtype": kept, "device": "meta"})
    weights, lacks = hf_model.state_dict(), family.lacks(config)

    def convert(cfg: TransformerConfig, outline: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converted = convert_weights(family, cfg, weights, outline, n_layers=n_layers, lacks=lacks)
        return {name: weight.clone() for name, weight in converted.items()} if copies else converted

    return open_weights(model_class, cfg, convert, kept)


def open_weights(
    model_class: Callable[..., Opened],
    cfg: TransformerConfig,
    convert: Callable[[TransformerConfig, Mapping[str, Tensor]], dict[str, Tensor]],
    dtype: torch.dtype | None,
) -> Opened:
    """Make a model on the device "meta", where it takes no memory, and put weights of a type (or their own) into it."""
    model = model_class(cfg)
    outline = model.state_dict()
    weights = convert(cfg, outline)
    dtype = dtype or next(iter(weights.values())).dtype
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    return model.to(next(iter(weights.values())).device)


def checkpoint_revision(name: str, index: int | None, step: int | None) -> str:
    """Return the revision on the hub of a checkpoint, by its index in the list of checkpoints or by its step."""
    start = next((start for start in STEPS_ON_HUB if name.startswith(start)), None)
    if start is None:
        raise ValueError(f"{name} has no checkpoints; models whose names start with {', '.join(STEPS_ON_HUB)} do")
    form, steps = STEPS_ON_HUB[start]
    if "v0" in name:  # the first Pythia models have no early ones
        steps = tuple(each for each in steps if each >= 1000)
    return form.format(checkpoint_step(name, steps, index, step))


def check_float_weights(model: Any) -> None:
    """Refuse (ArgumentError) a model with quantized weights."""
    for name, weight in model.named_parameters():
        if weight.dtype not in DTYPES.values():
            raise ArgumentError(f"{name} is of type {weight.dtype}: load it in float32 (quantized: model.dequantize())")
    if packed := [part for part, module in model.named_modules() if ".quantized" in type(module).__module__]:
        raise ArgumentError(f"{packed[0]} is quantized, and its outputs may depend on the batch: load it in float32")


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype, also by its name; ArgumentError for one that no model has."""
    if dtype is not None and dtype not in (*DTYPES, *DTYPES.values()):
        raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return DTYPES[dtype] if isinstance(dtype, str) else dtype


def _load(name: str, dtype: torch.dtype | None, options: Mapping[str, Any], *, is_meta: bool) -> Any:
    """Load a model of transformers from a folder or the hub; its config is checked before its weights are fetched."""
    hub = {key: value for key, value in options.items() if key in HUB_OPTIONS}
    if Path(name).is_dir() and "revision" in options:
        raise ValueError(f"revision is for models on the hub, and {name} is a folder: give the revision's own folder")
    files = ModelFolder(Path(name), needs_tokenizer=False) if Path(name).is_dir() else None
    config = AutoConfig.from_pretrained(name, **{"trust_remote_code": False} | hub)
    config_fields(config)
    asked: Any = dtype or "auto"
    if files is not None:
        others = {key: value for key, value in options.items() if key not in HUB_OPTIONS}
        return files.load(config, asked, is_meta=is_meta, **others)
    if is_meta:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).to(dtype or config.dtype or torch.float32)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        name, config=config, dtype=asked, output_loading_info=True, **{"trust_remote_code": False} | dict(options)
    )
    model, report = loaded
    refuse_differences(name, report)
    return model


def _load_tokenizer(name: str, options: Mapping[str, Any], *, is_needed: bool) -> Any:
    """Load a tokenizer; None for a folder without one, or if it is not needed and not found."""
    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        return None
    hub = {key: value for key, value in options.items() if key in HUB_OPTIONS}
    with contextlib.suppress(*(() if is_needed else (OSError, ValueError))):
        return AutoTokenizer.from_pretrained(name, **{"trust_remote_code": False} | hub)
    return None
