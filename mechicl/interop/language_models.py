"""Language models with their tokenizers: ours, and all that TransformerLens supports."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mechicl.base.arguments import check_fields, checked
from mechicl.base.files import check_file, read_json
from mechicl.base.tensor_files import read_outline
from mechicl.checkpoints import are_weights_random, available, load_checkpoint
from mechicl.tasks.topics import TopicClassification, topic_tokenizer

UNTRAINED_SEED = 1_000_003
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "vocab_size")
"""Names in configs of `transformers` of sizes that are dimensions of weights."""
MOST_POSITIONS = 2**17
"""Largest `n_positions` in a folder whose weights have fewer: rotary positions have no weights."""
MOST_CONFIG = 2**20
"""Largest config.json in bytes."""


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model and its tokenizer.

    Attributes:
        name: name of the checkpoint, of the model on the hub, or of the folder.
        model: a `HookedTransformer` of token ids, or a `TransformerBridge`, in eval mode.
        tokenizer: a tokenizer with the interface of `transformers`.
    """

    name: str
    model: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def dequantized_from(self) -> str | None:
        """Name of the GGUF file that the weights come from, through `load_gguf`: they are not the published ones."""
        config = getattr(getattr(self.model, "original_model", None), "config", None)
        return getattr(config, "dequantized_from", None)


@checked
def load_language_model(
    name: str | Path,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    seed: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LanguageModel:
    """Load a language model and its tokenizer by name or path.

    Args:
        name: a causal language model of `transformers`, by its name on the Hugging Face hub or as a folder with its
            config, safetensors and tokenizer; or a mechicl checkpoint trained on texts ("topics-3l", or a folder).
        revision: branch, tag or commit on the hub, such as "step1000" of Pythia; by default the main branch.
        gguf_file: file name of quantized weights in the folder or repository. They are dequantized, so they are close
            to the published weights and not equal (needs the package `gguf`).
        seed: training seed of a mechicl checkpoint; by default the seed with the lowest held-out loss.
        device: device of the model.
        dtype: floating-point type of the weights.

    Returns:
        A `LanguageModel`: `model`, in eval mode, is a TransformerLens `TransformerBridge` (or a `HookedTransformer` for
        a mechicl checkpoint), `tokenizer` one of `transformers`. Analyses with an argument `language` take it whole,
        others take `.model`. Inside `with checkpoints.random_weights():` it has random weights instead, as a control.

    Raises:
        UnknownSeedError: the mechicl checkpoint has no such seed.
        ValueError: the mechicl checkpoint was not trained on texts; a revision was given for a folder; the config in a
            folder claims more or larger layers than its safetensors contain; there is no tokenizer; or TransformerLens
            does not support the architecture.
        ImportError: a GGUF file without the package `gguf`.
        OSError: no such model, or no network connection to fetch it.

    Example:
        >>> load_language_model("topics-3l").tokenizer("cat oak").input_ids
        [0, 23, 47]
    """
    folder = Path(name)
    if str(name) in available() or (folder / "record.json").is_file():
        if revision is not None or gguf_file is not None:
            raise ValueError(f"revision and gguf_file are for models of transformers, {name} is a checkpoint of ours")
        checkpoint = load_checkpoint(name)
        if not isinstance(checkpoint.task, TopicClassification):
            raise ValueError(f"{checkpoint.name} was trained on {type(checkpoint.task).__name__}, not on texts")
        return LanguageModel(checkpoint.name, checkpoint.model(seed).to(device), topic_tokenizer())
    if folder.is_dir() and revision is not None:
        raise ValueError(f"revision is for models on the hub, and {name} is a folder: give the revision's own folder")
    if not folder.is_dir() and not _is_hub_name(str(name)):
        raise FileNotFoundError(f"{name} is neither a folder nor a name on the hub, such as EleutherAI/pythia-160m")
    if gguf_file is not None:
        bridge = _bridge_of_gguf(str(name), gguf_file, revision, device, dtype)
    else:
        if (folder / "config.json").exists():
            _check_folder(folder)
        bridge = _bridge(str(name), revision, seed or 0, device, dtype)
    bridge.eval()
    if bridge.tokenizer is None or getattr(bridge.tokenizer, "vocab_size", 1) == 0:
        raise ValueError(f"{name} has no tokenizer: save one into its folder, by tokenizer.save_pretrained")
    title = folder.name if folder.is_dir() else str(name)
    return LanguageModel(f"{title}@{revision}" if revision else title, bridge, bridge.tokenizer)


def is_language_model(name: str | Path) -> bool:
    """Return True for a folder of `transformers`, a folder with GGUF files, or a name like those on the hub."""
    folder = Path(name)
    if str(name) in available() or (folder / "record.json").is_file():
        return False
    if folder.is_dir():
        return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))
    return "/" in str(name) and _is_hub_name(str(name))


