# ruff: noqa
# type: ignore
"""A notebook like those of courses on interpretability, written for TransformerLens 3; `model` is given.

Its test changes the imports to those of `mechicl.compat.transformer_lens`.
"""

from functools import partial

import torch
from transformer_lens import (
    ActivationCache,
    FactoredMatrix,
    HookedTransformer,
    HookedTransformerConfig,
    HookedTransformerKeyValueCache,
    SVDInterpreter,
    evals,
    head_detector,
    patching,
    utils,
)
from transformer_lens.hook_points import HookPoint

torch.set_grad_enabled(False)
assert isinstance(model, HookedTransformer) and isinstance(model.cfg, HookedTransformerConfig)
n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads

# Cell 1: texts and tokens
text = "the cat sat on the mat the cat sat"
tokens = model.to_tokens(text)
assert model.to_string(tokens[0, 1:]) == text and model.to_str_tokens(text)[1:] == text.split()
assert model.to_str_tokens(text, prepend_bos=False) == text.split()
assert model.to_single_str_token(model.to_single_token("cat")) == "cat"
assert model.get_token_position("cat", text, mode="last") == 8
logits, loss = model(text, return_type="both")
log_probs = logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
assert torch.allclose(loss, -log_probs.mean()) and torch.allclose(utils.lm_cross_entropy_loss(logits, tokens), loss)
assert torch.allclose(model(tokens, return_type="loss", loss_per_token=True)[0], -log_probs, atol=1e-5)
prediction = logits.argmax(dim=-1).squeeze()[:-1]
num_correct = (prediction == tokens.squeeze()[1:]).sum()
assert torch.isclose(utils.lm_accuracy(logits, tokens), num_correct / len(prediction))
utils.test_prompt("the cat sat on the", "mat", model, prepend_space_to_answer=False, top_k=3)

# Cell 2: the cache
logits, cache = model.run_with_cache(tokens, remove_batch_dim=True)
assert cache["pattern", 0].shape == (n_heads, 10, 10) and torch.equal(
    cache["pattern", 0], cache["blocks.0.attn.hook_pattern"]
)
pattern_from_q_and_k = cache["attn_scores", 0].softmax(-1)
assert torch.allclose(pattern_from_q_and_k, cache["pattern", 0], atol=1e-6)
assert torch.allclose(cache["resid_mid", 0] + cache["mlp_out", 0], cache["resid_post", 0], atol=1e-5)
logits, cache = model.run_with_cache(tokens)
assert cache.remove_batch_dim()["q", 0].shape == (10, n_heads, model.cfg.d_head)
logits, cache = model.run_with_cache(tokens)
cache.to("cpu")
filtered = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("z"), stop_at_layer=1)[1]
assert list(filtered.keys()) == ["blocks.0.attn.hook_z"]
last = model.run_with_cache(tokens, names_filter="blocks.0.attn.hook_z", pos_slice=-1, device="cpu")[1]
assert torch.equal(last["z", 0][:, 0], cache["z", 0][:, -1])

# Cell 3: the logit difference, attributed to layers and heads
answers = torch.tensor([[model.to_single_token("on"), model.to_single_token("mat")]])
directions = model.tokens_to_residual_directions(answers)
difference = (logits[0, -1, answers[0, 0]] - logits[0, -1, answers[0, 1]]).item()
scaled = cache.apply_ln_to_stack(cache["resid_post", -1][:, -1], layer=-1, pos_slice=-1)
bias = (model.output_biases[answers[0, 0]] - model.output_biases[answers[0, 1]]).item()
assert abs((scaled[0] @ (directions[0, 0] - directions[0, 1])).item() + bias - difference) < 1e-4
per_layer, labels = cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
parts = cache.logit_attrs(per_layer, tokens=answers[:, 0], incorrect_tokens=answers[:, 1], pos_slice=-1)
assert abs(parts.sum().item() + bias - difference) < 1e-4 and labels[0] == "embed"
accumulated, labels = cache.accumulated_resid(layer=-1, incl_mid=True, pos_slice=-1, return_labels=True)
assert torch.allclose(accumulated[-1], cache["resid_post", -1][:, -1])
per_head, labels = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
assert labels[:2] == ["L0H0", "L0H1"] and per_head.shape == (n_layers * n_heads, 1, model.cfg.d_model)
assert labels == model.all_head_labels() == list(model.all_head_labels)
head_sum = cache.stack_head_results(layer=1).sum(0) + (model.b_O[0] if model.cfg.attn_bias else 0)
assert torch.allclose(head_sum, cache["attn_out", 0], atol=1e-4)
assert cache.get_full_resid_decomposition(layer=1, expand_neurons=False, return_labels=True)[1][0] == "L0H0"
assert cache.stack_activation("pattern").shape == (n_layers, 1, n_heads, 10, 10)
assert cache.stack_head_results(layer=1, pos_slice=utils.Slice((1, 5))).shape[2] == 4
utils.to_numpy(parts), utils.remove_batch_dim(logits), utils.get_corner(logits[0])


