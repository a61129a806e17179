"""The report on a trained model: every number in report.json, every picture in one offline HTML file."""

from pathlib import Path

from mechicl.checkpoints import CheckpointError, load_checkpoint
from mechicl.reports.claims import Claim, Claims, Row
from mechicl.reports.comparison import Comparison, Section, published
from mechicl.reports.descent import write_descent_report
from mechicl.reports.layers import write_layers_report
from mechicl.reports.model_parts import write_model_parts_report
from mechicl.reports.one_layer import write_one_layer_report
from mechicl.reports.texts import write_texts_report
from mechicl.reports.tokens import write_tokens_report
from mechicl.tasks.topics import TopicClassification

__all__ = ["Claim", "Claims", "Comparison", "Row", "Section", "published", "write_report"]

_ONE_STEP = {  # what the one-layer study takes for granted: its construction's architecture
    "n_layers": 1, "n_heads": 1, "attention": "linear", "normalization_type": None, "d_mlp": None, "damping": 1.0,
    "attn_bias": False, "keys": "context", "normalize_by_context": False, "recurrent": False,
    "positional_embedding_type": "none", "read_in": "identity", "read_out": "identity",
}  # fmt: skip


def write_report(name: str | Path, out: str | Path, *, n_prompts: int = 10_000, progress: bool = True) -> Path:
    """Study a checkpoint and write `report.html` and `report.json` into a folder.

    Args:
        name: of a shipped checkpoint, or the path of one.
        out: folder to write to; made if need be.
        n_prompts: held-out prompts for each measurement.
        progress: show progress bars.

    Returns:
        The path of report.html.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or a kind of model that there is no report for.
    """
    checkpoint = load_checkpoint(name)
    if checkpoint.record.get("training", {}).get("more_tasks"):
        raise CheckpointError(
            f"{checkpoint.name} was trained on several tasks at once: save one of `load_checkpoint(...).by_task()` by "
            f"itself to report on it"
        )
    cfg = checkpoint.models[0].cfg
    if isinstance(checkpoint.task, TopicClassification):
        write = write_texts_report
    elif cfg.prompt_format == "token_ids":
        write = write_tokens_report
    elif cfg.one_pass:
        write = write_layers_report
    elif cfg.prompt_format == "interleaved":
        write = write_model_parts_report
    elif all(getattr(cfg, field) == value for field, value in _ONE_STEP.items()):
        write = write_one_layer_report
    else:
        write = write_descent_report
    return write(checkpoint, Path(out), n_prompts=n_prompts, progress=progress)
