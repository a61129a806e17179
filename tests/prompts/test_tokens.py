import pytest
import torch

from mechicl.prompts import TokenSequences
from tests.tasks.reference import same


def sequences(ids, predictable):
    return TokenSequences(torch.tensor(ids), torch.tensor(predictable))


COUNTING = sequences([[3, 1, 3, 1], [0, 2, 4, 0], [5, 5, 5, 5]], [[False, False, True, True], [False] * 4,
                                                                  [False, True, True, True]])  # fmt: skip


def test_a_model_reads_all_but_the_last_token_and_is_to_predict_the_next_where_that_can_be_done():
    assert len(COUNTING) == 3
    assert COUNTING.read.tolist() == [[3, 1, 3], [0, 2, 4], [5, 5, 5]]
    expected = []
    for ids, predictable in zip(COUNTING.ids.tolist(), COUNTING.predictable.tolist(), strict=True):
        expected.append([ids[pos + 1] if predictable[pos + 1] else -100 for pos in range(len(ids) - 1)])
    assert expected == [[-100, 3, 1], [-100, -100, -100], [5, 5, 5]]
    assert COUNTING.targets().tolist() == expected
    assert COUNTING.targets().dtype == torch.int64
    assert COUNTING.ids.tolist()[0] == [3, 1, 3, 1]  # untouched


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


def test_parts_put_together_are_the_whole_again():
    assert same(TokenSequences.concatenate([COUNTING[:1], COUNTING[1:1], COUNTING[1:]]), COUNTING)


@pytest.mark.parametrize(
    ("ids", "predictable", "message"),
    [
        (torch.zeros(4).long(), torch.zeros(4).bool(), r"must both be \[prompt pos\], got \(4,\) and \(4,\)"),
        (torch.zeros(2, 4).long(), torch.zeros(2, 3).bool(), r"got \(2, 4\) and \(2, 3\)"),
        (torch.zeros(2, 4), torch.zeros(2, 4).bool(), "must be int64 and predictable bool, got torch.float32"),
        (torch.zeros(2, 4).long(), torch.zeros(2, 4).long(), "predictable bool, got torch.int64 and torch.int64"),
        (torch.zeros(2, 4).long(), torch.ones(2, 4).bool(), "the first token of a sequence has nothing before it"),
    ],
)
def test_malformed_sequences_are_refused_with_the_reason(ids, predictable, message):
    malformed = object.__new__(TokenSequences)
    object.__setattr__(malformed, "ids", ids)
    object.__setattr__(malformed, "predictable", predictable)
    with pytest.raises(ValueError, match=message):
        malformed.__post_init__()  # what the constructor calls, past the tests' own check of types
