"""Lists of the largest values that are cut inside a tie."""

import math
import warnings

import numpy as np
import pytest
import torch

from mechicl.statistics.results import largest


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize(("values", "n", "order", "tied"), [
    ([3.0, 1.0, 2.0], 2, [0, 2], 0),
    ([1.0, 2.0, 1.0, 1.0], 2, [1, 0], 2),
    ([1.0, 1.0], 2, [0, 1], 0),
    ([1.0, 1.0], 5, [0, 1], 0),
    ([0.0] * 30, 10, list(range(10)), 20),
    ([math.nan, 1.0, math.nan, 0.0], 2, [1, 3], 0),
    ([math.inf, -math.inf, 2.0], 1, [0], 0),
])  # fmt: skip
def test_the_largest_values_and_the_number_tied_with_the_last(kind, values, n, order, tied):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, note = largest(kind(values), n)
    assert found == order
    assert note == (f"{tied} more tie with the last of these {n}" if tied else "")
    if tied:
        with pytest.warns(UserWarning, match=f"heads are cut inside a tie.*{tied} more"):
            largest(kind(values), n, "heads")
