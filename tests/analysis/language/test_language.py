"""Analyses of language models against the model of `transformers`, run with torch's own hooks."""

import copy
import itertools
import math
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import scipy.stats
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from mechicl import constructions
from mechicl.analysis import ablate, attribute, patch, score_edges, score_heads
from mechicl.analysis.interventions import PatchingSession, Replacement, Site, patch_paths
from mechicl.analysis.language import (
    AlignmentFit,
    CausalModel,
    ablate_matched,
    align_variables,
    function_vectors,
    icl_score,
    loss_by_position,
    stability,
    steering,
    task_vectors,
)
from mechicl.analysis.language.numbers import run_continued
from mechicl.analysis.language.vectors import _next_without, strongest_heads, sum_of_outputs
from mechicl.base.settings import settings
from mechicl.interop import LanguageModel
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.suffix_runs import suffix_runs
from mechicl.models.pretrained.loading import from_transformers
from mechicl.text import WORD_TASKS, WordTask, word_prompts
from tests.analysis.language.conftest import make_tokenizer
from tests.families import open_family, place_of, putting, token_ids

N_HEADS = 4
DRAW: dict[str, Any] = {"n_shots": 4, "n_prompts": 6}
FIRST = CausalModel({"a": lambda ids: ids[0] % 2}, lambda values: values["a"])


