"""Contexts of points as demonstrations: fine-tuning on a prompt's context, compared with reading it."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch

from mechicl.analysis.finetuning.context_comparison import FineTuningComparison, compare_with_finetuning
from mechicl.analysis.finetuning.hyperparameter_search import (
    SEARCHED_EPOCHS,
    SEARCHED_RATES,
    TuningSearch,
    search_tuning,
)
from mechicl.analysis.finetuning.sgd import FineTuning, fine_tune_each
from mechicl.base.arguments import checked
from mechicl.base.progress import progress_bar
from mechicl.models import HookedTransformer
from mechicl.prompts import Prompts, Shots


@checked
def prompt_shots(model: HookedTransformer, prompt: Prompts) -> Shots:
    """Convert one prompt of points to demonstrations (its context) and a query, for `fine_tune` and comparisons.

    Without demonstrations a model reads the query alone. If its query sees only the context (`keys="context"`), it
    would predict 0 for a query alone, so it reads the context's inputs too, with targets of 0.

    Args:
        model: the model whose tokens are made.
        prompt: one prompt, with one context point or more.

    Returns:
        A `Shots` of token sequences `[pos d_token]`: `zero_shot` (the query without demonstrations), `in_context`
        (after them), `targets` (the query's y), and `examples` with `example_targets`: each context point as a query
        without demonstrations, and its y, to fine-tune on.

    Example:
        >>> len(prompt_shots(model, prompts[:1]).examples)
        20
    """
    if len(prompt) != 1 or prompt.n_context < 1:
        raise ValueError(f"prompt must be one prompt with context points, got {prompt}")
    xs, ys = prompt.context
    bare = Prompts(prompt.xs, torch.zeros_like(prompt.ys)) if model.cfg.keys == "context" else prompt.prefix(0)
    bare = bare.with_query(prompt.query.xs)
    alone = model.encode(bare)[0]
    tokens_per_point = model.cfg.format.n_tokens(1) - model.cfg.format.n_tokens(0)
    return Shots(
        zero_shot=(alone,),
        in_context=(model.encode(prompt)[0],),
        targets=prompt.ys[:, -1],
        query_lengths=(len(alone),),
        examples=tuple(model.encode(bare.with_query(x))[0] for x in xs[0].split(1)),
        example_targets=ys[0],
        example_spans=tuple((tokens_per_point * i, 1) for i in range(prompt.n_context)),
    )


@checked(locks=True)
def search_on_prompts(
    model: HookedTransformer,
    prompts: Prompts,
    tuning: FineTuning | None = None,
    *,
    learning_rates: Sequence[float] = SEARCHED_RATES,
    epochs: Sequence[int] = SEARCHED_EPOCHS,
    progress: bool | None = None,
) -> TuningSearch:
    """Search for the learning rate and number of epochs at which fine-tuning on contexts predicts their queries best.

    For each prompt the model is fine-tuned on the context's points and predicts the query without the context.

    Args:
        model: a trained model; it stays unchanged.
        prompts: other prompts than those to be measured later.
        tuning: settings other than learning rate and epochs (`FineTuning`); by default plain SGD of all W_K and W_V.
        epochs: numbers of epochs (passes over the context) to try.

    Returns:
        A `TuningSearch`, as of `search_tuning`: `best`, the `FineTuning` settings with the least mean squared error.

    Example:
        >>> search_on_prompts(model, prompts[:2], learning_rates=(0.003, 0.01), epochs=(1,)).best
    """
    search = partial(search_tuning, model, tuning=tuning, learning_rates=learning_rates, epochs=epochs, progress=False)
    bar = progress_bar(prompts.split(1), unit="prompt", progress=progress)
    searches = [search(prompt_shots(model, prompt)) for prompt in bar]
    score, loss = (torch.cat([getattr(search, name) for search in searches], dim=-1) for name in ("score", "loss"))
    return dataclasses.replace(searches[0], score=score, loss=loss)


@checked(locks=True)
def compare_on_prompts(
    model: HookedTransformer, prompts: Prompts, tuning: FineTuning, *, seed: int = 0, progress: bool | None = None
) -> FineTuningComparison:
    """Compare, for each prompt, a model fine-tuned on its context with the same model reading it.

    Args:
        model: a trained model; it stays unchanged.
        prompts: prompts whose contexts are the demonstrations.
        tuning: settings of fine-tuning, such as `search_on_prompts(...).best` on other prompts.

    Returns:
        A `FineTuningComparison` with one value per prompt (its axis `query`). Scores are minus the squared error.

    Example:
        >>> compare_on_prompts(model, prompts[:4], FineTuning(0.01)).recall()
    """
    shots = [prompt_shots(model, prompt) for prompt in prompts.split(1)]
    tuned = fine_tune_each(model, shots, tuning, progress=progress)
    pairs = progress_bar(zip(shots, tuned, strict=True), total=len(shots), unit="prompt", progress=progress)
    # a prompt takes two seeds, one for each random baseline
    parts = [
        compare_with_finetuning(model, each, changed, seed=seed + 2 * i, progress=False)
        for i, (each, changed) in enumerate(pairs)
    ]
    return FineTuningComparison.concatenate(parts)
