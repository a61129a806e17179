"""Analyses of language models against the model of `transformers`, run with torch's own hooks."""

import itertools
import math
from contextlib import contextmanager
from typing import Any

import pytest
import scipy.stats
import torch

from mechicl import constructions
from mechicl.analysis import ablate, score_edges
from mechicl.analysis.language import (
    CausalModel,
    ablate_matched,
    align_variables,
    function_vectors,
    icl_score,
    late_minus_early,
    loss_by_position,
    stability,
    steering,
    task_vectors,
)
from mechicl.analysis.language.vectors import strongest_heads
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.suffix_runs import suffix_runs
from mechicl.text import WORD_TASKS, word_prompts

D_HEAD, N_HEADS = 8, 4
DRAW: dict[str, Any] = {"n_shots": 4, "n_prompts": 6}


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
    losses = loss_by_position(language, ids)
    torch.testing.assert_close(losses.T.flatten(), expected, atol=1e-4, rtol=0)
    assert late_minus_early(losses, 1, 9).mean == pytest.approx((losses[9] - losses[1]).mean().item())
    with pytest.raises(ValueError, match="late"):
        late_minus_early(losses, 1, 500)


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
            part = slice(head * D_HEAD, (head + 1) * D_HEAD)

            def put(z, part=part, layer=layer):
                z[:, -1, part] = means[layer, part]
                return z

            logits = logits_of(hf_model, shuffled.ids, [(hf_model.model.layers[layer].self_attn.o_proj, put)])
            effects[layer, head] = probability(logits, shuffled.targets) - plain
    torch.testing.assert_close(found.indirect_effects, effects, atol=1e-5, rtol=0)

    best = effects.mean(-1).flatten().argsort(descending=True)[:3].tolist()
    assert found.heads == tuple(divmod(index, N_HEADS) for index in best)
    vector = torch.zeros(32)
    for layer, head in found.heads:
        part = slice(head * D_HEAD, (head + 1) * D_HEAD)
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


def test_task_vectors(language, hf_model):
    found = task_vectors(language, "antonyms", seed=1, progress=False, **DRAW)
    zero = word_prompts(language.tokenizer, "antonyms", n_shots=0, n_prompts=6, seed=1)
    shown = word_prompts(language.tokenizer, "antonyms", **DRAW, seed=2)
    kept = []
    logits_of(hf_model, shown.ids, [(hf_model.model.layers[2], lambda stream: kept.append(stream) or stream)])

    def put(stream):
        stream[:, -1] = kept[0][:, -1]
        return stream

    expected = probability(logits_of(hf_model, zero.ids, [(hf_model.model.layers[2], put)]), zero.targets)
    torch.testing.assert_close(found.patched[1], expected, atol=1e-5, rtol=0)


def test_matched_ablation(language, hf_model):
    prompts = word_prompts(language.tokenizer, "antonyms", **DRAW)
    reference = word_prompts(language.tokenizer, "antonyms", labels="shuffled", n_shots=4, n_prompts=9)
    options = {"reference": reference, "progress": False}
    found = ablate_matched(language.model, prompts, [(0, 1), (2, 3), (2, 0)], exclude=[(2, 0)], n_random=4, **options)
    assert found.heads == ((0, 1), (2, 3))
    outputs = heads_outputs(hf_model, reference.ids).mean(1, keepdim=True)

    def put(layer, head):
        part = slice(head * D_HEAD, (head + 1) * D_HEAD)

        def replace(z):
            z[..., part] = outputs[layer, :, :, part].expand_as(z[..., part])  # means of intact runs
            return z

        return hf_model.model.layers[layer].self_attn.o_proj, replace

    expected = probability(logits_of(hf_model, prompts.ids, [put(0, 1), put(2, 3)]), prompts.targets)
    torch.testing.assert_close(found.ablated, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.intact, probability(logits_of(hf_model, prompts.ids), prompts.targets))
    assert found.matched.shape == (4, 6)
    with pytest.raises(ValueError, match="5 other heads to draw 7"):
        ablate_matched(language.model, prompts, [(layer, h) for layer in (0, 1) for h in range(4)][:7], **options)
    other = word_prompts(language.tokenizer, "antonyms", n_shots=3, n_prompts=2)
    with pytest.raises(ValueError, match="must have as many tokens"):
        ablate_matched(language.model, prompts, [(0, 1)], reference=other)


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
    with pytest.raises(ValueError, match="draws"):
        stability(lambda _: scores, [0])