# Cell 4: hooks
def ablate(z, hook: HookPoint, head: int):
    z[:, :, head, :] = 0.0
    return z


name = utils.get_act_name("z", 0)
ablated = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(name, partial(ablate, head=1))])
assert (ablated - loss).abs() > 1e-6
store = torch.zeros(n_layers, n_heads)


def score(pattern, hook: HookPoint):
    store[hook.layer()] = pattern.diagonal(dim1=-2, dim2=-1, offset=-1).mean(dim=(0, -1))


model.run_with_hooks(tokens, return_type=None, fwd_hooks=[(lambda name: name.endswith("pattern"), score)])
assert torch.allclose(store[1], cache["pattern", 1].diagonal(dim1=-2, dim2=-1, offset=-1).mean(dim=(0, -1)))
model.add_hook(name, partial(ablate, head=1))
assert torch.allclose(model(tokens, return_type="loss"), ablated)
model.reset_hooks()
model.add_perma_hook(name, partial(ablate, head=1))
model.reset_hooks()
assert torch.allclose(model(tokens, return_type="loss"), ablated)
model.reset_hooks(including_permanent=True)
assert torch.allclose(model(tokens, return_type="loss"), loss)
with model.hooks(fwd_hooks=[(name, partial(ablate, head=1))]):
    assert torch.allclose(model(tokens, return_type="loss"), ablated)
model.blocks[0].attn.hook_z.add_hook(partial(ablate, head=1))
assert torch.allclose(model(tokens, return_type="loss"), ablated)
model.reset_hooks()


def remember(stream, hook: HookPoint):
    hook.ctx["stream"] = stream


model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_post", remember)])
assert torch.allclose(model.hook_dict["blocks.0.hook_resid_post"].ctx["stream"], cache["resid_post", 0], atol=1e-5)
model.hook_dict["blocks.0.hook_resid_post"].clear_context()
stream = model(tokens, stop_at_layer=1)
assert torch.allclose(model(stream, start_at_layer=1), logits, atol=1e-5)

# Cell 5: gradients
torch.set_grad_enabled(True)
gradients = {}
model.reset_hooks()
model.add_hook("blocks.0.hook_resid_post", lambda grad, hook: gradients.update({hook.name: grad}), "bwd")
(model(tokens)[0, -1, 3] - model(tokens)[0, -1, 4]).backward()
model.reset_hooks()
model.zero_grad()
assert gradients["blocks.0.hook_resid_post"].shape == (1, 10, model.cfg.d_model)
torch.set_grad_enabled(False)

# Cell 6: circuits
full_OV = FactoredMatrix(model.W_E @ model.W_V[0, 1], model.W_O[0, 1] @ model.W_U)
assert torch.allclose(full_OV.AB, model.W_E @ model.OV[0, 1].AB @ model.W_U, atol=1e-4)
U, S, Vh = full_OV.svd()
assert torch.allclose(U @ S.diag() @ Vh.T, full_OV.AB, atol=1e-4)
indices = torch.randint(0, model.cfg.d_vocab, (5,))
assert torch.allclose(full_OV[indices, indices].AB, full_OV.AB[indices][:, indices], atol=1e-4)
assert model.QK[0, 0].AB.shape == (model.cfg.d_model, model.cfg.d_model)
assert model.QK.eigenvalues.shape == (n_layers, n_heads, model.cfg.d_head)
scores = model.all_composition_scores("K")
assert scores.shape == (n_layers, n_heads, n_layers, n_heads) and scores[0, 1, 1, 2] > 0 and scores[1, 0, 0, 0] == 0
embedded = model.embed(tokens) + (model.pos_embed(tokens) if hasattr(model, "pos_embed") else 0)
assert torch.allclose(embedded, cache["resid_pre", 0])
assert torch.allclose(model.unembed(model.ln_final(cache["resid_post", -1])), logits, atol=1e-5)

# Cell 7: patching
clean, corrupted = tokens, model.to_tokens("the mat sat on the cat the mat sat")
corrupted_logits, clean_cache = model(corrupted), model.run_with_cache(clean)[1]


def metric(logits):
    return logits[0, -1, 3] - logits[0, -1, 4]