@contextmanager
def edited(parts):
    """Attach hooks `(module, function)` to the inputs of modules."""
    handles = [
        module.register_forward_pre_hook(lambda _, args, f=f: (f(args[0].clone()), *args[1:])) for module, f in parts
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def logits_of(hf_model, ids, parts=()):
    with edited(parts):
        return hf_model(ids).logits[:, -1]


def probability(logits, targets):
    return logits.softmax(-1).gather(1, targets[:, None])[:, 0]


def heads_outputs(hf_model, ids):
    """Inputs of the output projections at all positions, `[layer prompt pos head * d_head]`."""
    kept = []
    parts = [(layer.self_attn.o_proj, lambda z: kept.append(z) or z) for layer in hf_model.model.layers]
    logits_of(hf_model, ids, parts)
    return torch.stack(kept)


def replacing(hf_model, heads, outputs, pos: Any = slice(None)):
    """Hooks that replace the outputs of heads at positions by others, `[layer ... head * d_head]`."""
    width = hf_model.config.hidden_size // hf_model.config.num_attention_heads

    def put(z, layer):
        for part in (slice(head * width, (head + 1) * width) for at, head in heads if at == layer):
            z[:, pos, part] = outputs[layer][..., part]
        return z

    return [(hf_model.model.layers[layer].self_attn.o_proj, partial(put, layer=layer)) for layer, _ in heads]


def test_few_shot_scores(language, hf_model):
    scores = icl_score(language, ["antonyms", WORD_TASKS["plural"]], shots=(0, 3), n_prompts=5, seed=3, progress=False)
    assert scores.accuracy.shape == (2, 3, 2, 5)
    kinds: tuple[Any, ...] = scores.labels
    for k, labels in enumerate(kinds):
        prompts = word_prompts(language.tokenizer, "plural", n_shots=3, n_prompts=5, labels=labels, seed=3)
        logits = logits_of(hf_model, prompts.ids)
        expected = logits.log_softmax(-1).gather(1, prompts.targets[:, None])[:, 0]
        torch.testing.assert_close(scores.log_probability[1, k, 1], expected, atol=1e-4, rtol=0)
        assert scores.accuracy[1, k, 1].equal((logits.argmax(-1) == prompts.targets).float())
    assert scores.log_probability[1, 0, 0].equal(scores.log_probability[1, 2, 0])
    zero = word_prompts(language.tokenizer, "plural", n_shots=0, n_prompts=5, seed=3)
    expected = logits_of(hf_model, zero.ids).log_softmax(-1).gather(1, zero.targets[:, None])[:, 0]
    for k in range(3):  # without demonstrations all labels are the same
        torch.testing.assert_close(scores.log_probability[1, k, 0], expected, atol=1e-4, rtol=0)
    difference = scores.accuracy[1, 0, 1] - scores.accuracy[1, 1, 1]
    assert scores.gain("plural").mean == pytest.approx(difference.mean().item())
    with pytest.raises(ValueError, match="capitals"):
        scores.gain("capitals")


def test_loss_by_position(language, hf_model):
    ids = word_prompts(language.tokenizer, "plural", **DRAW).ids
    with torch.no_grad():
        logits = hf_model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    for dtype in (torch.int32, torch.int64):
        losses = loss_by_position(language, ids.to(dtype))
        torch.testing.assert_close(losses.T.flatten(), expected, atol=1e-4, rtol=0)


def test_function_vectors(language, hf_model):
    found = function_vectors(language, "antonyms", n_heads=3, n_clean=9, seed=1, progress=False, **DRAW)
    draw: dict[str, Any] = {"tokenizer": language.tokenizer, "task": "antonyms", "n_shots": 4}
    clean = word_prompts(**draw, n_prompts=9, seed=1)
    shuffled = word_prompts(**draw, n_prompts=6, labels="shuffled", seed=2)
    means = heads_outputs(hf_model, clean.ids)[:, :, -1].mean(1)  # [layer head * d_head]
    plain = probability(logits_of(hf_model, shuffled.ids), shuffled.targets)
    torch.testing.assert_close(found.shuffled, plain, atol=1e-5, rtol=0)
    effects = torch.empty(3, N_HEADS, 6)
    for layer in range(3):
        for head in range(N_HEADS):
            logits = logits_of(hf_model, shuffled.ids, replacing(hf_model, [(layer, head)], means, -1))
            effects[layer, head] = probability(logits, shuffled.targets) - plain
    torch.testing.assert_close(found.indirect_effects, effects, atol=1e-5, rtol=0)

    best = effects.mean(-1).flatten().argsort(descending=True)[:3].tolist()
    assert found.heads == tuple(divmod(index, N_HEADS) for index in best)
    vector = torch.zeros(32)
    for layer, head in found.heads:
        part = slice(head * 8, (head + 1) * 8)
        vector += hf_model.model.layers[layer].self_attn.o_proj.weight[:, part] @ means[layer, part]
    torch.testing.assert_close(found.vector, vector.detach(), atol=1e-5, rtol=0)

    zero = word_prompts(language.tokenizer, "antonyms", n_shots=0, n_prompts=6, seed=3)
    for layer in range(3):

        def add(stream):
            stream[:, -1] += vector
            return stream

        following = hf_model.model.layers[layer + 1] if layer < 2 else hf_model.model.norm
        expected = probability(logits_of(hf_model, zero.ids, [(following, add)]), zero.targets)
        torch.testing.assert_close(found.added[layer], expected.detach(), atol=1e-5, rtol=0)
        with steering(language.model, found.vector, layer, pos=-1), torch.no_grad():
            steered = probability(language.model(zero.ids)[:, -1], zero.targets)
        torch.testing.assert_close(steered, expected.detach(), atol=1e-5, rtol=0)


NORMED = {"Gemma 2": "post_attention_layernorm", "OLMo 2": "post_attention_layernorm",
          "Gemma 3": "post_attention_layernorm", "GLM 4": "post_self_attn_layernorm"}  # fmt: skip


@pytest.mark.parametrize("name", ["Granite", *NORMED, "Cohere", "GPT-J", "GPT-2", "Qwen3"])
@torch.no_grad()
def test_outputs_of_heads_are_what_they_add_to_the_stream(name):
    """Against torch hooks on the plain model: the heads' sum, and the change of the stream without a head."""
    bridge, plain = open_family(name, dtype=torch.float64)
    adapter, ids, n_heads, layer = ModelAdapter(bridge), token_ids(0, 5), bridge.cfg.n_heads, 1
    block = f"{bridge.adapter.component_mapping['blocks'].name}.{layer}"
    projection, _ = place_of(bridge, plain, "z", layer) or pytest.fail("no output projection")
    seen: dict[str, torch.Tensor] = {}

    def added(head: int | None) -> torch.Tensor:
        """The update by the block without its MLP, at the last position, where the head's z is 0."""

        def edit(z: torch.Tensor) -> None:
            seen["z"] = z.clone()
            z.unflatten(-1, (n_heads, -1))[..., slice(0) if head is None else head, :] = 0

        with (
            putting(plain, (f"{block}.{bridge.blocks[layer].mlp.name}", "out"), lambda out: out.zero_()),
            putting(plain, (block, "in"), lambda stream: seen.update(before=stream.clone())),
            putting(plain, (block, "out"), lambda stream: seen.update(after=stream.clone())),
            putting(plain, (projection, "in"), edit),
        ):
            plain(ids)
        return (seen["after"] - seen["before"])[:, -1]

    whole, z = added(None), seen["z"]
    vectors = [sum_of_outputs(adapter, ids, [(layer, head)]) for head in range(n_heads)]
    project = plain.get_submodule(projection)
    bias = project.bias if name == "GPT-2" else 0.0
    torch.testing.assert_close(torch.stack(vectors).sum(0) + bias, whole.mean(0), rtol=1e-5, atol=1e-6)
    for head, vector in enumerate(vectors):
        expected = whole - added(head)
        if name in NORMED:  # the head's summand, multiplied by what the norm multiplies the sum by
            only = torch.zeros_like(z)
            only.unflatten(-1, (n_heads, -1))[..., head, :] = z.unflatten(-1, (n_heads, -1))[..., head, :]
            factor = plain.get_submodule(f"{block}.{NORMED[name]}")(project(z)) / project(z)
            expected = (project(only) * factor)[:, -1]
        torch.testing.assert_close(vector, expected.mean(0), rtol=1e-5, atol=1e-6)


def test_task_vectors(language, hf_model):
    found = task_vectors(language, "antonyms", seed=1, progress=False, **DRAW)
    zero = word_prompts(language.tokenizer, "antonyms", n_shots=0, n_prompts=6, seed=1)
    shown = word_prompts(language.tokenizer, "antonyms", **{**DRAW, "n_prompts": 7}, seed=1)
    assert all(a != b for a, b in zip(zero.queries, shown.queries[1:], strict=True))
    kept = []
    logits_of(hf_model, shown.ids, [(hf_model.model.layers[2], lambda stream: kept.append(stream) or stream)])

    def put(stream):
        stream[:, -1] = kept[0][1:, -1]
        return stream

    expected = probability(logits_of(hf_model, zero.ids, [(hf_model.model.layers[2], put)]), zero.targets)
    torch.testing.assert_close(found.patched[1], expected, atol=1e-5, rtol=0)


def test_task_vectors_come_from_prompts_that_do_not_show_the_query(language):
    few = WordTask("few", WORD_TASKS["antonyms"].pairs[:12])
    sources = word_prompts(language.tokenizer, few, n_shots=8, n_prompts=40)
    for i in range(8):
        j = _next_without(sources, i, 8)
        assert f"Q :  {sources.queries[i]} " not in language.tokenizer.decode(sources.ids[j])
    with pytest.raises(ValueError, match=r"n_shots=\d+ show nearly all of them; take fewer shots"):
        task_vectors(language, few, n_shots=sources.n_pairs - 1, n_prompts=4, progress=False)


def test_matched_ablation(language, hf_model):
    prompts = word_prompts(language.tokenizer, "antonyms", **DRAW)
    reference = word_prompts(language.tokenizer, "antonyms", labels="shuffled", n_shots=4, n_prompts=9)
    options = {"reference": reference, "progress": False}
    heads = [(0, 1), (2, 3), (2, 1), (2, 0)]
    found = ablate_matched(language.model, prompts, heads, exclude=[(2, 0)], n_random=4, **options)
    assert found.heads == ((0, 1), (2, 3), (2, 1))
    outputs = heads_outputs(hf_model, reference.ids).mean(1)  # of intact runs
    without = logits_of(hf_model, prompts.ids, replacing(hf_model, found.heads, outputs))
    expected = probability(without, prompts.targets)
    torch.testing.assert_close(found.ablated, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.intact, probability(logits_of(hf_model, prompts.ids), prompts.targets))
    assert found.matched.shape == (4, 6)
    with pytest.raises(ValueError, match="5 other heads to draw 7"):
        ablate_matched(language.model, prompts, [(layer, h) for layer in (0, 1) for h in range(4)][:7], **options)
    other = word_prompts(language.tokenizer, "antonyms", n_shots=3, n_prompts=2)
    with pytest.raises(ValueError, match="reference must have the prompts' length"):
        ablate_matched(language.model, prompts, [(0, 1)], reference=other)


def test_prompts_with_the_same_query_are_one_sample(language, hf_model):
    few = replace(WORD_TASKS["antonyms"], name="few", pairs=WORD_TASKS["antonyms"].pairs[:5])
    draw: dict[str, Any] = {"n_shots": 2, "n_prompts": 12, "seed": 3}
    prompts = word_prompts(language.tokenizer, few, **draw)
    shares = probability(logits_of(hf_model, prompts.ids), prompts.targets)
    queries = list(dict.fromkeys(prompts.queries))
    expected = torch.stack([
        torch.stack([share for share, query in zip(shares, prompts.queries, strict=True) if query == each]).mean()
        for each in queries
    ])  # fmt: skip
    found = ablate_matched(language.model, prompts, [(0, 1)], reference=prompts, n_random=2, progress=False)
    torch.testing.assert_close(found.intact, expected)
    assert found.effect().n == found.ablated.numel() == found.matched.shape[1] == 5
    vector = function_vectors(language, few, n_shots=2, n_heads=2, n_prompts=7, n_clean=12, seed=3, progress=False)
    torch.testing.assert_close(vector.few_shot, expected)
    assert {values.shape[-1] for values in vector.samples().values()} == {5}
    tasks = task_vectors(language, few, **draw, progress=False)
    torch.testing.assert_close(tasks.few_shot, expected)
    assert {values.shape[-1] for values in tasks.samples().values()} == {5}
    options: dict[str, Any] = {"shots": (0, 2), "labels": ("true",), "progress": False}
    scores = icl_score(language, [few, "plural"], **options, n_prompts=12, seed=3)
    assert scores.accuracy.shape == (2, 1, 2, 5)
    assert sorted(prompts.queries[:5]) == sorted(queries)
    torch.testing.assert_close(scores.log_probability[0, 0, 1].exp(), shares[:5])


@pytest.mark.parametrize("kind", ["gpt2", "window"])
def test_a_prompt_is_scored_as_it_is_alone(kind):
    """Models with learned positions, and with a window that prompts exceed."""
    torch.manual_seed(3)
    tokenizer = make_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "initializer_range": 0.3, "attn_implementation": "eager"}
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **sizes)).eval()
    else:
        widths = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = MistralConfig(**widths, **sizes, num_key_value_heads=1, sliding_window=8)
        model = MistralForCausalLM(config).eval()
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    bridge.eval()
    language = LanguageModel(kind, bridge, tokenizer)
    draw: dict[str, Any] = {"n_prompts": 6, "seed": 1}
    prompts = word_prompts(tokenizer, "antonyms", n_shots=3, **draw)
    rows = zip(prompts.ids, prompts.targets, strict=True)
    alone = torch.stack([logits_of(model, row[None])[0].log_softmax(-1)[target] for row, target in rows])
    options: dict[str, Any] = {"shots": (3,), "labels": ("true",), "progress": False}
    for memory in (2**28, 4e6):
        with settings(memory=memory):
            scores = icl_score(language, "antonyms", **options, **draw)
        torch.testing.assert_close(scores.log_probability[0, 0, 0], alone, atol=1e-5, rtol=0)
    more = icl_score(language, "antonyms", **options, n_prompts=40, seed=1)
    torch.testing.assert_close(more.log_probability[0, 0, 0, :6], alone, atol=1e-5, rtol=0)
    losses = loss_by_position(language, prompts.ids)
    for order in (torch.arange(6), torch.tensor([3, 5])):
        with settings(memory=4e6):
            torch.testing.assert_close(loss_by_position(language, prompts.ids[order]), losses[:, order])


