# ruff: noqa
# type: ignore
"""A notebook of the usual kind, written for TransformerLens 3; its test changes the import line."""

from transformer_lens import HookedTransformer, HookedTransformerConfig

# Cell 1: what else such notebooks import
import tempfile

import einops
import torch
import transformer_lens.evals
from tokenizers import Tokenizer, models, pre_tokenizers
from transformer_lens import ActivationCache, FactoredMatrix, SVDInterpreter, patching
from transformer_lens import utilities as utils
from transformer_lens.head_detector import detect_head
from transformer_lens.hook_points import HookPoint
from transformers import AutoTokenizer, PreTrainedTokenizerFast

# Cell 2: a vocabulary, a model, some training on repeated sequences
words = ["<|endoftext|>", "The", "cat", "sat", "on", "mat", "Mary", "John", "gave", "a", "drink", "to", "and", "."]
vocab = {word: index for index, word in enumerate([*words, *(f"w{i}" for i in range(50 - len(words)))])}
words_to_ids = Tokenizer(models.WordLevel(vocab, unk_token="<|endoftext|>"))
words_to_ids.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
folder = tempfile.mkdtemp()
PreTrainedTokenizerFast(
    tokenizer_object=words_to_ids, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
).save_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
cfg = HookedTransformerConfig(
    n_layers=2, d_model=32, n_ctx=40, d_head=8, n_heads=4, d_mlp=64, d_vocab=50, act_fn="gelu", seed=0, device="cpu",
    normalization_type="LN",
)  # fmt: skip
model = HookedTransformer(cfg, tokenizer=tokenizer)
print(cfg.n_params, cfg.attn_scale, cfg.attention_dir, cfg.d_vocab_out, model.n_params_total, model.cfg.attn_only)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)


def repeated(batch: int, half: int = 12) -> torch.Tensor:
    """Random words, twice, after the end-of-text token."""
    once = torch.randint(14, 50, (batch, half), generator=generator)
    return torch.cat([torch.zeros(batch, 1, dtype=torch.long), once, once], dim=1)


for step in range(30):
    loss = model(repeated(32), return_type="loss")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())

# Cell 3: losses, activations, attention patterns
model.eval()
tokens = repeated(4)
logits, loss = model(tokens, return_type="both")
per_token = model(tokens, return_type="loss", loss_per_token=True)
print(
    loss.item(), per_token.shape, per_token[:, 12:].mean().item(), model.loss_fn(logits, tokens, per_token=True).sum()
)
logits, cache = model.run_with_cache(tokens)
print(isinstance(cache, ActivationCache), len(cache), sorted({name.split(".")[-1] for name in cache}))
print(sorted(cache.keys()))
for name, activation in sorted(cache.items()):
    print(name, tuple(activation.shape), activation.abs().clamp(max=1e4).mean().item())
pattern = cache["pattern", 1]
induction = pattern.diagonal(1 - 12, dim1=-2, dim2=-1).mean((0, -1))
previous = cache["pattern", 0, "attn"].diagonal(-1, dim1=-2, dim2=-1).mean((0, -1))
print(induction, previous, model.all_head_labels()[0] if callable(model.all_head_labels) else model.all_head_labels[0])
_, single = model.run_with_cache(tokens[0], remove_batch_dim=True)
print(single["q", 0].shape, single["normalized", 1, "ln2"].norm(), single["scale"].mean())


# Cell 4: ablations by hooks
def zero_head(z: torch.Tensor, hook: HookPoint, head: int) -> torch.Tensor:
    z[:, :, head] = 0
    return z


for layer in range(cfg.n_layers):
    for head in range(cfg.n_heads):
        hooks = [(utils.get_act_name("z", layer), lambda z, hook, head=head: zero_head(z, hook, head))]
        ablated = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks)
        print(f"L{layer}H{head}", (ablated - loss).item())
model.add_hook("blocks.0.hook_resid_post", lambda x, hook: print(hook.name, hook.layer(), x.norm().item()))
model(tokens, return_type=None)
model.reset_hooks()
with model.hooks(fwd_hooks=[("hook_embed", lambda x, hook: x * 2)]), torch.no_grad():
    print(model(tokens, return_type="loss").item())
