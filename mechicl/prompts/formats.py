"""Layouts of regression prompts as tokens: paired and interleaved."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.base.arguments import Count, between, check_fields, checked
from mechicl.prompts.prompts import Prompts, join_parts

PromptFormatName = Literal["paired", "interleaved"]
"""The name of a format in a model's config."""

Labelled = Annotated[int, between(0, 10**6)]
"""Numbers of points that have labels: no picture shows more."""


@dataclass(frozen=True)
class _Layout:
    x_dim: int
    y_dim: int

    def __post_init__(self) -> None:
        check_fields(self)

    def _require_dims(self, prompts: Prompts) -> None:
        """Refuse prompts of other dimensions, which would be broadcast, or overwrite each other's entries."""
        if (prompts.x_dim, prompts.y_dim) != (self.x_dim, self.y_dim):
            raise ValueError(f"{self} cannot encode prompts with x_dim={prompts.x_dim}, y_dim={prompts.y_dim}")


@dataclass(frozen=True)
class Paired(_Layout):
    """Layout of prompts with one token `(x_i, y_i)` a point.

    The query's token is `(x_q, -x_q W_0)`, with `W_0 = 0` by default. The one prediction is read at the last token.
    Source: von Oswald et al. 2023, section 2.
    """

    @property
    def d_token(self) -> int:
        """Width of a token: x_dim + y_dim."""
        return self.x_dim + self.y_dim

    @checked
    def n_tokens(self, n_context: int) -> int:
        """Return the number of tokens of a prompt: the context points and the query."""
        return n_context + 1

    @checked
    def encode(
        self, prompts: Prompts, initial_weights: Float[Tensor, "x y"] | None = None
    ) -> Float[Tensor, "prompt pos d_token"]:
        """Return the tokens `(x, y)` of prompts, without the query's target.

        Args:
            initial_weights: W_0 `[x y]` of the query's token `(x_q, -x_q W_0)`; 0 by default.
        """
        self._require_dims(prompts)
        query = prompts.query.xs
        if initial_weights is None:
            start = query.new_zeros(len(prompts), prompts.y_dim)
        else:
            start = -query @ initial_weights.to(prompts.device, prompts.dtype)
        return join_parts([prompts.xs, torch.cat([prompts.ys[:, :-1], start[:, None]], dim=1)], dim=2)

    @checked(undefined=True)
    def prediction_positions(self, n_tokens: int) -> slice:
        """Return the positions at which predictions are read, among `n_tokens`: the last token."""
        return slice(n_tokens - 1, n_tokens)

    @checked
    def labels(self, n_context: Labelled) -> list[str]:
        """Return a label for each token of a prompt: `(x1, y1)`, ..., `(query, ?)`."""
        return [f"(x{i + 1}, y{i + 1})" for i in range(n_context)] + ["(query, ?)"]


@dataclass(frozen=True)
class Interleaved(_Layout):
    """Layout of prompts with x and y in alternate tokens, without the query's y.

    Each is zero-padded to the wider of the two. Point t is predicted at its own x token, from the points before it.
    Source: Garg et al. 2022; Fu et al. 2024, section 3.
    """

    @property
    def d_token(self) -> int:
        """Width of a token: the larger of x_dim and y_dim."""
        return max(self.x_dim, self.y_dim)

    @checked
    def n_tokens(self, n_context: int) -> int:
        """Return the number of tokens of a prompt: two for each context point and one for the query."""
        return 2 * n_context + 1

    @checked
    def encode(
        self, prompts: Prompts, initial_weights: Float[Tensor, "x y"] | None = None
    ) -> Float[Tensor, "prompt pos d_token"]:
        """Return the tokens `x_1, y_1, x_2, y_2, ..., x_q` of prompts, zero-padded.

        Args:
            initial_weights: not available in this format; None.
        """
        self._require_dims(prompts)
        if initial_weights is not None:
            raise ValueError("initial_weights need the paired format: an x token has no entries for -x W_0")
        tokens = prompts.xs.new_zeros(len(prompts), self.n_tokens(prompts.n_context), self.d_token)
        tokens[:, 0::2, : self.x_dim] = prompts.xs
        tokens[:, 1::2, : self.y_dim] = prompts.ys[:, :-1]
        return tokens

    @checked(undefined=True)
    def prediction_positions(self, n_tokens: int) -> slice:
        """Return the positions at which predictions are read, among `n_tokens`: all x tokens."""
        return slice(0, n_tokens, 2)

    @checked
    def labels(self, n_context: Labelled) -> list[str]:
        """Return a label for each token of a prompt: `x1`, `y1`, `x2`, ..., `query`."""
        return [f"{axis}{i + 1}" for i in range(n_context) for axis in "xy"] + ["query"]


PromptFormat = Paired | Interleaved
"""A layout of points and targets as tokens."""


@checked
def prompt_format(name: PromptFormatName, *, x_dim: Count, y_dim: Count) -> PromptFormat:
    """Return the layout of regression prompts as tokens with a given name.

    Args:
        name: "paired" puts x and y of a point into one token; "interleaved" has a token for x and one for y in turn.

    Returns:
        A `Paired` or `Interleaved`: `encode(prompts)` are the tokens `[prompt pos d_token]`, and `prediction_positions`
        the tokens at which predictions are read.
    """
    return {"paired": Paired, "interleaved": Interleaved}[name](x_dim=x_dim, y_dim=y_dim)
