"""Regression prompts as demonstrations and a query: our models fine-tuned on a context against reading it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from tqdm.auto import tqdm

from mechicl.analysis.finetuning.comparison import FineTuningComparison, compare_with_finetuning
from mechicl.analysis.finetuning.search import EPOCHS, LEARNING_RATES, TuningSearch, search_tuning
from mechicl.analysis.finetuning.tuning import FineTuning
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts
from mechicl.shots import Shots

ZeroShot = Literal["query", "unlabelled"]


def prompt_shots(model: HookedTransformer, prompt: Prompts, zero_shot: ZeroShot | None = None) -> Shots:
    """One prompt's context as demonstrations, and its query.

    Args:
        model: which encodes the prompt.
        prompt: one prompt, with one context point or more.
        zero_shot: what is left of a prompt without its demonstrations. "query": nothing but the query. "unlabelled":
            the context's inputs with targets of 0, for models whose query sees nothing but the context: alone, it
            would be predicted as 0 whatever the weights. By default as the model's `keys` need it.

    Raises:
        ValueError: not one prompt, no context points, or an unknown form.
    """
    if len(prompt) != 1 or prompt.n_context < 1:
        raise ValueError(f"one prompt with context points needed, got {prompt}")
    zero_shot = zero_shot or ("unlabelled" if model.cfg.keys == "context" else "query")
    if zero_shot not in ("query", "unlabelled"):
        raise ValueError(f"zero_shot={zero_shot!r} is not 'query' or 'unlabelled'")
    n = prompt.n_context
    xs, ys = prompt.context
    bare = Prompts(prompt.xs, torch.zeros_like(prompt.ys)) if zero_shot == "unlabelled" else prompt.prefix(0)
    bare = bare.with_query(prompt.query.xs)
    in_context = model.encode(prompt)[0]
    alone = model.encode(bare)[0]
    examples = [model.encode(bare.with_query(x))[0] for x in xs[0].split(1)]
    per_point = model.cfg.format.n_tokens(1) - model.cfg.format.n_tokens(0)
    return Shots(
        zero_shot=(alone,),
        in_context=(in_context,),
        targets=prompt.ys[:, -1],
        n_own=(len(alone),),
        examples=tuple(examples),
        example_targets=ys[0],
        places=tuple((per_point * i, 1) for i in range(n)),
    )


def search_on_prompts(
    model: HookedTransformer,
    prompts: Prompts,
    tuning: FineTuning | None = None,
    *,
    learning_rates: Sequence[float] = LEARNING_RATES,
    epochs: Sequence[int] = EPOCHS,
    zero_shot: ZeroShot | None = None,
    progress: bool = False,
) -> TuningSearch:
    """The learning rate and number of epochs at which fine-tuning on contexts predicts their queries best.

    Args:
        model: on prompts of points.
        prompts: held-out ones, not those to be measured later.
        tuning: the other settings.
        learning_rates: to try.
        epochs: to try.
        zero_shot: see `prompt_shots`.
        progress: show a progress bar.

    Raises:
        ValueError: no prompts, or what `search_tuning` refuses.
    """
    found = [
        search_tuning(model, shots, tuning, learning_rates=learning_rates, epochs=epochs)
        for shots in _each(model, prompts, zero_shot, progress)
    ]
    if not found:
        raise ValueError("a search needs prompts")
    together = {name: torch.cat([getattr(of, name) for of in found], dim=-1) for name in ("score", "loss")}
    return dataclasses.replace(found[0], **together)


def compare_on_prompts(
    model: HookedTransformer,
    prompts: Prompts,
    tuning: FineTuning,
    *,
    zero_shot: ZeroShot | None = None,
    seed: int = 0,
    progress: bool = False,
) -> FineTuningComparison:
    """For each prompt: a model fine-tuned on its context against the same model reading it.

    Args:
        model: on prompts of points.
        prompts: each gives one query.
        tuning: how to fine-tune, the same for all.
        zero_shot: see `prompt_shots`.
        seed: of the random baselines.
        progress: show a progress bar.

    Raises:
        ValueError: prompts that do not fit the model, or what `fine_tune` refuses.

    Example:
        >>> task = LinearRegression(x_dim=5, n_context=20, inputs="gaussian")
        >>> compare_on_prompts(load("gpt2-8l"), task.sample(16, seed=0), FineTuning(0.01)).recall()
    """
    each = _each(model, prompts, zero_shot, progress)
    parts = [compare_with_finetuning(model, shots, tuning, seed=seed + 2 * i) for i, shots in enumerate(each)]
    return FineTuningComparison.concatenate(parts)


def _each(model: HookedTransformer, prompts: Prompts, zero_shot: ZeroShot | None, progress: bool) -> Iterator[Shots]:
    for prompt in tqdm(prompts.split(1), unit="prompt", disable=not progress, leave=False):
        yield prompt_shots(model, prompt, zero_shot)