by_position = patching.get_act_patch_resid_pre(model, corrupted, clean_cache, metric)
assert torch.isclose(by_position[1, 0], metric(corrupted_logits), atol=1e-5)  # the first token is the same in both
by_head = patching.get_act_patch_attn_head_out_all_pos(model, corrupted, clean_cache, metric)
by_block = patching.get_act_patch_block_every(model, corrupted, clean_cache, metric)
assert by_head.shape == (n_layers, n_heads) and by_block.shape == (3, n_layers, 10)
model.set_ungroup_grouped_query_attention(True)
clean_cache = model.run_with_cache(clean)[1]
every = patching.get_act_patch_attn_head_all_pos_every(model, corrupted, clean_cache, metric)
assert every.shape == (5, n_layers, n_heads) and torch.allclose(every[0], by_head, atol=1e-5)
model.set_ungroup_grouped_query_attention(False)
for switch in (model.set_use_attn_result, model.set_use_split_qkv_input, model.set_use_hook_mlp_in):
    switch(True)
more = model.run_with_cache(tokens)[1]
assert torch.allclose(
    more["result", 0].sum(2) + (model.b_O[0] if model.cfg.attn_bias else 0), more["attn_out", 0], atol=1e-4
)
assert torch.equal(more["blocks.0.hook_q_input"][:, :, 1], more["resid_pre", 0])
assert torch.equal(more["blocks.0.hook_mlp_in"], more["resid_mid", 0])
for switch in (model.set_use_attn_result, model.set_use_split_qkv_input, model.set_use_hook_mlp_in):
    switch(False)

# Cell 8: heads, singular vectors
detected = head_detector.detect_head(model, text, "previous_token_head")
assert detected.shape == (n_layers, n_heads)
if model.cfg.n_key_value_heads is None:
    vectors = SVDInterpreter(model).get_singular_vectors("OV", layer_index=0, head_index=0, num_vectors=4)
    assert vectors.shape == (model.cfg.d_vocab, 1, 4)

# Cell 9: neurons, biases and single parts, a copy from the config, a step of training
assert cache.stack_neuron_results(layer=1, pos_slice=-1).shape == (model.cfg.d_mlp, 1, model.cfg.d_model)
assert cache.get_neuron_results(1, neuron_slice=5, pos_slice=-1).isfinite().all()
assert model.accumulated_bias(2).shape == model.accumulated_bias(1, mlp_input=True).shape == (model.cfg.d_model,)
normed = model.blocks[0].ln1(embedded)
attention = model.blocks[0].attn(query_input=normed, key_input=normed, value_input=normed)
assert torch.allclose(attention, cache["attn_out", 0], atol=1e-5)
assert torch.allclose(model.blocks[0](embedded), cache["resid_post", 0], atol=1e-5)
assert len(list(model.hook_points())) == len(model.hook_dict) and "blocks.0.attn" in model.mod_dict
other = HookedTransformer(HookedTransformerConfig.from_dict(dict(model.cfg.to_dict())), tokenizer=model.tokenizer)
other.load_state_dict(model.state_dict())
assert torch.equal(other(tokens), model(tokens)) and other.cfg.n_params == model.cfg.n_params
with torch.enable_grad():
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    before = other(tokens, return_type="loss")
    before.backward()
    optimizer.step()
assert other(tokens, return_type="loss") < before
assert evals.sanity_check(model).isfinite()

# Cell 10: generation, padding, cached keys and values
options = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
assert torch.equal(model.generate(tokens, **options), model.generate(tokens, use_past_kv_cache=False, **options))
assert torch.equal(model.generate(tokens, **options)[:, 10], logits[:, -1].argmax(-1))
padded = model(["the cat sat", "mat"], padding_side="left")
assert torch.allclose(padded[1, -2:], model("mat")[0], atol=1e-5)
past = HookedTransformerKeyValueCache.init_cache(model.cfg, model.cfg.device, 1)
first = model(tokens[:, :6], past_kv_cache=past)
past.freeze()
for _ in range(2):  # a frozen one does not grow
    rest = model(tokens[:, 6:], past_kv_cache=past)
    assert torch.allclose(torch.cat([first, rest], dim=1), logits, atol=1e-5)

# Cell 11: weights, devices, dtypes
log_probs_before = logits.log_softmax(-1)
state = model.state_dict()
for step in (model.fold_layer_norm, model.center_unembed):
    state = step(state)
model.process_weights_(fold_ln=True, center_writing_weights=model.cfg.normalization_type == "LN")
assert model.cfg.normalization_type in ("LNPre", "RMSPre")
assert torch.allclose(model(tokens).log_softmax(-1), log_probs_before, atol=1e-4)
assert torch.allclose(model.W_U, state["unembed.W_U"], atol=1e-5)
model.to("cpu", print_details=False)
assert model.half().cfg.dtype == torch.float16 and model.float().cfg.dtype == torch.float32
wrapped = ActivationCache({"hook_embed": torch.zeros(1, 2, 3)}, model)
assert wrapped["embed"].shape == (1, 2, 3)
print("all cells ran")
