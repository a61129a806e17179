"""What TransformerLens' users call on a model: the notebook as it was written, and the rest of the names."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from mechicl.models import HookedTransformer, HookedTransformerConfig, TransformerConfig
from tests.strategies import random_model

NOTEBOOK = Path(__file__).parent / "induction_notebook.py"
IMPORT = "from transformer_lens import HookedTransformer, HookedTransformerConfig\n"
SMALL: dict[str, Any] = {"n_layers": 3, "d_model": 8, "n_ctx": 6, "d_head": 4, "d_vocab": 11, "dtype": "float64"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_for_transformer_lens_runs_but_for_the_import_line(capsys: pytest.CaptureFixture[str]):
    code = NOTEBOOK.read_text()
    assert code.count(IMPORT) == 1
    code = code.replace(IMPORT, IMPORT.replace("transformer_lens", "mechicl.models"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(code, NOTEBOOK.name, "exec"), {})
    said = capsys.readouterr().out
    assert "LNPre tensor(True)" in said  # processed weights: the same log-probabilities
    assert said.splitlines()[-1] == "True True True"
    assert "False" not in said.replace(" causal 50 21682 False", "")  # attn_only; all else that it checks holds


def test_weights_of_all_layers():
    model = random_model(HookedTransformerConfig(**SMALL))
    for layer, block in enumerate(model.blocks):
        for name in ("b_Q", "b_K", "b_V", "b_O"):
            assert torch.equal(getattr(model, name)[layer], getattr(block.attn, name))
        for name in ("b_in", "b_out"):
            assert torch.equal(getattr(model, name)[layer], getattr(block.mlp, name))
    assert model.W_gate is None
    assert torch.equal(model.W_pos, model.pos_embed.W_pos)
    assert torch.equal(model.W_E_pos, torch.cat([model.W_E, model.W_pos]))
    gated = random_model(HookedTransformerConfig(**SMALL, gated_mlp=True))
    assert gated.W_gate is not None
    assert torch.equal(gated.W_gate[1], gated.blocks[1].mlp.W_gate)
    bare = random_model(HookedTransformerConfig(**SMALL, attn_bias=False, positional_embedding_type="rotary"))
    assert bare.b_Q.shape == (3, 2, 4)
    assert bare.b_O.shape == (3, 8)
    assert not bare.b_K.any()
    with pytest.raises(AttributeError, match="W_pos"):
        _ = bare.W_pos
    points = HookedTransformer(TransformerConfig(x_dim=2, n_context=3, positional_embedding_type="sinusoidal"))
    tokens = torch.zeros(1, 4, 3)
    assert torch.allclose(points.run_with_cache(tokens)[1]["hook_pos_embed"][0], points.W_pos)


def test_labels_and_counts():
    model = HookedTransformer(HookedTransformerConfig(**SMALL))
    labels = ["L0H0", "L0H1", "L1H0", "L1H1", "L2H0", "L2H1"]
    assert model.all_head_labels == labels  # TransformerLens 4
    assert model.all_head_labels() == labels  # and 3
    assert model.n_params_total == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
@pytest.mark.usefixtures("unchecked_types")
def test_composition_scores(mode: Any):
    model = random_model(HookedTransformerConfig(**SMALL))
    scores = model.all_composition_scores(mode)
    for layer in range(3):
        for head in range(2):
            writes = model.W_V[layer, head] @ model.W_O[layer, head]
            for after in range(3):
                for reader in range(2):
                    attn = model.blocks[after].attn
                    if mode == "V":
                        reads = attn.W_V[reader] @ attn.W_O[reader]
                    else:
                        reads = attn.W_Q[reader] @ attn.W_K[reader].T
                        reads = reads if mode == "Q" else reads.T
                    expected = (writes @ reads).norm() / writes.norm() / reads.norm() * (layer < after)
                    torch.testing.assert_close(scores[layer, head, after, reader], expected)
    with pytest.raises(ValueError, match="mode='O' is not one of"):
        model.all_composition_scores("O")  # type: ignore[arg-type]


def test_directions_of_outputs():
    model = random_model(HookedTransformerConfig(**SMALL))
    scaled = model.ln_final.w[:, None] * model.W_U
    tokens = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(model.tokens_to_residual_directions(tokens), scaled.T[tokens])
    for one in (4, torch.tensor(4), torch.tensor([4])):
        assert torch.equal(model.tokens_to_residual_directions(one), scaled[:, 4])
    plain = random_model(HookedTransformerConfig(**SMALL, normalization_type="LNPre"))
    assert torch.equal(plain.tokens_to_residual_directions(tokens), plain.W_U.T[tokens])
    assert torch.equal(plain.output_biases, plain.b_U)


def test_losses_of_resumed_runs():
    model = random_model(HookedTransformerConfig(**SMALL))
    tokens = torch.tensor([[1, 2, 3, 4]])
    residual = model(tokens, stop_at_layer=1)
    resumed = model(residual, start_at_layer=1, tokens=tokens, return_type="loss")
    torch.testing.assert_close(resumed, model(tokens, return_type="loss"))
    with pytest.raises(ValueError, match="tokens= with start_at_layer"):
        model(residual, start_at_layer=1, return_type="loss")
    mask = torch.tensor([[1, 1, 1, 0]])
    masked = model.loss_fn(model(tokens), tokens, mask)
    torch.testing.assert_close(masked, model.loss_fn(model(tokens), tokens, per_token=True)[0, :2].mean())


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("bad", [-1, 7])
def test_losses_of_ids_that_logits_do_not_have_are_refused(bad):
    with pytest.raises(IndexError, match=r"tokens have ids from .* the logits are of 0 to 6"):
        random_model(HookedTransformerConfig(**SMALL)).loss_fn(torch.zeros(1, 3, 7), torch.tensor([[1, bad, 2]]))


@pytest.mark.usefixtures("unchecked_types")
def test_masks_of_padding():
    model = random_model(HookedTransformerConfig(**SMALL))
    tokens, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 1, 1, 0]])
    for same in (mask, mask.bool()):
        loss = model(tokens, return_type="loss", attention_mask=same)
        torch.testing.assert_close(loss, model(tokens[:, :3], return_type="loss"))
    assert torch.equal(model(tokens, attention_mask=mask, padding_side="right"), model(tokens))
    with pytest.raises(ValueError, match="only padding on the right"):
        model(tokens, attention_mask=mask.flip(1))
    with pytest.raises(ValueError, match="padding_side='left'"):
        model(tokens, padding_side="left")
    both = random_model(HookedTransformerConfig(**SMALL, attention_dir="bidirectional"))
    with pytest.raises(ValueError, match="only padding on the right of causal keys"):
        both(tokens, attention_mask=mask)
    assert torch.equal(both(tokens, attention_mask=torch.ones_like(mask)), both(tokens))


def test_products_by_their_names():
    model = random_model(HookedTransformerConfig(**SMALL))
    torch.testing.assert_close(model.blocks[1].attn.OV.AB, model.OV[1].AB)
    torch.testing.assert_close(model.blocks[1].attn.QK.AB, model.QK[1].AB)


def test_other_fields_of_their_configs():
    cfg: Any = HookedTransformerConfig(**SMALL, model_name="mine")
    assert (cfg.model_name, cfg.final_rms, cfg.use_attn_scale, cfg.n_devices) == ("custom", False, True, 1)
    with pytest.raises(AttributeError, match="no field 'no_such'"):
        _ = cfg.no_such
    assert copy.deepcopy(cfg) == cfg


def test_configs_in_other_forms():
    cfg = HookedTransformerConfig(**SMALL)
    assert cfg.dtype == cfg.torch_dtype == torch.float64
    assert HookedTransformerConfig.from_dict(cfg.to_dict()) == cfg
    assert HookedTransformerConfig.unwrap(cfg) is cfg
    assert HookedTransformerConfig.unwrap(SMALL) == HookedTransformerConfig(**(SMALL | {"dtype": torch.float64})) == cfg
