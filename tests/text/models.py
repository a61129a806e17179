"""Small untrained models of texts, for tests that need one."""

from pathlib import Path
from typing import Any

from mechicl.checkpoints import save
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import task_to_dict
from mechicl.tasks.topics import WORDS, TopicClassification

SMALL = TransformerConfig(
    prompt_format="token_ids", d_vocab=len(WORDS), n_ctx=64, n_layers=1, n_heads=2, d_model=16, d_mlp=16,
    attention="softmax", normalization_type="LN", initializer_range=0.3,
)  # fmt: skip
RECORD: dict[str, Any] = {"training": {"task": task_to_dict(TopicClassification())}}


def reader(seed: int = 0) -> HookedTransformer:
    return HookedTransformer(SMALL, seed=seed).eval()


def saved(folder: Path, n_seeds: int = 2, **record: Any) -> Path:
    """A checkpoint of readers."""
    seeds = list(range(n_seeds))
    return save(folder, [reader(seed) for seed in seeds], {**RECORD, "seeds": seeds, **record})