def _is_hub_name(name: str) -> bool:
    return name.count("/") < 2 and not name.startswith((".", "/", "~"))


def _bridge(name: str, revision: str | None, seed: int, device: str | torch.device, dtype: torch.dtype) -> Any:
    from transformer_lens.model_bridge import TransformerBridge  # takes seconds

    with torch.random.fork_rng(enabled=are_weights_random()), _named_errors(name):
        if not are_weights_random():
            return TransformerBridge.boot_transformers(name, revision=revision, device=device, dtype=dtype)
        torch.manual_seed(UNTRAINED_SEED + seed)
        return TransformerBridge.boot_transformers(name, revision=revision, load_weights=False).to(device, dtype)


def load_gguf(
    name: str | Path, gguf_file: str, *, revision: str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Load a model of `transformers` and its tokenizer from quantized weights; `save_pretrained` can save both."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("GGUF files need the package gguf: pip install 'mechicl[gguf]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": gguf_file} | ({} if revision is None else {"revision": revision})
    with _named_errors(str(name)):
        tokenizer = AutoTokenizer.from_pretrained(str(name), **where)
        model: Any = AutoModelForCausalLM.from_pretrained(str(name), dtype=dtype, attn_implementation="eager", **where)
    model.hf_quantizer = None  # the weights are no longer quantized; with these two the model could not be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dequantized_from = Path(gguf_file).name  # saved with the model; reports mention it
    return model, tokenizer


def _bridge_of_gguf(
    name: str, gguf_file: str, revision: str | None, device: str | torch.device, dtype: torch.dtype
) -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_gguf(name, gguf_file, revision=revision, dtype=dtype)
    if are_weights_random():
        with torch.random.fork_rng():
            torch.manual_seed(UNTRAINED_SEED)
            model = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").to(dtype)
    architecture = (model.config.architectures or [type(model).__name__])[0]
    with _named_errors(name):
        return build_bridge_from_module(
            model.to(device).eval(), architecture, hf_config=model.config, tokenizer=tokenizer, model_name=name
        )


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryError(f"{name} does not fit into memory: give dtype=torch.bfloat16, or a smaller model") from error
    except OSError as error:
        if "offline" in str(error) or "connect" in str(error).lower() or "couldn't reach" in str(error).lower():
            raise OSError(f"{name} is not in a folder and cannot be fetched without a network connection") from error
        raise
    except (KeyError, ValueError, NotImplementedError) as error:
        if "architecture" in str(error).lower() or "model_type" in str(error).lower():
            raise ValueError(f"TransformerLens does not support the architecture of {name}: {error}") from error
        raise


def _check_folder(folder: Path) -> None:
    """Refuse a folder of `transformers` whose config claims more than its weights, before memory is allocated."""
    for path in folder.iterdir():
        if not path.is_dir():
            check_file(path)
    config = read_json(folder / "config.json", MOST_CONFIG)
    tensors = [tensor for path in folder.glob("*.safetensors") for tensor in read_outline(path)[0].values()]
    if not tensors:
        raise ValueError(f"{folder} has no safetensors; weights in other formats are not read")
    widest = max(max(t.shape, default=1) for t in tensors)
    bounds: dict[str, int] = {**dict.fromkeys(LAYERS, len(tensors)), **dict.fromkeys(WIDTHS, widest)}
    bounds["n_positions"] = max(widest, MOST_POSITIONS)
    for name, bound in bounds.items():
        value = config.get(name)
        if isinstance(value, int | float) and value > bound:
            raise ValueError(f"{folder}: {name}={value} in config.json exceeds the weights, which allow {bound}")
