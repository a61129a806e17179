import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mechicl.checkpoints import CheckpointError, load, load_checkpoint
from mechicl.models import TransformerConfig

CONFIGS = {
    "one linear layer": TransformerConfig(x_dim=3, n_context=4),
    "float64": TransformerConfig(x_dim=3, n_context=4, y_dim=2, n_layers=2, dtype="float64"),
    "bfloat16": TransformerConfig(x_dim=3, n_context=4, dtype="bfloat16"),
    "recurrent": TransformerConfig(x_dim=3, n_context=4, n_layers=4, recurrent=True, d_mlp=5, damping=0.7),
    "mixed attention": TransformerConfig(
        x_dim=3, n_context=4, n_layers=3, attention="relu,softmax,linear", sink="learned", normalize_by_context=True
    ),
    "gradient descent": TransformerConfig(
        x_dim=3, n_context=4, y_dim=2, n_layers=2, d_model=8, d_mlp=5, mlp_location="input", read_in="linear",
        read_out="identity", attention_weights="gradient_descent",
    ),
    "everything learned": TransformerConfig(
        x_dim=3, n_context=4, y_dim=2, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_mlp=6,
        attention="softmax", sink="learned", normalization_type="LN", positional_embedding_type="standard",
        read_in="linear", read_out="linear", read_bias=True, attn_bias=True, act_fn="gelu_new", token_clip=9.5,
    ),
}  # fmt: skip


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def sign(folder: Path) -> None:
    """Replace the digests by those of the changed files, as someone would who changes a checkpoint on purpose."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("[!r]*.*")}
    edit(folder / "record.json", lambda record: record.update(sha256=digests))


def change_tensors(folder: Path, change: Callable[[Any], Any], name: str = "weights", steps: str = "0,10") -> None:
    tensors = load_file(folder / f"{name}.safetensors")
    change(tensors)
    save_file(tensors, folder / f"{name}.safetensors", metadata={"steps": steps})
    sign(folder)


def refused(folder: Path, message: str) -> None:
    """Loading fails with this message in every way."""
    for attempt in (lambda: load(folder), lambda: load(str(folder), seed=9), lambda: load_checkpoint(folder)):
        with pytest.raises(CheckpointError, match=message) as caught:
            attempt()
        assert str(folder) in str(caught.value)
