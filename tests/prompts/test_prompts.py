"""Prompts of points and tokens, shots, formats, and what they refuse."""

# pyright: reportArgumentType=false, reportCallIssue=false
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
import pytest
import torch

from mechicl.prompts import Interleaved, Paired, Prompts, Shots, TokenSequences, prompt_format
from tests.tasks.reference import same


def counting(n_prompts=3, n_points=4, x_dim=2, y_dim=1, dtype=torch.float32):
    """Prompts whose every entry is a different whole number, so that no two places can be confused."""
    n_xs, n_ys = n_prompts * n_points * x_dim, n_prompts * n_points * y_dim
    xs = torch.arange(1, n_xs + 1, dtype=dtype).reshape(n_prompts, n_points, x_dim)
    ys = -torch.arange(1, n_ys + 1, dtype=dtype).reshape(n_prompts, n_points, y_dim)
    return Prompts(xs, ys)


SHAPES = [
    {},
    {"n_prompts": 0},
    {"n_points": 1, "y_dim": 3},
    {"n_prompts": 5, "n_points": 6, "x_dim": 1, "y_dim": 2, "dtype": torch.float64},
    {"x_dim": 3, "y_dim": 3, "dtype": torch.bfloat16},
]
any_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
PREDICTABLE = [[False, False, True, True], [False] * 4, [False, True, True, True]]
TOKENS = TokenSequences(torch.tensor([[3, 1, 3, 1], [0, 2, 4, 0], [5, 5, 5, 5]]), torch.tensor(PREDICTABLE))
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


@pytest.mark.parametrize("unusual", [
    lambda a: np.broadcast_to(a[:1], a.shape),  # read-only
    lambda a: a[::-1],  # an axis reversed
    lambda a: a.astype(">f8"),  # a foreign byte order, on most machines
    np.asfortranarray,
])  # fmt: skip
def test_numpy_arrays_of_any_memory_layout_keep_their_values(unusual):
    xs = unusual(np.arange(24.0).reshape(2, 3, 4))
    assert Prompts(xs, np.zeros((2, 3, 1))).xs.tolist() == xs.tolist()


@pytest.mark.parametrize(("index", "rows"), [
    (slice(1, 3), [1, 2]),
    (slice(None, None, 2), [0, 2, 4]),
    (slice(7, 9), []),
    ([3, 0, 3], [3, 0, 3]),
    ((0, 1), [0, 1]),  # not the two axes
    (range(2, 4), [2, 3]),
    ([], []),
    (torch.tensor([-1, 2]), [4, 2]),
    (torch.tensor([False, True, False, False, True]), [1, 4]),
    (np.array([4, 1]), [4, 1]),
    (np.array([False, True, False, False, True]), [1, 4]),
])  # fmt: skip
def test_batches_are_picked_by_slice_indices_or_mask(index, rows):
    prompts = counting(n_prompts=5)
    tokens = TokenSequences(torch.arange(20).view(5, 4), torch.arange(4).ge(2).expand(5, 4))
    pairs = [(prompts[index].xs, prompts.xs), (prompts[index].ys, prompts.ys)]
    if isinstance(index, slice | torch.Tensor):
        pairs += [(tokens[index].ids, tokens.ids), (tokens[index].predictable, tokens.predictable)]
    for picked, whole in pairs:
        assert picked.shape == (len(rows), *whole.shape[1:])
        assert picked.tolist() == [whole[row].tolist() for row in rows]


@pytest.mark.parametrize("index", [np.array([1, 0, 1], dtype=np.uint8), torch.tensor([1, 0, 1], dtype=torch.uint8)])
def test_an_index_of_bytes_is_refused(index):
    with pytest.raises(TypeError, match="uint8 may be a mask or indices"):
        counting(n_prompts=3)[index]
    with pytest.raises(TypeError, match="uint8 may be a mask or indices"):
        TokenSequences(torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4) > 0)[torch.as_tensor(index)]


@any_shape
def test_a_prefix_makes_each_point_the_query_in_turn(shape):
    prompts = counting(**shape)
    for t in range(prompts.n_context + 1):
        cut = prompts.prefix(t)
        assert cut.n_context == t
        assert torch.equal(cut.query.xs, prompts.xs[:, t])
        assert torch.equal(cut.query.ys, prompts.ys[:, t])
        assert torch.equal(cut.context.xs, prompts.xs[:, :t])


@any_shape
def test_a_random_permutation_keeps_the_points_together_and_the_query_last(shape):
    prompts = counting(**{**shape, "dtype": torch.float64})
    permuted = prompts.permuted(seed=2**31)
    assert torch.equal(permuted.query.xs, prompts.query.xs)
    before, after = (torch.cat([each.xs, each.ys], dim=-1).tolist() for each in (prompts, permuted))
    assert list(map(sorted, before)) == list(map(sorted, after))
    assert same(permuted, prompts.permuted(seed=2**31))


