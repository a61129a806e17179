"""Logits read off the stream after each layer, and logits as sums of what the model's parts write."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn

from mechicl.base.arguments import Count, checked
from mechicl.base.memory import Budget
from mechicl.base.progress import progress_bar
from mechicl.models.opening.adapter import Hook, ModelAdapter
from mechicl.models.opening.edits import check_edits
from mechicl.models.opening.parts import record_writes, take_apart
from mechicl.models.opening.sites import list_nodes
from mechicl.models.transformer.attention import soft_cap
from mechicl.prompts import Prompts, TokenSequences
from mechicl.statistics import UNBOUNDED, Result, interval
from mechicl.statistics.results import NOT_SAMPLES

N_SHOWN = 10  # components that are printed
SUM_TOLERANCE = 0.05  # largest error of a sum of contributions, as a share of the sum of their absolute values


@dataclass(frozen=True, eq=False)
class LogitLens(Result):
    """Logits read off the stream after each layer, and how near they are to the model's; see `logit_lens`.

    The axis `layer` has the streams before the first layer (0) and after each layer; the last is the model's output.

    Attributes:
        logits: `[layer prompt vocab]` of the last position, or `[layer prompt pos vocab]` of all positions.
        answers: ids of the tokens that the next two are about, `[prompt]` or `[prompt pos]`.
        log_probabilities: log probability of the answer in nats `[layer prompt]`, a mean over positions.
        ranks: number of tokens with a larger logit than the answer `[layer prompt]`, a mean over positions.
        divergences: Kullback-Leibler divergence of the model's probabilities from those of the layer, in nats.
    """

    logits: Float[Tensor, "layer prompt *pos vocab"] = field(metadata=NOT_SAMPLES)
    answers: Int[Tensor, "prompt *pos"] = field(metadata=NOT_SAMPLES)
    log_probabilities: Float[Tensor, "layer prompt"]
    ranks: Float[Tensor, "layer prompt"]
    divergences: Float[Tensor, "layer prompt"]


@checked(locks=True)
@torch.no_grad()
def logit_lens(
    model: Any,
    tokens: TokenSequences | Int[Tensor, "prompt pos"],
    answers: Int[Tensor, "prompt"] | Int[Tensor, "prompt pos"] | None = None,
    *,
    at: Literal["query", "positions"] = "query",
    progress: bool | None = None,
) -> LogitLens:
    """Read logits off the stream after each layer, through the model's own final norm, read-out and soft cap.

    It shows at which layer the prediction is made. Source: nostalgebraist 2020, "Interpreting GPT: the logit lens". For
    models of points, see `Lens`.

    Args:
        model: a language model in eval mode: a `HookedTransformer` of token ids, or a `TransformerBridge`.
        tokens: token ids `[prompt pos]`, without padding.
        answers: ids of the tokens whose probabilities are followed, `[prompt]`, or `[prompt pos]` with
            `at="positions"`; by default the tokens with the model's largest logits.
        at: "query" for the last position, "positions" for all.

    Raises:
        ValueError: a model without a stream, a bridge that ignores edits of its last stream, or answers of another
            shape.

    Example:
        >>> lens = logit_lens(model, tokens)
        >>> lens.to_dataframe()[["layer", "log_probabilities", "divergences"]]
    """
    adapter = ModelAdapter(model, at)
    ids = adapter.encode(tokens)
    names = [*adapter.stream_names().values()]
    last = names[-1]
    check_edits(adapter, ids, [last])
    outputs = adapter.run(ids[:1])
    if answers is not None and answers.shape != (len(ids), *outputs.shape[1:-1]):
        raise ValueError(f"answers must be {[len(ids), *outputs.shape[1:-1]]} for at={at!r}, got {[*answers.shape]}")
    streams = len(names) * ids.shape[1] * model.cfg.d_model * outputs.element_size()
    batches = ids.split(Budget().rows(adapter.bytes_per_row(ids) + streams + 3 * len(names) * outputs.nbytes))
    read = []
    for part in progress_bar(batches, unit="batch", progress=progress, desc="logit lens"):
        recorded = adapter.record(part, names, len(part))
        if adapter.ours:
            rows = slice(-1, None) if at == "query" else slice(None)
            read.append(torch.stack([adapter.resume_from_end(recorded[name][:, rows]) for name in names]))
            continue
        hooks: list[Hook] = [(last, lambda end, hook, name=name: recorded[name]) for name in names]  # noqa: B023
        read.append(torch.stack([adapter.run(part, [hook]) for hook in hooks]))
    logits = torch.cat(read, 1)
    answers = logits[-1].argmax(-1) if answers is None else answers.to(logits.device)
    logs = logits.log_softmax(-1)
    chosen = answers.expand(logits.shape[:-1])[..., None]
    quantities = (
        logs.gather(-1, chosen)[..., 0],
        (logits > logits.gather(-1, chosen)).sum(-1).to(logs),
        (logs[-1].exp() * (logs[-1] - logs)).sum(-1),
    )
    return LogitLens(logits, answers, *(each.flatten(2).mean(-1) if each.ndim > 2 else each for each in quantities))


@dataclass(frozen=True, eq=False)
class LogitAttribution(Result):
    """A logit, or a difference of two, as the sum of what the model's parts contribute; see `direct_logit_attribution`.

    Attributes:
        components: names of the parts: "embedding", "head 3.1", "MLP 2", ..., the biases of the attention of all
            layers, the biases of the read-out and, for models that have one, the soft cap of the logits.
        contributions: `[component prompt]`.
        logits: the model's logit of the answer, less that of the wrong one if there is one, `[prompt]`.
        errors: `logits` less the sum of the contributions `[prompt]`.
    """

    components: tuple[str, ...]
    contributions: Float[Tensor, "component prompt"]
    logits: Float[Tensor, "prompt"] = field(metadata=NOT_SAMPLES)
    errors: Float[Tensor, "prompt"] = field(metadata=NOT_SAMPLES)

    def strongest(self, n: Count = N_SHOWN) -> list[str]:
        """Return the components with the largest mean contributions, up or down."""
        order = self.contributions.mean(-1).abs().argsort(descending=True)
        return [self.components[i] for i in order[:n].tolist()]

    def _lines(self) -> list[tuple[str, str]]:
        means = {
            name: str(interval(values, within=UNBOUNDED))
            for name, values in zip(self.components, self.contributions, strict=True)
        }
        return [
            ("logits", str(interval(self.logits, within=UNBOUNDED))),
            ("sum of contributions", str(interval(self.contributions.sum(0), within=UNBOUNDED))),
            ("largest error of a sum", f"{float(self.errors.abs().max()):.2g}"),
            *((name, means[name]) for name in self.strongest()),
        ]


@checked(locks=True)
@torch.no_grad()
def direct_logit_attribution(
    model: Any,
    prompts: Prompts | TokenSequences | Int[Tensor, "prompt pos"],
    answers: Int[Tensor, "prompt"],
    wrong: Int[Tensor, "prompt"] | None = None,
    *,
    progress: bool | None = None,
) -> LogitAttribution:
    """Split a logit of the last position, or a difference of two, into what each part of the model contributes.

    The final stream is the sum of what the embedding, the heads and the MLPs write. The final norm is applied with the
    scale that it has in the run, so the logit is linear in each of them. Effects through later parts are not counted:
    see `patch_paths`. Where a norm follows the attention, a head has its share of the normed sum, with the scale of
    the run. Source: Elhage et al. 2021; Wang et al. 2023, section 3.1.

    Args:
        model: in eval mode: a `HookedTransformer`, or a `TransformerBridge` whose stream is the sum of its parts'
            outputs.
        prompts: token ids `[prompt pos]`, without padding; or prompts, for a model of points.
        answers: id of the token whose logit is split, `[prompt]`; for a model of points, the output's index.
        wrong: id of the token whose logit is subtracted, `[prompt]`.

    Raises:
        ValueError: a model whose stream is not the sum of its parts' outputs, or whose logits are not the sum of the
            contributions; answers of another number than the prompts, or outside the vocabulary.

    Example:
        >>> attribution = direct_logit_attribution(model, tokens, answers, wrong)
        >>> attribution.strongest(3)
    """
    adapter = ModelAdapter(model)
    tokens, parts = adapter.encode(prompts), take_apart(adapter)
    vocab = adapter.run(tokens[:1]).shape[-1]
    chosen = torch.stack([answers] if wrong is None else [answers, wrong]).to(tokens.device)
    if chosen.shape[1] != len(tokens) or not 0 <= int(chosen.min()) <= int(chosen.max()) < vocab:
        raise ValueError(f"answers and wrong must be {len(tokens)} ids below {vocab}, got {chosen.tolist()}")
    nodes = list_nodes(model)
    writes_of_row = len(nodes) * tokens.shape[1] * model.cfg.d_model * next(model.parameters()).element_size()
    parts.embed(tokens[:1])  # after which a bridge knows its parts
    rows = Budget().rows(parts.bytes_per_row(tokens) + 3 * writes_of_row)
    contributions, logits = [], []
    for batch in progress_bar(torch.arange(len(tokens)).split(rows), unit="batch", progress=progress, desc="logits"):
        ids, indices = tokens[batch], chosen[:, batch]
        written = record_writes(adapter, ids)[:, :, -1]
        biases = sum(parts.attention_bias(layer) for layer in range(adapter.n_layers))
        written = torch.cat([written, torch.zeros_like(written[:1]) + biases])
        contributions.append(_contribute(model, written, indices))
        logits.append(_difference(adapter.run(ids), indices))
    components = (*map(str, nodes), "biases of the attention", "biases of the read-out", "soft cap")
    total, split = torch.cat(logits), torch.cat(contributions, 1)
    if not _cap_of(model):
        components, split = components[:-1], split[:-1]
    errors = total - split.sum(0)
    if not bool((errors.abs() <= SUM_TOLERANCE * split.abs().sum(0)).all()):
        raise ValueError(
            f"the contributions do not add up to the logits (error {float(errors.abs().max()):.3g}): this model has "
            f"another read-out than a norm, a linear map and a soft cap"
        )
    return LogitAttribution(components, split, total, errors)


def _contribute(
    model: Any, written: Float[Tensor, "component prompt d_model"], indices: Int[Tensor, "answer prompt"]
) -> Float[Tensor, "component_or_readout prompt"]:
    """Contributions of parts of the final stream, of the read-out's biases and of its soft cap."""
    norm, stream = getattr(model, "ln_final", nn.Identity()), written.sum(0)
    weight, bias, centres = _frozen(norm, stream)
    with torch.enable_grad():
        normed = norm(stream[:, None]).detach().requires_grad_()
        uncapped = model.unembed(normed)[:, 0]
        read = _difference(uncapped, indices)
        (direction,) = torch.autograd.grad(read.sum(), normed)
    centred = written - written.mean(-1, keepdim=True) if centres else written
    linear = einsum(centred, weight * direction[:, 0], "component prompt d, prompt d -> component prompt")
    constant = _difference(model.unembed(torch.zeros_like(normed))[:, 0], indices) + direction[:, 0] @ bias
    capped = _difference(soft_cap(uncapped, _cap_of(model) or -1.0), indices)
    return torch.cat([linear, constant[None], (capped - read)[None]]).detach()


