"""TransformerLens' interface of a model: a notebook written for it, weights, losses, more hooks, texts in and out."""

import copy
import re
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformer_lens import TransformerLensKeyValueCache
from transformer_lens.tools.analysis import direct_logit_attribution
from transformers import PreTrainedTokenizerFast

from mechicl.checkpoints import load
from mechicl.models import HookedTransformer, HookedTransformerConfig, TransformerConfig, process_weights
from mechicl.models.opening.sites import list_nodes
from mechicl.models.transformer.weight_processing import STEPS, why_not
from mechicl.tasks import LinearRegression
from tests.strategies import configs, random_model, random_prompts, random_tokens

SMALL: dict[str, Any] = {"n_layers": 3, "d_model": 8, "n_ctx": 6, "d_head": 4, "d_vocab": 11, "dtype": "float64"}
IDS = TransformerConfig(**SMALL).replace(n_layers=2, act_fn="relu")
POINTS = TransformerConfig(x_dim=3, y_dim=2, n_context=4, prompt_format="interleaved", d_model=8, dtype="float64")
REQUESTS = {
    "use_attn_in": ("hook_attn_in",),
    "use_split_qkv_input": ("hook_q_input", "hook_k_input", "hook_v_input"),
    "use_hook_mlp_in": ("hook_mlp_in",),
}
close = torch.testing.assert_close


def small(**fields: Any) -> HookedTransformer:
    return random_model(HookedTransformerConfig(**(SMALL | fields))).eval()


# ---- weights ----
def test_weights_of_all_layers():
    model = small(gated_mlp=True)
    for name in ("b_Q", "b_K", "b_V", "b_O", "b_in", "b_out", "W_gate"):
        parts = [block.attn if hasattr(block.attn, name) else block.mlp for block in model.blocks]
        assert torch.equal(getattr(model, name), torch.stack([getattr(part, name) for part in parts]))
    assert torch.equal(model.W_E_pos, torch.cat([model.W_E, model.pos_embed.W_pos]))
    close(model.blocks[1].attn.OV.AB, model.OV[1].AB)
    close(model.blocks[1].attn.QK.AB, model.QK[1].AB)
    bare = small(attn_bias=False, positional_embedding_type="rotary")
    assert bare.W_gate is None
    assert not bare.b_K.any()
    points = HookedTransformer(TransformerConfig(x_dim=2, n_context=3, positional_embedding_type="sinusoidal"))
    assert torch.allclose(points.run_with_cache(torch.zeros(1, 4, 3))[1]["hook_pos_embed"][0], points.W_pos)
    labels = ["L0H0", "L0H1", "L1H0", "L1H1", "L2H0", "L2H1"]
    assert model.all_head_labels == model.all_head_labels() == labels  # TransformerLens 4 and 3
    assert [layer for layer, _ in model.blocks_with("attn")] == [0, 1, 2]
    assert small(attn_only=True).blocks_with("mlp") == []
    with pytest.raises(AttributeError, match="no_part"):
        model.no_part  # noqa: B018
    assert model.n_params_total == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_scores(mode: Any):
    model = small()
    scores = model.all_composition_scores(mode)
    qk: Any = model.QK.AB
    reads: Any = {"Q": qk, "K": qk.mT, "V": model.OV.AB}[mode]
    for layer, head, after, reader in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
        writes, read = model.W_V[layer, head] @ model.W_O[layer, head], reads[after, reader]
        expected = (writes @ read).norm() / writes.norm() / read.norm() * (layer < after)
        close(scores[layer, head, after, reader], expected)


def test_directions_of_outputs():
    model = small()
    scaled = model.get_parameter("ln_final.w")[:, None] * model.W_U
    tokens = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(model.tokens_to_residual_directions(tokens), scaled.T[tokens])
    for one in (4, torch.tensor(4), torch.tensor([4])):
        assert torch.equal(model.tokens_to_residual_directions(one), scaled[:, 4])
    plain = small(normalization_type="LNPre")
    assert torch.equal(plain.tokens_to_residual_directions(tokens), plain.W_U.T[tokens])
    assert torch.equal(plain.output_biases, plain.b_U)


