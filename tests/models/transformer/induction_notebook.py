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
end, folder = "<|endoftext|>", tempfile.mkdtemp()
PreTrainedTokenizerFast(tokenizer_object=words_to_ids, bos_token=end, eos_token=end, pad_token=end).save_pretrained(
    folder
)
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

# Cell 3: losses, activations, attention patterns
model.eval()
tokens = repeated(4)
logits, loss = model(tokens, return_type="both")
print(loss.item(), model.loss_fn(logits, tokens, per_token=True).sum())
logits, cache = model.run_with_cache(tokens)
print(isinstance(cache, ActivationCache), {name: tuple(activation.shape) for name, activation in cache.items()})
print(cache["pattern", 1].diagonal(1 - 12, dim1=-2, dim2=-1).mean((0, -1)), cache["pattern", 0, "attn"].shape)
print(model.all_head_labels()[0] if callable(model.all_head_labels) else model.all_head_labels[0])
_, single = model.run_with_cache(tokens[0], remove_batch_dim=True)
print(single["q", 0].shape, single["normalized", 1, "ln2"].norm(), single["scale"].mean())


# Cell 4: ablations by hooks
def zero_head(z: torch.Tensor, hook: HookPoint, head: int) -> torch.Tensor:
    z[:, :, head] = 0
    return z


hooks = [(utils.get_act_name("z", 1), lambda z, hook: zero_head(z, hook, 2))]
print((model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks) - loss).item())
model.add_hook("blocks.0.hook_resid_post", lambda x, hook: print(hook.name, hook.layer(), x.norm().item()))
model(tokens, return_type=None)
model.reset_hooks()
residual = model(tokens, stop_at_layer=1)
print(model(residual, start_at_layer=1).sum(), model(residual, start_at_layer=1, tokens=tokens, return_type="loss"))
for switch in ("attn_result", "split_qkv_input", "hook_mlp_in"):
    getattr(model, f"set_use_{switch}")(True)
_, wide = model.run_with_cache(tokens)
for name in ("attn.hook_result", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in"):
    print(name, wide[f"blocks.1.{name}"].shape)
for switch in ("attn_result", "split_qkv_input", "hook_mlp_in"):
    getattr(model, f"set_use_{switch}")(False)

# Cell 5: direct logit attribution, on folded weights
before = model(tokens)
model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
same = (model(tokens).log_softmax(-1) - before.log_softmax(-1)).abs().max() < 1e-5
print(model.cfg.normalization_type, same)
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
print(cache.stack_neuron_results(layer=1, pos_slice=-1).norm(), cache.stack_activation("z").shape)
print(cache.get_neuron_results(1, neuron_slice=5, pos_slice=-1).sum())
print(torch.allclose(model.unembed(model.ln_final(cache["resid_post", -1])), model(tokens), atol=1e-5))

# Cell 6: activation patching
clean, corrupted = tokens[:1], tokens[:1].clone()
corrupted[0, 5] = corrupted[0, 17] = 15
clean_logits, clean_cache = model.run_with_cache(clean)
for sweep in ("attn_head_out_by_pos", "attn_head_all_pos_every", "block_every", "attn_head_pattern_all_pos"):
    print(getattr(patching, f"get_act_patch_{sweep}")(model, corrupted, clean_cache, lambda logits: logits[0, 17, 14]))

# Cell 7: weights
OV, QK = model.OV, model.QK
print(OV.shape, OV[1, 0].S, QK[0, 1].norm(), OV[0].eigenvalues.real.sum(-1), (OV @ model.W_U)[1, 2].norm())
print(FactoredMatrix(model.W_E @ model.W_V[1, 0], model.W_O[1, 0] @ model.W_U).AB.argmax(-1))
print(SVDInterpreter(model).get_singular_vectors("OV", layer_index=1, head_index=0, num_vectors=2).shape)
print(model.accumulated_bias(2).norm(), model.accumulated_bias(1, mlp_input=True).norm())
embedded = model.embed(tokens) + model.pos_embed(tokens)
print(model.blocks[0](embedded).norm(), model.blocks[0].mlp(model.blocks[0].ln2(embedded)).norm())
normed = model.blocks[0].ln1(embedded)
print(model.blocks[0].attn(query_input=normed, key_input=normed, value_input=normed).norm())

# Cell 8: text
text = "Mary gave John a drink . John gave"
print(model.to_tokens(text), model.get_token_position("gave", text), model(["The cat", "The mat"], return_type="loss"))
print(model.generate("The cat", max_new_tokens=6, temperature=0, verbose=False))
utils.test_prompt("Mary gave John a", "drink", model, prepend_space_to_answer=False)
_, text_cache = model.run_with_cache(text)
print(text_cache.logit_attrs(text_cache.decompose_resid(), tokens="John", incorrect_tokens="Mary")[..., -1])
print(detect_head(model, "The cat sat on The cat sat on", "previous_token_head"))
print(transformer_lens.evals.sanity_check(model).item())

# Cell 9: saving and loading
other = HookedTransformer(HookedTransformerConfig.from_dict(dict(model.cfg.to_dict())), tokenizer=tokenizer)
other.load_state_dict(model.state_dict())
points = len(list(model.hook_points())) == len(model.hook_dict)
print(torch.equal(other(tokens), model(tokens)), points, "blocks.0.attn" in model.mod_dict)
