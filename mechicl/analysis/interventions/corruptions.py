"""Corrupted prompts to patch from or to: another task, other labels, another query, another prompt, noise."""

from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.prompts import Prompts

Corruption = Literal["task", "labels", "query", "prompt", "noise"]
TokenCorruption = Literal["occurrences", "sequence"]


@checked
def corrupt(prompts: Prompts, kind: Corruption, *, seed: int = 0, noise_std: float = 1.0) -> Prompts:
    """Prompts that differ from the given ones in one respect, of the same shape.

    Args:
        prompts: the clean ones; at least two for "query" and "prompt", and two context points for "labels".
        kind: "task": the same inputs, with the targets of other linear weights, standard normal and scaled so that
            all targets keep their mean square (made for linear regression). "labels": the context's targets in
            another order, each in another place than before. "query": another query input, that of another prompt
            (the query's target, which no model sees, stays the clean one's). "prompt": another prompt of the batch.
            "noise": Gaussian noise on the context's targets.
        seed: of what is drawn.
        noise_std: of the noise, in standard deviations of the targets.

    Returns:
        Corrupted prompts, the same for the same seed.

    Raises:
        ValueError: an unknown kind, or too few prompts or points for it.

    Example:
        >>> corrupt(prompts, "task").xs.equal(prompts.xs)
        True
    """
    generator = torch.Generator().manual_seed(seed)
    xs, ys, n = prompts.xs, prompts.ys.clone(), len(prompts)
    if kind in ("query", "prompt"):
        if n < 2:
            raise ValueError(f"kind={kind!r} takes from another prompt, and there is {n}")
        other = derangement(n, generator).to(xs.device)
        return prompts[other] if kind == "prompt" else prompts.with_query(xs[other, -1])
    if kind == "task":
        weights = torch.randn(n, prompts.x_dim, prompts.y_dim, generator=generator, dtype=torch.float64)
        targets = xs @ weights.to(xs)
        return Prompts(xs, targets * (ys.square().mean() / targets.square().mean().clamp(min=1e-30)).sqrt())
    if kind == "noise":
        noise = torch.randn(ys[:, :-1].shape, generator=generator, dtype=torch.float64).to(ys)
        ys[:, :-1] += noise_std * ys.std() * noise
        return Prompts(xs, ys)
    if prompts.n_context < 2:
        raise ValueError(f"kind='labels' exchanges labels of context points, and there is {prompts.n_context}")
    orders = torch.stack([derangement(prompts.n_context, generator) for _ in range(n)]).to(ys.device)
    ys[:, :-1] = ys[:, :-1].gather(1, orders[..., None].expand(-1, -1, prompts.y_dim))
    return Prompts(xs, ys)


@checked
def corrupt_tokens(
    ids: Int[Tensor, "prompt pos"],
    kind: TokenCorruption = "occurrences",
    *,
    d_vocab: int | None = None,
    seed: int = 0,
) -> Int[Tensor, "prompt pos"]:
    """Token sequences that differ from the given ones in one respect, of the same shape.

    Args:
        ids: the clean ones.
        kind: "occurrences": every earlier occurrence of the last token is replaced by another random token, so that
            there is nothing left for an induction head to find. "sequence": another sequence of the batch.
        d_vocab: replacements are drawn from the tokens below this; by default those up to the largest in `ids`.
        seed: of what is drawn.

    Returns:
        Corrupted ids, the same for the same seed.

    Raises:
        ValueError: an unknown kind, one sequence to take another from, or no other token to draw.

    Example:
        >>> corrupt_tokens(torch.tensor([[3, 1, 2, 3]]), d_vocab=5)[0, 3].item()
        3
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "sequence":
        if len(ids) < 2:
            raise ValueError(f"kind='sequence' takes another sequence, and there is {len(ids)}")
        return ids[derangement(len(ids), generator).to(ids.device)]
    least = int(ids.max()) + 1 if ids.numel() else 0
    size = least if d_vocab is None else d_vocab
    if size < max(least, 2):
        raise ValueError(f"d_vocab must be at least {max(least, 2)} to have these tokens and another one, got {size}")
    last = ids[:, -1:]
    drawn = torch.randint(size - 1, ids.shape, generator=generator).to(ids)
    same = ids == last
    same[:, -1] = False  # the token that looks for it stays
    return torch.where(same, drawn + (drawn >= last), ids)  # never the token itself


def derangement(n: int, generator: torch.Generator) -> Tensor:
    """A random cyclic order of n things: each one's place goes to another."""
    order = torch.randperm(n, generator=generator)
    result = torch.empty_like(order)
    result[order] = order.roll(1)
    return result
