"""Training of layers with a state, compared with a loop over positions and with softmax attention of the same size."""

from statistics import median

from benchmarks.apart import Apart
from benchmarks.rows import Row, Settings, compare_speeds, ratios, row

KINDS = ("delta", "gated_linear", "mamba2", "mesa")
LOOP, SOFTMAX = "a plain loop over positions", "softmax attention of the same size"


def measure(settings: Settings, steps: int = 60) -> list[Row]:
    """Measure steps per second of ours over the others'."""
    rows = []
    for kind in KINDS:
        make = {
            "ours": lambda kind=kind: Apart("our_training:Recurrent", ours=True, kind=kind),
            LOOP: lambda kind=kind: Apart("recurrent_twins:training", kind=kind),
            SOFTMAX: lambda: Apart("our_training:Recurrent", ours=True, kind="softmax"),
        }
        speeds, _ = compare_speeds(make, lambda name: steps // 4 if name == LOOP else steps, min(settings.rounds, 3))
        mine = speeds.pop("ours")
        for name, others in speeds.items():
            compared = f"{median(mine):.3g} against {median(others):.3g} steps/s"
            detail = f"{compared}; 4 layers, 2 heads, width 24, 41 positions, batch 64"
            bar = ">= 1.5" if name == LOOP else "shown"
            rows.append(row(f"training speed of {kind} layers over {name}", ratios(mine, others), bar, detail))
    return rows
