"""Functions of tests that put several public functions together: recurrent layers, clamped trainings, reports."""

import tempfile
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mechicl import report
from mechicl.models import TransformerConfig, build
from mechicl.tasks import LinearRegression
from mechicl.training import Clamp, TrainingConfig, train

TASK = LinearRegression(x_dim=2, n_context=4)
SIZES: dict[str, Any] = {
    "x_dim": 2, "n_context": 4, "prompt_format": "interleaved", "read_in": "linear", "read_out": "linear", "d_model": 6,
    "initializer_range": 0.3,
}  # fmt: skip
TWO_LAYERS = TransformerConfig(**SIZES, attention="softmax", n_layers=2, n_heads=2, d_mlp=4, attn_only=False)


def predict_with_recurrent_layers(
    attention: str,
    n_layers: int = 1,
    n_heads: int = 2,
    d_head: int | None = None,
    conv_width: int = 0,
    gate: str | None = None,
    normalize_keys: bool | None = None,
    normalization_type: str | None = "LN",
    dtype: str = "float32",
    seed: int = 0,
) -> Tensor:
    """Predictions of a model with recurrent layers."""
    fields: dict[str, Any] = {"d_head": d_head, "gate": gate, "normalize_keys": normalize_keys}
    norm: Any = normalization_type
    config = TransformerConfig(
        **SIZES, attention=attention, n_layers=n_layers, n_heads=n_heads, conv_width=conv_width, dtype=dtype,
        normalization_type=norm, **{name: value for name, value in fields.items() if value is not None},
    )  # fmt: skip
    return build(config, seed=seed).predict(TASK.sample(4, seed=0))


def train_with_a_clamp(
    component: str,
    layer: int | None = None,
    head: int | Sequence[int] | None = None,
    pos: int | Sequence[int] | None = None,
    method: str = "value",
    value: float = 0.0,
    source: str | None = None,
    snapshot: int | None = None,
    steps: tuple[int, int] | None = None,
) -> Any:
    """Weights after three steps with a clamp."""
    places: dict[str, Any] = {"layer": layer, "head": head, "pos": pos, "method": method}
    clamp = Clamp(component, **places, value=value, source=source, snapshot=snapshot, steps=steps)
    config = TrainingConfig(
        task=TASK, model=TWO_LAYERS, steps=3, batch_size=4, eval_prompts=8, interventions=(clamp,), cpu=True
    )
    with tempfile.TemporaryDirectory() as folder:
        return train(config, folder, progress=False).models


def report_on(checkpoint: Any, n_prompts: int | None = None, sections: Sequence[str] | None = None) -> str:
    """The length of a report's page in hundreds of kilobytes."""
    with tempfile.TemporaryDirectory() as folder:
        model = build(TWO_LAYERS) if checkpoint == "model" else checkpoint
        page = report(model, TASK, folder, n_prompts=n_prompts, sections=sections, progress=False)
        return page.name