def test_the_interval_of_stability_is_a_jackknife_over_draws():
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randperm(8, generator=generator)[:4].tolist() for _ in range(6)]

    def mean_jaccard(draws):
        pairs = [(set(a), set(b)) for a, b in itertools.combinations(draws, 2)]
        return sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs)

    left_out = [mean_jaccard(sets[:i] + sets[i + 1 :]) for i in range(6)]
    error = math.sqrt(5 / 6 * sum((value - sum(left_out) / 6) ** 2 for value in left_out))
    measured = stability(lambda i: sets[i], range(6), progress=False).mean()
    assert measured.mean == pytest.approx(mean_jaccard(sets), abs=1e-6)
    assert measured.half_width == pytest.approx(scipy.stats.t.ppf(0.975, 5) * error, rel=1e-4)
    assert math.isnan(stability(lambda i: sets[i], range(2), progress=False).mean().low)
    assert 0 < stability(lambda _: sets[0], range(6), progress=False).mean().low < 1  # agreement in six draws


def test_selections_that_are_cut_inside_a_tie_warn():
    with pytest.warns(UserWarning, match="cut inside a tie.*3 more tie with the last of these 2"):
        stability(lambda _: torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), [0, 1], top=2, progress=False)
    with pytest.warns(UserWarning, match="strongest heads are cut inside a tie.*4 more"):
        assert strongest_heads(torch.zeros(2, 3), 2) == ((0, 0), (0, 1))


