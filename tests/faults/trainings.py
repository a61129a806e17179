"""Small trainings that are killed and damaged, and comparisons of their folders."""

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
TOKENS = RepeatedTokens(d_vocab=7, n_ctx=12, min_period=2, max_period=5)
TOKEN_MODEL = TransformerConfig(
    prompt_format="token_ids", d_vocab=7, n_ctx=12, n_layers=2, n_heads=2, d_model=8, attention="softmax",
    initializer_range=0.3, attn_only=True, normalization_type=None, attn_bias=False, read_bias=False,
)  # fmt: skip
LSTM = LSTMConfig(x_dim=3, n_context=4, n_layers=2, d_model=6)


def small(**changes: object) -> TrainingConfig:
    """A training that takes a fraction of a second on the CPU."""
    fields: dict[str, object] = {
        "task": TASK, "model": MODEL, "steps": 12, "batch_size": 16, "learning_rate": 0.01, "eval_every": 4,
        "eval_prompts": 32, "log_every": 1, "save_every": 3, "n_snapshots": 4, "cpu": True,
    }  # fmt: skip
    return TrainingConfig(**(fields | changes))  # pyright: ignore[reportArgumentType]


class _Stop(Exception):
    pass


def interrupt(config: TrainingConfig, folder: Path, step: int) -> None:
    """Train until the save at a step."""

    def stop(saved: int) -> None:
        if saved == step:
            raise _Stop

    try:
        train(config, folder, progress=False, on_save=stop)
    except _Stop:
        return
    raise ValueError(f"no save at step {step}")


def differences(a: Path, b: Path) -> list[str]:
    """Compare the folders of two trainings bit for bit: the last save, the metrics, the snapshots."""
    wrong = [f"the state's {name}" for name in unequal(*(read_tensors(folder / STATE_FILE)[0] for folder in (a, b)))]
    lines = [[{**line, "steps_per_second": 0} for line in Metrics.read(folder)] for folder in (a, b)]
    wrong += ["the metrics"] * (lines[0] != lines[1])
    names = {path.name for folder in (a, b) for path in folder.glob("snapshots/*")}
    for name in sorted(names):
        if not all((folder / "snapshots" / name).is_file() for folder in (a, b)):
            return [*wrong, f"snapshot {name} is in one folder only"]
        tensors = (read_tensors(folder / "snapshots" / name)[0] for folder in (a, b))
        wrong += [f"{name}'s {tensor}" for tensor in unequal(*tensors)]
    return wrong


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in any bit."""
    return [name for name in {**a, **b} if name not in a or name not in b or not torch.equal(a[name], b[name])]
