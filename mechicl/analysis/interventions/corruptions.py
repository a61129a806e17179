"""Corrupted prompts to patch from or to: another task, other labels, another query, another prompt, noise."""

from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.prompts import Prompts

Corruption = Literal["task", "labels", "query", "prompt", "noise"]


@checked
def corrupt(prompts: Prompts, kind: Corruption, *, seed: int = 0, noise_std: float = 1.0) -> Prompts:
    """Corrupt prompts in one respect, for instance as the corrupted run of `patch`; the result has the same shape.

    Args:
        prompts: the clean ones; at least two for "query" and "prompt", and two context points for "labels".
        kind: the change:

            - "task": the same inputs with the targets of new linear weights drawn from N(0, I), multiplied by one
              factor so that the mean square of all targets stays the same (made for linear regression);
            - "labels": the context's targets permuted in each prompt, so that none keeps its point;
            - "query": the query's input comes from another prompt (its target, which no model sees, stays);
            - "prompt": each prompt is replaced by another one of the batch;
            - "noise": Gaussian noise is added to the context's targets.
        noise_std: standard deviation of the noise for "noise", in units of the targets' standard deviation.

    Example:
        >>> corrupt(prompts, "task").xs.equal(prompts.xs)
        True
    """
    generator = torch.Generator().manual_seed(seed)
    xs, ys, n = prompts.xs, prompts.ys.clone(), len(prompts)
    if kind in ("query", "prompt"):
        if n < 2:
            raise ValueError(f"kind={kind!r} needs at least 2 prompts, got {n}")
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
        raise ValueError(f"kind='labels' needs at least 2 context points, got {prompts.n_context}")
    orders = torch.stack([derangement(prompts.n_context, generator) for _ in range(n)]).to(ys.device)
    ys[:, :-1] = ys[:, :-1].gather(1, orders[..., None].expand(-1, -1, prompts.y_dim))
    return Prompts(xs, ys)


@checked
def corrupt_tokens(
    ids: Int[Tensor, "prompt pos"], *, d_vocab: int | None = None, seed: int = 0
) -> Int[Tensor, "prompt pos"]:
    """Replace every earlier occurrence of a sequence's last token by another random one: nothing to find by induction.

    Args:
        ids: the clean token ids.
        d_vocab: size of the vocabulary that replacements are drawn from; by default the largest id plus 1.

    Returns:
        Token ids of the same shape.

    Example:
        >>> corrupt_tokens(torch.tensor([[3, 1, 2, 3]]), d_vocab=5)[0, 3].item()
        3
    """
    generator = torch.Generator().manual_seed(seed)
    least = int(ids.max()) + 1 if ids.numel() else 0
    size = least if d_vocab is None else d_vocab
    if size < max(least, 2):
        raise ValueError(f"d_vocab must be at least {max(least, 2)}, for the tokens of ids and another one, got {size}")
    last = ids[:, -1:]
    drawn = torch.randint(size - 1, ids.shape, generator=generator).to(ids)
    same = ids == last
    same[:, -1] = False  # the token that looks for it stays
    return torch.where(same, drawn + (drawn >= last), ids)  # never the token itself


def derangement(n: int, generator: torch.Generator) -> Tensor:
    """Draw a random cyclic permutation of n items: none keeps its place."""
    order = torch.randperm(n, generator=generator)
    result = torch.empty_like(order)
    result[order] = order.roll(1)
    return result