def test_stability_of_known_sets():
    sets = [["a", "b"], ["a", "c"], ["a", "b"]]
    found = stability(lambda i: sets[i], range(3), progress=False)
    torch.testing.assert_close(found.jaccard, torch.tensor([(1 / 3 + 1) / 2, 1 / 3, (1 / 3 + 1) / 2]))
    assert found.frequencies().values.tolist() == [["a", 1.0], ["b", 2 / 3], ["c", 1 / 3]]
    scores = torch.tensor([[0.0, 5.0], [3.0, 1.0]])
    assert stability(lambda _: scores, [0, 1], top=2, progress=False).selections[0] == ("0.1", "1.0")
    assert stability(lambda _: scores.numpy(), [0, 1], top=2, progress=False).selections[0] == ("0.1", "1.0")
    assert stability(lambda _: [], [0, 1], progress=False).mean().mean == 1
    with pytest.raises(ValueError, match="draws"):
        stability(lambda _: scores, [0])
    for wrong in (scores * math.nan, scores[:1]):
        with pytest.raises(ValueError, match="more than top=2"):
            stability(lambda _, wrong=wrong: wrong, [0, 1], top=2, progress=False)
    with pytest.raises(TypeError, match="collection"):
        stability(lambda _: {"a": 1.0}, [0, 1], progress=False)


