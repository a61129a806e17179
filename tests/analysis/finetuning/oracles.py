"""Fine-tuning and its measures by plain loops, and the models and shots that they run on."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from transformers import GPT2LMHeadModel

from mechicl.analysis.finetuning import FineTuning
from mechicl.analysis.finetuning.forward_passes import run_with_changes
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.prompts import Shots
from tests.analysis.interventions.oracles import bridge, model_of, no_hook_left

D_VOCAB, N_CTX = 20, 16
LINEAR = {"attention": "linear", "normalization_type": None, "d_mlp": None, "attn_only": True, "attn_bias": True}
OURS: dict[str, dict[str, Any]] = {
    "softmax": {"d_mlp": 12, "normalization_type": "LN"},
    "linear": LINEAR | {"read_bias": False},
    "one head": {"n_heads": 1, "n_layers": 1, "d_mlp": None, "attn_only": True},
    "deep": {"n_layers": 4, "attention": "softmax,relu,linear,softmax"},
    "looped": {"recurrent": True, "damping": 0.6, "n_layers": 3},
    "sink": {"sink": "learned"},
    "momentum": {"momentum": 0.4},
}
KINDS = (*OURS, "gpt2", "llama")
LAYERS = {"gpt2": {"n_layer": 2}}  # as few as possible: bridges are slow


def model_on_tokens(kind: str, **fields: Any) -> Any:
    """A model in float64, the test's own."""
    return copy.deepcopy(_model_on_tokens(kind, **fields))


@functools.cache
def _model_on_tokens(kind: str, **fields: Any) -> Any:
    if kind in ("gpt2", "llama"):
        model = bridge(kind, **LAYERS.get(kind, {}), **fields)
        model.cfg.dtype = torch.float64  # `to` warns of a change
        return model.to(torch.float64)
    model = model_of("ids", **({"d_vocab": D_VOCAB, "n_ctx": N_CTX} | OURS[kind] | fields))
    if kind == "linear":  # to keep its numbers small
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 0.4
    return model


def wrapped_model(kind: str) -> Any:
    """The bare GPT-2 that `model_on_tokens` wraps, with the same weights."""
    config = bridge(kind, **LAYERS[kind]).original_model.config
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval().double()


def token_shots(
    lengths: Sequence[int] = (2, 1, 2), queries: Sequence[int] = (1, 3, 2, 3, 2), seed: int = 0, prefix: int = 0
) -> Shots:
    """Demonstrations and queries of these lengths, after a start token.

    The first `prefix` of an example's tokens are the same in all of them.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(3, D_VOCAB, (n,), generator=generator).tolist()

    start, end, choices = 0, 1, [2, 5, 9]
    shared = draw(prefix)
    examples = [shared + draw(n - prefix) for n in lengths]
    labels = [choices[i % 3] for i in range(len(lengths))]
    context, spans = [start], []
    for example, label in zip(examples, labels, strict=True):
        spans.append((len(context), len(example)))
        context += [*example, label, end]
    texts = [draw(n) for n in queries]
    return Shots(
        zero_shot=tuple(torch.tensor([start, *text]) for text in texts),
        in_context=tuple(torch.tensor(context + text) for text in texts),
        targets=torch.tensor([choices[(i + 1) % 3] for i in range(len(texts))]),
        query_lengths=tuple(map(len, texts)),
        examples=tuple(torch.tensor([start, *example]) for example in examples),
        example_targets=torch.tensor(labels),
        example_spans=tuple(spans),
        choices=torch.tensor(choices),
    )


# ---- measures ----
def cosine_of(a: np.ndarray, b: np.ndarray) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    return dot / lengths if lengths else math.nan


def direction(vector: np.ndarray) -> np.ndarray:
    length = math.sqrt(sum(x * x for x in vector))
    return vector / length if length else vector


def update_cosine(alone: np.ndarray, in_context: np.ndarray, after: np.ndarray) -> float:
    return cosine_of(direction(in_context) - direction(alone), direction(after) - direction(alone))


def kendall(a: Any, b: Any, tie: float = 0.0) -> float:
    """Kendall's tau-b, pair by pair; values of b within `tie` are equal."""
    a, b = np.asarray(a).tolist(), np.asarray(b).tolist()
    agreeing = apart_a = apart_b = 0
    for i in range(len(a)):
        for j in range(i):
            sign_a = (a[i] > a[j]) - (a[i] < a[j])
            sign_b = (b[i] > b[j] + tie) - (b[i] < b[j] - tie)
            agreeing += sign_a * sign_b
            apart_a += sign_a != 0
            apart_b += sign_b != 0
    return agreeing / math.sqrt(apart_a * apart_b) if apart_a and apart_b else math.nan


Activations = Mapping[str, Tensor]
Read = Callable[[Tensor], Activations]
READ = ("hook_attn_out", "attn.hook_z", "attn.hook_q", "attn.hook_attn_scores", "attn.hook_pattern")


