"""Small trainings that are killed and damaged, and how two of them are compared."""

from pathlib import Path

import torch
from torch import Tensor

from mechicl.base.tensor_files import read_tensors
from mechicl.models import LSTMConfig, TransformerConfig
from mechicl.tasks import LinearRegression, RepeatedTokens
from mechicl.training import TrainingConfig, train
from mechicl.training.metrics import Metrics
from mechicl.training.state import STATE_FILE

TASK = LinearRegression(x_dim=3, n_context=4)
MODEL = TransformerConfig(x_dim=3, n_context=4, n_layers=1, initializer_range=0.3)
WORDS = RepeatedTokens(d_vocab=7, n_ctx=12, min_period=2, max_period=5)
READER = TransformerConfig(
    prompt_format="token_ids", d_vocab=7, n_ctx=12, n_layers=2, n_heads=2, d_model=8, attention="softmax",
    initializer_range=0.3, attn_only=True, normalization_type=None, attn_bias=False, read_bias=False,
)  # fmt: skip
LSTM = LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=6)


def small(**changes: object) -> TrainingConfig:
    """A run of a fraction of a second on the CPU."""
    fields: dict[str, object] = {
        "task": TASK, "model": MODEL, "steps": 12, "batch_size": 16, "learning_rate": 0.01, "eval_every": 4,
        "eval_prompts": 32, "log_every": 1, "save_every": 3, "n_snapshots": 4, "cpu": True,
    }  # fmt: skip
    return TrainingConfig(**(fields | changes))  # pyright: ignore[reportArgumentType]


def interrupt(config: TrainingConfig, folder: Path, step: int) -> None:
    """A run that ends right after its save at a step."""

    class Stop(Exception):
        pass

    def stop(saved: int) -> None:
        if saved == step:
            raise Stop

    try:
        train(config, folder, progress=False, on_save=stop)
    except Stop:
        return
    raise ValueError(f"no save at step {step}")


def differences(a: Path, b: Path) -> list[str]:
    """What two runs' folders differ in: tensors of the last save, lines of the metrics, snapshots. None is the bar."""
    wrong = [
        f"the state's {name}" for name in unequal(read_tensors(a / STATE_FILE)[0], read_tensors(b / STATE_FILE)[0])
    ]
    lines = [[{**line, "steps_per_second": 0} for line in Metrics.read(folder)] for folder in (a, b)]
    wrong += ["the metrics"] * (lines[0] != lines[1])
    snapshots = [sorted(path.name for path in folder.glob("snapshots/*")) for folder in (a, b)]
    if snapshots[0] != snapshots[1]:
        return [*wrong, f"which snapshots there are: {snapshots[0]}"]
    for name in snapshots[0]:
        tensors = [read_tensors(folder / "snapshots" / name)[0] for folder in (a, b)]
        wrong += [f"{name}'s {tensor}" for tensor in unequal(*tensors)]
    return wrong


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same, bit for bit."""
    return [name for name in {**a, **b} if name not in a or name not in b or not torch.equal(a[name], b[name])]