def test_the_subspace_of_a_copied_token():
    model = constructions.induction(d_vocab=8, n_ctx=16, n_heads=2, previous_token_head=0, induction_head=1, seed=0)
    generator = torch.Generator().manual_seed(0)
    segments = torch.stack([torch.randperm(8, generator=generator)[:6] for _ in range(1000)])
    ids = torch.cat([segments, segments[:, :3]], dim=1)  # the answer is the fourth token of the segment
    causal = CausalModel({"copied": lambda row: int(row[3])}, lambda values: values["copied"])
    fit = AlignmentFit(rank=8, n_pairs=1000, epochs=8)
    found = align_variables(model, causal, "copied", ids, layers=[1], fit=fit, progress=False)
    assert found.controls["whole stream"].mean() >= 0.99
    assert found.accuracy.mean() >= 0.99
    assert found.controls["random targets"].mean() <= 0.35
    assert found.controls["untrained"].mean() <= 0.5
    with pytest.raises(ValueError, match="variable"):
        align_variables(model, causal, "other", ids)
    with pytest.raises(ValueError, match=r"variable must be one of \['copied'\], got 'other'"):
        causal.interchange(ids[0], ids[1], "other")
    vector = torch.zeros(model.cfg.d_model)
    with pytest.raises(ValueError, match="pos must be an int or None, got 'x'"):
        steering(model, vector, 0, pos="x")  # type: ignore
    with pytest.raises(ValueError, match="never changes"):
        align_variables(model, causal, "copied", ids[ids[:, 3] == 0])
    with pytest.raises(ValueError, match="four different"):
        align_variables(model, causal, "copied", ids[:1].repeat(8, 1))