def cached(model: Any) -> Read:
    """Activations and outputs of a run of one sequence."""

    def read(tokens: Tensor) -> Activations:
        with torch.no_grad():
            outputs, cache = model.run_with_cache(tokens[None])
        layers = range(model.cfg.n_layers)
        activations = {
            f"{layer} {name}": cache[f"blocks.{layer}.{name}"][0].double() for layer in layers for name in READ
        }
        return activations | {"outputs": outputs[0, -1].double()}

    return read


def added(model: Any, changes: Mapping[str, Tensor], scale: float = 1.0) -> Any:
    """A copy of the model with other weights."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, change in changes.items():
            parameters[name] += scale * change
    return model


def linearized_outputs(model: Any, tokens: Tensor, changes: dict[str, Tensor]) -> Tensor:
    """Predictions by the library's first-order expansion in the changes of parameters, `[prompt d_out]`."""
    adapter = ModelAdapter(model)
    return run_with_changes(adapter, adapter.encode(tokens), {}, changes, linearized=True)[0]


def expanded(model: Any, changes: Mapping[str, Tensor]) -> Read:
    """The activations of `cached`, in the model's first-order expansion, by reverse-mode differentiation, twice."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    names = [f"blocks.{layer}.{name}" for layer in range(model.cfg.n_layers) for name in READ]

    def read(tokens: Tensor) -> Activations:
        def function(*weights: Tensor) -> tuple[Tensor, ...]:
            seen: dict[str, Tensor] = {}

            def keep(activation: Tensor, hook: Any, name: str) -> None:
                # masked scores are -inf, or nearly, and do not change
                seen[name] = activation[0].clamp(min=-1e30)

            with model.hooks(fwd_hooks=[(name, partial(keep, name=name)) for name in names]):
                outputs = functional_call(model, dict(zip(changes, weights, strict=True)), (tokens[None],))
            return outputs[0, -1], *(seen[name] for name in names)

        start = tuple(parameters[name].detach() for name in changes)
        values, slopes = torch.autograd.functional.jvp(function, start, tuple(changes.values()))
        outputs, *activations = [a + b for a, b in zip(values, slopes, strict=True)]
        short = [name.removeprefix("blocks.").replace(".", " ", 1) for name in names]
        return dict(zip(short, activations, strict=True)) | {"outputs": outputs}

    return read


def compared(n_layers: int, shots: Shots, before: Read, tuned: Read, seed: int) -> dict[str, np.ndarray]:
    """The expected comparison, query by query and head by head."""
    n = len(shots)
    expected: dict[str, Any] = {}
    runs = [(before(shots.zero_shot[i]), before(shots.in_context[i]), tuned(shots.zero_shot[i])) for i in range(n)]
    examples_after, examples_before = ([read(example) for example in shots.examples] for read in (tuned, before))

    for which, name in enumerate(("zero_shot", "in_context", "finetuned")):
        outputs = [run[which]["outputs"].numpy() for run in runs]
        scored = [score_and_loss(out, y, shots.choices) for out, y in zip(outputs, shots.targets, strict=True)]
        expected[f"{name}_score"], expected[f"{name}_loss"] = zip(*scored, strict=True)
    expected["prediction_distance"] = [
        distance(in_context["outputs"].numpy(), after["outputs"].numpy(), shots.choices)
        for _, in_context, after in runs
    ]

    n_heads, d_model = runs[0][0]["0 attn.hook_z"].shape[1], runs[0][0]["0 hook_attn_out"].shape[-1]
    positions = [p for first, number in shots.example_spans for p in range(first, first + number)]
    noise, uniform = (
        draw(n_layers, n, size, generator=torch.Generator().manual_seed(of_seed), dtype=torch.float64).numpy()
        for draw, size, of_seed in ((torch.randn, d_model, seed), (torch.rand, len(positions), seed + 1))
    )
    by_layer = (
        "update_similarity", "random_update_similarity", "centred_update_similarity", "rank_correlation",
        "rank_correlation_before", "random_rank_correlation",
    )  # fmt: skip
    by_head = ("head_update_similarity", "map_similarity_before", "map_similarity_after", "head_rank_correlation")
    expected |= {name: np.full((n_layers, n), np.nan) for name in by_layer}
    expected |= {name: np.full((n_layers, n_heads, n), np.nan) for name in by_head}

    def products(layer: int, query: Activations, examples: Sequence[Activations]) -> np.ndarray:
        """Products of the last query vector with those of the demonstrations' own tokens, `[head token]`."""
        last = query[f"{layer} attn.hook_q"][-1].numpy()
        shown = np.concatenate([
            example[f"{layer} attn.hook_q"].numpy()[-number:]
            for example, (_, number) in zip(examples, shots.example_spans, strict=True)
        ])  # fmt: skip
        return np.array([[last[h] @ vectors[h] for vectors in shown] for h in range(n_heads)])

    for layer in range(n_layers):
        ends = [[direction(run[f"{layer} hook_attn_out"][-1].numpy()) for run in three] for three in runs]
        shared = [sum(three[k] - three[0] for three in ends) / n for k in (1, 2)]  # by all queries
        for i, (alone, in_context, after) in enumerate(runs):
            outs = [run[f"{layer} hook_attn_out"][-1].numpy() for run in runs[i]]
            expected["update_similarity"][layer, i] = update_cosine(*outs)
            own = [ends[i][k] - ends[i][0] - shared[k - 1] for k in (1, 2)]
            expected["centred_update_similarity"][layer, i] = cosine_of(*own) if n > 1 else np.nan
            change = direction(outs[1]) - direction(outs[0])
            expected["random_update_similarity"][layer, i] = cosine_of(change, noise[layer, i])
            attended = in_context[f"{layer} attn.hook_pattern"][:, -1, positions].numpy()
            implied, unchanged = products(layer, after, examples_after), products(layer, alone, examples_before)
            expected["rank_correlation"][layer, i] = kendall(attended.sum(0), implied.sum(0), 1e-9)
            expected["rank_correlation_before"][layer, i] = kendall(attended.sum(0), unchanged.sum(0), 1e-9)
            expected["random_rank_correlation"][layer, i] = kendall(attended.sum(0), uniform[layer, i].tolist())
            for h in range(n_heads):
                moved = [run[f"{layer} attn.hook_z"][-1, h].numpy() for run in runs[i]]
                expected["head_update_similarity"][layer, h, i] = update_cosine(*moved)
                expected["head_rank_correlation"][layer, h, i] = kendall(attended[h], implied[h], 1e-9)
                length = shots.query_lengths[i]
                rows = [run[f"{layer} attn.hook_attn_scores"][h, -1, -length:].numpy() for run in runs[i]]
                if length > 1:  # one score has no direction but a sign
                    expected["map_similarity_before"][layer, h, i] = cosine_of(rows[1], rows[0])
                    expected["map_similarity_after"][layer, h, i] = cosine_of(rows[1], rows[2])
    return {name: np.array(value) for name, value in expected.items()}


