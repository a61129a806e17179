"""Measure SimAOU after fine-tuning on true, flipped and equal labels, and in untrained models.

python analyses/barnatan/update_controls.py
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from analyses.support.script import Option, script
from mechicl.analysis.finetuning import FineTuning, compare_with_finetuning, draw_texts, fine_tune, search_tuning
from mechicl.base.files import read_json
from mechicl.checkpoints import random_weights
from mechicl.interop.language_models import load_language_model
from mechicl.reports import Comparison, Row
from mechicl.statistics import interval
from mechicl.text import TEXT_TASKS, Labels, text_shots

TUNED = Path(__file__).parents[1] / "results" / "icl_against_finetuning_topics-3l.json"
LABELS: dict[Labels, str] = {"true": "true labels", "flipped": "flipped labels", "one": "one label for all"}
MEASURES = {"update_similarity": "SimAOU", "centred_update_similarity": "SimAOU without the mean change over queries"}
SMALL_GRID: dict[str, Any] = {"learning_rates": (0.01, 0.1, 1.0), "epochs": (1, 4, 12), "choose_by": "loss"}


@script(seeds=Option((0, 1, 2), "training seeds of the model, each with its own texts"))
def compare(args: Any) -> Comparison:
    """Measure both similarities for each kind of label, and in untrained models."""
    tuned = read_json(TUNED)["trials"]  # by task
    values: dict[tuple[str, str], list[list[float]]] = defaultdict(list)  # [seed][task]
    for seed in args.seeds:
        model = load_language_model("topics-3l", seed=seed)
        with random_weights():
            untrained = load_language_model("topics-3l", seed=seed).model
        of_seed: dict[tuple[str, str], list[float]] = defaultdict(list)
        for name in tuned:
            best = tuned[name][seed]["tunings"]["plain"]
            tuning = FineTuning(learning_rate=best["learning_rate"], epochs=best["epochs"])
            texts = draw_texts(TEXT_TASKS[name], seed=seed)
            shots = text_shots(model.tokenizer, texts.demonstrations, texts.queries)
            held_out = text_shots(model.tokenizer, texts.demonstrations, texts.held_out)
            compared = {}
            for labels, words in LABELS.items():
                shown = text_shots(model.tokenizer, texts.demonstrations.relabelled(labels), texts.queries)
                changes = fine_tune(model.model, shown, tuning, progress=False)
                compared[words] = compare_with_finetuning(model.model, shots, changes, seed=seed, progress=False)
            small = search_tuning(untrained, held_out, **SMALL_GRID, progress=False).best
            compared["untrained model, true labels"] = compare_with_finetuning(
                untrained, shots, small, seed=seed, progress=False
            )
            for words, each in compared.items():
                for measure in MEASURES:
                    of_seed[measure, words].append(getattr(each, measure).nanmean().item())
        for key, by_task in of_seed.items():
            values[key].append(by_task)
    rows = [
        Row(f"{MEASURES[measure]}, {words}", None, interval(torch.tensor(by_seed).mean(1)), "seeds")
        for (measure, words), by_seed in values.items()
    ]
    lead = (
        "Cosines between the change of attention outputs by demonstrations with true labels and by plain fine-tuning "
        "on demonstrations with these labels: means over four tasks, layers and queries of topics-3l, with 95% "
        f"intervals over {len(args.seeds)} seeds. Learning rates and epochs are those that icl_against_finetuning.py "
        "chose for true labels; in untrained models they are searched for in its small grid."
    )
    return Comparison("Controls of the similarity of updates", lead, rows)


if __name__ == "__main__":
    compare.run()