@pytest.mark.parametrize("name", ["GPT-2", "Mistral", "Gemma 2", "GPT-OSS", "Mamba", "RecurrentGemma"])
@torch.no_grad()
def test_continued_texts_are_whole_runs(name):
    """Also where a window of 3 drops cached positions, and where there is no cache of keys and values."""
    bridge, plain = open_family(name)
    ids = token_ids(0, 3, 5)
    continuations = ((), (3,), (3, 5), (3, 6), (4,), (4, 5))
    for tokens, logits in run_continued(ModelAdapter(bridge), ids, continuations):
        expected = plain(torch.cat([ids, torch.tensor([tokens] * 3).to(ids)], 1)).logits[:, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["Llama", "Llama, native", "Mistral", "Gemma 2", "GPT-OSS"])
@torch.no_grad()
def test_sweeps_from_a_position_on_are_whole_runs(name):
    """With cached keys and values, of which layers with a window keep 3 of 8 positions."""
    bridge, plain = open_family(name.removesuffix(", native"))
    model, ids = bridge, token_ids(0, 3, 8)
    if name.endswith("native"):
        model = from_transformers(HookedTransformer, copy.deepcopy(plain))
    assert suffix_runs(ModelAdapter(model), ids, 4, 3, 3) is not None
    swept = ablate(model, ids, "z", {"layer": None, "pos": [1, 4, 7]}, method="zero", progress=False)
    assert swept.predictions is not None
    for layer, by_pos in enumerate(swept.predictions):
        for pos, predicted in zip((1, 4, 7), by_pos, strict=True):
            place = place_of(bridge, plain, "z", layer) or pytest.fail("no output projection")
            with putting(plain, place, lambda z, pos=pos: z[:, pos].zero_()):
                expected = plain(ids).logits[:, -1]
            torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def steer(stream: torch.Tensor, pos: int | None, vector: torch.Tensor) -> None:
    stream[:, slice(None) if pos is None else pos] += vector


