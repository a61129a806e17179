"""Fine-tuning and its measures by plain loops, and the models and shots that they run on."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from mechicl.analysis.finetuning import FineTuning
from mechicl.shots import Shots
from tests.analysis.interventions.oracles import bridge, model_of, no_hook_left

D_VOCAB, N_CTX = 20, 16
OURS: dict[str, dict[str, Any]] = {
    "softmax": {"d_mlp": 12, "normalization_type": "LN"},
    "linear": {"attention": "linear", "normalization_type": None, "d_mlp": None, "attn_bias": True},
    "one head": {"n_heads": 1, "n_layers": 1, "d_mlp": None},
    "deep": {"n_layers": 4, "attention": "softmax,relu,linear,softmax"},
    "looped": {"recurrent": True, "damping": 0.6, "n_layers": 3},
    "sink": {"sink": "learned"},
    "momentum": {"momentum": 0.4},
}
KINDS = (*OURS, "gpt2", "llama")


def model_on_tokens(kind: str, **fields: Any) -> Any:
    """In float64."""
    if kind in ("gpt2", "llama"):
        found = bridge(kind, **fields)
        found.cfg.dtype = torch.float64  # `to` warns of a change
        return found.to(torch.float64)
    model = model_of("ids", **({"d_vocab": D_VOCAB, "n_ctx": N_CTX} | OURS[kind] | fields))
    if kind == "linear":  # nothing else keeps its numbers small
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 0.4
    return model


def wrapped_model(kind: str) -> Any:
    """The model of transformers that `model_on_tokens` wraps, bare, with the same weights."""
    config = bridge(kind).original_model.config
    torch.manual_seed(0)
    return {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}[kind](config).eval().double()


def token_shots(
    own: Sequence[int] = (2, 1, 2), queries: Sequence[int] = (1, 3, 2, 3, 2), seed: int = 0, prefix: int = 0
) -> Shots:
    """Demonstrations and queries with these numbers of tokens of their own, behind a start token.

    The first `prefix` of an example's own tokens are the same in all of them.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(3, D_VOCAB, (n,), generator=generator).tolist()

    start, end, choices = 0, 1, [2, 5, 9]
    shared = draw(prefix)
    examples = [shared + draw(n - prefix) for n in own]
    labels = [choices[i % 3] for i in range(len(own))]
    context, places = [start], []
    for example, label in zip(examples, labels, strict=True):
        places.append((len(context), len(example)))
        context += [*example, label, end]
    asked = [draw(n) for n in queries]
    return Shots(
        zero_shot=tuple(torch.tensor([start, *query]) for query in asked),
        in_context=tuple(torch.tensor(context + query) for query in asked),
        targets=torch.tensor([choices[(i + 1) % 3] for i in range(len(asked))]),
        query_lengths=tuple(map(len, asked)),
        examples=tuple(torch.tensor([start, *example]) for example in examples),
        example_targets=torch.tensor(labels),
        example_spans=tuple(places),
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


def update_cosine(alone: np.ndarray, behind: np.ndarray, after: np.ndarray) -> float:
    return cosine_of(direction(behind) - direction(alone), direction(after) - direction(alone))


def kendall(a: Any, b: Any, tie: float = 0.0) -> float:
    """Kendall's tau-b, pair by pair; values of b that are no further apart than `tie` are equal."""
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


Read = Callable[[Tensor], Mapping[str, Tensor]]
READ = ("hook_attn_out", "attn.hook_z", "attn.hook_q", "attn.hook_attn_scores", "attn.hook_pattern")


def cached(model: Any) -> Read:
    """Activations and outputs of a run of one sequence."""

    def read(tokens: Tensor) -> Mapping[str, Tensor]:
        with torch.no_grad():
            outputs, cache = model.run_with_cache(tokens[None])
        layers = range(model.cfg.n_layers)
        found = {f"{layer} {name}": cache[f"blocks.{layer}.{name}"][0].double() for layer in layers for name in READ}
        return found | {"outputs": outputs[0, -1].double()}

    return read


def added(model: Any, changes: Mapping[str, Tensor], scale: float = 1.0) -> Any:
    """A copy of the model with other weights."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, change in changes.items():
            parameters[name] += scale * change
    return model


def expanded(model: Any, changes: Mapping[str, Tensor]) -> Read:
    """The same of the model's first-order expansion, by reverse-mode differentiation, twice."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    names = [f"blocks.{layer}.{name}" for layer in range(model.cfg.n_layers) for name in READ]

    def read(tokens: Tensor) -> Mapping[str, Tensor]:
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
        of = {name.removeprefix("blocks.").replace(".", " ", 1): a for name, a in zip(names, activations, strict=True)}
        return of | {"outputs": outputs}

    return read


def compared(n_layers: int, shots: Shots, before: Read, tuned: Read, seed: int) -> dict[str, np.ndarray]:
    """What a comparison should find, query by query and head by head."""
    n = len(shots)
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(seed)
    runs = [
        (before(shots.zero_shot[i]), before(shots.in_context[i]), tuned(shots.zero_shot[i])) for i in range(n)
    ]  # fmt: skip
    read_examples = [tuned(example) for example in shots.examples]
    examples_before = [before(example) for example in shots.examples]

    names = ("zero_shot", "in_context", "finetuned")
    for name, which in zip(names, range(3), strict=True):
        outputs = [runs[i][which]["outputs"].numpy() for i in range(n)]
        scored = [
            score_and_loss(out, target, shots.choices) for out, target in zip(outputs, shots.targets, strict=True)
        ]
        found[f"{name}_score"] = [score for score, _ in scored]
        found[f"{name}_loss"] = [loss for _, loss in scored]
    found["prediction_distance"] = [
        distance(behind["outputs"].numpy(), after["outputs"].numpy(), shots.choices) for _, behind, after in runs
    ]

    n_heads = runs[0][0]["0 attn.hook_z"].shape[1]
    d_model = runs[0][0]["0 hook_attn_out"].shape[-1]
    noise = torch.randn(n_layers, n, d_model, generator=generator, dtype=torch.float64).numpy()
    places = [p for first, number in shots.example_spans for p in range(first, first + number)]
    uniform = torch.rand(
        n_layers, n, len(places), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
    )
    by_layer = (
        "update_similarity", "random_update_similarity", "rank_correlation", "rank_correlation_before",
        "random_rank_correlation",
    )  # fmt: skip
    by_head = ("head_update_similarity", "map_similarity_before", "map_similarity_after", "head_rank_correlation")
    found |= {name: np.full((n_layers, n), np.nan) for name in by_layer}
    found |= {name: np.full((n_layers, n_heads, n), np.nan) for name in by_head}
    for layer in range(n_layers):
        queries_shown, shown_before = (
            np.concatenate([
                of[f"{layer} attn.hook_q"].numpy()[len(example) - number :]
                for of, example, (_, number) in zip(read, shots.examples, shots.example_spans, strict=True)
            ])
            for read in (read_examples, examples_before)
        )  # fmt: skip
        for i in range(n):
            alone, behind, after = runs[i]
            outs = [of[f"{layer} hook_attn_out"][-1].numpy() for of in runs[i]]
            found["update_similarity"][layer, i] = update_cosine(*outs)
            change = direction(outs[1]) - direction(outs[0])
            found["random_update_similarity"][layer, i] = cosine_of(change, noise[layer, i])
            attended = behind[f"{layer} attn.hook_pattern"][:, -1, places].numpy()
            last = after[f"{layer} attn.hook_q"][-1].numpy()
            implied = np.array([[last[h] @ shown[h] for shown in queries_shown] for h in range(n_heads)])
            found["rank_correlation"][layer, i] = kendall(attended.sum(0), implied.sum(0), 1e-9)
            last = alone[f"{layer} attn.hook_q"][-1].numpy()
            unchanged = np.array([[last[h] @ shown[h] for shown in shown_before] for h in range(n_heads)])
            found["rank_correlation_before"][layer, i] = kendall(attended.sum(0), unchanged.sum(0), 1e-9)
            found["random_rank_correlation"][layer, i] = kendall(attended.sum(0), uniform[layer, i].tolist())
            for h in range(n_heads):
                moved = [of[f"{layer} attn.hook_z"][-1, h].numpy() for of in runs[i]]
                found["head_update_similarity"][layer, h, i] = update_cosine(*moved)
                found["head_rank_correlation"][layer, h, i] = kendall(attended[h], implied[h], 1e-9)
                own = shots.query_lengths[i]
                rows = [of[f"{layer} attn.hook_attn_scores"][h, -1, -own:].numpy() for of in (alone, behind, after)]
                if own > 1:  # one score has no direction but a sign
                    found["map_similarity_before"][layer, h, i] = cosine_of(rows[1], rows[0])
                    found["map_similarity_after"][layer, h, i] = cosine_of(rows[1], rows[2])
    return {name: np.array(value) for name, value in found.items()}


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


# ---- fine-tuning ----


def example_loss(outputs: Tensor, target: Tensor, choices: Tensor | None) -> Tensor:
    """Of one output `[d_out]`."""
    if choices is None:
        return ((outputs - target) ** 2).sum()
    return -F.log_softmax(outputs, -1)[target]


def sgd(model: Any, names: Sequence[str], shots: Shots, tuning: FineTuning) -> tuple[dict[str, Tensor], Tensor]:
    """Changes and losses of torch's own SGD, on a copy."""
    tuned = copy.deepcopy(model)
    parameters = dict(tuned.named_parameters())
    optimizer = torch.optim.SGD([parameters[name] for name in names], lr=tuning.learning_rate)
    pairs = list(zip(shots.examples, shots.example_targets, strict=True))
    losses = []
    for _ in range(tuning.epochs):
        for first in range(0, len(pairs), tuning.examples_per_step):
            batch = pairs[first : first + tuning.examples_per_step]
            of_batch = [example_loss(tuned(tokens[None])[0, -1], y, shots.choices) for tokens, y in batch]
            losses += [loss.item() for loss in of_batch]
            optimizer.zero_grad()
            torch.stack(of_batch).mean().backward()
            optimizer.step()
    before = dict(model.named_parameters())
    changes = {name: (parameters[name] - before[name]).detach() for name in names}
    return changes, torch.tensor(losses, dtype=torch.float64).view(tuning.epochs, -1)


# ---- whether a model is as it was ----


class Snapshot:
    """What a model was, to the bit."""

    def __init__(self, model: Any):
        self.model = model
        self.values = {name: of.detach().clone() for name, of in self._all()}
        self.example_spans = {name: of.data_ptr() for name, of in self._all()}
        self.required = {name: of.requires_grad for name, of in model.named_parameters()}
        self.training = [part.training for part in model.modules()]
        self.own = [sorted(vars(block)) for block in model.blocks]

    def _all(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]

    def check(self) -> None:
        """The model is that still: weights, flags, hooks, and how its blocks run."""
        now = dict(self._all())
        assert now.keys() == self.values.keys()
        assert all(torch.equal(now[name], value) for name, value in self.values.items())
        assert all(now[name].data_ptr() == place for name, place in self.example_spans.items())
        assert {name: of.requires_grad for name, of in self.model.named_parameters()} == self.required
        assert all(of.grad is None for of in self.model.parameters())
        assert [part.training for part in self.model.modules()] == self.training
        assert [sorted(vars(block)) for block in self.model.blocks] == self.own
        assert no_hook_left(self.model)
