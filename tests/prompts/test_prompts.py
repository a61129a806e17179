import numpy as np
import pytest
import torch

from mechicl.prompts import Interleaved, Paired, Prompts, prompt_format


def counting(n_prompts=3, n_points=4, x_dim=2, y_dim=1, dtype=torch.float32):
    """Prompts whose every entry is a different whole number, so that no two places can be confused."""
    n_xs, n_ys = n_prompts * n_points * x_dim, n_prompts * n_points * y_dim
    xs = torch.arange(1, n_xs + 1, dtype=dtype).reshape(n_prompts, n_points, x_dim)
    ys = -torch.arange(1, n_ys + 1, dtype=dtype).reshape(n_prompts, n_points, y_dim)
    return Prompts(xs, ys)


def same(a, b):
    return torch.equal(a.xs, b.xs) and torch.equal(a.ys, b.ys) and a.dtype == b.dtype


SHAPES = [
    {},
    {"n_prompts": 0},
    {"n_points": 1, "y_dim": 3},
    {"n_prompts": 5, "n_points": 6, "x_dim": 1, "y_dim": 2, "dtype": torch.float64},
    {"x_dim": 3, "y_dim": 3, "dtype": torch.bfloat16},
]
any_shape = pytest.mark.parametrize(
    "shape",
    [{"n_prompts": 3, "n_points": 4, "x_dim": 2, "y_dim": 1, "dtype": torch.float32, **shape} for shape in SHAPES],
    ids=str,
)


# ---- Prompts: construction ----


@pytest.mark.parametrize(
    "unusual",
    [
        lambda a: np.broadcast_to(a[:1], a.shape),  # read-only
        lambda a: a[::-1],  # an axis reversed
        lambda a: a.astype(">f8"),  # a foreign byte order, on most machines
        np.asfortranarray,
    ],
)
def test_numpy_arrays_of_any_memory_layout_keep_their_values(unusual):
    xs = unusual(np.arange(24.0).reshape(2, 3, 4))
    prompts = Prompts(xs, np.zeros((2, 3, 1)))
    assert prompts.xs.tolist() == xs.tolist()


def test_prompts_show_their_sizes_and_not_their_numbers():
    text = repr(counting(n_prompts=3, n_points=4, x_dim=2, y_dim=1))
    assert text == "Prompts(n_prompts=3, n_context=3, x_dim=2, y_dim=1, dtype=torch.float32, device='cpu')"


# ---- Prompts: selecting, cutting, joining ----


@pytest.mark.parametrize(
    ("index", "rows"),
    [
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
    ],
)
def test_prompts_are_picked_by_slice_indices_or_mask(index, rows):
    prompts = counting(n_prompts=5)
    picked = prompts[index]
    assert len(picked) == len(rows)
    assert picked.xs.shape[1:] == prompts.xs.shape[1:]
    for ours, whole in ((picked.xs, prompts.xs), (picked.ys, prompts.ys)):
        assert ours.tolist() == [whole[row].tolist() for row in rows]


@any_shape
def test_a_prefix_makes_each_point_the_query_in_turn(shape):
    prompts = counting(**shape)
    for t in range(prompts.n_context + 1):
        cut = prompts.prefix(t)
        assert cut.n_context == t
        assert torch.equal(cut.query.xs, prompts.xs[:, t])
        assert torch.equal(cut.query.ys, prompts.ys[:, t])
        assert torch.equal(cut.context.xs, prompts.xs[:, :t])


def test_permuting_with_an_order_a_prompt_moves_each_context_its_own_way():
    prompts = counting(n_prompts=2, n_points=4, y_dim=3)
    orders = [[2, 0, 1], [1, 2, 0]]
    permuted = prompts.permuted(torch.tensor(orders, dtype=torch.int32))
    for i, order in enumerate(orders):
        for new, old in enumerate([*order, 3]):
            assert torch.equal(permuted.xs[i, new], prompts.xs[i, old])
            assert torch.equal(permuted.ys[i, new], prompts.ys[i, old])


@any_shape
def test_a_random_permutation_keeps_the_points_together_and_the_query_last(shape):
    prompts = counting(**{**shape, "dtype": torch.float64})
    permuted = prompts.permuted(seed=2**31)
    assert torch.equal(permuted.query.xs, prompts.query.xs)
    assert torch.equal(permuted.query.ys, prompts.query.ys)
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
    changed.xs.sum().backward()
    assert xs.grad is not None
    assert xs.grad.eq(1).all()


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


def test_paired_predictions_are_read_at_the_last_token_and_interleaved_ones_at_every_x():
    for n, paired, interleaved in ((7, [6], [0, 2, 4, 6]), (1, [0], [0])):
        assert list(range(n))[Paired(2, 1).prediction_positions(n)] == paired
        assert list(range(n))[Interleaved(2, 1).prediction_positions(n)] == interleaved


def test_labels_name_every_token():
    assert Paired(2, 1).labels(2) == ["(x1, y1)", "(x2, y2)", "(query, ?)"]
    assert Interleaved(2, 1).labels(2) == ["x1", "y1", "x2", "y2", "query"]
    assert (Paired(2, 1).labels(0), Interleaved(2, 1).labels(0)) == (["(query, ?)"], ["query"])


def test_prompts_are_made_inside_vmap():
    xs, ys = torch.randn(5, 2, 3, 4), torch.randn(5, 2, 3, 1)
    means = torch.func.vmap(lambda x, y: Prompts(x, y).prefix(1).xs.mean())(xs, ys)
    torch.testing.assert_close(means, xs[:, :, :2].mean((1, 2, 3)))
