import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl.shots import Shots

SHOTS = Shots(
    zero_shot=(torch.tensor([0, 7]), torch.tensor([0, 8, 9])),
    in_context=(torch.tensor([0, 4, 5, 1, 6, 2, 7]), torch.tensor([0, 4, 5, 1, 6, 2, 8, 9])),
    targets=torch.tensor([1, 2]),
    n_own=(1, 2),
    examples=(torch.tensor([0, 4, 5]), torch.tensor([0, 6])),
    example_targets=torch.tensor([1, 2]),
    places=((1, 2), (4, 1)),
    choices=torch.tensor([1, 2, 3]),
)


def test_what_shots_say_of_themselves():
    assert len(SHOTS) == 2
    assert SHOTS.longest == 8
    assert SHOTS.demonstration_positions().tolist() == [1, 2, 4]
    short = dataclasses.replace(SHOTS, examples=(torch.arange(30), torch.tensor([0, 6])))
    assert short.longest == 30


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=5), st.integers(1, 3))
def test_positions_of_demonstrations(sizes, own):
    places, expected, now = [], [], 0
    for number, gap in sizes:
        now += gap
        places.append((now, number))
        expected += range(now, now + number)
        now += number
    shots = Shots(
        (torch.zeros(own, 2),), (torch.zeros(now + own, 2),), torch.zeros(1, 1), (own,),
        tuple(torch.zeros(number, 2) for number, _ in sizes), torch.zeros(len(sizes), 1), tuple(places),
    )  # fmt: skip
    assert shots.demonstration_positions().tolist() == expected
    assert shots.longest == now + own


REFUSED = {
    "no queries": ({"zero_shot": ()}, "needs queries and demonstrations, got 0 and 2"),
    "no demonstrations": ({"examples": ()}, "needs queries and demonstrations, got 2 and 0"),
    "in context": ({"in_context": SHOTS.in_context[:1]}, "2 queries alone, but 1 in context, 2 targets and 2 counts"),
    "targets": ({"targets": torch.tensor([1])}, "2 queries alone, but 2 in context, 1 targets"),
    "counts": ({"n_own": (1, 2, 3)}, "and 3 counts"),
    "example targets": ({"example_targets": torch.tensor([1])}, "2 examples, but 1 targets and 2 places"),
    "places": ({"places": ((1, 2),)}, "2 examples, but 2 targets and 1 places"),
    "none of its own": ({"n_own": (0, 1)}, "0 tokens of its own in queries of 2 and 7"),
    "more of its own": ({"n_own": (1, 4)}, "4 tokens of its own in queries of 3 and 8"),
    "an empty place": ({"places": ((1, 0), (4, 1))}, "an example of 3 tokens cannot have 0 at 1"),
    "a place that is too long": ({"places": ((1, 2), (4, 3))}, "an example of 2 tokens cannot have 3 at 4"),
    "a place before": ({"places": ((-1, 2), (4, 1))}, "cannot have 2 at -1 of a prompt of 7"),
    "a place behind": ({"places": ((6, 2), (4, 1))}, "cannot have 2 at 6 of a prompt of 7"),
    "no choice": ({"targets": torch.tensor([1, 9])}, r"targets \[9\] are not among the choices \[1, 2, 3\]"),
    "no choice to learn": ({"example_targets": torch.tensor([0, 1])}, r"targets \[0\] are not among the choices"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_shots_that_are_refused(name):
    fields, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHOTS, **fields)