def test_with_query_replaces_only_the_query_input_and_is_differentiable():
    prompts = counting(n_prompts=2, n_points=4, x_dim=3)
    xs = torch.full((2, 3), 0.5, requires_grad=True)
    changed = prompts.with_query(xs)
    assert torch.equal(changed.query.xs, xs)
    assert torch.equal(changed.context.xs, prompts.context.xs)
    assert changed.ys is prompts.ys
    (gradient,) = torch.autograd.grad(changed.xs.sum(), xs)
    assert gradient.eq(1).all()


@any_shape
@pytest.mark.parametrize("size", [1, 2, 7])
def test_split_and_concatenate_undo_each_other(shape, size):
    prompts = counting(**shape)
    parts = prompts.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert len(parts) == max(1, -(-len(prompts) // size))
    assert same(Prompts.concatenate(parts), prompts)


def test_to_changes_the_dtype_of_both_parts():
    prompts = counting().to(torch.float64)
    assert prompts.xs.dtype == prompts.ys.dtype == torch.float64
    assert same(prompts.to("cpu", torch.float32), counting())


def test_prompts_are_made_inside_vmap():
    xs, ys = torch.randn(5, 2, 3, 4), torch.randn(5, 2, 3, 1)
    means = torch.func.vmap(lambda x, y: Prompts(x, y).prefix(1).xs.mean())(xs, ys)
    torch.testing.assert_close(means, xs[:, :, :2].mean((1, 2, 3)))


# ---- formats ----
@any_shape
def test_tokens_are_points_or_their_halves_without_the_querys_target(shape):
    prompts = counting(**shape)
    x_dim, y_dim = prompts.x_dim, prompts.y_dim
    width = max(x_dim, y_dim)
    paired, interleaved = (prompt_format(name, x_dim=x_dim, y_dim=y_dim) for name in ("paired", "interleaved"))
    pairs, halves = paired.encode(prompts), interleaved.encode(prompts)
    assert pairs.shape == (len(prompts), paired.n_tokens(prompts.n_context), paired.d_token)
    assert halves.shape == (len(prompts), 2 * prompts.n_context + 1, width)
    assert (interleaved.n_tokens(prompts.n_context), interleaved.d_token) == halves.shape[1:]
    assert pairs.dtype == halves.dtype == prompts.dtype
    for i in range(len(prompts)):
        points = [(x.tolist(), y.tolist()) for x, y in zip(prompts.xs[i], prompts.ys[i], strict=True)]
        assert pairs[i].tolist() == [*(x + y for x, y in points[:-1]), points[-1][0] + [0.0] * y_dim]
        padded = [half + [0.0] * (width - len(half)) for point in points for half in point]
        assert halves[i].tolist() == padded[:-1]


def test_paired_query_tokens_start_from_minus_the_initial_prediction():
    prompts = counting(n_prompts=3, n_points=4, x_dim=2, y_dim=3, dtype=torch.float64)
    weights = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, 4.0]])  # float32: it follows the prompts
    tokens = Paired(2, 3).encode(prompts, weights)
    for token, query in zip(tokens[:, -1].tolist(), prompts.query.xs.tolist(), strict=True):
        assert token[2:] == [-sum(x * w for x, w in zip(query, column, strict=True)) for column in weights.T.tolist()]
    assert torch.equal(tokens[:, :-1], Paired(2, 3).encode(prompts)[:, :-1])


def test_positions_of_predictions_and_labels_of_tokens():
    for n, paired, interleaved in ((7, [6], [0, 2, 4, 6]), (1, [0], [0])):
        assert list(range(n))[Paired(2, 1).prediction_positions(n)] == paired
        assert list(range(n))[Interleaved(2, 1).prediction_positions(n)] == interleaved
    assert Paired(2, 1).labels(2) == ["(x1, y1)", "(x2, y2)", "(query, ?)"]
    assert Interleaved(2, 1).labels(2) == ["x1", "y1", "x2", "y2", "query"]


# ---- token sequences and shots ----
def test_a_model_reads_all_but_the_last_token_and_predicts_the_next_where_that_is_possible():
    assert TOKENS.read.tolist() == [[3, 1, 3], [0, 2, 4], [5, 5, 5]]
    assert TOKENS.targets().tolist() == [[-100, 3, 1], [-100, -100, -100], [5, 5, 5]]
    assert TOKENS.targets().dtype == torch.int64


def test_positions_of_demonstrations():
    assert len(SHOTS) == 2
    assert SHOTS.demonstration_positions().tolist() == [1, 2, 4]
    assert replace(SHOTS, example_spans=((0, 1), (3, 2))).demonstration_positions().tolist() == [0, 3, 4]