def test_the_subspace_of_a_copied_token():
    model = constructions.induction(d_vocab=8, n_ctx=16, n_heads=2, previous_token_head=0, induction_head=1, seed=0)
    generator = torch.Generator().manual_seed(0)
    segments = torch.stack([torch.randperm(8, generator=generator)[:6] for _ in range(1000)])
    ids = torch.cat([segments, segments[:, :3]], dim=1)  # the answer is the fourth token of the segment
    causal = CausalModel({"copied": lambda row: int(row[3])}, lambda values: values["copied"])
    found = align_variables(model, causal, "copied", ids, layers=[1], rank=8, n_pairs=1000, epochs=8, progress=False)
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


def test_sweeps_from_a_position_on_are_whole_runs(language, hf_model):
    prompts = word_prompts(language.tokenizer, "plural", **DRAW)
    adapter, last = ModelAdapter(language.model, "query"), prompts.ids.shape[1] - 1
    assert suffix_runs(adapter, prompts.ids, last, 12, 4, 1e9) is not None
    assert suffix_runs(adapter, prompts.ids, last, 12, 6, 1e3) is None  # too little memory
    assert suffix_runs(adapter, prompts.ids, 0, 12, 6, 1e9) is None
    places = [last - 3, last]
    swept = ablate(
        language.model, prompts.ids, "attn_out", ("layer", "pos"), only={"pos": places}, method="zero", progress=False
    )
    for layer in range(3):
        for i, place in enumerate(places):

            def put(z, place=place):
                z[:, place] = 0
                return z

            expected = logits_of(hf_model, prompts.ids, [(hf_model.model.layers[layer].self_attn.o_proj, put)])
            assert swept.predictions is not None
            torch.testing.assert_close(swept.predictions[layer, i], expected, atol=1e-4, rtol=0)


def test_variables_may_be_tensors():
    plain = CausalModel({"a": lambda ids: int(ids[0])}, lambda values: values["a"])
    tensors = CausalModel({"a": lambda ids: ids[0]}, lambda values: values["a"])
    ids = torch.tensor([[3, 1], [2, 1]])
    for causal in (plain, tensors):
        assert causal.interchange(ids[0], ids[1], "a") == 2
        assert type(causal.values(ids[0])["a"]) is int
    with pytest.raises(ValueError, match="token id"):
        CausalModel({"a": lambda ids: ids[0]}, lambda values: -1).interchange(ids[0], ids[1], "a")


def test_places_of_variables_are_checked(language):
    causal = CausalModel({"a": lambda ids: ids[0] % 2}, lambda values: values["a"])
    ids = torch.randint(50, (40, 4), generator=torch.Generator().manual_seed(0))
    cases: Any = (({"pos": 4}, "pos"), ({"read": -5}, "read"), ({"layers": []}, "layers"), ({"layers": [3]}, "0 to 2"))
    for wrong, named in cases:
        with pytest.raises(ValueError, match=named):
            align_variables(language.model, causal, "a", ids, progress=False, **wrong)
    beyond = CausalModel(causal.variables, lambda values: values["a"] + 10**6)
    with pytest.raises(ValueError, match="token ids below"):
        align_variables(language.model, beyond, "a", ids, progress=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"shots": []}, "shots"), ({"labels": []}, "labels"), ({"tasks": []}, "tasks"),
     ({"tasks": ["plural", "plural"]}, "tasks"), ({"labels": ["true", "other task"]}, "other task")],
)  # fmt: skip
def test_empty_or_repeated_axes_of_few_shot_scores(language, options, named):
    with pytest.raises(ValueError, match=named):
        icl_score(language, **{"tasks": ["plural"], **options}, n_prompts=2, progress=False)


def test_stability_of_arrays_and_of_nothing():
    array = torch.tensor([[0.1, 3.0], [2.0, 0.2]]).numpy()
    assert stability(lambda _: array, [0, 1], top=2, progress=False).selections[0] == ("0.1", "1.0")
    assert stability(lambda _: [], [0, 1], progress=False).mean().mean == 1
    for wrong in (array * float("nan"), array[:1]):
        with pytest.raises(ValueError, match="more than top=2"):
            stability(lambda _, wrong=wrong: wrong, [0, 1], top=2, progress=False)
    with pytest.raises(TypeError, match="collection"):
        stability(lambda _: {"a": 1.0}, [0, 1], progress=False)


def test_edges_of_a_language_model_are_scored_with_all_defaults(language):
    ids = word_prompts(language.tokenizer, "plural", **DRAW).ids
    scores = score_edges(language.model, ids[:2, :5], progress=False)
    assert len(scores.edges) > 0
    assert all(torch.isfinite(each).all() for each in scores.samples().values())


def test_steering_by_a_vector_of_another_width(language):
    with pytest.raises(ValueError, match="width 32"), steering(language.model, torch.zeros(3), layer=0):
        pass