def score_and_loss(out: np.ndarray, target: Tensor, choices: Tensor | None) -> tuple[float, float]:
    if choices is None:
        error = sum((a - b) ** 2 for a, b in zip(out.tolist(), target.tolist(), strict=True))
        return -error, error
    logits = {choice: out[choice] for choice in choices.tolist()}
    right = int(target)
    chosen = max(logits, key=lambda choice: logits[choice])
    return float(chosen == right), -math.log(
        math.exp(logits[right]) / sum(math.exp(logit) for logit in logits.values())
    )


def distance(a: np.ndarray, b: np.ndarray, choices: Tensor | None) -> float:
    if choices is None:
        return math.sqrt(sum((a - b) ** 2))
    shares = []
    for out in (a, b):
        weights = [math.exp(out[choice]) for choice in choices.tolist()]
        shares.append([weight / sum(weights) for weight in weights])
    return sum(abs(p - q) for p, q in zip(*shares, strict=True)) / 2


def example_loss(outputs: Tensor, target: Tensor, choices: Tensor | None) -> Tensor:
    """The loss of one output `[d_out]`."""
    if choices is None:
        return ((outputs - target) ** 2).sum()
    return -F.log_softmax(outputs, -1)[target]


def sgd(model: Any, shots: Shots, tuning: FineTuning, names: Sequence[str]) -> tuple[dict[str, Tensor], Tensor]:
    """Changes and losses of torch's own SGD, on a copy."""
    tuned = copy.deepcopy(model)
    parameters = dict(tuned.named_parameters())
    optimizer = torch.optim.SGD([parameters[name] for name in names], lr=tuning.learning_rate)
    pairs = list(zip(shots.examples, shots.example_targets, strict=True))
    losses = []
    for _ in range(tuning.epochs):
        for first in range(0, len(pairs), tuning.examples_per_step):
            batch = [
                example_loss(tuned(tokens[None])[0, -1], target, shots.choices)
                for tokens, target in pairs[first:][: tuning.examples_per_step]
            ]
            losses += [loss.item() for loss in batch]
            optimizer.zero_grad()
            torch.stack(batch).mean().backward()
            optimizer.step()
    before = dict(model.named_parameters())
    changes = {name: (parameters[name] - before[name]).detach() for name in names}
    return changes, torch.tensor(losses, dtype=torch.float64).view(tuning.epochs, -1)


class Snapshot:
    """A copy of a model's state, to compare bits with."""

    def __init__(self, model: Any):
        self.model = model
        self.before = self._state()

    def _state(self) -> tuple[dict[str, Tensor], list[Any]]:
        tensors = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        flags = [(p.requires_grad, p.grad is None) for p in self.model.parameters()]
        addresses = [value.data_ptr() for _, value in tensors]
        attributes = [sorted(vars(block)) for block in self.model.blocks]
        return {n: v.detach().clone() for n, v in tensors}, [
            flags, addresses, attributes, [part.training for part in self.model.modules()],
        ]  # fmt: skip

    def check(self) -> None:
        """The model has not changed: weights, flags, hooks, and attributes of its blocks."""
        (tensors, rest), (before, rest_before) = self._state(), self.before
        assert tensors.keys() == before.keys()
        assert all(torch.equal(tensors[name], value) for name, value in before.items())
        assert rest == rest_before
        assert no_hook_left(self.model)
