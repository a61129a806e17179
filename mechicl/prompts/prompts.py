"""A batch of in-context regression prompts.

A prompt is a context of points `(x_i, y_i)` and one query point whose `y` is to be predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import ArgumentError, Count, checked, count_undefined

At = Literal["query", "points", "positions"]
"""Where predictions are read: at the query, at all points (each from earlier ones), or at all token positions."""
PointsAt = Literal["query", "points"]
"""Where predictions are read, for a learner without tokens."""


def refuse_bytes(index: slice | Tensor) -> None:
    """Refuse uint8, which torch reads as a mask and NumPy as indices."""
    if isinstance(index, Tensor) and index.dtype == torch.uint8:
        raise TypeError("an index of uint8 may be a mask or indices: convert it to bool or int64")


class Points(NamedTuple):
    """Inputs and targets of some points: the context `[prompt point x]`, or the query `[prompt x]`."""

    xs: Tensor
    ys: Tensor


@dataclass(frozen=True, eq=False)
class Prompts:
    """A batch of in-context regression prompts: context points `(x_i, y_i)`, and a last point, the query, to predict.

    Tensors are not copied, and gradients flow; numpy arrays are copied only where torch cannot share their memory.
    `prompts[:10]` are some of the prompts; `context` and `query` have the parts.

    Attributes:
        xs: inputs `[prompt point x]`, with `n_context + 1` points.
        ys: targets `[prompt point y]`, the query's included; learners do not read that one.

    Raises:
        ArgumentError: xs or ys is not a floating-point tensor or array, has another number of axes, no points, or
            masked or non-finite values; or their dtypes, devices or sizes differ.

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
            shapes = f"{tuple(xs.shape)} and {tuple(ys.shape)}{hint}"
            raise ArgumentError(f"Prompts needs xs [prompt point x] and ys [prompt point y], got shapes {shapes}")
        if xs.shape[:2] != ys.shape[:2]:
            raise ArgumentError(f"xs {tuple(xs.shape)} and ys {tuple(ys.shape)} differ in prompts or points")
        if 0 in (*xs.shape[1:], ys.shape[2]):
            shapes = f"xs {tuple(xs.shape)}, ys {tuple(ys.shape)}"
            raise ArgumentError(f"Prompts need one point (the query), one input and one target dimension, got {shapes}")
        if (xs.dtype, xs.device) != (ys.dtype, ys.device):
            types = f"{xs.dtype}, {xs.device} and {ys.dtype}, {ys.device}"
            raise ArgumentError(f"xs and ys must have the same dtype and device, got {types}")
        for name, values in (("xs", xs), ("ys", ys)):
            if count_undefined(values):
                prompt, point, _ = (~values.detach().isfinite()).nonzero()[0].tolist()
                raise ArgumentError(f"{name} has a value that is not finite, first in prompt {prompt}, point {point}")
        object.__setattr__(self, "xs", xs)
        object.__setattr__(self, "ys", ys)

    def _with(self, xs: Tensor, ys: Tensor) -> "Prompts":
        """Return prompts of values taken from these, which need no second check."""
        prompts = object.__new__(Prompts)
        object.__setattr__(prompts, "xs", xs)
        object.__setattr__(prompts, "ys", ys)
        return prompts

    def __repr__(self) -> str:
        return (
            f"Prompts(n_prompts={len(self)}, n_context={self.n_context}, x_dim={self.x_dim}, y_dim={self.y_dim}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )

    def __len__(self) -> int:
        return self.xs.shape[0]

    def __getitem__(self, index: slice | Tensor | np.ndarray | Sequence[int]) -> "Prompts":
        """Return some of the prompts, by slice, indices or boolean mask."""
        if isinstance(index, int | str) or getattr(index, "ndim", 1) != 1:
            raise TypeError("prompts need a slice, indices or a mask; a single one is prompts[i : i + 1]")
        if not isinstance(index, slice | Tensor):  # a tuple would index two axes
            index = torch.tensor(index, dtype=None if len(index) else torch.long)
        refuse_bytes(index)
        return self._with(self.xs[index], self.ys[index])

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

    @checked
    def prefix(self, n_context: int) -> "Prompts":
        """Cut the prompts after `n_context` context points: the next point becomes the query."""
        if not 0 <= n_context <= self.n_context:
            raise ValueError(f"n_context must be 0 to {self.n_context}, got {n_context}")
        return self._with(self.xs[:, : n_context + 1], self.ys[:, : n_context + 1])

    @checked
    def permuted(self, *, seed: int) -> "Prompts":
        """Return the prompts with their context points in random order, another one for each; the query stays last."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand(len(self), self.n_context, generator=generator).argsort(dim=1).to(self.device)
        index = torch.cat([order, order.new_full((len(self), 1), self.n_context)], dim=1)
        rows = torch.arange(len(self), device=self.device)[:, None]
        return self._with(self.xs[rows, index], self.ys[rows, index])

    @checked
    def with_query(self, xs: Float[Tensor, "prompt x"]) -> "Prompts":
        """Return the same contexts and targets with other query inputs `xs`, which may require gradients."""
        if xs.shape != (len(self), self.x_dim):
            raise ValueError(f"xs must be [prompt x] = [{len(self)}, {self.x_dim}], got {list(xs.shape)}")
        return Prompts(torch.cat([self.xs[:, :-1], xs[:, None]], dim=1), self.ys)

    @classmethod
    @checked
    def concatenate(cls, prompts: "Sequence[Prompts]") -> "Prompts":
        """Join several batches of equally shaped prompts to one."""
        if not prompts:
            raise ValueError("prompts must be one or more batches, got none")
        shapes = {(p.n_context, p.x_dim, p.y_dim) for p in prompts}
        if len(shapes) > 1:
            raise ValueError(f"prompts must have the same (n_context, x_dim, y_dim), got {sorted(shapes)}")
        return cls(join_parts([p.xs for p in prompts], dim=0), torch.cat([p.ys for p in prompts]))

    @checked
    def split(self, size: Count) -> "list[Prompts]":
        """Split into batches of at most `size` prompts; one empty batch if there are none, like `Tensor.split`."""
        return [self[start : start + size] for start in range(0, max(len(self), 1), size)]

    def to(self, *args, **kwargs) -> "Prompts":
        """Move to another device or dtype, with the arguments of `Tensor.to`. Returns self if that changes nothing."""
        xs, ys = self.xs.to(*args, **kwargs), self.ys.to(*args, **kwargs)
        return self if xs is self.xs and ys is self.ys else Prompts(xs, ys)  # values are checked only once


def lies_prompts_last(values: Float[Tensor, "prompt point x"]) -> bool:
    """Return whether prompts lie along the last axis in memory, as in batches of some trainings."""
    return values.stride(0) == 1 < values.stride(2)


def join_parts(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate `[prompt point x]` as `torch.cat`, but keep prompts last in memory where they are."""
    if not lies_prompts_last(parts[0]):
        return torch.cat(list(parts), dim=dim)
    return torch.cat([part.permute(1, 2, 0) for part in parts], dim=(dim - 1) % 3).permute(2, 0, 1)


def _as_float_tensor(name: str, values: Tensor | np.ndarray) -> Tensor:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ArgumentError(f"{name} is a masked array: fill the masked values, or leave their prompts out")
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        # torch shares only memory that it may write to, in the machine's byte order, with no axis reversed.
        if not (values.flags.writeable and values.dtype.isnative and all(s >= 0 for s in values.strides)):
            values = values.astype(values.dtype.newbyteorder("="), order="C")
        values = torch.from_numpy(values)
    if not isinstance(values, Tensor | np.ndarray):
        raise ArgumentError(f"{name} must be a torch tensor or a numpy array, got {type(values).__name__}")
    if isinstance(values, np.ndarray) or not values.is_floating_point():
        raise ArgumentError(f"{name} must be floating point, got {values.dtype}: convert it to float32 or float64")
    if values.is_meta:
        raise ArgumentError(f"{name} is on the device 'meta', where tensors have no values")
    return values