# ---- losses ----
@pytest.mark.usefixtures("unchecked_types")
def test_losses_of_token_ids():
    model, tokens = random_model(IDS), random_tokens(IDS)
    logits = model(tokens).detach()
    losses = [[-logits[i, t].log_softmax(0)[tokens[i, t + 1]].item() for t in range(5)] for i in range(2)]
    expected = torch.tensor(losses, dtype=torch.float64)
    close(model(tokens, return_type="loss").detach(), expected.mean())
    close(model(tokens, "loss", loss_per_token=True).detach(), expected)
    both = model(tokens, return_type="both")
    assert torch.equal(both.logits, logits)
    close(both.loss.detach(), expected.mean())
    assert model(tokens, return_type=None) is None
    close(model(tokens[0], return_type="loss").detach(), expected[0].mean())
    assert model(tokens[0]).shape == (1, 6, 11)
    residual = model(tokens, stop_at_layer=1)
    close(model(residual, start_at_layer=1, tokens=tokens, return_type="loss").detach(), expected.mean())
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)
    for same in (mask, mask.bool()):
        close(model(tokens, return_type="loss", attention_mask=same).detach(), expected[:, :3].mean())
    assert torch.equal(model(tokens, attention_mask=mask, padding_side="right"), model(tokens))
    both_ways = small(attention_dir="bidirectional")
    assert torch.equal(both_ways(tokens, attention_mask=torch.ones_like(mask)), both_ways(tokens))


def test_losses_of_prompts():
    for cfg in (POINTS, POINTS.replace(prompt_format="paired", d_model=None)):
        model, prompts = random_model(cfg), random_prompts(cfg)
        if cfg.one_pass:
            predictions, targets = model.predict_prefixes(prompts), prompts.ys
        else:
            predictions, targets = model.predict(prompts)[:, None], prompts.query.ys[:, None]
        expected = (predictions - targets).square().sum(-1) / 2
        assert torch.allclose(model(prompts, return_type="loss"), expected.mean())
        assert torch.allclose(model(prompts, return_type="loss", loss_per_token=True), expected)
        assert torch.equal(model(prompts, return_type="both").logits, model(prompts))


# ---- hooks on request ----
@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("normalization_type", ["LN", "RMSPre", None])
def test_copies_of_the_stream_are_read(request_name: str, normalization_type: Any):
    model = random_model(IDS.replace(normalization_type=normalization_type))
    tokens = random_tokens(model.cfg)
    plain, cache = model.run_with_cache(tokens)
    getattr(model, f"set_{request_name}")(True)
    outputs, copies = model.run_with_cache(tokens)
    close(outputs, plain)
    for point in REQUESTS[request_name]:
        read = cache["resid_mid", 1] if point == "hook_mlp_in" else cache["resid_pre", 1][:, :, None].expand(2, 6, 2, 8)
        names = [f"blocks.1.{place}{point}" for place in ("", "attn.") if f"blocks.1.{place}{point}" in model.hook_dict]
        assert len(names) == 1 + (point != "hook_mlp_in")  # in the block and the attention, as TransformerLens 3 and 4
        for name in names:
            close(copies[name], read, rtol=1e-12, atol=1e-12)
        if len(names) > 1:  # the later one sees the edit of the earlier one
            edits: list[Any] = [
                (name, lambda x, hook, by=by: x + by) for name, by in zip(names, (1.0, 2.0), strict=True)
            ]
            once = model.run_with_hooks(tokens, fwd_hooks=[(names[0], lambda x, hook: x + 3.0)])
            close(model.run_with_hooks(tokens, fwd_hooks=edits), once)
    close(model(tokens), plain)  # the quick route
    assert set(HookedTransformer(model.cfg).hook_dict) == set(model.hook_dict)
    getattr(model, f"set_{request_name}")(False)
    assert not any(name.endswith(REQUESTS[request_name]) for name in model.hook_dict)


