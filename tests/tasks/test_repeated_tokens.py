import dataclasses
import json
import subprocess
import sys

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechicl.tasks import RepeatedTokens, Task, task_from_dict, task_to_dict
from mechicl.tokens import TokenSequences

LEAST_P = 1e-3  # seeds are fixed: a right sampler fails for about one seed in a thousand


def sequences(ids, predictable):
    return TokenSequences(torch.tensor(ids), torch.tensor(predictable))


def same(a, b):
    return torch.equal(a.ids, b.ids) and torch.equal(a.predictable, b.predictable)


def period_of(predictable):
    """Number of tokens before the second copy, by a plain loop over a sequence's marks."""
    for pos, marked in enumerate(predictable):
        if marked:
            return pos - 1
    raise AssertionError("nothing can be predicted")


COUNTING = sequences([[3, 1, 3, 1], [0, 2, 4, 0], [5, 5, 5, 5]], [[False, False, True, True], [False] * 4,
                                                                  [False, True, True, True]])  # fmt: skip


# ---- TokenSequences ----


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
        (torch.zeros(0, dtype=torch.long), []),
    ],
)
def test_sequences_are_picked_by_slice_indices_or_mask(index, rows):
    picked = COUNTING[index]
    assert picked.ids.shape == picked.predictable.shape == (len(rows), 4)
    assert picked.ids.tolist() == [COUNTING.ids[row].tolist() for row in rows]
    assert picked.predictable.tolist() == [COUNTING.predictable[row].tolist() for row in rows]


def test_parts_put_together_are_the_whole_again():
    assert same(TokenSequences.concatenate([COUNTING[:1], COUNTING[1:1], COUNTING[1:]]), COUNTING)
    assert same(TokenSequences.concatenate([COUNTING]), COUNTING)


