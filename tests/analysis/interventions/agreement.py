"""Agreement of sweeps on bridges with plain runs: `python -m tests.analysis.interventions.agreement` prints a table."""

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mechicl.analysis import patch
from mechicl.models.opening.sites import AXES, axes_of
from tests.analysis.interventions.oracles import hook_name, place, recorded
from tests.families import FAMILIES, open_family, place_of, putting, token_ids

TOLERANCE = 1e-4
ON_REQUEST = ("attn_in", "q_input", "k_input", "v_input", "mlp_in", "result")
COMPONENTS = tuple(component for component in AXES if component not in ON_REQUEST)


@dataclass(frozen=True)
class Agreement:
    """The largest difference for a component of a family, in units of the largest logit, or the error message."""

    difference: float | None
    refusal: str | None
    by_torch: bool = False  # compared with torch's hooks on the plain model

    def __str__(self) -> str:
        if self.difference is None:
            return "none" if "has no hook" in str(self.refusal) else "refused"
        verdict = "equal" if self.difference < TOLERANCE else f"WRONG BY {self.difference:.1g}"
        return verdict if self.by_torch else f"({verdict})"


@torch.no_grad()
def runs_as_it_did(bridge: Any, plain: Any) -> bool:
    """True if a bridge has the logits of the model that it was made of."""
    try:
        logits = plain(token_ids(0)).logits
        return bool((bridge(token_ids(0)) - logits).abs().max() < TOLERANCE * logits.abs().max())
    except ValueError:  # an encoder and decoder need other inputs
        return True


def agreement_of(
    bridge: Any, plain: Any, component: str, layers: Sequence[int], places: Sequence[int] | None = None
) -> Agreement:
    """Compare patching a component, cell by cell, with whole runs in which it is written to in place."""
    clean, corrupted = token_ids(0), token_ids(1)
    axis = "head" if "head" in axes_of(component) else "pos"
    axes = {"layer": layers, axis: places}
    try:
        sweep = patch(bridge, clean, corrupted, component, axes, progress=False)
    except ValueError as error:
        return Agreement(None, str(error))
    assert sweep.predictions is not None
    largest, by_torch = 0.0, runs_as_it_did(bridge, plain)
    for i, layer in enumerate(sweep.indices[0]):
        name, values = hook_name(component, layer), recorded(bridge, clean, hook_name(component, layer))
        at = place_of(bridge, plain, component, layer) if by_torch else None
        by_torch = at is not None
        for j, index in enumerate(sweep.indices[1]):
            edit = partial(_write, values=values, cell=place(component, {axis: index}))
            with torch.no_grad():
                if at is None:
                    logits = bridge.run_with_hooks(corrupted, fwd_hooks=[(name, edit)])
                else:
                    with putting(plain, at, edit):
                        logits = plain(corrupted).logits
            expected = logits[:, -1]
            difference = (sweep.predictions[i, j] - expected).abs().max() / expected.abs().max()
            largest = max(largest, float(difference.nan_to_num(torch.inf)))
    return Agreement(largest, None, by_torch)


def _write(activation: Tensor, hook: Any = None, *, values: Tensor, cell: Any) -> None:
    activation.view(values.shape)[cell] = values[cell]  # torch's modules do not split heads


def main(names: Sequence[str]) -> None:
    """Print the table of all families, or of some; those with the same row share it."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows: dict[tuple[str, ...], list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for name in names or FAMILIES:
        bridge, plain = open_family(name)
        cells = {component: agreement_of(bridge, plain, component, [0, 1, 2]) for component in COMPONENTS}
        rows.setdefault(tuple(map(str, cells.values())), []).append(
            f"{name}{'' if runs_as_it_did(bridge, plain) else '*'}"
        )
        for component, cell in cells.items():
            if str(cell) == "refused":
                reasons.setdefault(str(cell.refusal), []).append(f"{name} {component}")
    print(f"| family | {' | '.join(COMPONENTS)} |\n|---|{'---|' * len(COMPONENTS)}")
    for row, families in rows.items():
        print(f"| {', '.join(families)} | {' | '.join(row)} |")
    for reason, where in reasons.items():
        print(f"\n{', '.join(where)}: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