def test_one_heads_queries_read_another_stream():
    model = random_model(IDS)
    model.set_use_split_qkv_input(True)
    tokens, other = random_tokens(IDS), torch.randn(2, 6, 8, dtype=torch.float64)

    def replace(stream: Tensor, hook: Any) -> Tensor:
        stream[:, :, 1] = other
        return stream

    with model.hooks(fwd_hooks=[("blocks.0.hook_q_input", replace)]):
        _, cache = model.run_with_cache(tokens)
    _, plain = model.run_with_cache(tokens)
    block = model.blocks[0]
    close(cache["q", 0][:, :, 1], (block.ln1(other) @ block.attn.W_Q[1] + block.attn.b_Q[1]).detach())
    close(cache["q", 0][:, :, 0], plain["q", 0][:, :, 0], rtol=1e-12, atol=1e-12)
    close(cache["k", 0], plain["k", 0], rtol=1e-12, atol=1e-12)


def test_a_missing_mlp_has_no_neurons():
    model = random_model(IDS.replace(attn_only=True))
    tokens = random_tokens(model.cfg)
    plain, nodes = model(tokens), list_nodes(model)
    model.set_use_hook_mlp_in(True)
    outputs, cache = model.run_with_cache(tokens)
    close(outputs, plain)
    assert torch.equal(cache["blocks.1.hook_mlp_in"], cache["resid_pre", 1] + cache["attn_out", 1])
    assert not cache["blocks.1.hook_mlp_out"].any()
    assert list_nodes(model) == nodes
    moved = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_mlp_in", lambda stream, hook: stream + 1)])
    close(moved, plain)
    added = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_mlp_out", lambda out, hook: out + 1)])
    close(added, model(cache["resid_post", 0] + 1, start_at_layer=1))


def outputs(model: HookedTransformer, tokens: Tensor) -> Tensor:
    """Predictions, or log-probabilities of tokens."""
    out = model(tokens)
    return out.log_softmax(-1) if model.cfg.prompt_format == "token_ids" else out


@settings(max_examples=30)
@given(cfg=configs(dtype="float64"), seed=st.integers(0, 3))
def test_outputs_stay_what_they_are(cfg: TransformerConfig, seed: int):
    model = random_model(cfg, seed=seed)
    tokens = random_tokens(cfg)
    before = outputs(model, tokens)
    assume(before.numel() == 0 or before.abs().max() < 100)
    processed = process_weights(model)
    torch.testing.assert_close(outputs(processed, tokens), before, rtol=1e-7, atol=1e-8)
    assert torch.equal(outputs(model, tokens), before)
    if cfg.normalization_type and why_not(model, "fold_ln") is None:
        # not those of queries, keys, outputs and the embedding
        folded = re.compile(r"(ln1|ln2|mlp\.ln|ln_final)\.[wb]$")
        assert not [name for name in processed.state_dict() if folded.search(name)]
    # once more changes nothing
    again = process_weights(processed)
    for name, weight in processed.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=1e-7, atol=1e-9)


@settings(max_examples=30)
@given(cfg=configs(dtype="float64"), name=st.sampled_from([*STEPS]))
def test_a_step_that_is_asked_for_is_taken_or_refused(cfg: TransformerConfig, name: str):
    model = random_model(cfg)
    tokens = random_tokens(cfg)
    before = outputs(model, tokens)
    assume(before.numel() == 0 or before.abs().max() < 100)
    wanted: dict[str, Any] = dict.fromkeys(STEPS, False) | {name: True}
    kinds = {"fold_ln": ("LN", "RMS"), "center_writing_weights": ("LN", "LNPre")}
    has_norm = cfg.normalization_type in kinds.get(name, (cfg.normalization_type,))
    no_biases = name == "fold_value_biases" and not cfg.attn_bias
    if why_not(model, name) is not None and has_norm and not no_biases:
        with pytest.raises(ValueError, match=f"^{name} would change"):
            process_weights(model, **wanted)
    else:
        processed = process_weights(model, **wanted)
        torch.testing.assert_close(outputs(processed, tokens), before, rtol=1e-7, atol=1e-8)


def test_factors_become_orthogonal():
    model = small()
    processed = process_weights(model, refactor_factored_attn_matrices=True)
    gram = processed.W_O @ processed.W_O.mT
    torch.testing.assert_close(gram, torch.eye(4, dtype=torch.float64).expand_as(gram))
    plain = process_weights(model, fold_value_biases=False)
    torch.testing.assert_close(processed.OV.AB, plain.OV.AB)


