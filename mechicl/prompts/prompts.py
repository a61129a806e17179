"""Prompts, and the formats that lay them out as tokens.

A prompt is a context of points `(x_i, y_i)` and one query point whose `y` is to be predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.base.arguments import check_arguments

PromptFormatName = Literal["paired", "interleaved"]
At = Literal["query", "points", "positions"]
"""Which predictions are meant: the query's, those of all points (each from the points before it), or the outputs at all
positions of the tokens."""
PointsAt = Literal["query", "points"]
"""Which predictions are meant of a learner without tokens: the query's, or those of all points."""


MOST_LABELLED = 10**6  # points: no picture shows more


class Points(NamedTuple):
    """Inputs and targets of some points: the context `[prompt point x]`, or the query `[prompt x]`."""

    xs: Tensor
    ys: Tensor


@dataclass(frozen=True, eq=False)
class Prompts:
    """A batch of in-context regression prompts. The last point of each is the query.

    Tensors are kept as they are (no copy, gradients flow); numpy arrays are wrapped, or copied where torch cannot
    share their memory.

    Shapes: xs `[prompt point x]`, ys `[prompt point y]`, with `n_context + 1` points.

    Raises:
        TypeError: xs or ys is not a floating-point tensor or array, or their dtypes or devices differ.
        ValueError: wrong number of axes, sizes that disagree, no point at all, or a value that is not finite.

    Example:
        >>> prompts = Prompts(np.zeros((4, 11, 10)), np.zeros((4, 11, 1)))
        >>> prompts.n_context, prompts.query.xs.shape
        (10, torch.Size([4, 10]))
    """

    xs: Float[Tensor, "prompt point x"]
    ys: Float[Tensor, "prompt point y"]

    def __init__(self, xs: Tensor | np.ndarray, ys: Tensor | np.ndarray):
        xs, ys = _as_float_tensor("xs", xs), _as_float_tensor("ys", ys)
        if xs.ndim != 3 or ys.ndim != 3:
            hint = "; give ys a last axis: ys[..., None]" if ys.ndim == 2 else ""
            raise ValueError(
                f"Prompts needs xs [prompt point x] and ys [prompt point y], got shapes {tuple(xs.shape)} "
                f"and {tuple(ys.shape)}{hint}"
            )
        if xs.shape[:2] != ys.shape[:2]:
            raise ValueError(f"xs {tuple(xs.shape)} and ys {tuple(ys.shape)} differ in prompts or points")
        if xs.shape[1] == 0 or xs.shape[2] == 0 or ys.shape[2] == 0:
            raise ValueError(
                f"a prompt has at least one point (the query), one input and one target dimension; "
                f"got xs {tuple(xs.shape)}, ys {tuple(ys.shape)}"
            )
        if xs.dtype != ys.dtype or xs.device != ys.device:
            raise TypeError(
                f"xs ({xs.dtype}, {xs.device}) and ys ({ys.dtype}, {ys.device}) need the same dtype and device"
            )
        for name, values in (("xs", xs), ("ys", ys)):
            if values.detach().sum().isfinite():  # a sum is 20 times quicker, and finite only if every value is
                continue
            finite = values.detach().isfinite()
            if not finite.all():
                prompt, point, _ = (~finite).nonzero()[0].tolist()
                raise ValueError(f"{name} has a value that is not finite, first in prompt {prompt}, point {point}")
        object.__setattr__(self, "xs", xs)
        object.__setattr__(self, "ys", ys)

    def __repr__(self) -> str:
        return (
            f"Prompts(n_prompts={len(self)}, n_context={self.n_context}, x_dim={self.x_dim}, y_dim={self.y_dim}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )

    def __len__(self) -> int:
        return self.xs.shape[0]

    def __getitem__(self, index: slice | Tensor | np.ndarray | Sequence[int]) -> "Prompts":
        """Some of the prompts, by slice, indices or boolean mask.

        Raises:
            TypeError: one number, or indices on several axes: the result would not be a batch.
        """
        if isinstance(index, int) or getattr(index, "ndim", 1) != 1:
            raise TypeError("prompts are picked by a slice, indices or a mask; one of them is prompts[i : i + 1]")
        if not isinstance(index, slice | Tensor):  # as it is, a tuple would index two axes
            index = torch.tensor(index, dtype=None if len(index) else torch.long)
        return Prompts(self.xs[index], self.ys[index])

    @property
    def n_context(self) -> int:
        """Number of context points, the query not counted."""
        return self.xs.shape[1] - 1

    @property
    def x_dim(self) -> int:
        """Dimension of the inputs."""
        return self.xs.shape[2]

    @property
    def y_dim(self) -> int:
        """Dimension of the targets."""
        return self.ys.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Common dtype of xs and ys."""
        return self.xs.dtype

    @property
    def device(self) -> torch.device:
        """Common device of xs and ys."""
        return self.xs.device

    @property
    def context(self) -> Points:
        """The context points: xs `[prompt point x]`, ys `[prompt point y]`."""
        return Points(self.xs[:, :-1], self.ys[:, :-1])

    @property
    def query(self) -> Points:
        """The query: xs `[prompt x]`, ys `[prompt y]` (the target that learners do not see)."""
        return Points(self.xs[:, -1], self.ys[:, -1])

    def prefix(self, n_context: int) -> "Prompts":
        """The prompts cut after `n_context` context points: point number `n_context` becomes the query."""
        if not 0 <= n_context <= self.n_context:
            raise ValueError(f"prefix({n_context}): these prompts have 0 to {self.n_context} context points")
        return Prompts(self.xs[:, : n_context + 1], self.ys[:, : n_context + 1])

    def permuted(
        self, order: Int[Tensor, "*prompt point"] | Sequence[int] | None = None, *, seed: int | None = None
    ) -> "Prompts":
        """The same prompts with their context points in another order; the query stays last.

        Args:
            order: indices of the context points, `[point]` for all prompts alike or `[prompt point]`.
            seed: instead of `order`, an independent random order for each prompt.

        Raises:
            ValueError: neither or both are given, or a row of `order` is no permutation.
        """
        if (order is None) == (seed is None):
            raise ValueError("permuted() needs an order or a seed, and not both")
        if order is None:
            assert seed is not None
            generator = torch.Generator().manual_seed(seed)
            order = torch.rand(len(self), self.n_context, generator=generator).argsort(dim=1)
        order = torch.as_tensor(order).to(self.device)
        if order.ndim == 1:
            order = order.expand(len(self), -1)
        expected = torch.arange(self.n_context, device=self.device)
        if order.shape != (len(self), self.n_context) or not (order.sort(dim=1).values == expected).all():
            raise ValueError(
                f"order must hold each of the {self.n_context} context points once, as [point] or [prompt point]; "
                f"got shape {tuple(order.shape)}"
            )
        query = torch.full((len(self), 1), self.n_context, device=self.device)
        index = torch.cat([order.long(), query], dim=1)
        rows = torch.arange(len(self), device=self.device)[:, None]
        return Prompts(self.xs[rows, index], self.ys[rows, index])

    def with_query(self, xs: Float[Tensor, "prompt x"]) -> "Prompts":
        """The same contexts and targets with other query inputs (for sensitivities: `xs` may require grad).

        Raises:
            ValueError: xs of another shape.
        """
        if xs.shape != (len(self), self.x_dim):
            raise ValueError(f"xs must be [prompt x] = [{len(self)}, {self.x_dim}], got {list(xs.shape)}")
        return Prompts(torch.cat([self.xs[:, :-1], xs[:, None]], dim=1), self.ys)

    @classmethod
    def concatenate(cls, prompts: "Sequence[Prompts]") -> "Prompts":
        """Several batches of equally shaped prompts as one batch."""
        if not prompts:
            raise ValueError("concatenate() needs at least one batch of prompts")
        shapes = {(p.n_context, p.x_dim, p.y_dim) for p in prompts}
        if len(shapes) > 1:
            raise ValueError(f"prompts of different (n_context, x_dim, y_dim) cannot be concatenated: {sorted(shapes)}")
        return cls(_join([p.xs for p in prompts], dim=0), torch.cat([p.ys for p in prompts]))

    def __add__(self, other: "Prompts") -> "Prompts":
        return Prompts.concatenate([self, other])

    def split(self, size: int) -> "list[Prompts]":
        """Batches of at most `size` prompts, in order; one empty batch if there are none, as `Tensor.split`."""
        if size < 1:
            raise ValueError(f"split({size}): a batch holds at least one prompt")
        return [self[start : start + size] for start in range(0, max(len(self), 1), size)]

    def to(self, *args, **kwargs) -> "Prompts":
        """On another device or in another dtype; arguments as for `Tensor.to`. Itself, where that changes nothing."""
        xs, ys = self.xs.to(*args, **kwargs), self.ys.to(*args, **kwargs)
        return self if xs is self.xs and ys is self.ys else Prompts(xs, ys)  # values are checked only once


def lies_prompts_last(values: Float[Tensor, "prompt point x"]) -> bool:
    """Whether prompts lie along the last axis in memory, as batches of some trainings have them."""
    return values.stride(0) == 1 < values.stride(2)


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, of `[prompt point x]`; where prompts lie last in memory, they stay there."""
    if not lies_prompts_last(parts[0]):
        return torch.cat(list(parts), dim=dim)
    return torch.cat([part.permute(1, 2, 0) for part in parts], dim=(dim - 1) % 3).permute(2, 0, 1)


def _as_float_tensor(name: str, values: Tensor | np.ndarray) -> Tensor:
    if isinstance(values, np.ndarray):
        if values.dtype.kind != "f":
            raise TypeError(
                f"{name} must be floating point, got {values.dtype}: convert it first, e.g. by astype(float)"
            )
        # torch shares only memory that it may write to, in the machine's byte order, with no axis reversed.
        if not (values.flags.writeable and values.dtype.isnative and all(s >= 0 for s in values.strides)):
            values = values.astype(values.dtype.newbyteorder("="), order="C")
        values = torch.from_numpy(values)
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a torch tensor or a numpy array, got {type(values).__name__}")
    if not values.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {values.dtype}: convert it first, e.g. {name}.float()")
    if values.is_meta:
        raise ValueError(f"{name} is on the device 'meta', where tensors have no values")
    return values


def _check_labelled(n_context: int) -> None:
    if not 0 <= n_context <= MOST_LABELLED:
        raise ValueError(f"n_context must be 0 to {MOST_LABELLED} for points to have labels, got {n_context}")


def _require_dims(layout: "PromptFormat", prompts: Prompts) -> None:
    """Prompts of other dimensions would be broadcast, or take the place of each other's entries, unnoticed."""
    if (prompts.x_dim, prompts.y_dim) != (layout.x_dim, layout.y_dim):
        raise ValueError(f"{layout} cannot encode prompts with x_dim={prompts.x_dim}, y_dim={prompts.y_dim}")


@dataclass(frozen=True)
class Paired:
    """One token `(x_i, y_i)` a point; the query's is `(x_q, -x_q W_0)`, with `W_0 = 0` by default.

    The one prediction is read at the last token. Source: von Oswald et al. 2023, section 2.
    """

    x_dim: int
    y_dim: int

    @property
    def d_token(self) -> int:
        """Width of a token: x_dim + y_dim."""
        return self.x_dim + self.y_dim

    def n_tokens(self, n_context: int) -> int:
        """The context points and the query."""
        return n_context + 1

    def encode(
        self, prompts: Prompts, initial_weights: Float[Tensor, "x y"] | None = None
    ) -> Float[Tensor, "prompt pos d_token"]:
        """Tokens `(x, y)`; the query's target is left out.

        Raises:
            ValueError: the prompts have other dimensions than the format.
        """
        _require_dims(self, prompts)
        query = prompts.query.xs
        if initial_weights is None:
            start = query.new_zeros(len(prompts), prompts.y_dim)
        else:
            start = -query @ initial_weights.to(prompts.device, prompts.dtype)
        return _join([prompts.xs, torch.cat([prompts.ys[:, :-1], start[:, None]], dim=1)], dim=2)

    def prediction_positions(self, n_tokens: int) -> slice:
        """The last token only."""
        return slice(n_tokens - 1, n_tokens)

    def labels(self, n_context: int) -> list[str]:
        """`(x1, y1)`, ..., `(query, ?)`."""
        _check_labelled(n_context)
        return [f"(x{i + 1}, y{i + 1})" for i in range(n_context)] + ["(query, ?)"]


@dataclass(frozen=True)
class Interleaved:
    """x and y in alternate tokens, each zero-padded to the wider of the two; the query's y is left out.

    Point t is predicted at its own x token, from the points before it. Source: Garg et al. 2022;
    Fu et al. 2024, section 3.
    """

    x_dim: int
    y_dim: int

    @property
    def d_token(self) -> int:
        """Width of a token: the larger of x_dim and y_dim."""
        return max(self.x_dim, self.y_dim)

    def n_tokens(self, n_context: int) -> int:
        """Two for a context point, one for the query."""
        return 2 * n_context + 1

    def encode(
        self, prompts: Prompts, initial_weights: Float[Tensor, "x y"] | None = None
    ) -> Float[Tensor, "prompt pos d_token"]:
        """Tokens `x_1, y_1, x_2, y_2, ..., x_q`, zero-padded.

        Raises:
            ValueError: the prompts have other dimensions than the format, or initial weights are given.
        """
        _require_dims(self, prompts)
        if initial_weights is not None:
            raise ValueError("initial_weights belong to the paired format: an x token has no place for -x W_0")
        tokens = prompts.xs.new_zeros(len(prompts), self.n_tokens(prompts.n_context), self.d_token)
        tokens[:, 0::2, : self.x_dim] = prompts.xs
        tokens[:, 1::2, : self.y_dim] = prompts.ys[:, :-1]
        return tokens

    def prediction_positions(self, n_tokens: int) -> slice:
        """Every x token."""
        return slice(0, n_tokens, 2)

    def labels(self, n_context: int) -> list[str]:
        """`x1`, `y1`, `x2`, ..., `query`."""
        _check_labelled(n_context)
        return [f"{axis}{i + 1}" for i in range(n_context) for axis in "xy"] + ["query"]


PromptFormat = Paired | Interleaved


def prompt_format(name: PromptFormatName, *, x_dim: int, y_dim: int) -> PromptFormat:
    """The format of that name: "paired" or "interleaved"."""
    formats = {"paired": Paired, "interleaved": Interleaved}
    if name not in formats:
        raise ValueError(f"prompt_format {name!r} is not one of {sorted(formats)}")
    return formats[name](x_dim=x_dim, y_dim=y_dim)


check_arguments(__name__)
