"""Language models with their tokenizers: ours, and all that TransformerLens supports."""

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from mechicl.base.arguments import ArgumentError, check_fields, checked
from mechicl.checkpoints import UnknownSeedError, are_weights_random, available, load_checkpoint
from mechicl.models import HookedTransformer
from mechicl.models.config_checks import check_device
from mechicl.models.pretrained.families import is_computed
from mechicl.models.pretrained.folders import ModelFolder, download_model, refuse_differences
from mechicl.models.pretrained.loading import check_float_weights, from_transformers, read_dtype
from mechicl.tasks.topics import TopicClassification, topic_tokenizer

UNTRAINED_SEED = 1_000_003


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model and its tokenizer.

    Attributes:
        name: name of the checkpoint, of the model on the hub, or of the folder.
        model: a `HookedTransformer` of token ids, or a `TransformerBridge`, in eval mode.
        tokenizer: a tokenizer with the interface of `transformers`.
        dequantized_from: name of the GGUF file that the weights come from, if they are not the published ones.
    """

    name: str
    model: Any
    tokenizer: Any
    dequantized_from: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, opened as a {type(self.model).__name__})"


@checked
def load_language_model(
    name: str | Path | None = None,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    gguf_file: str | None = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    bridge: bool = False,
) -> LanguageModel:
    """Load a language model and its tokenizer by name or path, or open a model of `transformers`.

    Args:
        name: a causal language model of `transformers`, by its name on the Hugging Face hub or as a folder with its
            config, safetensors and tokenizer; or a mechicl checkpoint trained on texts ("topics-3l", or a folder).
        model: instead of a name, a model of `transformers` in memory. It is copied, so it stays unchanged.
        tokenizer: a tokenizer of `transformers`, for `model`, or instead of the one in the folder; it is copied. The
            copy puts the token of beginning before texts if `cfg.default_prepend_bos` is True, as TransformerLens does
            for GPT-2 and others, although their own tokenizers do not.
        revision: branch, tag or commit on the hub, such as "step1000" of Pythia; by default the main branch.
        gguf_file: file name of quantized weights in the folder or repository. They are dequantized, so they are close
            to the published weights and not equal (needs the package `gguf`).
        seed: training seed of a mechicl checkpoint, by default that of lowest held-out loss; or of the random weights.
        device: device of the model; by default the CPU, or the device of `model`.
        dtype: float16, bfloat16, float32 or float64; by default float32, or the type of `model` or of the checkpoint.
        bridge: True to open a model of transformers through TransformerLens' `TransformerBridge` in any case.

    Returns:
        A `LanguageModel`, whose `model`, in eval mode, is a `HookedTransformer` with unprocessed weights (see
        `HookedTransformer.from_pretrained_no_processing`), or a TransformerLens `TransformerBridge` for families that
        `HookedTransformer` does not compute; `print` shows which. `tokenizer` is one of `transformers`. Analyses with
        an argument `language` take it whole, others take `.model`. Inside `with checkpoints.random_weights():` it has
        random weights instead, as a control.

    Raises:
        UnknownSeedError: there are no weights of such a seed.
        ValueError: the names and shapes of the weights in the files are not those that the config requires (known
            buffers and tied weights excepted), or the weights are integers, quantized, or not safetensors; an adapter
            without its model; no tokenizer; a device or dtype that cannot be used; the mechicl checkpoint was not
            trained on texts; a revision was given for a folder; or TransformerLens does not support the architecture.
        ImportError: a GGUF file without the package `gguf`.
        OSError: no such model or file, or no network connection to fetch it.

    Example:
        >>> load_language_model("topics-3l").tokenizer("cat oak").input_ids
        [0, 23, 47]
    """
    if (name is None) == (model is None):
        raise ArgumentError("give either a name (or a folder), or model= and tokenizer=")
    read_dtype(dtype)
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ArgumentError(f"tokenizer must be one of transformers, got {type(tokenizer).__name__}")
    check_device(device)
    if model is not None:
        if revision is not None or gguf_file is not None:
            raise ArgumentError("revision and gguf_file are for models that are loaded by name, not for model=")
        return _open(model, tokenizer, type(model).__name__, seed, device, dtype, bridge=bridge)
    folder, title = Path(str(name)), str(name)
    if title in available() or (folder / "record.json").is_file():
        if revision is not None or gguf_file is not None or tokenizer is not None:
            raise ValueError(f"revision and gguf_file (and tokenizer) are for models of transformers, {name} is a "
                             f"checkpoint of ours")  # fmt: skip
        checkpoint = load_checkpoint(title)
        if not isinstance(checkpoint.task, TopicClassification):
            raise ValueError(f"{checkpoint.name} was trained on {type(checkpoint.task).__name__}, not on texts")
        return LanguageModel(checkpoint.name, checkpoint.model(seed).to(device or "cpu", dtype), topic_tokenizer())
    if folder.is_dir() and revision is not None:
        raise ValueError(f"revision is for models on the hub, and {name} is a folder: give the revision's own folder")
    if not folder.is_dir() and not _is_hub_name(title):
        raise FileNotFoundError(f"{name} is neither a folder nor a name on the hub, such as EleutherAI/pythia-160m")
    _check_seed(seed, title)
    if folder.is_dir():
        title = folder.resolve().name
    if revision is not None:
        title = f"{title}@{revision}"
    dtype = dtype or torch.float32
    if gguf_file is not None:
        opened, own = load_gguf(str(name), gguf_file, revision=revision, dtype=dtype)
        return _open(opened, tokenizer or own, title, seed, device, None, is_ours=True, bridge=bridge)
    if not folder.is_dir():
        with _named_errors(title):
            folder = download_model(str(name), revision)
    folder = folder.resolve()
    with _named_errors(str(folder)):
        files = ModelFolder(folder, needs_tokenizer=tokenizer is None)
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        opened = files.load(config, dtype, is_meta=are_weights_random())
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return _open(opened, tokenizer, title, seed, device or "cpu", dtype, is_ours=True, bridge=bridge)


def _check_seed(seed: int | None, name: str) -> None:
    if seed is not None and not are_weights_random():
        raise UnknownSeedError(f"{name} has one set of weights, so seed={seed} cannot be honoured: leave it out")


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


def _open(
    model: Any, tokenizer: Any, name: str, seed: int | None, device: Any, dtype: Any, *, bridge: bool,
    is_ours: bool = False,
) -> LanguageModel:  # fmt: skip
    """Open a model of `transformers` in memory, as a copy if it is not ours: a bridge changes what it wraps."""
    if not isinstance(model, transformers.PreTrainedModel):
        raise ArgumentError(f"model must be a model of transformers (PreTrainedModel), got {type(model).__name__}")
    if tokenizer is None:
        raise ArgumentError("give tokenizer=, the tokenizer of transformers that belongs to model=")
    if getattr(tokenizer, "vocab_size", 1) == 0:
        raise ValueError(f"the tokenizer of {name} has no words: give tokenizer=")
    _check_seed(seed, name)
    check_float_weights(model)
    if are_weights_random():
        device, dtype = device or model.device, dtype or model.dtype
        with torch.random.fork_rng():
            torch.manual_seed(UNTRAINED_SEED + (seed or 0))
            model, is_ours = type(model)(copy.deepcopy(model.config)), True
    if weight := next((weight for weight, value in model.named_parameters() if value.is_meta), None):
        raise ArgumentError(f"{weight} is on the device 'meta': load it in float32")
    source = getattr(model.config, "dequantized_from", None)
    with _named_errors(name), _reopened(tokenizer) as tokenizer:
        if not bridge and is_computed(model.config):
            ours = from_transformers(HookedTransformer, model, dtype=dtype, copies=not is_ours)
            ours.to(device or model.device).set_tokenizer(tokenizer)
            opened: Any = ours
        else:
            opened = _bridge(model if is_ours else copy.deepcopy(model), tokenizer, name, device, dtype)
        if opened.cfg.default_prepend_bos:
            return LanguageModel(name, opened, opened.tokenizer, source)
        for special in ("eos_token", "pad_token", "bos_token", "padding_side"):
            setattr(tokenizer, special, getattr(opened.tokenizer, special))
        return LanguageModel(name, opened, tokenizer, source)


def _bridge(model: Any, tokenizer: Any, name: str, device: Any, dtype: Any) -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model.eval().to(device or model.device)
    for parameter in model.parameters() if dtype is not None else ():  # and no buffers: positions need float32
        parameter.data = parameter.data.to(dtype)
    model.set_attn_implementation("eager")  # others do not compute patterns
    kind = type(model).__name__
    return build_bridge_from_module(model, kind, hf_config=model.config, tokenizer=tokenizer, model_name=name).eval()


def load_gguf(
    name: str | Path, gguf_file: str, *, revision: str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Load a model of `transformers` and its tokenizer from quantized weights; `save_pretrained` can save both."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("GGUF files need the package gguf: pip install 'mechicl[gguf]'")
    from transformers import AutoModelForCausalLM

    if Path(name).is_dir() and not (Path(name) / gguf_file).is_file():
        files = sorted(path.name for path in Path(name).glob("*.gguf"))
        raise FileNotFoundError(f"{name} has no file gguf_file={gguf_file!r}; its GGUF files are {files}")
    where = {"gguf_file": gguf_file, "trust_remote_code": False} | ({} if revision is None else {"revision": revision})
    with _named_errors(str(name)):
        tokenizer = AutoTokenizer.from_pretrained(str(name), **where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(name), dtype=dtype, attn_implementation="eager", output_loading_info=True, **where
        )
        model, report = loaded
        refuse_differences(f"{name}/{gguf_file}", report)
    model.hf_quantizer = None  # the weights are no longer quantized; with these two the model could not be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dequantized_from = Path(gguf_file).name  # saved with the model; reports mention it
    return model, tokenizer


@contextmanager
def _reopened(tokenizer: Any) -> Iterator[Any]:
    """Copy a tokenizer through a temporary folder: TransformerLens opens a tokenizer again from where it was."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        yield AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


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
    except Exception as error:
        if "architecture" in str(error).lower() or "model_type" in str(error).lower():
            raise ValueError(f"TransformerLens does not support the architecture of {name}: {error}") from error
        if type(error) is ValueError:  # and none of its subclasses, such as errors of reading JSON
            raise
        raise ValueError(f"{name} cannot be opened ({error!r}): check its config and tokenizer") from error
