"""The parts of a report that open a transformer, whatever it is compared with: its heads, and fine-tuning."""

from collections.abc import Callable
from functools import partial

from mechicl.reports.comparison import Part
from mechicl.reports.finetuning import finetuning, no_finetuning, slow_finetuning
from mechicl.reports.model_parts import model_parts, no_model_parts
from mechicl.reports.study import Study


def heads_and_finetuning(
    study: Study, *, progress: bool = True
) -> tuple[dict[str, Callable[[], Part]], dict[str, str], dict[str, str]]:
    """What measures each part by name, why one waits to be asked for, and why one is left out: as `Kind` takes them."""
    parts: dict[str, Callable[[], Part]] = {}
    missing: dict[str, str] = {}
    for name, reason, measure in (
        ("heads", no_model_parts(study), model_parts),
        ("fine-tuning", no_finetuning(study), finetuning),
    ):
        if reason:
            missing[name] = reason
        else:
            parts[name] = partial(measure, study, progress=progress)
    slow = slow_finetuning(study) if "fine-tuning" in parts else ""
    return parts, {"fine-tuning": slow} if slow else {}, missing
