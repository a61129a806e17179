"""Lists of the largest values, which report ties that they cut through."""

import math
from typing import Any

import torch

from mechicl.base.warning import warn


def largest(values: Any, n: int, warn_of: str = "") -> tuple[list[int], str]:
    """Return the indices of the `n` largest entries, largest first and NaN last, and a note on ties with the last one.

    The note is empty unless entries that are left out equal the last one of the list. Equal entries keep their order.
    With the name of the entries in `warn_of`, the note is also a warning.
    """
    values = values if isinstance(values, torch.Tensor) else torch.tensor(values)
    flat = values.detach().cpu().double().flatten().nan_to_num(-math.inf, math.inf, -math.inf)
    order = flat.argsort(descending=True, stable=True)
    tied = int((flat[order[n:]] == flat[order[n - 1]]).sum()) if 0 < n < len(flat) else 0
    note = f"{tied} more tie with the last of these {n}" if tied else ""
    if note and warn_of:
        warn(f"the strongest {warn_of} are cut inside a tie, and the first in order are taken: {note}")
    return order[:n].tolist(), note