def test_in_place_as_transformer_lens_does_it():
    model = small()
    model.set_use_attn_result(True)
    tokens = random_tokens(model.cfg)
    before, expected = outputs(model, tokens), process_weights(model).state_dict()
    embed, seen = model.embed, []
    model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
    assert model.cfg.normalization_type == "LNPre"
    assert model.embed is embed
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(outputs(model, tokens), before)
    _, cache = model.run_with_cache(tokens)
    assert cache["blocks.1.attn.hook_result"].shape == (2, 6, 2, 8)
    assert not model.has_hooks()
    model.add_hook("blocks.1.ln1.hook_scale", cast(Any, lambda x, hook: seen.append(x)))
    model.process_weights()
    torch.testing.assert_close(outputs(model, tokens), before)
    assert len(seen) == 1  # hooks stay
    model.reset_hooks()


def test_keys_and_values_of_each_head_of_a_group():
    model = small(n_heads=4, n_key_value_heads=2)
    tokens = random_tokens(model.cfg)
    plain, grouped = model.run_with_cache(tokens)
    model.set_ungroup_grouped_query_attention(True)
    close(model(tokens), plain)
    same, cache = model.run_with_cache(tokens)
    close(same, plain)
    for name in ("k", "v"):
        close(cache[name, 1], grouped[name, 1].repeat_interleave(2, dim=2))
    model.set_use_split_qkv_input(True)
    assert model.run_with_cache(tokens)[1]["blocks.0.hook_k_input"].shape[2] == 4
    zeroed = model.run_with_cache(tokens, names_filter="blocks.0.attn.hook_z")[1]
    with model.hooks([("blocks.0.attn.hook_v", lambda v, hook: v.index_fill(2, torch.tensor([1]), 0))]):
        _, cache = model.run_with_cache(tokens)
    changed = (cache["z", 0] - zeroed["z", 0]).abs().amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, True, False, False]
    model.set_ungroup_grouped_query_attention(False)
    assert model.run_with_cache(tokens)[1]["k", 0].shape[2] == 2
    norms = small(n_heads=4, n_key_value_heads=2, use_qk_norm=True, qk_norm_over="all")
    with pytest.raises(ValueError, match="qk_norm_over"):
        norms.set_ungroup_grouped_query_attention(True)


# ---- attribution ----
def check_that_parts_sum(model: HookedTransformer, tokens: Tensor, output: int, cut: float) -> None:
    """Assert that every decomposition of TransformerLens sums to an output, less its bias."""
    out, cache = model.run_with_cache(tokens)
    expected = out[..., output] - model.output_biases[output]
    scale = out.abs().max()
    stacks = [
        cache.decompose_resid(),
        cache.stack_head_results(incl_remainder=True),
        cache.get_full_resid_decomposition(expand_neurons=False),
        cache.accumulated_resid(incl_mid=model.cfg.block_mlp)[-1:],
    ]
    for stack in stacks:
        total = cache.logit_attrs(stack, tokens=output).sum(0)
        assert (total - expected).abs().max() / scale < cut


@settings(max_examples=30)
@given(cfg=configs(dtype="float64", mlp_location="blocks", token_clip=None, language=False))
def test_parts_sum_to_the_outputs(cfg: TransformerConfig):
    assume(cfg.n_layers > 0 and (cfg.normalization_type is None or cfg.final_norm))
    model = random_model(cfg)
    tokens = random_tokens(cfg)
    assume(model(tokens).abs().max() < 100)
    for same in (model, process_weights(model)):
        check_that_parts_sum(same, tokens, cfg.d_out - 1, cut=1e-9)