@pytest.mark.parametrize("name", ["GPT-2", "GPT-2, native", "Mistral", "RecurrentGemma"])
@pytest.mark.parametrize("pos", [None, 0, 2, 4])
@torch.no_grad()
def test_steering_at_a_position_in_generation(name, pos):
    """Whole runs of the plain model, with the vector added by torch's hooks, have the same tokens."""
    bridge, plain = open_family(name.removesuffix(", native"))
    model = from_transformers(HookedTransformer, copy.deepcopy(plain)) if name.endswith("native") else bridge
    loop, vector = token_ids(2, 2, 5), 3 * torch.randn(8, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    with steering(model, vector, 0, pos=pos):
        found = model.generate(loop, max_new_tokens=5, **options)
    intact = model.generate(loop, max_new_tokens=5, **options)
    block = f"{bridge.adapter.component_mapping['blocks'].name}.0"
    for _ in range(5):
        with putting(plain, (block, "out"), partial(steer, pos=pos, vector=vector)):
            loop = torch.cat([loop, plain(loop).logits[:, -1:].argmax(-1)], 1)
    assert found.tolist() == loop.tolist()
    assert found.tolist() != intact.tolist() or pos in (0, 2) or name == "RecurrentGemma"


@pytest.mark.parametrize(("pos", "named"), [(5, "-5 to 4"), (-6, "-5 to 4"), (-1, "0, as keys and values are cached")])
def test_positions_that_a_text_lacks_cannot_be_steered(pos, named):
    bridge, _ = open_family("GPT-2")
    with pytest.raises(ValueError, match=f"pos must be {named}"), steering(bridge, torch.ones(8), 0, pos=pos):
        bridge.generate(token_ids(0, 1, 5), max_new_tokens=3, verbose=False, stop_at_eos=False)
    own = HookedTransformer(TransformerConfig(prompt_format="token_ids", d_vocab=9, n_ctx=8, d_model=8, n_heads=2))
    if pos != -1:
        with pytest.raises(ValueError, match=f"pos must be {named}"), steering(own, torch.ones(8), 0, pos=pos):
            own(torch.arange(5)[None])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    with pytest.raises(ValueError, match="padding"), steering(bridge, torch.ones(8), 0, pos=1):
        bridge(token_ids(0, 1, 5), attention_mask=mask)


def test_patches_of_whole_prompts_are_refused_in_runs_that_continue_a_text():
    bridge, _ = open_family("GPT-2")
    session = PatchingSession(bridge, token_ids(0, 1), token_ids(1, 1))
    session.toggle(Site("resid_post", 0, pos=0))
    with bridge.hooks(fwd_hooks=session.hooks()), pytest.raises(ValueError, match="run whole prompts"):
        bridge.generate(token_ids(1, 1), max_new_tokens=2, verbose=False, stop_at_eos=False)


def ends(pad: int, side: int, n: int = 1) -> torch.Tensor:
    """Three texts, of which the last is `n` tokens shorter."""
    ids = token_ids(0, 3)
    ids[-1, slice(0, n) if side == 0 else slice(-n, None)] = pad
    return ids


PADDED: dict[str, Any] = {
    "patch": lambda model, ids: patch(model, ids, token_ids(1, 3), progress=False),
    "patch into": lambda model, ids: patch(model, token_ids(1, 3), ids, progress=False),
    "ablate": lambda model, ids: ablate(model, ids, progress=False),
    "reference": lambda model, ids: ablate(model, token_ids(1, 3), method=Replacement("mean", ids), progress=False),
    "attribute": lambda model, ids: attribute(model, ids, token_ids(1, 3), metrics=lambda x: x[:, 0], progress=False),
    "patch_paths": lambda model, ids: patch_paths(model, ids, token_ids(1, 3), progress=False),
    "score_edges": lambda model, ids: score_edges(model, ids, progress=False),
    "score_heads": lambda model, ids: score_heads(model, sequences=ids, progress=False),
    "session": lambda model, ids: PatchingSession(model, ids, token_ids(1, 3)),
    "loss_by_position": lambda model, ids: loss_by_position(LanguageModel("tiny", model, make_tokenizer()), ids),
    "align_variables": lambda model, ids: align_variables(model, FIRST, "a", ids, progress=False),
}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("side", [0, -1])
def test_padded_texts_are_refused(name, side):
    bridge, _ = open_family("GPT-2")
    bridge.original_model.config.pad_token_id = 19
    with pytest.raises(ValueError, match="must not be padded"):
        PADDED[name](bridge, ends(19, side))


@pytest.mark.parametrize("n", [1, 2])
def test_a_padding_id_that_also_ends_texts(n):
    """One at the end of all texts belongs to them; more, or one at the end of some, is padding."""
    bridge, _ = open_family("GPT-2")
    bridge.original_model.config.pad_token_id = bridge.original_model.config.eos_token_id = 1
    whole = token_ids(0, 3)
    whole[:, -1] = 1
    assert ablate(bridge, whole, axes={"layer": 0, "head": None}, progress=False).predictions is not None
    for side in (0, -1):
        with pytest.raises(ValueError, match="must not be padded"):
            ablate(bridge, ends(1, side, n), progress=False)
    every = whole.clone()
    every[:, -2:] = 1
    with pytest.raises(ValueError, match="must not be padded"):
        ablate(bridge, every, progress=False)


def test_variables_may_be_tensors():
    plain = CausalModel({"a": lambda ids: int(ids[0])}, lambda values: values["a"])
    tensors = CausalModel({"a": lambda ids: ids[0]}, lambda values: values["a"])
    ids = torch.tensor([[3, 1], [2, 1]])
    for causal in (plain, tensors):
        assert causal.interchange(ids[0], ids[1], "a") == 2
        assert type(causal.values(ids[0])["a"]) is int
    with pytest.raises(ValueError, match="token id"):
        CausalModel({"a": lambda ids: ids[0]}, lambda values: -1).interchange(ids[0], ids[1], "a")


def of_first(language, causal=FIRST, **options):
    ids = torch.randint(50, (40, 4), generator=torch.Generator().manual_seed(0))
    return align_variables(language.model, causal, "a", ids, progress=False, **options)


def few_shot(language, **options):
    return icl_score(language, **{"tasks": ["plural"], **options}, n_prompts=2, progress=False)


@pytest.mark.parametrize(("call", "named"), [
    (lambda x: of_first(x, replace(FIRST, read=-5)), "read"),
    (lambda x: of_first(x, pos=4), "pos"),
    (lambda x: of_first(x, layers=[]), "layers"),
    (lambda x: of_first(x, layers=[3]), "0 to 2"),
    (lambda x: of_first(x, CausalModel(FIRST.variables, lambda values: values["a"] + 10**6)), "token ids below"),
    (lambda x: few_shot(x, shots=[]), "shots"),
    (lambda x: few_shot(x, labels=[]), "labels"),
    (lambda x: few_shot(x, tasks=[]), "tasks"),
    (lambda x: few_shot(x, tasks=["plural", "plural"]), "tasks"),
    (lambda x: few_shot(x, labels=["true", "other task"]), "other task"),
    (lambda x: steering(x.model, torch.zeros(3), layer=0).__enter__(), "width 32"),
    *((lambda x, ids=ids: loss_by_position(x, ids), "ids must be one or more texts of two or more tokens, each from 0")
      for ids in (torch.zeros(0, 8).long(), torch.zeros(3, 0).long(), torch.zeros(3, 1).long(),
                  torch.tensor([[1, 2, -1]]), torch.tensor([[1, 2, 10**6]]))),
])  # fmt: skip
def test_errors_name_the_argument(language, call, named):
    with pytest.raises(ValueError, match=named):
        call(language)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_undefined_weights_are_refused(language, value):
    broken = copy.deepcopy(language.model)
    with torch.no_grad():
        next(weight for name, weight in broken.named_parameters() if "norm" in name or weight.ndim == 2).fill_(value)
    tiny = replace(language, model=broken)
    ids = torch.randint(50, (40, 4), generator=torch.Generator().manual_seed(0))
    calls = [
        lambda: icl_score(tiny, ["antonyms"], shots=(0,), n_prompts=2, progress=False),
        lambda: loss_by_position(tiny, ids),
        lambda: function_vectors(tiny, "antonyms", n_heads=3, n_clean=9, progress=False, **DRAW),
        lambda: task_vectors(tiny, "antonyms", progress=False, **DRAW),
        lambda: align_variables(broken, FIRST, "a", ids, layers=[1], fit=AlignmentFit(n_pairs=4, epochs=1)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="that are NaN or infinite"):
            call()


@pytest.mark.parametrize("work", ["steering", "hooks", "recorded"])
def test_what_one_thread_does_to_a_model_does_not_change_the_runs_of_another(language, work):
    model, adapter = language.model, ModelAdapter(language.model)
    ids, others = word_prompts(language.tokenizer, "antonyms", **DRAW).ids[:2], torch.arange(12).view(2, 6)
    name = "blocks.1.hook_resid_post"
    plain = model(others).detach()
    [expected] = adapter.record(ids, [name], 2).values()
    greedy = model.generate(others, max_new_tokens=2, verbose=False, do_sample=False)
    seen: list = []
    main = threading.get_ident()

    @torch.no_grad()
    def run_here() -> None:
        seen.append((model(others), model.generate(others, max_new_tokens=2, verbose=False, do_sample=False)))

    def run_elsewhere(activation=None, hook=None) -> None:
        if threading.get_ident() == main:  # within the run of the main thread
            thread = threading.Thread(target=run_here)
            thread.start()
            thread.join()

    def change(activation, hook):
        run_elsewhere()
        return activation + 1

    if work == "steering":
        with steering(model, torch.full((32,), 3.0), 1):
            run_elsewhere()
            assert (model(others) - plain).abs().max() > 1e-3
    elif work == "hooks":
        assert (adapter.run(others, [(name, change)]) - plain[:, -1]).abs().max() > 1e-3
    else:
        model.add_hook("blocks.2.hook_resid_post", run_elsewhere)
        recorded = adapter.record(ids, [name], 2)[name]
        model.reset_hooks()
        assert torch.equal(recorded, expected)
    [(logits, tokens)] = seen
    assert torch.equal(logits, plain)
    assert torch.equal(tokens, greedy)