residual = model(tokens, stop_at_layer=1)
print(model(residual, start_at_layer=1).sum(), model(residual, start_at_layer=1, tokens=tokens, return_type="loss"))
model.set_use_attn_result(True)
model.set_use_split_qkv_input(True)
model.set_use_hook_mlp_in(True)
_, wide = model.run_with_cache(tokens)
for name in ("attn.hook_result", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in"):
    print(name, wide[f"blocks.1.{name}"].shape, wide[f"blocks.1.{name}"].norm())

for switch in ("attn_result", "split_qkv_input", "hook_mlp_in"):
    getattr(model, f"set_use_{switch}")(False)

# Cell 5: direct logit attribution, on folded weights
before = model(tokens)
model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
print(
    model.cfg.normalization_type,
    (model(tokens).log_softmax(-1) - before.log_softmax(-1)).abs().max() < 1e-5,
    loss.item(),
)
logits, cache = model.run_with_cache(tokens)
answers, wrong = tokens[:, -1], (tokens[:, -1] + 1) % 50
stack, labels = cache.decompose_resid(layer=-1, pos_slice=-2, mode="all", return_labels=True)
attribution = cache.logit_attrs(stack, tokens=answers, incorrect_tokens=wrong, pos_slice=-2)
difference = logits[range(4), -2, answers] - logits[range(4), -2, wrong] - model.b_U[answers] + model.b_U[wrong]
print(dict(zip(labels, attribution.mean(-1).tolist())), (attribution.sum(0) - difference).abs().max().item() < 1e-4)
directions = model.tokens_to_residual_directions(torch.stack([answers, wrong], dim=1))
heads, labels = cache.stack_head_results(layer=-1, pos_slice=-2, return_labels=True)
scaled = cache.apply_ln_to_stack(heads, layer=-1, pos_slice=-2)
print(labels[:2], einops.einsum(scaled, directions[:, 0] - directions[:, 1], "part batch d, batch d -> part").tolist())
accumulated, labels = cache.accumulated_resid(layer=-1, incl_mid=True, pos_slice=-2, return_labels=True)
print(labels, cache.logit_attrs(accumulated, tokens=answers, pos_slice=-2).mean(-1))
print((cache.apply_ln_to_stack(accumulated, pos_slice=-2) @ model.W_U).log_softmax(-1)[:, 0, answers[0]])
everything, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
print(labels, (everything.sum(0) - cache["resid_post", -1]).abs().max() < 1e-4)
print(cache.stack_neuron_results(layer=1, pos_slice=-1).norm(), cache.stack_activation("z").shape)
print(cache.get_neuron_results(1, neuron_slice=5, pos_slice=-1).sum())
print(torch.allclose(model.unembed(model.ln_final(cache["resid_post", -1])), model(tokens), atol=1e-5))

# Cell 6: activation patching
clean, corrupted = tokens[:1], tokens[:1].clone()
corrupted[0, 5] = corrupted[0, 17] = 15
clean_logits, clean_cache = model.run_with_cache(clean)


def metric(logits: torch.Tensor) -> torch.Tensor:
    """The logit of the word after the repeated one."""
    return logits[0, 17, clean[0, 18]] - logits[0, 17, 14]


print(metric(clean_logits).item(), metric(model(corrupted)).item())
print(patching.get_act_patch_resid_pre(model, corrupted, clean_cache, metric))
print(patching.get_act_patch_attn_head_out_by_pos(model, corrupted, clean_cache, metric))
print(patching.get_act_patch_attn_head_all_pos_every(model, corrupted, clean_cache, metric))
print(patching.get_act_patch_block_every(model, corrupted, clean_cache, metric))
print(patching.get_act_patch_attn_head_pattern_all_pos(model, corrupted, clean_cache, metric))

# Cell 7: weights
for mode in "QKV":
    print(model.all_composition_scores(mode)[0, :, 1])
OV, QK = model.OV, model.QK
print(OV.shape, OV[1, 0].S, QK[0, 1].norm(), OV[0].eigenvalues.real.sum(-1), OV[1].svd()[1][..., 0])
full_OV = FactoredMatrix(model.W_E @ model.W_V[1, 0], model.W_O[1, 0] @ model.W_U)
print(
    full_OV.AB.argmax(-1).eq(torch.arange(50)).float().mean(), full_OV[:3, :3].AB, (model.OV @ model.W_U)[1, 2].norm()
)
print((model.W_pos @ model.W_Q[0, 0] @ model.W_K[0, 0].T @ model.W_pos.T).diagonal(-1).mean(), model.W_E_pos.shape)
print(SVDInterpreter(model).get_singular_vectors("OV", layer_index=1, head_index=0, num_vectors=2).shape)
print(model.accumulated_bias(2).norm(), model.accumulated_bias(1, mlp_input=True).norm())
embedded = model.embed(tokens) + model.pos_embed(tokens)
print(embedded.norm(), model.blocks[0](embedded).norm(), model.blocks[0].mlp(model.blocks[0].ln2(embedded)).norm())
normed = model.blocks[0].ln1(embedded)
print(
    model.blocks[0].attn(query_input=normed, key_input=normed, value_input=normed).norm(),
    model.input_to_embed(tokens)[0].norm(),
)

# Cell 8: text
text = "Mary gave John a drink . John gave"
print(model.to_tokens(text), model.to_str_tokens(text, prepend_bos=False), model.to_single_token("Mary"))
print(
    model.get_token_position("gave", text), model(text).shape, model(["The cat", "The mat"], return_type="loss").item()
)
print(model.generate("The cat", max_new_tokens=6, temperature=0, verbose=False))
utils.test_prompt("Mary gave John a", "drink", model, prepend_space_to_answer=False)
_, text_cache = model.run_with_cache(text)
print(text_cache.logit_attrs(text_cache.decompose_resid(), tokens="John", incorrect_tokens="Mary")[..., -1])
repeated_text = "The cat sat on The cat sat on"
print(detect_head(model, repeated_text, "previous_token_head"), transformer_lens.evals.sanity_check(model).item())

# Cell 9: saving and loading
other = HookedTransformer(HookedTransformerConfig.from_dict(dict(model.cfg.to_dict())), tokenizer=tokenizer)
other.load_state_dict(model.state_dict())
print(
    torch.equal(other(tokens), model(tokens)),
    len(list(model.hook_points())) == len(model.hook_dict),
    "blocks.0.attn" in model.mod_dict,
)