def _frozen(norm: Any, stream: Float[Tensor, "prompt d_model"]) -> tuple[Tensor, Tensor, bool]:
    """Weights `[prompt d_model]` and bias `[d_model]` of a norm with the scale of a run, and whether it centres first.

    They are read off the norm's outputs, so that any layer norm or root-mean-square norm will do.
    """
    wave = torch.ones_like(stream[:1])  # of mean 0
    wave[:, 1::2] = -1
    if wave.shape[1] % 2:
        wave[:, :3] = wave.new_tensor([1, 1, -2])
    wave = 1e3 * wave
    up, down, raised, bias = (norm(each[:, None])[0, 0] for each in (wave, -wave, wave + 1e4, 0 * wave))
    weight = (up - down) / (2 * wave[0])  # up to a factor
    centres = torch.allclose(raised, up, rtol=1e-2, atol=float(1e-2 * up.abs().max()))
    weighed = weight * (stream - stream.mean(-1, keepdim=True) if centres else stream)
    normed = norm(stream[:, None])[:, 0] - bias
    scale = (normed * weighed).sum(-1, keepdim=True) / weighed.square().sum(-1, keepdim=True)
    return scale * weight, bias, centres


def _difference(logits: Float[Tensor, "prompt vocab"], indices: Int[Tensor, "answer prompt"]) -> Tensor:
    chosen = logits.gather(-1, indices.T)
    return chosen[:, 0] - chosen[:, 1] if len(indices) > 1 else chosen[:, 0]


def _cap_of(model: Any) -> float | None:
    cap = getattr(model.cfg, "output_logits_soft_cap", -1)
    return cap if cap is not None and cap > 0 else None
