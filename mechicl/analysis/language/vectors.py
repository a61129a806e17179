"""Vectors that carry a task: function vectors of heads, task vectors of layers, and steering by any direction."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities import get_act_name

from mechicl.analysis.interventions import ablate, target_probability
from mechicl.analysis.interventions.ablation import Replacement
from mechicl.analysis.interventions.patching import make_experiment, make_grid, sweep_grid
from mechicl.analysis.interventions.runs import record_within
from mechicl.analysis.language.shots import predict_last
from mechicl.base.arguments import Count, checked
from mechicl.base.memory import Budget
from mechicl.base.threads import holding
from mechicl.interop import LanguageModel
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.parts import take_apart
from mechicl.models.temporary_hooks import in_this_thread
from mechicl.statistics import Result
from mechicl.statistics.results import NOT_SAMPLES, largest
from mechicl.text import WordPrompts, WordTask, word_prompts
from mechicl.text.scores import score_answers

HeadIndex = tuple[int, int]
N_MORE = 32
"""Further few-shot prompts to look for streams that know nothing of a query."""


@dataclass(frozen=True, eq=False)
class FunctionVector(Result):
    """A function vector, the heads that make it, and its effect on zero-shot prompts; see `function_vectors`.

    All samples are probabilities of the right answer's token (its first that differs between answers), or differences
    of them.

    Attributes:
        heads: heads whose mean outputs are summed, (layer, head), strongest first.
        vector: the sum of what they add to the residual stream, `[d_model]`.
        indirect_effects: gain in probability on prompts with shuffled labels, when one head's output at the last
            position is replaced by its mean over prompts with true labels.
        few_shot: probability on the prompts with true labels that the means are taken over.
        shuffled: probability on prompts with shuffled labels.
        zero_shot: probability without demonstrations.
        added: the same with the vector added to the stream after a layer, at the last position.
        random_added: the control: the same with a random vector of the same length.
    """

    task: str
    heads: tuple[HeadIndex, ...]
    vector: Tensor = field(metadata=NOT_SAMPLES)
    indirect_effects: Float[Tensor, "layer head prompt"]
    few_shot: Float[Tensor, " prompt"]
    shuffled: Float[Tensor, " prompt"]
    zero_shot: Float[Tensor, " prompt"]
    added: Float[Tensor, "layer prompt"]
    random_added: Float[Tensor, "layer prompt"]


@checked(locks=True)
def function_vectors(
    language: LanguageModel,
    task: WordTask | str,
    *,
    n_heads: Count = 10,
    n_shots: Count = 10,
    n_prompts: Count = 32,
    n_clean: Count = 100,
    seed: int = 0,
    progress: bool | None = None,
) -> FunctionVector:
    """Find the heads that carry a task from demonstrations to the answer, and add up their mean outputs.

    Each head's output at the last position is averaged over prompts with true labels and patched into prompts with
    shuffled labels. The mean outputs of the heads that raise the probability of the right answer most are summed to a
    vector, which is then added to zero-shot prompts, after each layer. A head's output is what it adds
    to the stream, with the model's factors. Where the heads' sum is normed (Gemma 2, OLMo 2), it is the head's share of
    the normed sum: its summand, multiplied by the norm's weight and factor on that prompt. Source: Todd et al. 2024,
    "Function vectors in large language models", sections 2 and 3.

    Args:
        language: a language model with its tokenizer, from `load_language_model`.
        task: a task of `mechicl.text`, or its name.
        n_shots: demonstrations per prompt.
        n_prompts: number of prompts with shuffled labels, and of zero-shot prompts.
        n_clean: number of prompts with true labels that the means are taken over.

    Returns:
        A `FunctionVector`; `intervals()` has means with 95% intervals over prompts.

    Example:
        >>> found = function_vectors(load_language_model("HuggingFaceTB/SmolLM2-135M"), "antonyms")
        >>> found.heads[:3], found.intervals()["added"]
    """
    draw = {"tokenizer": language.tokenizer, "task": task}
    clean = word_prompts(**draw, n_prompts=n_clean, n_shots=n_shots, seed=seed)
    shuffled = word_prompts(**draw, n_prompts=n_prompts, n_shots=n_shots, labels="shuffled", seed=seed + 1)
    zero = word_prompts(**draw, n_prompts=n_prompts, n_shots=0, seed=seed + 2)
    adapter = ModelAdapter(language.model, "query")
    take_apart(adapter).embed(adapter.encode(clean.ids[:1]))  # refuses models whose heads do not add to the stream
    last = shuffled.ids.shape[1] - 1
    swept = ablate(
        language.model, shuffled.ids, "z", {"layer": None, "pos": last, "head": None},
        method=Replacement("mean", clean.ids), metrics=target_probability(shuffled.targets), progress=progress,
    )  # fmt: skip
    effects = shuffled.by_query(swept.effect()[:, 0].cpu())
    heads = strongest_heads(effects.mean(-1), n_heads)
    vector = sum_of_outputs(adapter, clean.ids, heads)
    direction = torch.randn(vector.shape, generator=torch.Generator().manual_seed(seed))
    random = vector.norm() * (direction / direction.norm()).to(vector)
    streams = _streams_at_end(adapter, zero.ids)
    added, random_added = (
        _with_streams(adapter, zero, {name: stream + each for name, stream in streams.items()}, progress)
        for each in (vector, random)
    )
    return FunctionVector(
        task=clean.task,
        heads=heads,
        vector=vector.cpu(),
        indirect_effects=effects,
        few_shot=_probability(adapter, clean),
        shuffled=shuffled.by_query(swept.unpatched_values["metric"].cpu()),
        zero_shot=_probability(adapter, zero),
        added=added,
        random_added=random_added,
    )


@dataclass(frozen=True, eq=False)
class TaskVectors(Result):
    """Probability of the right answer in zero-shot prompts with the stream of few-shot ones; see `task_vectors`."""

    task: str
    patched: Float[Tensor, "layer prompt"]
    control: Float[Tensor, "layer prompt"]
    zero_shot: Float[Tensor, " prompt"]
    few_shot: Float[Tensor, " prompt"]


@checked(locks=True)
def task_vectors(
    language: LanguageModel,
    task: WordTask | str,
    *,
    n_shots: Count = 10,
    n_prompts: Count = 32,
    seed: int = 0,
    progress: bool | None = None,
) -> TaskVectors:
    """Measure how much of a task one layer's stream carries, by patching it into zero-shot prompts.

    The stream at the last position of a few-shot prompt replaces that of a zero-shot prompt, whose query is neither
    that of the few-shot prompt nor in its demonstrations. Source: Hendel et al. 2023, "In-context learning creates task
    vectors".

    Args:
        language: a language model with its tokenizer, from `load_language_model`.
        task: a task of `mechicl.text`, or its name.
        n_shots: demonstrations per few-shot prompt.
        n_prompts: number of prompts of each kind.

    Returns:
        Probabilities of the right answer: `patched` after each layer, and `control` with streams from prompts with
        shuffled labels, `[layer prompt]`; `zero_shot` without patching and `few_shot` with demonstrations, `[prompt]`.

    Raises:
        ValueError: a query is in every few-shot prompt, as demonstrations show nearly all pairs of the task.

    Example:
        >>> task_vectors(language, "capitals").to_dataframe()
    """
    draw = {"tokenizer": language.tokenizer, "task": task, "seed": seed}
    zero = word_prompts(**draw, n_shots=0, n_prompts=n_prompts)
    adapter = ModelAdapter(language.model, "query")
    few = word_prompts(**draw, n_shots=n_shots, n_prompts=n_prompts)
    results = []
    for labels in ("true", "shuffled"):  # of the same queries and demonstrated inputs
        sources = word_prompts(**draw, n_shots=n_shots, n_prompts=n_prompts + N_MORE, labels=labels)
        chosen = sources.ids[[_next_without(sources, i, n_prompts) for i in range(n_prompts)]]
        results.append(_with_streams(adapter, zero, _streams_at_end(adapter, chosen), progress))
    return TaskVectors(zero.task, *results, *(_probability(adapter, prompts) for prompts in (zero, few)))


@checked
@contextmanager
def steering(model: Any, vector: Float[Tensor, "d_model"], layer: int, *, pos: int | None = None) -> Iterator[None]:
    """Return a context manager that adds a vector to the residual stream after a layer.

    It acts on runs of the thread that enters it. Runs of other threads are not steered.

    Args:
        model: a model with hooks, such as `language.model`.
        vector: the vector to add, such as a function vector.
        layer: number of the layer; the stream after it is `resid_post`.
        pos: position in the text at which it is added, by default at all; also in runs that continue a text with cached
            keys and values, where positions from the end (-1) are refused, as are those that the text does not have.

    Example:
        >>> with steering(language.model, found.vector, layer=12, pos=-1):
        ...     logits = language.model(ids)
    """
    if not 0 <= layer < model.cfg.n_layers:
        raise ValueError(f"layer must be 0 to {model.cfg.n_layers - 1}, got {layer}")
    if len(vector) != model.cfg.d_model:
        raise ValueError(f"vector must have the width {model.cfg.d_model} of the stream, got {len(vector)}")

    n_cached = [0]  # positions of the text before those that the present run computes

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache, ours, mask = (kwargs.get(name) for name in ("past_key_values", "past_kv_cache", "attention_mask"))
        n_before = 0 if ours is None else ours.previous_attention_mask.shape[1]
        n_cached[:] = [n_before if cache is None else int(cache.get_seq_length())]
        padded = isinstance(mask, Tensor) and not mask.all()
        if pos is not None and (padded or kwargs.get("cache_params") is not None):
            raise ValueError("pos must be None for texts with padding, and in runs that continue a state")

    def add(stream: Tensor, hook: Any) -> Tensor:
        stream, n = stream.clone(), n_cached[0] + stream.shape[1]
        if pos is not None and not (0 if n_cached[0] else -n) <= pos < n:
            lowest = "0, as keys and values are cached," if n_cached[0] else -n
            raise ValueError(f"pos must be {lowest} to {n - 1} for a text of {n} tokens, got {pos}")
        if pos is None or pos % n >= n_cached[0]:
            stream[:, slice(None) if pos is None else pos % n - n_cached[0]] += vector.to(stream)
        return stream

    root = getattr(model, "original_model", model)  # a bridge's own hooks do not see the cache
    with ExitStack() as stack:
        stack.enter_context(holding(model))
        stack.callback(root.register_forward_pre_hook(in_this_thread(begin), with_kwargs=True).remove)
        hook = (get_act_name("resid_post", layer), in_this_thread(add))
        stack.enter_context(model.hooks(fwd_hooks=[hook]))
        yield


def strongest_heads(effects: Float[Tensor, "layer head"], n: int) -> tuple[HeadIndex, ...]:
    """Return the layers and heads of the `n` largest values, largest first; warn if others tie with the last."""
    return tuple(divmod(index, effects.shape[1]) for index in largest(effects, n, "heads")[0])


def sum_of_outputs(
    adapter: ModelAdapter, ids: Int[Tensor, "prompt pos"], heads: Sequence[HeadIndex]
) -> Float[Tensor, "d_model"]:
    """Return the sum of what some heads add to the residual stream at the last position, each a mean over prompts."""
    parts, ids = take_apart(adapter), adapter.encode(ids)
    names = {layer: get_act_name("z", layer) for layer, _ in heads}
    recorded = record_within(adapter, ids, list(names.values()), Budget())
    means = {layer: parts.write(layer, recorded[name][:, -1:])[:, :, 0].mean(1) for layer, name in names.items()}
    return torch.stack([means[layer][head] for layer, head in heads]).sum(0).detach()


def _next_without(sources: WordPrompts, i: int, n: int) -> int:
    """Return the first of the prompts after the i-th of n, then of those before it and of all others, without query i.

    Neither its query nor its demonstrations may have the input of query i, whose answer the stream would then carry.
    """
    query = sources.queries[i]
    for j in (*range(i + 1, n + 1), *range(i), *range(n + 1, len(sources))):
        if query not in (sources.queries[j], *sources.shown[j]):
            return j
    raise ValueError(
        f"no few-shot prompt lacks the query {query!r}: task {sources.task!r} has {sources.n_pairs} pairs, and "
        f"n_shots={sources.n_shots} show nearly all of them; take fewer shots"
    )


def _streams_at_end(adapter: ModelAdapter, ids: Tensor) -> dict[str, Tensor]:
    ids = adapter.encode(ids)
    names = [get_act_name("resid_post", layer) for layer in range(adapter.n_layers)]
    recorded = record_within(adapter, ids, names, Budget())
    return {name: stream[:, -1].clone() for name, stream in recorded.items()}


def _with_streams(
    adapter: ModelAdapter, prompts: WordPrompts, streams: dict[str, Tensor], progress: bool | None
) -> Float[Tensor, "layer query"]:
    """Return the probability of the right answer with the stream after each layer replaced at the last position."""
    ids = adapter.encode(prompts.ids)
    n_pos = ids.shape[1]
    grid = make_grid(adapter, ids, "resid_post", {"layer": None, "pos": n_pos - 1})
    values = {name: stream[:, None].expand(-1, n_pos, -1) for name, stream in streams.items()}  # only the last is used
    experiment = make_experiment(adapter, ids, prompts.ids, target_probability(prompts.targets))
    swept = sweep_grid(experiment, grid, values, "stream at the last position", progress=progress)
    return prompts.by_query(swept.values["metric"][:, 0].cpu())


def _probability(adapter: ModelAdapter, prompts: WordPrompts) -> Float[Tensor, " query"]:
    """Return the probability of each query's right answer."""
    _, log_probability = score_answers(predict_last(adapter, prompts.ids), prompts.targets)
    return prompts.by_query(log_probability.exp().cpu())
