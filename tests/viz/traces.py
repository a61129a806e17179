"""Read the drawn numbers from plotly's figures."""

from typing import Any

import torch
from torch import Tensor


def lines(figure: Any, name: str) -> list[tuple[list, list]]:
    """Return places and values of all traces of a name."""
    return [(list(trace.x), list(trace.y)) for trace in figure.data if trace.name == name]


def heatmaps(figure: Any) -> list[Tensor]:
    """Return the numbers of every heatmap, `[y x]`."""
    return [torch.tensor(trace.z, dtype=torch.float64) for trace in figure.data if trace.type == "heatmap"]