def test_parts_sum_to_the_predictions_of_a_trained_model():
    model: Any = load("gpt2-8l")
    tokens = model.encode(LinearRegression(x_dim=model.cfg.x_dim, n_context=model.cfg.n_context).sample(4, seed=0))
    with torch.no_grad():
        processed = process_weights(model)
        precise = copy.deepcopy(model).double()
        torch.testing.assert_close(process_weights(precise)(tokens.double()), precise(tokens.double()))
        torch.testing.assert_close(processed.output_biases, processed.b_U)
        for same in (model, processed):
            check_that_parts_sum(same, tokens, 0, cut=1e-5)
            logits, cache = same.run_with_cache(tokens)
            for unit in ("component", "head"):
                result = direct_logit_attribution(same, answer_tokens=0, unit=unit, pos=None, cache=cache)
                error = result.attribution.sum(0) - (logits[..., 0] - same.output_biases[0])
                assert error.abs().max() / logits.abs().max() < 1e-5


VOCABULARY = ["<pad>", "<bos>", "<eos>", "the", "cat", "sat", "on", "mat"]
TEXT: dict[str, Any] = {"n_layers": 2, "d_model": 8, "n_ctx": 12, "d_head": 4, "d_vocab": len(VOCABULARY)}


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    ids = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    ids.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=ids, **special)


