"""In-context learning of language models: accuracy by number of demonstrations, and loss by position."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.analysis.interventions.runs import rows_at_once
from mechicl.base.annotations import described
from mechicl.base.arguments import Count, Natural, checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.interop import LanguageModel
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.text import WORD_TASKS, WordTask, word_prompts
from mechicl.text.few_shot import WordLabels
from mechicl.text.scores import FewShotScores, score_answers


@checked(locks=True)
def icl_score(
    language: LanguageModel,
    tasks: Sequence[WordTask | str] | WordTask | str = tuple(WORD_TASKS),
    *,
    shots: Sequence[Natural] = (0, 2, 4, 8, 16),
    labels: Sequence[WordLabels] = ("true", "shuffled", "random"),
    n_prompts: Count = 50,
    seed: int = 0,
    progress: bool | None = None,
) -> FewShotScores:
    """Measure few-shot accuracy by number of demonstrations, with controls for the labels.

    A model that learns the mapping from the demonstrations is better with true labels than with shuffled ones. Format
    and output words are the same in both. With "random" labels the output words are different too.

    Args:
        language: a language model with its tokenizer, from `load_language_model`.
        tasks: tasks of `mechicl.text`, or their names; by default all.
        shots: numbers of demonstrations; 0 is zero-shot, and 1 cannot be shuffled.
        labels: outputs of the demonstrations: "true" ones, "shuffled" within a prompt, or "random" words of other
            tasks. The queries are the same for all of them, and at 0 shots so is the result.
        n_prompts: number of prompts for each task, kind of labels and number of demonstrations; at most the number of
            pairs that every task has with this tokenizer, since prompts with the same query are not independent.

    Returns:
        A `FewShotScores`: `accuracy` and `log_probability` `[task label shot prompt]`; `gain(task)` is the accuracy
        with true labels minus that with shuffled ones, with a 95% interval over prompts.

    Example:
        >>> scores = icl_score(load_language_model("HuggingFaceTB/SmolLM2-135M"), ["antonyms", "capitals"])
        >>> print(scores.gain("antonyms"))
    """
    tasks = (tasks,) if isinstance(tasks, WordTask | str) else tuple(tasks)
    adapter = ModelAdapter(language.model, "query")
    names = tuple(task if isinstance(task, str) else task.name for task in tasks)
    for name, values in (("tasks", names), ("labels", labels), ("shots", shots)):
        if not values or len(set(values)) < len(values) or "other task" in values:
            raise ValueError(f"{name} must be one or more different ones, without 'other task', got {list(values)}")
    first = (word_prompts(language.tokenizer, task, n_prompts=1, n_shots=max(shots)) for task in tasks)
    n_prompts = min(n_prompts, *(prompt.n_pairs for prompt in first))
    shape = (len(tasks), len(labels), len(shots), n_prompts)
    accuracy, log_probability = torch.empty(shape), torch.empty(shape)
    cells = [(t, k, s) for t in range(len(tasks)) for s in range(len(shots)) for k in range(len(labels))]
    for t, k, s in progress_bar(cells, unit="cell", progress=progress):
        if shots[s] == 0 and k > 0:  # without demonstrations there are no labels
            accuracy[t, k, s], log_probability[t, k, s] = accuracy[t, 0, s], log_probability[t, 0, s]
            continue
        prompts = word_prompts(
            language.tokenizer, tasks[t], n_prompts=n_prompts, n_shots=shots[s], labels=labels[k], seed=seed
        )
        logits = predict_last(adapter, prompts.ids)
        accuracy[t, k, s], log_probability[t, k, s] = score_answers(logits, prompts.targets)
    return FewShotScores(names, tuple(labels), tuple(shots), accuracy, log_probability)


@checked(locks=True)
def loss_by_position(
    language: LanguageModel, ids: Int[Tensor, "text pos"], *, progress: bool | None = None
) -> Float[Tensor, "pos text"]:
    """Return the next-token loss of texts at every position but the last, in nats.

    Args:
        language: a language model with its tokenizer, from `load_language_model`.
        ids: token ids of texts of one length, from `language.tokenizer`.

    Returns:
        `[pos text]`: entry t is the loss of the prediction of token t + 1 from tokens 0 to t.

    Raises:
        ValueError: no texts, texts of fewer than two tokens, or ids outside the vocabulary.

    Example:
        >>> losses = loss_by_position(language, ids)
        >>> print(interval(losses[500] - losses[50]))    # below 0 if it uses its context (Olsson et al. 2022)
    """
    adapter = ModelAdapter(language.model, "positions")
    vocabulary = language.model.cfg.d_vocab
    if not len(ids) or ids.shape[1] < 2 or ids.min() < 0 or ids.max() >= vocabulary:
        limits = f", {ids.min()} to {ids.max()}" if ids.numel() else ""
        raise ValueError(f"ids must be one or more texts of two or more tokens, each from 0 to {vocabulary - 1}, got "
                         f"{described(ids)}{limits}")  # fmt: skip
    ids = adapter.encode(ids.long())
    rows = rows_at_once(adapter, ids, Budget().holding(8 * ids.numel()))
    losses = []
    for part in progress_bar(ids.split(rows), unit="batch", progress=progress, desc="loss by position"):
        with torch.no_grad():
            log_probabilities = adapter.run(part)[:, :-1].log_softmax(-1)
        losses.append(-log_probabilities.gather(-1, part[:, 1:, None])[..., 0])
    return torch.cat(losses).T.cpu()


def predict_last(adapter: ModelAdapter, ids: Int[Tensor, "prompt pos"]) -> Float[Tensor, "prompt vocab"]:
    """Return the logits at the last position, in batches that fit into memory."""
    ids = adapter.encode(ids)
    one = adapter.run(ids[:1]).nbytes
    return adapter.predict(ids, rows_at_once(adapter, ids, Budget().holding(len(ids) * one)))
