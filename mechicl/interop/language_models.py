"""Language models with their tokenizers: ours, and all that TransformerLens supports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mechicl.base.arguments import checked
from mechicl.base.files import check_file, read_json
from mechicl.base.tensor_files import read_outline
from mechicl.checkpoints import are_weights_random, available, load_checkpoint
from mechicl.tasks.topics import TopicClassification, topic_tokenizer

UNTRAINED_SEED = 1_000_003
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "vocab_size", "n_positions")
"""Names in configs of `transformers` of sizes that are dimensions of weights."""
MOST_CONFIG = 2**20
"""Largest config.json in bytes."""


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model and its tokenizer.

    Attributes:
        name: name of the checkpoint, on the hub, or of the folder.
        model: our model of token ids, or a `TransformerBridge`, in eval mode.
        tokenizer: a tokenizer with the interface of `transformers`.
    """

    name: str
    model: Any
    tokenizer: Any


@checked
def load_language_model(
    name: str | Path, *, seed: int | None = None, device: str | torch.device = "cpu"
) -> LanguageModel:
    """Load a language model by name or path.

    Args:
        name: one of our checkpoints trained on texts ("topics-3l", or a folder), or a causal language model of
            `transformers`: its name on the hub, or a folder with its config, safetensors and tokenizer.
        seed: training seed of one of our checkpoints; by default its best.
        device: device of the model.

    Returns:
        The model and its tokenizer; within `checkpoints.random_weights`, an untrained model of the same config.

    Raises:
        UnknownSeedError: our checkpoint has no such seed.
        ValueError: our checkpoint was not trained on texts; or the config in a folder claims more or larger layers than
            its safetensors contain.
        OSError: no such model.

    Example:
        >>> load_language_model("topics-3l").tokenizer("cat oak").input_ids
        [0, 23, 47]
    """
    folder = Path(name)
    if str(name) in available() or (folder / "record.json").is_file():
        checkpoint = load_checkpoint(name)
        if not isinstance(checkpoint.task, TopicClassification):
            raise ValueError(f"{checkpoint.name} was trained on {type(checkpoint.task).__name__}, not on texts")
        return LanguageModel(checkpoint.name, checkpoint.model(seed).to(device), topic_tokenizer())
    if (folder / "config.json").exists():
        _check_folder(folder)
    from transformer_lens.model_bridge import TransformerBridge  # takes seconds

    with torch.random.fork_rng(enabled=are_weights_random()):
        if are_weights_random():
            torch.manual_seed(UNTRAINED_SEED + (seed or 0))
        bridge = TransformerBridge.boot_transformers(str(name), device=device, load_weights=not are_weights_random())
    bridge.eval()
    return LanguageModel(folder.name if folder.is_dir() else str(name), bridge, bridge.tokenizer)


def _check_folder(folder: Path) -> None:
    """Refuse a folder of `transformers` whose config claims more than its weights, before memory is allocated."""
    for path in folder.iterdir():
        if not path.is_dir():
            check_file(path)
    config = read_json(folder / "config.json", MOST_CONFIG)
    tensors = [tensor for path in folder.glob("*.safetensors") for tensor in read_outline(path)[0].values()]
    if not tensors:
        raise ValueError(f"{folder} has no safetensors; weights in other formats are not read")
    bounds = dict.fromkeys(LAYERS, len(tensors)) | dict.fromkeys(WIDTHS, max(max(t.shape, default=1) for t in tensors))
    for name, bound in bounds.items():
        value = config.get(name)
        if isinstance(value, int | float) and value > bound:
            raise ValueError(f"{folder}: {name}={value} in config.json exceeds the weights, which allow {bound}")
