"""Heads: scores are those of plain loops and dense matrices, constructions have what they are built for; errors."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechicl import constructions
from mechicl.analysis import composition_scores, measure_target_copying, read_dual_form, score_heads
from mechicl.analysis.heads import HeadScores
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression
from tests.analysis.interventions.oracles import bridge, ids
from tests.families import open_family
from tests.strategies import configs, random_model, random_prompts

quick = settings(max_examples=10)
TOKENS = TransformerConfig(
    prompt_format="token_ids", d_vocab=30, n_ctx=24, n_layers=3, n_heads=2, d_model=10, d_head=4, attention="softmax",
    dtype="float64", attn_only=True, normalization_type=None, attn_bias=False, read_bias=False,
)  # fmt: skip
POINTS = TransformerConfig(
    x_dim=3, n_context=4, y_dim=2, prompt_format="interleaved", keys="full", n_layers=2, n_heads=2, d_model=12,
    attention="softmax", positional_embedding_type="standard", dtype="float64",
)  # fmt: skip
INDUCTION: dict[str, Any] = {
    "d_vocab": 40, "n_ctx": 50, "n_heads": 3, "previous_token_head": 2, "induction_head": 1, "seed": 0,
}  # fmt: skip
TASK = LinearRegression(x_dim=3, n_context=4, y_dim=2)


def prompts(n: int = 6, seed: int = 0, **fields: Any) -> Prompts:
    return TASK.replace(**fields).sample(n, seed=seed, dtype=torch.float64)


def patterns(model: Any, tokens: Tensor) -> np.ndarray:
    """`[layer prompt head query key]`"""
    _, cache = model.run_with_cache(tokens)
    result = [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(model.cfg.n_layers)]
    return torch.stack(result).detach().double().numpy()


def by_loops(model: Any, tokens: Tensor, places: Any, softmax: list[bool]) -> dict[str, np.ndarray]:
    """Scores `[layer head prompt]`: for each prompt, places gives the keys of each query, by name."""
    attention = patterns(model, tokens)
    layers, n, heads = attention.shape[:3]
    scores: dict[str, np.ndarray] = {}
    for i, layer, head in itertools.product(range(n), range(layers), range(heads)):
        weights = attention[layer, i, head] if softmax[layer] else abs(attention[layer, i, head])
        for name, keys_of in places(tokens[i]).items():
            total = 0.0
            for query, keys in keys_of.items():
                size = 1.0 if softmax[layer] else weights[query].sum()
                total += sum(weights[query, key] for key in keys) / size if size else 0.0
            scores.setdefault(name, np.zeros((layers, heads, n)))[layer, head, i] = total / len(keys_of)
    return scores


def token_places(ids: Tensor) -> dict[str, dict[int, list[int]]]:
    tokens = ids.tolist()
    earlier = {i: [j for j in range(i) if tokens[j] == tokens[i]] for i in range(len(tokens))}
    earlier = {i: result for i, result in earlier.items() if result}
    return {
        "previous_token": {i: [i - 1] for i in range(1, len(tokens))},
        "duplicate_token": earlier,
        "induction": {i: [j + 1 for j in result] for i, result in earlier.items()},
    }


def point_places(tokens: Tensor, backwards: bool = True) -> dict[str, dict[int, list[int]]]:
    n_pos = len(tokens)
    places = {"previous_token": {i: [i - 1] for i in range(1, n_pos)}}
    places["target_to_input"] = {i: [i - 1] for i in range(1, n_pos, 2)}
    if backwards:
        places["input_to_target"] = {i: [i + 1] for i in range(0, n_pos - 1, 2)}
    return places


@quick
@given(configs(formats=("token_ids",)), st.integers(0, 3))
def test_scores_on_token_ids_are_those_of_plain_loops(cfg, seed):
    if cfg.n_layers == 0 or cfg.n_ctx < 2:
        return
    cfg = cfg.replace(dtype="float64")
    model = random_model(cfg, seed, scale=0.1).eval()
    tokens = ids(seed, n=5, n_pos=cfg.n_ctx, d_vocab=cfg.d_vocab)
    tokens[:, -1] = tokens[:, 0]  # each repeats one token at least
    result = score_heads(model, sequences=tokens)
    softmax = [cfg.for_layer(layer).attention == "softmax" for layer in range(cfg.n_layers)]
    for name, expected in by_loops(model, tokens, token_places, softmax).items():
        np.testing.assert_allclose(result[name].numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_scores_of_a_bridge_are_those_of_plain_loops(kind):
    model, tokens = bridge(kind), torch.cat([ids(0, n=5, n_pos=8, d_vocab=20)] * 2, dim=1)
    result = score_heads(model, sequences=tokens)
    for name, expected in by_loops(model, tokens, token_places, [True] * model.cfg.n_layers).items():
        np.testing.assert_allclose(result[name].numpy(), expected, rtol=1e-5, atol=1e-6)
        assert result[name].dtype == torch.float64


def read_by(model: Any, **options: Any) -> Tensor:
    """The sequences that a model is given to read."""
    seen = []
    model.add_hook("hook_embed", lambda value, hook: seen.append(value.argmax(-1)))
    score_heads(model, **options)
    model.reset_hooks()
    return torch.cat(seen[1:])  # without the pass of one prompt that measures memory


@pytest.mark.parametrize(("d_vocab", "n_ctx", "period"), [(40, 50, 25), (9, 50, 9), (9, 4, 2)])
def test_drawn_sequences_are_a_segment_of_different_tokens_twice(d_vocab, n_ctx, period):
    model = constructions.induction(d_vocab=d_vocab, n_ctx=n_ctx)  # whose embedding is one-hot
    tokens = read_by(model, n_prompts=20)
    assert tokens.shape == (20, 2 * period)
    assert torch.equal(tokens[:, :period], tokens[:, period:])
    assert all(len(set(row)) == period for row in tokens.tolist())
    assert set(tokens.flatten().tolist()) == set(range(d_vocab)) or period < 9
    assert torch.equal(read_by(model, n_prompts=20)[:, -period:], tokens[:, :period])
    if d_vocab == 40:
        assert not torch.equal(read_by(model, n_prompts=20, seed=1)[:, -period:], tokens[:, :period])


@quick
@given(configs(formats=("interleaved",)))
def test_scores_on_prompts_are_those_of_plain_loops(cfg):
    if cfg.n_layers == 0 or cfg.n_context == 0:
        return
    cfg = cfg.replace(dtype="float64")
    model, p = random_model(cfg, scale=0.1).eval(), random_prompts(cfg, 3)
    result = score_heads(model, prompts=p)
    tokens, backwards = model.encode(p), cfg.keys != "causal"
    assert list(result.scores) == list(point_places(tokens[0], backwards))
    softmax = [cfg.for_layer(layer).attention == "softmax" for layer in range(cfg.n_layers)]
    for name, expected in by_loops(model, tokens, lambda t: point_places(t, backwards), softmax).items():
        np.testing.assert_allclose(result[name].numpy(), expected, rtol=1e-10, atol=1e-12)


def dense(model: Any) -> dict[str, np.ndarray]:
    arrays = {name: getattr(model, f"W_{name}").detach().double().numpy() for name in "QKVOEU"}
    for name in "KV":
        arrays[name] = arrays[name].repeat(arrays["Q"].shape[1] // arrays[name].shape[1], axis=1)
    return arrays


def eigenvalue_score(circuit: np.ndarray) -> float:
    values = np.linalg.eigvals(circuit)
    return values.real.sum() / np.abs(values).sum() if np.abs(values).sum() else 0.0


def earlier_pairs(w: dict[str, np.ndarray]) -> list[tuple[int, int, int, int]]:
    layers, heads = w["Q"].shape[:2]
    return [
        (a, h, b, k) for a in range(layers) for h in range(heads) for b in range(a + 1, layers) for k in range(heads)
    ]


def dense_matching(w: dict[str, np.ndarray]) -> np.ndarray:
    result = np.zeros(w["Q"].shape[:2] * 2)
    for a, h, b, k in earlier_pairs(w):
        result[a, h, b, k] = eigenvalue_score(
            w["E"] @ w["Q"][b, k] @ w["K"][b, k].T @ w["O"][a, h].T @ w["V"][a, h].T @ w["E"].T
        )
    return result


def dense_compositions(w: dict[str, np.ndarray], kind: str) -> np.ndarray:
    result = np.zeros(w["Q"].shape[:2] * 2)
    for a, h, b, k in earlier_pairs(w):
        writes = w["V"][a, h] @ w["O"][a, h]
        reads = {"Q": w["Q"][b, k] @ w["K"][b, k].T, "V": w["V"][b, k] @ w["O"][b, k]}
        reads["K"] = reads["Q"].T
        norm = np.linalg.norm
        result[a, h, b, k] = norm(writes @ reads[kind]) / norm(writes) / norm(reads[kind])
    return result


MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: random_model(TOKENS).eval(),
    "wider than the stream": lambda: random_model(TOKENS.replace(d_head=13, n_heads=1, normalization_type="LN")).eval(),
    "looped": lambda: random_model(TOKENS.replace(d_vocab=3, recurrent=True)).eval(),
    "gpt2": bridge,
    "two heads share keys and values": lambda: bridge("llama"),
}


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_weights_are_those_of_dense_matrices(name):
    model = MODELS[name]()
    w, result = dense(model), score_heads(model, n_prompts=2)
    layers, heads = w["Q"].shape[:2]
    matching, compositions = dense_matching(w), dense_compositions(w, "K")
    for layer in range(layers):
        for head in range(heads):
            circuit = w["E"] @ w["V"][layer, head] @ w["O"][layer, head] @ w["U"]
            assert result["copying"][layer, head].item() == pytest.approx(eigenvalue_score(circuit), abs=1e-7)
            place = np.unravel_index(compositions[:, :, layer, head].argmax(), (layers, heads))
            expected = matching[(*place, layer, head)]
            assert result["prefix_matching"][layer, head].item() == pytest.approx(expected, abs=1e-7)
    for kind in ("Q", "K", "V"):
        np.testing.assert_allclose(composition_scores(model, kind).numpy(), dense_compositions(w, kind), atol=1e-10)


def test_the_baseline_is_what_random_matrices_get():
    model = HookedTransformer(TOKENS.replace(n_layers=4, n_heads=4, d_model=30, d_head=8, initializer_range=1.0))
    for kind in ("Q", "K", "V"):
        raw, less = composition_scores(model, kind), composition_scores(model, kind, baseline=True)
        pairs = raw > 0
        baseline = (raw - less)[pairs]
        assert pairs.sum() == 6 * 16
        torch.testing.assert_close(baseline, baseline[:1].expand(96))
        assert (less[~pairs] == 0).all()
        # cut normal weights are as good as normal ones: 96 pairs and 64 draws know the mean to a percent or so
        assert abs(less[pairs].mean().item()) < 0.04 * baseline[0].item()
        other = composition_scores(model, kind, baseline=True, seed=1)[pairs]
        assert 0 < (other - less[pairs]).abs().max() < 0.02


def test_the_planted_heads_are_found():
    model = constructions.induction(**INDUCTION)
    scores = score_heads(model)
    planted = {"previous_token": (0, 2), "induction": (1, 1), "copying": (1, 1), "prefix_matching": (1, 1)}
    for name, place in planted.items():
        assert scores.best(name)[:2] == place
        assert scores.mean(name)[place] > 0.99
        others = scores.mean(name).clone()
        others[place] = 0
        assert others.abs().max() < (0.1 if scores.is_of_attention(name) else 0.6)
    assert scores.mean("duplicate_token").max() < 0.1
    assert composition_scores(model, "K")[0, :, 1, 1].argmax() == 2
    second_copy = range(25, 50)
    for name, value in scores.chance.items():
        queries = range(1, second_copy.stop) if name == "previous_token" else second_copy
        by_hand = np.mean([1 / (i + 1) for i in queries]) if scores.is_of_attention(name) else 0
        assert value == pytest.approx(by_hand)


def test_the_best_head_s_score_is_measured_on_other_prompts_than_those_that_chose_it():
    drawn = torch.rand(12, 12, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer, head, score = HeadScores({"noise": drawn}, {"noise": 0.5}).best("noise")
    assert drawn[..., ::2].mean(-1).max() == drawn[layer, head, ::2].mean() > 0.6  # the largest of 144 by chance
    assert score.mean == pytest.approx(drawn[layer, head, 1::2].mean().item())
    assert score.low < 0.5 < score.high


@pytest.mark.parametrize("keys", ["causal", "context", "full"])
def test_chance_is_the_score_of_uniform_attention(keys):
    read: list[tuple[TransformerConfig, dict[str, Any]]]
    read = [(TOKENS, {"sequences": ids(0, d_vocab=4)}), (POINTS, {"prompts": prompts()})]
    for cfg, options in read:
        model = random_model(cfg.replace(keys=keys)).eval()
        with torch.no_grad():
            for block in model.blocks:
                block.attn.W_Q.zero_()
        result = score_heads(model, **options)
        for name in filter(result.is_of_attention, result.scores):
            expected = torch.full_like(result.mean(name), result.chance[name])
            torch.testing.assert_close(result[name].mean(-1), expected, rtol=0, atol=1e-12)


WINDOWS = {  # keys that each layer sees, of 3
    "Mistral": (3, 3, 3), "Gemma 2": (3, None, 3), "Gemma 3": (3, 3, 3), "GPT-Neo": (None, 3, None),
    "GPT-OSS": (3, None, 3), "Llama": (None, None, None), "Falcon (ALiBi)": (None, None, None),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WINDOWS)
def test_chance_is_uniform_attention_in_the_window_of_each_layer(name):
    model, _ = open_family(name)
    tokens = ids(0, n=5, n_pos=9, d_vocab=4)
    result = score_heads(model, sequences=tokens, progress=False)
    for layer, window in enumerate(WINDOWS[name]):
        expected: dict[str, float] = dict.fromkeys(["previous_token", "duplicate_token", "induction"], 0)
        for row in tokens:
            for score, keys_of in token_places(row).items():
                for query, keys in keys_of.items():
                    seen = range(0 if window is None else max(query - window + 1, 0), query + 1)
                    expected[score] += sum(key in seen for key in keys) / len(seen) / len(keys_of) / len(tokens)
        for score, chance in expected.items():
            assert result.chance_by_layer[score][layer].item() == pytest.approx(chance)
    for score, chances in result.chance_by_layer.items():
        assert result.chance[score] == pytest.approx(chances.mean().item())


def test_the_table_has_a_row_per_head_and_the_intervals_are_over_prompts():
    scores = score_heads(random_model(TOKENS).eval(), n_prompts=9)
    table = scores.to_dataframe()
    row = table[(table["layer"] == 2) & (table["head"] == 1)].iloc[0]
    expected = interval(scores["induction"][2, 1])
    assert (row["induction"], row["induction_half_width"]) == pytest.approx((expected.mean, expected.half_width))
    assert row["copying"] == scores["copying"][2, 1].item()
    found = score_heads(constructions.induction(**INDUCTION), n_prompts=3).interval("induction", 1, 1)
    assert 0 <= found.low <= found.high <= 1  # a share's interval does not leave its range


# ---- errors ----
SIX, IDS = prompts(), ids(0, d_vocab=4)
NO_PROMPTS, NO_CONTEXT = SIX[:0], SIX.prefix(0)
LINEAR, MODEL = (random_model(cfg).eval() for cfg in (TOKENS.replace(attention="linear"), POINTS))
PAIRED = HookedTransformer(TransformerConfig(x_dim=3, y_dim=2, n_context=4)).eval()
MOMENTUM = HookedTransformer(TransformerConfig(x_dim=3, n_context=4, keys="causal", momentum=0.5)).eval()
NORMED = random_model(TOKENS.replace(normalization_type="RMS", norm_location="after")).eval()
LSTM = HookedLSTM(LSTMConfig(x_dim=3, y_dim=2, n_context=4, d_model=5)).eval()


def score(**options: Any):
    """Scores of a reader of tokens, whose config is changed by the options that are fields."""
    fields = {name: options.pop(name) for name in ("n_ctx", "d_vocab", "n_layers") if name in options}
    return score_heads(HookedTransformer(TOKENS.replace(**fields)).eval(), **options)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("call", "named"), [
    (lambda: score(n_ctx=3), "at least 4 positions and 2 different tokens; the model has n_ctx=3"),
    (lambda: score(prompts=SIX), "prompt_format='token_ids' is scored on token ids"),
    (lambda: score(sequences=IDS[:0]), "one prompt or more"),
    (lambda: score(sequences=torch.arange(8)[None]), "a token that occurs twice"),
    (lambda: score(n_layers=0), "no layers"),
    (lambda: score(n_prompts=2).best("inductoin"), "no score 'inductoin'.*did you mean 'induction'"),
    (lambda: score(n_prompts=2).interval("copying", 0, 0), "'copying' is a score of the weights"),
    (lambda: score(n_prompts=2).interval("induction", 3, 0), "no head 0 of layer 3 among 3 layers of 2"),
    (lambda: score_heads(MODEL), "prompt_format='interleaved' is scored on prompts"),
    (lambda: score_heads(MODEL, prompts=NO_PROMPTS), "at least one prompt and one context point"),
    (lambda: score_heads(PAIRED, prompts=SIX), "contain x and y together"),
    (lambda: score_heads(LSTM, prompts=SIX), r"this HookedLSTM has no hook blocks\.0\.attn\.hook_pattern"),
    (lambda: score_heads(0), "int has no hooks"),
    (lambda: composition_scores(LSTM), "W_Q, W_K, W_V and W_O, got HookedLSTM"),
    # ---- the dual form ----
    *[(lambda n=n: read_dual_form(LINEAR, IDS, n_demonstration_tokens=n), "n_demonstration_tokens must be")
      for n in (-1, 6)],
    (lambda: read_dual_form(bridge(), IDS), "attention of a HookedTransformer, got TransformerBridge"),
    (lambda: read_dual_form(LINEAR, IDS, 3), "layer must be 0 to 2, got 3"),
    (lambda: read_dual_form(LINEAR, SIX), "takes ids"),
    (lambda: read_dual_form(LINEAR, IDS[:, :0]), "token ids must have one position or more"),
    *[(lambda bad=bad: read_dual_form(LINEAR, bad), r"ints \[prompt pos\]") for bad in (IDS[0], IDS.double())],
    (lambda: read_dual_form(MOMENTUM, SIX), r"got momentum=0\.5"),
    (lambda: read_dual_form(NORMED, IDS), "norms the sum of its heads' outputs"),
    (lambda: read_dual_form(LSTM, SIX), "HookedTransformer, got HookedLSTM"),
    # ---- copying ----
    (lambda: measure_target_copying(PAIRED, SIX), "takes 'paired' ones"),
    *[(lambda p=p: measure_target_copying(MODEL, p), "at least two prompts and one context point")
      for p in (SIX[:1], NO_CONTEXT)],
    *[(lambda layer=layer: measure_target_copying(MODEL, SIX, layer), "layer must be 0 to 1, got")
      for layer in (-1, 2)],
])  # fmt: skip
def test_errors_name_the_argument_or_the_cause(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