# ---- errors ----
XS, YS = torch.zeros(3, 4, 2), torch.zeros(3, 4, 1)
PROMPTS = Prompts(XS, YS)
MASKED = np.ma.masked_array(np.zeros((2, 3, 4)), mask=np.zeros((2, 3, 4)))
MASKED[0, 1, 2] = np.ma.masked
LARGE = Prompts(torch.full((1, 1, 1), 1e6), torch.zeros(1, 1, 1))
ids, no = torch.zeros(2, 4).long(), torch.zeros(2, 4).bool()
CALLS = [
    (partial(Prompts, XS[0], YS[0]), r"xs \[prompt point x\]"),
    (partial(Prompts, XS, YS[..., 0]), r"ys\[\.\.\., None\]"),
    (partial(Prompts, XS, torch.zeros(3, 5, 1)), "differ in prompts or points"),
    (partial(Prompts, XS[:, :0], YS[:, :0]), "one point"),
    (partial(Prompts, XS, YS[..., :0]), "one input and one target dimension"),
    (partial(Prompts, XS, YS.double()), "same dtype and device"),
    (partial(Prompts, XS.long(), YS), "xs must be floating point"),
    (partial(Prompts, XS.long().numpy(), YS), "xs must be floating point"),
    (partial(Prompts, [[[0.0]]], [[[0.0]]]), "xs must be a torch tensor or a numpy array, got list"),
    (partial(Prompts, XS.to("meta"), YS.to("meta")), "xs is on the device 'meta'"),
    (partial(Prompts, MASKED, np.zeros((2, 3, 1))), "xs is a masked array"),
    *((partial(PROMPTS.__getitem__, index), "a slice, indices or a mask") for index in (0, "a", XS > 0)),
    (lambda: list(PROMPTS), "a slice, indices or a mask"),
    *((partial(PROMPTS.prefix, n), "n_context must be 0 to 3") for n in (-1, 4)),
    (partial(PROMPTS.split, 0), "size"),
    (partial(PROMPTS.with_query, XS[:, 0, :1]), "xs must be"),
    (partial(Prompts.concatenate, [PROMPTS, PROMPTS.prefix(2)]), "same .*got"),
    (partial(Prompts.concatenate, []), "one or more batches"),
    (partial(PROMPTS.to, torch.int64), "floating point"),
    (partial(LARGE.to, torch.float16), "not finite"),  # 1e6 overflows half precision
    (partial(Interleaved(2, 1).encode, PROMPTS, torch.zeros(2, 1)), "paired format"),
    *(
        (partial(layout(x_dim, y_dim).encode, PROMPTS), "cannot encode prompts with x_dim=2, y_dim=1")
        for layout in (Paired, Interleaved)
        for x_dim, y_dim in ((1, 1), (3, 1), (2, 2))  # some would be broadcast
    ),
    (partial(Paired(2, 1).labels, 10**7), "n_context"),
    (partial(prompt_format, "pairs", x_dim=1, y_dim=1), "name must be 'paired' or 'interleaved', got 'pairs'"),
    (partial(TokenSequences, ids[0], no[0]), r"ids must be a tensor of ints \[prompt pos\]"),
    (partial(TokenSequences, ids, no[:, :3]), r"got \(2, 4\) and \(2, 3\)"),
    (partial(TokenSequences, ids.float(), no), r"ids must be a tensor of ints \[prompt pos\], got a tensor of float32"),
    (partial(TokenSequences, ids, ids), "predictable must be a tensor of bools"),
    (partial(TokenSequences, ids, ~no), "first token"),
    (partial(TokenSequences, ids - 1, no), "negative"),
    *(
        (partial(replace, SHOTS, **{name: value}), words)
        for name, value, words in (
            ("zero_shot", (), "zero_shot"),
            ("examples", (), "examples"),
            ("in_context", SHOTS.in_context[:1], "in_context must have 2 entries, got 1"),
            ("example_spans", ((1, 2),), "example_spans must have 2"),
            *(("query_lengths", lengths, "query_lengths must fit") for lengths in ((0, 1), (1, 4))),
            *(
                ("example_spans", (span, (4, 1)), "example_spans must fit")
                for span in ((1, 0), (1, 4), (-1, 2), (6, 2))
            ),
            ("targets", torch.tensor([1, 9]), r"choices \[1, 2, 3\], got \[9\]"),
            ("example_targets", torch.tensor([0, 1]), r"choices \[1, 2, 3\], got \[0\]"),
        )
    ),
]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("call", "words"), CALLS)
def test_what_is_wrong_is_named(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize("bad", [float("nan"), -inf])
@pytest.mark.parametrize("name", ["xs", "ys"])
def test_a_value_that_is_not_finite_is_refused_with_its_position(bad, name):
    values = {"xs": torch.zeros(5, 4, 2), "ys": torch.zeros(5, 4, 1)}
    values[name][[3, 4], [2, 0], 0] = bad
    with pytest.raises(ValueError, match=rf"^{name} has a value that is not finite, first in prompt 3, point 2$"):
        Prompts(**values)