@pytest.fixture
def model() -> HookedTransformer:
    model = random_model(HookedTransformerConfig(**TEXT)).eval()
    model.set_tokenizer(word_tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"))
    return model


def test_to_tokens(model: HookedTransformer):
    assert model.to_tokens("the cat").tolist() == [[1, 3, 4]]
    assert model.to_tokens("the cat", prepend_bos=False).tolist() == [[3, 4]]
    assert model.to_tokens(["the cat sat", "mat"]).tolist() == [[1, 3, 4, 5], [1, 7, 0, 0]]  # padded on the right
    assert model.to_tokens(["the"] * 2, prepend_bos=False).tolist() == [[3], [3]]
    assert model.to_tokens("the " * 19).shape == (1, 12)
    assert model.to_tokens("the " * 19, truncate=False).shape == (1, 20)
    assert model.to_tokens("", prepend_bos=False).shape == (1, 0)
    assert model.to_tokens("", prepend_bos=False).dtype == torch.int64
    tokens = torch.tensor([[1, 2]])
    assert model.to_tokens(tokens) is tokens
    points = HookedTransformer(TransformerConfig(x_dim=2, n_context=3))
    prompts = random_prompts(points.cfg)
    assert torch.equal(points.to_tokens(prompts), points.encode(prompts))


@pytest.mark.usefixtures("unchecked_types")
def test_to_text(model: HookedTransformer):
    assert model.to_string(torch.tensor([3, 4])) == "the cat"
    assert model.to_string(torch.tensor([[3], [4]])) == ["the", "cat"]
    assert model.to_string([3, 4]) == model.to_string(np.array([3, 4])) == "the cat"
    assert model.to_string(torch.tensor(4)) == "cat"
    assert model.to_str_tokens("the cat") == ["<bos>", "the", "cat"]
    assert model.to_str_tokens(["the", "cat sat"], prepend_bos=False) == [["the"], ["cat", "sat"]]
    for ids in (torch.tensor([3, 4]), torch.tensor([[3, 4]]), np.array([3, 4])):
        assert model.to_str_tokens(ids) == ["the", "cat"]
    assert model.to_single_str_token(7) == "mat"
    assert model.to_single_token("cat") == model.to_single_token(4) == 4
    column = model.get_parameter("ln_final.w") * model.W_U[:, 4]
    torch.testing.assert_close(model.tokens_to_residual_directions("cat"), column)
    assert model.get_token_position("the", "the cat the mat") == 1
    assert model.get_token_position("the", "the cat the mat", mode="last") == 3
    assert model.get_token_position("the", "the cat the mat", mode="last", prepend_bos=False) == 2
    assert model.get_token_position(4, torch.tensor([[3, 4]])) == 1


def test_text_as_input(model: HookedTransformer):
    tokens = model.to_tokens("the cat")
    assert torch.equal(model("the cat"), model(tokens))
    assert torch.equal(model("the cat", prepend_bos=False), model(tokens[:, 1:]))
    assert torch.equal(model(["the cat"], return_type="loss"), model(tokens, return_type="loss"))
    assert model.run_with_cache("the cat")[1]["hook_embed"].shape == (1, 3, 8)
    assert torch.equal(model.run_with_hooks("the cat", fwd_hooks=[]), model(tokens))
    embedded, same, *_ = model.input_to_embed("the cat")
    assert torch.equal(same, tokens)
    assert torch.equal(embedded, model(tokens, stop_at_layer=0))


def test_tokenizers():
    plain = word_tokenizer(bos_token="<bos>", eos_token="<eos>")
    for default in (True, False):
        cfg = HookedTransformerConfig(**TEXT, default_prepend_bos=default)
        model = HookedTransformer(cfg, tokenizer=plain)
        assert model.to_tokens("the cat").tolist() == [[1, 3, 4] if default else [3, 4]]
        assert model.to_tokens("the cat", prepend_bos=True).tolist() == [[1, 3, 4]]
        assert model.to_tokens("the cat", prepend_bos=False).tolist() == [[3, 4]]
    bare = word_tokenizer(eos_token="<eos>")
    model.set_tokenizer(bare)
    assert bare.pad_token is None  # the model has a copy
    assert model.tokenizer is not None
    assert (model.tokenizer.pad_token, model.tokenizer.bos_token) == ("<eos>", "<eos>")


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>", "$A <eos>", "<bos> $A <eos> <eos>"])
def test_only_a_text_and_its_beginning_are_read(template: str):
    tokenizer = word_tokenizer(bos_token="<bos>", eos_token="<eos>")
    special = [("<bos>", 1), ("<eos>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    model = HookedTransformer(HookedTransformerConfig(**TEXT), tokenizer=tokenizer)
    assert model.to_tokens("the cat").tolist() == [[1, 3, 4]]
    assert model.to_tokens("the cat", prepend_bos=False).tolist() == [[3, 4]]
    assert model.to_str_tokens("the cat", prepend_bos=False) == ["the", "cat"]
    assert model.to_tokens(["the cat sat", "mat"]).tolist() == [[1, 3, 4, 5], [1, 7, 2, 2]]
    assert model.to_tokens("the cat sat on the mat the cat sat on the mat the").shape == (1, 12)
    assert model.to_single_token("cat") == 4


@torch.no_grad()
def test_the_loss_of_texts_leaves_padding_out(model: HookedTransformer):
    texts = ["the cat sat on the mat", "mat", "cat sat"]
    total, n = 0.0, 0
    for text in texts:
        tokens = model.to_tokens(text)[0]
        logs = model(text)[0].log_softmax(-1)
        for place in range(len(tokens) - 1):
            total -= float(logs[place, tokens[place + 1]])
            n += 1
    for order in (texts, texts[::-1]):
        assert float(model(order, return_type="loss")) == pytest.approx(total / n, rel=1e-5)
        assert float(model.run_with_cache(order, return_type="loss")[0]) == pytest.approx(total / n, rel=1e-5)
    for keys in ("causal", "full"):
        same = HookedTransformer(model.cfg.replace(keys=keys, dtype="float64"), tokenizer=model.tokenizer)
        for side in ("left", "right"):
            together = same(texts, padding_side=side)
            for row, text in zip(together, texts, strict=True):
                alone = same(text)[0]
                torch.testing.assert_close(row[-len(alone) :] if side == "left" else row[: len(alone)], alone)


@torch.no_grad()
def test_padding_on_the_left(model: HookedTransformer):
    texts = ["the cat sat", "mat", "on the"]
    expected = [[1, 3, 4, 5], [0, 0, 1, 7], [0, 1, 6, 3]]
    assert model.to_tokens(texts, padding_side="left").tolist() == expected
    tokens = torch.tensor(expected)
    model.set_tokenizer(cast(Any, model.tokenizer), default_padding_side="left")
    assert torch.equal(model.to_tokens(texts), tokens)
    with_mask = model(tokens, attention_mask=tokens != 0)
    for row, text in zip(with_mask, texts, strict=True):
        alone = model(text)[0]
        torch.testing.assert_close(row[-len(alone) :], alone)
    # the padding of ids is found where it is on the tokenizer's side
    for same in (model(texts), model(tokens), model.run_with_cache(tokens)[0], model.run_with_cache(texts)[0]):
        torch.testing.assert_close(same, with_mask)
    loss = model(tokens, return_type="loss")
    assert float(loss) == pytest.approx(float(model(tokens, attention_mask=tokens != 0, return_type="loss")))


def test_data_points_are_texts_of_the_data_set(model: HookedTransformer):
    model.dataset = [{"text": "the cat"}, {"text": "mat"}]
    drawn = {model.sample_datapoint() for _ in range(50)}
    assert drawn == {"the cat", "mat"}
    assert cast(Tensor, model.sample_datapoint(tokenize=True)).tolist() in ([[1, 3, 4]], [[1, 7]])


# ---- generated tokens ----
def greedy(model: HookedTransformer, tokens: Tensor, steps: int, stop: int | None = None) -> Tensor:
    rows = tokens.tolist()
    for row in rows:
        for _ in range(steps):
            ended = stop in row[tokens.shape[1] :]
            row.append(stop if ended else int(model(torch.tensor([row]))[0, -1].argmax()))
    return torch.tensor(rows)


def test_the_likeliest_tokens(model: HookedTransformer):
    tokens = torch.tensor([[1, 3, 4], [1, 7, 5]])
    options: dict[str, Any] = {"stop_at_eos": False, "verbose": False}
    expected = greedy(model, tokens, 5)
    settings: list[dict[str, Any]] = [{"do_sample": False}, {"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}]
    for likeliest in settings:
        assert torch.equal(model.generate(tokens, 5, **options, **likeliest), expected)
    options["do_sample"] = False
    text = model.generate("the cat", 5, **options)
    assert text == cast(Any, model.tokenizer).decode(expected[0], skip_special_tokens=True)
    assert torch.equal(model.generate("the cat", 5, return_type="tokens", **options), expected[:1])
    assert model.generate(tokens, 5, return_type="str", **options)[0] == text
    assert model.generate(["the cat", "mat"], 5, **options) == [text, model.generate("mat", 5, **options)]
    padded = model.generate(["the cat", "mat"], 5, return_type="tokens", **options)
    assert padded.shape == (2, 8)
    assert padded[1, 0] == 0  # the shorter one is padded on the left, as in TransformerLens


WINDOWS = {"positional_embedding_type": "rotary", "use_local_attn": True, "window_size": 3, "n_key_value_heads": 2}
KINDS_WITH_CACHE: list[dict[str, Any]] = [{}, WINDOWS]  # test_language_features.py has the logits of all kinds


@torch.no_grad()
@pytest.mark.parametrize("fields", [*KINDS_WITH_CACHE, {"keys": "full"}, {"attention": "delta"}, {"momentum": 0.5}])
def test_neither_a_cache_nor_other_texts_change_a_continuation(fields: dict[str, Any]):
    sizes = TEXT | {"n_ctx": 30, "d_model": 16, "dtype": "float64"}
    model = random_model(HookedTransformerConfig(**(sizes | fields)))
    model.set_tokenizer(word_tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"))
    texts, read = ["the cat sat on the mat", "mat", "on the cat"], []
    expected = [greedy(model, model.to_tokens(text), 12)[0, -12:].tolist() for text in texts]
    assert len({*map(tuple, expected)}) > 1 or fields  # they depend on the text
    options: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    model.add_hook("hook_embed", lambda embedded, hook: read.append(embedded.shape[1]))
    for cached in (True, False):
        read.clear()
        assert model.generate(texts, 12, use_past_kv_cache=cached, **options)[:, -12:].tolist() == expected
        if fields in KINDS_WITH_CACHE:
            assert read == ([7] + 11 * [1] if cached else [*range(7, 19)])
        assert model.generate(texts[0], 12, use_past_kv_cache=cached, **options)[0, -12:].tolist() == expected[0]
    pieces = [*model.generate_stream(texts[0], 12, max_tokens_per_yield=5, do_sample=False, stop_at_eos=False)]
    assert torch.cat(pieces, dim=1)[0, -12:].tolist() == expected[0]
    assert [piece.shape[1] for piece in pieces] == [8, 5, 5, 1]


@torch.no_grad()
def test_a_generated_padding_token_is_text():
    model = random_model(HookedTransformerConfig(**(TEXT | {"n_ctx": 30, "d_model": 16, "dtype": "float64"})))
    tokens = torch.tensor([[6, 2, 3], [5, 7, 4]])
    expected = greedy(model, tokens, 12)
    pad = int(expected[0, 3])
    assert pad not in tokens
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": VOCABULARY[pad]}
    model.set_tokenizer(word_tokenizer(**special), default_padding_side="left")
    for cached in (True, False):
        options: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "use_past_kv_cache": cached}
        assert torch.equal(model.generate(tokens, 12, verbose=False, **options), expected)
        assert torch.equal(torch.cat([*model.generate_stream(tokens, 12, **options)], dim=1), expected)
    # in the second row, all three tokens of the first piece and the first of the second are padding
    tokens = torch.tensor([[6, 2, 3, pad, 4, 5], [pad, pad, pad, pad, 4, 5], [pad, pad, 3, pad, 4, 5]])
    whole = model(tokens)
    close(model(tokens[1:2, 4:])[0], whole[1, 4:])
    for run in (model, lambda piece, **options: model.run_with_cache(piece, **options)[0]):
        cache = TransformerLensKeyValueCache.init_cache(cast(Any, model.cfg), "cpu", len(tokens))
        pieces = [run(piece, past_kv_cache=cache) for piece in tokens.split(3, dim=1)]
        close(torch.cat(pieces, dim=1)[:, 4:], whole[:, 4:])


@pytest.mark.parametrize("prepends", [True, False])
@torch.no_grad()
def test_a_text_may_begin_with_the_padding_token(model: HookedTransformer, prepends: bool):
    model.set_tokenizer(word_tokenizer(eos_token="<eos>"), default_padding_side="left")
    options: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    text, bare = "<eos> the cat", HookedTransformer(model.cfg)
    bare.load_state_dict(model.state_dict())
    tokens = model.to_tokens(text, prepend_bos=prepends)
    assert tokens.tolist() == [[2] * prepends + [2, 3, 4]]
    expected, logits = greedy(bare, tokens, 5), bare(tokens)
    close(model(text, prepend_bos=prepends), logits)
    close(model.run_with_cache(text, prepend_bos=prepends)[0], logits)
    close(model.run_with_cache(text, prepend_bos=prepends, attention_mask=None)[0], logits)
    for cached in (True, False):
        made = model.generate(text, 5, use_past_kv_cache=cached, prepend_bos=prepends, **options)
        assert torch.equal(made, expected)


def test_rows_that_have_ended_are_filled_up(model: HookedTransformer):
    tokens = torch.tensor([[1, 3, 4], [1, 7, 5]])
    free = greedy(model, tokens, 6)
    stop = int(free[0, 4])  # the second token of the first row
    ended = model.generate(tokens, 6, eos_token_id=stop, do_sample=False, verbose=False)
    assert torch.equal(ended, greedy(model, tokens, 6, stop)[:, : ended.shape[1]])
    several = model.generate(tokens[:1], 6, eos_token_id=[stop, 99], do_sample=False, verbose=False)
    assert several.shape == (1, 4 + free[0, 3:].tolist().index(stop))


def test_draws_have_the_models_probabilities(model: HookedTransformer):
    tokens = torch.tensor([[1, 3, 4]]).expand(20_000, 3)
    options: dict[str, Any] = {"stop_at_eos": False, "verbose": False, "seed": 0}
    drawn = model.generate(tokens, 1, temperature=0.7, **options)[:, -1]
    expected = (model(tokens[:1])[0, -1] / 0.7).softmax(-1)
    frequencies = drawn.bincount(minlength=8) / len(drawn)
    assert (frequencies - expected).abs().max() < 5 * (0.25 / len(drawn)) ** 0.5
    assert torch.equal(model.generate(tokens, 1, temperature=0.7, **options)[:, -1], drawn)
    assert not torch.equal(model.generate(tokens, 1, **{**options, "seed": 1})[:, -1], drawn)
    state = torch.get_rng_state()
    model.generate(tokens[:1], 1, **options)
    assert torch.equal(torch.get_rng_state(), state)
    top = set(model(tokens[:1])[0, -1].topk(2).indices.tolist())
    assert set(model.generate(tokens[:200], 1, top_k=2, **options)[:, -1].tolist()) == top
