"""Token sequences and shots."""

import pytest
import torch

from mechicl.prompts import Shots, TokenSequences
from tests.tasks.reference import same

PREDICTABLE = [[False, False, True, True], [False] * 4, [False, True, True, True]]
COUNTING = TokenSequences(torch.tensor([[3, 1, 3, 1], [0, 2, 4, 0], [5, 5, 5, 5]]), torch.tensor(PREDICTABLE))
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


def test_a_model_reads_all_but_the_last_token_and_predicts_the_next_where_that_is_possible():
    assert len(COUNTING) == 3
    assert COUNTING.read.tolist() == [[3, 1, 3], [0, 2, 4], [5, 5, 5]]
    assert COUNTING.targets().tolist() == [[-100, 3, 1], [-100, -100, -100], [5, 5, 5]]
    assert COUNTING.targets().dtype == torch.int64
    assert COUNTING.ids.tolist()[0] == [3, 1, 3, 1]  # unchanged


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(7, 9), []),
        (torch.tensor([2, 0, 2]), [2, 0, 2]),
        (torch.tensor([False, True, True]), [1, 2]),
    ],
)
def test_sequences_are_picked_by_slice_indices_or_mask(index, rows):
    picked = COUNTING[index]
    assert picked.ids.shape == picked.predictable.shape == (len(rows), 4)
    assert picked.ids.tolist() == [COUNTING.ids[row].tolist() for row in rows]
    assert picked.predictable.tolist() == [COUNTING.predictable[row].tolist() for row in rows]


def test_joined_parts_are_the_whole_again():
    assert same(TokenSequences.concatenate([COUNTING[:1], COUNTING[1:1], COUNTING[1:]]), COUNTING)


def test_positions_of_demonstrations():
    assert len(SHOTS) == 2
    assert SHOTS.demonstration_positions().tolist() == [1, 2, 4]
    regression = Shots(
        zero_shot=(torch.zeros(1, 2),), in_context=(torch.zeros(7, 2),), targets=torch.zeros(1, 1), query_lengths=(1,),
        examples=(torch.zeros(1, 2), torch.zeros(3, 2)), example_targets=torch.zeros(2, 1),
        example_spans=((0, 1), (3, 3)),
    )  # fmt: skip
    assert regression.demonstration_positions().tolist() == [0, 3, 4, 5]
