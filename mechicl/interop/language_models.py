"""Language models with their tokenizers: those that come with mechicl, and any that TransformerLens opens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mechicl.base.arguments import checked
from mechicl.base.files import check_file, read_json
from mechicl.base.tensor_files import read_outline
from mechicl.checkpoints import are_weights_random, available, load_checkpoint
from mechicl.tasks.topics import TopicClassification, topic_tokenizer

FIRST = 1_000_003  # seed of untrained models' weights
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "vocab_size", "n_positions")
"""What configs of `transformers` call the sizes that are sides of the weights' matrices."""
MOST_CONFIG = 2**20
"""Bytes of a config.json that are read."""


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model and its tokenizer.

    Attributes:
        name: of the checkpoint, the hub or the folder.
        model: ours on token ids, or a `TransformerBridge`, in eval mode.
        tokenizer: as in `transformers`.
    """

    name: str
    model: Any
    tokenizer: Any


@checked
def load_language_model(
    name: str | Path, *, seed: int | None = None, device: str | torch.device = "cpu"
) -> LanguageModel:
    """A language model by name or path.

    Args:
        name: a checkpoint of ours that was trained on texts ("topics-3l", or a folder), or a causal language model of
            `transformers`: its name on the hub, or a folder with its config, safetensors and tokenizer.
        seed: of a checkpoint of ours: which of its training seeds.
        device: where to put it.

    Returns:
        The model and its tokenizer; within `checkpoints.random_weights`, one of the same config that was never trained.

    Raises:
        UnknownSeedError: a checkpoint of ours without that seed.
        ValueError: a checkpoint of ours that reads no texts; or a folder whose config claims more layers, or larger
            ones, than its safetensors hold.
        OSError: no such model.

    Example:
        >>> load_language_model("topics-3l").tokenizer("cat oak").input_ids
        [0, 23, 47]
    """
    folder = Path(name)
    if str(name) in available() or (folder / "record.json").is_file():
        checkpoint = load_checkpoint(name)
        if not isinstance(checkpoint.task, TopicClassification):
            raise ValueError(f"{checkpoint.name} was trained on {type(checkpoint.task).__name__} and reads no texts")
        return LanguageModel(checkpoint.name, checkpoint.model(seed).to(device), topic_tokenizer())
    if (folder / "config.json").exists():
        _check_folder(folder)
    from transformer_lens.model_bridge import TransformerBridge  # loads every architecture of transformers: seconds

    with torch.random.fork_rng(enabled=are_weights_random()):
        if are_weights_random():
            torch.manual_seed(FIRST + (seed or 0))
        bridge = TransformerBridge.boot_transformers(str(name), device=device, load_weights=not are_weights_random())
    bridge.eval()
    return LanguageModel(folder.name if folder.is_dir() else str(name), bridge, bridge.tokenizer)


def _check_folder(folder: Path) -> None:
    """Refuse a folder of `transformers` whose config claims more than its weights are, before a model is made of it."""
    for path in folder.iterdir():
        if not path.is_dir():
            check_file(path)
    config = read_json(folder / "config.json", MOST_CONFIG)
    tensors = [tensor for path in folder.glob("*.safetensors") for tensor in read_outline(path)[0].values()]
    if not tensors:
        raise ValueError(f"{folder} has no safetensors: weights in other files are not read")
    bounds = dict.fromkeys(LAYERS, len(tensors)) | dict.fromkeys(WIDTHS, max(max(t.shape, default=1) for t in tensors))
    for name, bound in bounds.items():
        value = config.get(name)
        if isinstance(value, int | float) and value > bound:
            raise ValueError(f"{folder}: {name}={value} in its config.json is more than its weights hold ({bound})")
