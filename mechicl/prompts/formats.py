"""Layouts of regression prompts as tokens: paired and interleaved."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, checked
from mechicl.prompts.prompts import Prompts, join

PromptFormatName = Literal["paired", "interleaved"]
"""What a model's config calls its format."""

MOST_LABELLED = 10**6  # points: no picture shows more


def _check_labelled(n_context: int) -> None:
    if not 0 <= n_context <= MOST_LABELLED:
        raise ValueError(f"n_context must be 0 to {MOST_LABELLED} for points to have labels, got {n_context}")


def _require_dims(layout: "Paired | Interleaved", prompts: Prompts) -> None:
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
        return join([prompts.xs, torch.cat([prompts.ys[:, :-1], start[:, None]], dim=1)], dim=2)

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
"""A layout of points and targets as tokens."""


@checked
def prompt_format(name: PromptFormatName, *, x_dim: Count, y_dim: Count) -> PromptFormat:
    """The format of that name: "paired" or "interleaved"."""
    return {"paired": Paired, "interleaved": Interleaved}[name](x_dim=x_dim, y_dim=y_dim)
