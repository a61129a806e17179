import dataclasses

import pytest
import torch

from mechicl.prompts import Shots

SHOTS = Shots(
    zero_shot=(torch.tensor([0, 7]), torch.tensor([0, 8, 9])),
    in_context=(torch.tensor([0, 4, 5, 1, 6, 2, 7]), torch.tensor([0, 4, 5, 1, 6, 2, 8, 9])),
    targets=torch.tensor([1, 2]),
    query_lengths=(1, 2),
    examples=(torch.tensor([0, 4, 5]), torch.tensor([0, 6])),
    example_targets=torch.tensor([1, 2]),
    example_spans=((1, 2), (4, 1)),
    choices=torch.tensor([1, 2, 3]),
)


def test_positions_of_demonstrations():
    assert len(SHOTS) == 2
    assert SHOTS.demonstration_positions().tolist() == [1, 2, 4]
    regression = Shots(
        zero_shot=(torch.zeros(1, 2),), in_context=(torch.zeros(7, 2),), targets=torch.zeros(1, 1), query_lengths=(1,),
        examples=(torch.zeros(1, 2), torch.zeros(3, 2)), example_targets=torch.zeros(2, 1),
        example_spans=((0, 1), (3, 3)),
    )  # fmt: skip
    assert regression.demonstration_positions().tolist() == [0, 3, 4, 5]


REFUSED = {
    "no queries": ({"zero_shot": ()}, "needs queries and demonstrations, got 0 and 2"),
    "no demonstrations": ({"examples": ()}, "needs queries and demonstrations, got 2 and 0"),
    "in context": ({"in_context": SHOTS.in_context[:1]}, "2 queries alone, but 1 in context, 2 targets and 2 lengths"),
    "targets": ({"targets": torch.tensor([1])}, "2 queries alone, but 2 in context, 1 targets"),
    "lengths": ({"query_lengths": (1, 2, 3)}, "and 3 lengths"),
    "example targets": ({"example_targets": torch.tensor([1])}, "2 examples, but 1 targets and 2 spans"),
    "spans": ({"example_spans": ((1, 2),)}, "2 examples, but 2 targets and 1 spans"),
    "an empty query": ({"query_lengths": (0, 1)}, "a query of 0 tokens in prompts of 2 and 7"),
    "a query that is too long": ({"query_lengths": (1, 4)}, "a query of 4 tokens in prompts of 3 and 8"),
    "an empty span": ({"example_spans": ((1, 0), (4, 1))}, "an example of 3 tokens cannot have 0 at 1"),
    "a span that is too long": ({"example_spans": ((1, 2), (4, 3))}, "an example of 2 tokens cannot have 3 at 4"),
    "a span before": ({"example_spans": ((-1, 2), (4, 1))}, "cannot have 2 at -1 of a prompt of 7"),
    "a span after": ({"example_spans": ((6, 2), (4, 1))}, "cannot have 2 at 6 of a prompt of 7"),
    "no choice": ({"targets": torch.tensor([1, 9])}, r"targets \[9\] are not among the choices \[1, 2, 3\]"),
    "no choice to learn": ({"example_targets": torch.tensor([0, 1])}, r"targets \[0\] are not among the choices"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_shots_that_are_refused(name):
    fields, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHOTS, **fields)