@pytest.mark.parametrize(
    ("ids", "predictable", "message"),
    [
        (torch.zeros(4).long(), torch.zeros(4).bool(), r"must both be \[prompt pos\], got \(4,\) and \(4,\)"),
        (torch.zeros(2, 3, 4).long(), torch.zeros(2, 3, 4).bool(), r"must both be \[prompt pos\]"),
        (torch.zeros(2, 4).long(), torch.zeros(2, 3).bool(), r"got \(2, 4\) and \(2, 3\)"),
        (torch.zeros(2, 4), torch.zeros(2, 4).bool(), "must be int64 and predictable bool, got torch.float32"),
        (torch.zeros(2, 4).int(), torch.zeros(2, 4).bool(), "must be int64 and predictable bool, got torch.int32"),
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


def test_sequences_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        COUNTING.ids = COUNTING.ids  # pyright: ignore[reportAttributeAccessIssue]


# ---- RepeatedTokens ----


@st.composite
def tasks(draw):
    n_ctx = draw(st.integers(2, 20))
    max_period = draw(st.integers(1, n_ctx - 1))
    return RepeatedTokens(draw(st.integers(2, 9)), n_ctx, draw(st.integers(1, max_period)), max_period)


@given(tasks(), st.integers(0, 5), st.integers(0, 2**40))
def test_every_token_that_can_be_predicted_is_the_one_a_period_before(task, n_prompts, seed):
    batch = task.sample(n_prompts, seed=seed)
    assert batch.ids.shape == batch.predictable.shape == (n_prompts, task.n_ctx + 1)
    assert batch.read.shape == batch.targets().shape == (n_prompts, task.n_ctx)
    for ids, predictable in zip(batch.ids.tolist(), batch.predictable.tolist(), strict=True):
        period = period_of(predictable)
        assert task.min_period <= period <= task.max_period
        for pos, token in enumerate(ids):
            assert 0 <= token < task.d_vocab
            assert predictable[pos] == (pos >= period + 1)
            if pos >= period:
                assert token == ids[pos - period]
            if predictable[pos]:  # by what an induction head does: the last token came before this one last time, too
                assert ids[pos - 1] == ids[pos - 1 - period]


@given(tasks(), st.integers(0, 2**40))
def test_the_same_seed_gives_the_same_sequences_and_a_generator_moves_on(task, seed):
    first = task.sample(4, seed=seed)
    assert same(first, task.sample(4, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    assert same(first, task.sample(4, generator=generator))
    again = torch.Generator().manual_seed(seed)
    task.sample(4, generator=again)
    assert same(task.sample(4, generator=generator), task.sample(4, generator=again))


def test_sequences_differ_from_each_other_and_with_the_seed():
    task = RepeatedTokens()
    batch = task.sample(50, seed=0)
    assert len({tuple(ids) for ids in batch.ids.tolist()}) == 50
    assert not same(batch, task.sample(50, seed=1))
    generator = torch.Generator().manual_seed(0)
    assert not same(task.sample(50, generator=generator), task.sample(50, generator=generator))


def test_periods_are_uniform_on_their_range_both_ends_included():
    task = RepeatedTokens(d_vocab=4, n_ctx=12, min_period=3, max_period=9)
    counts = [0] * 7
    for predictable in task.sample(3500, seed=0).predictable.tolist():
        counts[period_of(predictable) - 3] += 1
    assert sum(counts) == 3500
    assert scipy.stats.chisquare(counts).pvalue > LEAST_P


def test_tokens_are_uniform_at_every_place_of_the_segment_and_independent_of_their_neighbours():
    task = RepeatedTokens(d_vocab=5, n_ctx=9, min_period=4, max_period=4)
    ids = task.sample(4000, seed=1).ids
    for place in range(4):
        assert scipy.stats.chisquare(torch.bincount(ids[:, place], minlength=5)).pvalue > LEAST_P
    for place in range(3):
        pairs = torch.bincount(5 * ids[:, place] + ids[:, place + 1], minlength=25)
        assert scipy.stats.chisquare(pairs).pvalue > LEAST_P


def test_the_period_says_nothing_about_the_tokens():
    task = RepeatedTokens(d_vocab=3, n_ctx=8, min_period=2, max_period=4)
    batch = task.sample(4000, seed=2)
    table = torch.zeros(3, 3, dtype=torch.long)
    for ids, predictable in zip(batch.ids.tolist(), batch.predictable.tolist(), strict=True):
        table[period_of(predictable) - 2, ids[1]] += 1
    assert scipy.stats.chi2_contingency(table.numpy()).pvalue > LEAST_P


def test_a_period_of_one_repeats_one_token():
    batch = RepeatedTokens(d_vocab=3, n_ctx=4, min_period=1, max_period=1).sample(20, seed=0)
    assert (batch.ids == batch.ids[:, :1]).all()
    assert batch.predictable.tolist() == [[False, False, True, True, True]] * 20


def test_no_sequences_are_a_batch_of_the_right_shape():
    batch = RepeatedTokens(n_ctx=40).sample(0, seed=0)
    assert len(batch) == 0
    assert batch.ids.shape == (0, 41)
    assert batch.targets().shape == batch.read.shape == (0, 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": None}, "needs a seed or a generator"),
        ({"seed": 0, "generator": torch.Generator()}, "not both"),
        ({"generator": torch.Generator(), "device": "meta"}, "cannot sample on meta"),
        ({"n_prompts": -1, "seed": 0}, "must not be negative"),
    ],
)
def test_bad_arguments_of_sample_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RepeatedTokens().sample(**({"n_prompts": 2} | arguments))


def test_sequences_have_no_floating_point_type_and_their_task_is_none_of_regression():
    with pytest.raises(TypeError, match="dtype"):
        RepeatedTokens().sample(2, seed=0, dtype=torch.float64)  # type: ignore[call-arg]
    assert not isinstance(RepeatedTokens(), Task)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_vocab": 1}, "d_vocab must be an int of at least 2, got 1"),
        ({"n_ctx": 1}, "n_ctx must be an int of at least 2"),
        ({"min_period": 0}, "min_period must be an int of at least 1"),
        ({"max_period": 0}, "max_period must be an int of at least 1"),
        ({"min_period": 5, "max_period": 4}, "min_period <= max_period < n_ctx=64, got 5 to 4"),
        ({"n_ctx": 32}, "max_period < n_ctx=32, got 4 to 32"),
        ({"d_vocab": True}, "d_vocab must be an int of at least 2, got True"),
    ],
)
def test_fields_out_of_range_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        RepeatedTokens(**fields)
    with pytest.raises(ValueError, match=message):
        RepeatedTokens().replace(**fields)
    with pytest.raises(ValueError, match=message):
        task_from_dict({"type": "RepeatedTokens", **fields})


def test_replace_leaves_the_old_task_alone():
    task = RepeatedTokens()
    assert task.replace(max_period=16) == RepeatedTokens(max_period=16)
    assert task == RepeatedTokens(d_vocab=64, n_ctx=64, min_period=4, max_period=32)


@given(tasks())
def test_the_task_survives_json(task):
    back = task_from_dict(json.loads(json.dumps(task_to_dict(task))))
    assert back == task
    assert type(back) is RepeatedTokens
    assert same(back.sample(3, seed=0), task.sample(3, seed=0))


def test_the_task_as_data_says_what_it_is():
    data = {"type": "RepeatedTokens", "d_vocab": 64, "n_ctx": 64, "min_period": 4, "max_period": 32}
    assert task_to_dict(RepeatedTokens()) == data


# In a process of its own, without the run-time type checks of the test suite, which would step in first.
TAMPERED = [
    ({"type": "RepeatedTokens", "x_dim": 3}, "RepeatedTokens has no field ['x_dim']"),
    ({"type": "RepeatedTokens", "task": {}}, "RepeatedTokens has no field ['task']"),
    ({"type": "RepeatedTokens", "n_ctx": "64"}, "n_ctx must be an int of at least 2, got '64'"),
    ({"type": "RepeatedTokens", "min_period": 4.0}, "min_period must be an int of at least 1, got 4.0"),
    ({"type": "RepeatedTokens", "max_period": None}, "max_period must be an int of at least 1, got None"),
]

PLAIN = """
import json, sys
from mechicl.tasks import task_from_dict
for data in json.load(sys.stdin):
    try:
        print("accepted", task_from_dict(data))
    except ValueError as error:
        print(error)
"""


def test_tampered_task_data_is_refused_with_the_reason():
    data = json.dumps([data for data, _ in TAMPERED])
    run = subprocess.run([sys.executable, "-c", PLAIN], input=data, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [message for _, message in TAMPERED]
