"""Training of a GPT-2 style model, compared with `transformers` and torch's encoder, as in Garg et al. 2022."""

from statistics import median
from typing import Any

from benchmarks.apart import Apart, NoPeerError
from benchmarks.rows import Row, Settings, compare_speeds, ratios, row

FUSED = {"activation": "gelu_pytorch_tanh"}
FORMS: dict[str, dict[str, Any]] = {
    "fused attention, its own gelu": {"kind": "transformers", "attention": "sdpa", "activation": "gelu_new"},
    "fused attention and gelu": {"kind": "transformers", "attention": "sdpa", **FUSED},
    "plain attention, fused gelu": {"kind": "transformers", "attention": "eager", **FUSED},
    "fused attention and gelu, torch.compile": {"kind": "transformers", "attention": "sdpa", **FUSED, "compiled": True},
    "plain attention, torch.compile": {"kind": "transformers", "attention": "eager", **FUSED, "compiled": True},
}
"""Of `transformers`' GPT-2: its defaults first; the quickest of all is the peer."""
ENCODER, COMPILED = "nn.TransformerEncoder", "ours, compile=True"


SMALL, PAPERS = "gpt2-8l", "gpt2-12l"
SIZES = {
    SMALL: "8 layers, width 64, 41 positions, batch 64, float32",
    PAPERS: "12 layers, width 256, 81 positions, batch 64, float32",
}


def measure(settings: Settings) -> list[Row]:
    """Measure steps per second of ours over each peer's, each in its own process."""
    return [*_rows(SMALL, settings.rounds, 30), *_rows(PAPERS, min(settings.rounds, 3), 3)]


def _rows(preset: str, rounds: int, steps: int) -> list[Row]:
    large = preset == PAPERS
    start = {
        "ours": lambda: Apart("our_training:OfPreset", ours=True, preset=preset),
        COMPILED: lambda: Apart("our_training:OfPreset", ours=True, compiled=True, preset=preset),
    }
    for name, options in {**FORMS, ENCODER: {"kind": "torch"}}.items():
        start[name] = lambda o=options: Apart("gpt2_twins:training", preset=preset, **o)
    speeds, _ = compare_speeds(start, lambda name: 2 * steps if name == COMPILED and not large else steps, rounds)
    present = [name for name in FORMS if name in speeds]
    if not present:
        raise NoPeerError("transformers is not installed, or none of its models runs: pip install transformers")
    best = max(present, key=lambda name: median(speeds[name]))

    def of(name: str, words: str, bar: str, detail: str, mine: str = "ours") -> Row:
        compared = f"{median(speeds[mine]):.3g} against {median(speeds[name]):.3g} steps/s; {detail}"
        how = mine.removeprefix("ours")
        return row(f"training speed of {preset} over {words}{how}", ratios(speeds[mine], speeds[name]), bar, compared)

    return [
        of(
            best, "transformers' GPT-2 in its best form", ">= 1.3" if not large else "shown", f"{best}; {SIZES[preset]}"
        ),
        of(best, "transformers' GPT-2 in its best form", ">= 1.1", f"{best}; {SIZES[preset]}", COMPILED),
        *(of(name, f"transformers' GPT-2, {name}", "shown", SIZES[preset]) for name in present if name != best),
        *(of(name, name, "shown", SIZES[preset]) for name in speeds if name == ENCODER),
    ]
