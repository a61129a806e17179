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


def measure(settings: Settings, steps: int = 30) -> list[Row]:
    """Measure steps per second of ours over each peer's, each in its own process."""
    start = {
        "ours": lambda: Apart("our_training:OfPreset", ours=True),
        COMPILED: lambda: Apart("our_training:OfPreset", ours=True, compiled=True),
    }
    for name, options in {**FORMS, ENCODER: {"kind": "torch"}}.items():
        start[name] = lambda o=options: Apart("gpt2_twins:training", **o)
    speeds, _ = compare_speeds(start, lambda name: 2 * steps if name == COMPILED else steps, settings.rounds)
    present = [name for name in FORMS if name in speeds]
    if not present:
        raise NoPeerError("transformers is not installed, or none of its models runs: pip install transformers")
    best = max(present, key=lambda name: median(speeds[name]))
    size = "8 layers, width 64, 41 positions, batch 64, float32"

    def of(name: str, words: str, bar: str, detail: str, mine: str = "ours") -> Row:
        compared = f"{median(speeds[mine]):.3g} against {median(speeds[name]):.3g} steps/s; {detail}"
        how = mine.removeprefix("ours")
        return row(f"training speed of gpt2-8l over {words}{how}", ratios(speeds[mine], speeds[name]), bar, compared)

    return [
        of(best, "transformers' GPT-2 in its best form", ">= 1.3", f"{best}; {size}"),
        of(best, "transformers' GPT-2 in its best form", ">= 1.1", f"{best}; {size}", COMPILED),
        *(of(name, f"transformers' GPT-2, {name}", "shown", size) for name in present if name != best),
        *(of(name, name, "shown", size) for name in speeds if name == ENCODER),
    ]
