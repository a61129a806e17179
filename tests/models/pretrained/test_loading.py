"""`HookedTransformer.from_pretrained`: folders, names, checkpoints, models in memory, TransformerLens' own format."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.pretrained import lens_files, loading
from mechicl.models.pretrained.folders import official_name
from mechicl.models.pretrained.loading import checkpoint_revision
from tests.analysis.language.conftest import make_tokenizer
from tests.analysis.language.test_smollm2 import FOLDER
from tests.families import D_VOCAB, token_ids
from tests.models.pretrained.variants import make_variant

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
Weights = dict[str, Tensor]
open_plain: Any = HookedTransformer.from_pretrained_no_processing


@pytest.fixture
def saved(tmp_path) -> tuple[Path, Any]:
    """A folder as `save_pretrained` writes it, and its model."""
    model = make_variant("GPT-2")
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


@torch.no_grad()
def test_a_folder_is_opened_with_and_without_processing(saved):
    folder, theirs = saved
    tokens = token_ids(0)
    plain, processed = open_plain(folder), HookedTransformer.from_pretrained(folder)
    expected = theirs(tokens).logits
    torch.testing.assert_close(plain(tokens), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(processed(tokens).log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert (plain.cfg.normalization_type, processed.cfg.normalization_type) == ("LN", "LNPre")
    assert plain.to_tokens("a", prepend_bos=False).tolist() == [
        make_tokenizer()("a", add_special_tokens=False).input_ids
    ]
    assert not plain.training
    assert all(weight.requires_grad for weight in plain.parameters())


def test_matrices_are_views_of_the_loaded_tensors(saved):
    weights = dict(open_plain(saved[0]).named_parameters())
    fused = [weights[f"blocks.0.attn.W_{letter}"].untyped_storage().data_ptr() for letter in "QKV"]
    assert len(set(fused)) == 1
    assert "unembed.W_U" not in weights


@torch.no_grad()
def test_a_model_in_memory_is_copied():
    theirs, tokens = make_variant("GPT-NeoX"), token_ids(0)
    expected = theirs(tokens).logits
    ours = HookedTransformer.from_pretrained("mine", hf_model=theirs, tokenizer=make_tokenizer())
    torch.testing.assert_close(ours(tokens).log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=1e-4)
    for weight in open_plain("mine", hf_model=theirs, tokenizer=make_tokenizer()).parameters():
        weight.zero_()
    assert torch.equal(theirs(tokens).logits, expected)


@torch.no_grad()
def test_the_first_layers_and_positions(saved):
    folder, theirs = saved
    short = open_plain(folder, first_n_layers=2, n_ctx=7)
    assert (short.cfg.n_layers, short.cfg.n_ctx, len(short.W_pos)) == (2, 7, 7)
    hidden = theirs(token_ids(0), output_hidden_states=True).hidden_states
    stream = short.run_with_cache(token_ids(0))[1]["blocks.1.hook_resid_post"]
    torch.testing.assert_close(stream, hidden[2], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="first_n_layers=4, but the model has 3 layers"):
        open_plain(folder, first_n_layers=4)
    with pytest.raises(ValueError, match=r"wpe.weight \[16, 8\] does not fit pos_embed.W_pos \[17, 8\]"):
        open_plain(folder, n_ctx=17)


@pytest.mark.parametrize("name", ["GPT-Neo", "Mistral", "Qwen2, windows", "Gemma 2", "Gemma 3", "Phi-3, window"])
@pytest.mark.parametrize("n_layers", [1, 2])
@torch.no_grad()
def test_the_first_layers_of_models_with_windows(name: str, n_layers: int):
    theirs, tokens = make_variant(name), token_ids(0, n_pos=12)
    short = open_plain("mine", hf_model=theirs, first_n_layers=n_layers, tokenizer=make_tokenizer())
    hidden = theirs(tokens, output_hidden_states=True).hidden_states[n_layers]
    stream = short.run_with_cache(tokens)[1][f"blocks.{n_layers - 1}.hook_resid_post"]
    torch.testing.assert_close(stream, hidden, atol=1e-4, rtol=1e-4)


def test_types_and_devices(saved):
    folder, theirs = saved
    theirs.to(torch.bfloat16).save_pretrained(folder)
    assert open_plain(folder).cfg.dtype == torch.float32
    assert {w.dtype for w in open_plain(folder, dtype=None).parameters()} == {torch.bfloat16}
    assert HookedTransformer.from_pretrained(folder, dtype="float16").cfg.dtype == torch.float16
    assert open_plain(folder, torch_dtype=torch.float64).cfg.dtype == torch.float64
    on_meta = open_plain(folder, device="meta")
    assert {w.device.type for w in on_meta.parameters()} == {"meta"}
    assert {n: w.shape for n, w in on_meta.named_parameters()} == {
        n: w.shape for n, w in open_plain(folder).named_parameters()
    }
    assert open_plain(folder, device_map="cpu").cfg.device == "cpu"
    options: dict[str, Any]
    for options, message in (
        ({"dtype": "int8"}, "dtype must be one of float32, .*, got int8"),
        ({"n_devices": 2}, "n_devices=2"),
        ({"load_in_8bit": True}, "load_in_8bit: quantized weights are not read"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"hf_model": theirs, "device_map": "cpu"}, r"\['device_map'\] are for weights that transformers loads"),
        ({"hf_model": torch.nn.Linear(2, 2)}, "hf_model must be a model of transformers, got Linear"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            open_plain("mine" if "hf_model" in options else folder, **options)


def test_defaults_of_the_first_token(saved):
    assert open_plain(saved[0]).cfg.default_prepend_bos
    assert not open_plain(saved[0], default_prepend_bos=False).cfg.default_prepend_bos
    assert not open_plain("mine", hf_model=make_variant("BLOOM"), tokenizer=make_tokenizer()).cfg.default_prepend_bos


# ---- a real model ----
PEAK = """
import resource, sys, torch
from transformers import AutoModelForCausalLM
from mechicl.models import HookedTransformer
if sys.argv[2] == "theirs":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
else:
    model = HookedTransformer.from_pretrained_no_processing(sys.argv[1])
for weight in model.parameters():
    weight.sum()  # reads the file, which is mapped
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_of(kind: str) -> int:
    arguments = [sys.executable, "-W", "ignore", "-c", PEAK, str(FOLDER), kind]
    return int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="SmolLM2 is not there: make lm fetches it (93 MB)")
@torch.no_grad()
def test_smollm2():
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    plain = open_plain(FOLDER)
    tokens = plain.to_tokens(["The capital of France is Paris.", "a, b, c, d, e, f"])
    expected = theirs(tokens).logits
    torch.testing.assert_close(plain(tokens), expected, atol=1e-4, rtol=0)
    processed = HookedTransformer.from_pretrained(FOLDER)(tokens)
    torch.testing.assert_close(processed.log_softmax(-1), expected.log_softmax(-1), atol=1e-3, rtol=0)
    assert peak_of("ours") <= 1.1 * peak_of("theirs")


# ---- names and checkpoints on the hub ----
@pytest.mark.parametrize(("name", "official"), [
    ("gpt2-small", "gpt2"), ("Pythia-160M", "EleutherAI/pythia-160m"),
    ("tiny-stories-33M", "roneneldan/TinyStories-33M"),
    ("attn-only-1l", "NeelNanda/Attn_Only_1L512W_C4_Code"), ("eleutherai/pythia-160m", "EleutherAI/pythia-160m"),
    ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
])  # fmt: skip
def test_names_of_transformer_lens(name, official):
    assert official_name(name) == official


@pytest.fixture
def hub(monkeypatch) -> list[tuple[str, dict[str, Any]]]:
    """A stand-in for the hub: what is asked of it."""
    asked: list[tuple[str, dict[str, Any]]] = []
    model = make_variant("GPT-NeoX")
    report = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}

    def answer(value: Any) -> Any:
        def from_pretrained(name: str, **options: Any) -> Any:
            asked.append((name, options))
            return value

        return from_pretrained

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", answer(model.config))
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", answer((model, report)))
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", answer(make_tokenizer()))
    return asked


@pytest.mark.parametrize(("name", "which", "revision"), [
    ("pythia-160m", {"checkpoint_value": 1000}, "step1000"), ("pythia-160m", {"checkpoint_index": 0}, "step0"),
    ("pythia-160m", {"checkpoint_index": -1, "checkpoint_value": 7}, "step143000"),
    ("pythia-70m-v0", {"checkpoint_index": 0}, "step1000"), ("pythia-70m", {"revision": "step16"}, "step16"),
    ("stanford-gpt2-small-a", {"checkpoint_label": 50_000}, "checkpoint-50000"), ("pythia-70m", {}, None),
])  # fmt: skip
def test_a_checkpoint_is_asked_of_the_hub(hub, name, which, revision):
    model = open_plain(name, token="secret", cache_dir="there", **which)
    assert model.cfg.n_layers == 3
    for asked, options in hub:
        assert (asked, options.get("revision"), options["token"]) == (official_name(name), revision, "secret")
        assert (options["cache_dir"], options["trust_remote_code"]) == ("there", False)
    assert len(hub) == 3


def test_checkpoints_that_do_not_exist(hub):
    with pytest.raises(ValueError, match=r"checkpoint_value=3 is not one of EleutherAI/pythia-70m: 0, 1 ... 143000"):
        open_plain("pythia-70m", checkpoint_value=3)
    with pytest.raises(ValueError, match="checkpoint_index=154, but EleutherAI/pythia-70m has 154 checkpoints"):
        checkpoint_revision("EleutherAI/pythia-70m", 154, None)
    with pytest.raises(ValueError, match="gpt2 has no checkpoints"):
        open_plain("gpt2", checkpoint_value=3)
    with pytest.raises(ValueError, match="no revision="):
        open_plain("pythia-70m", checkpoint_value=1, revision="main")
    with pytest.raises(ValueError, match="give one of them"):
        open_plain("pythia-70m", checkpoint_value=1, checkpoint_label=1)
    assert not hub


# ---- TransformerLens' own format ----
SIZES: dict[str, Any] = {
    "d_model": 8, "n_layers": 2, "d_mlp": 12, "d_head": 4, "n_heads": 2, "n_ctx": 9, "d_vocab": D_VOCAB,
}  # fmt: skip


def write_lens(folder: Path, weights: Weights, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | {"act_fn": "gelu", "attn_only": False} | config))
    torch.save(weights, folder / "final.pth")
    return folder


@pytest.mark.parametrize("config", [
    {"act_fn": "solu_ln", "normalization": "LNPre"},
    {"attn_only": True, "normalization_type": "LN", "shortformer_pos": True},
    {"normalization": "LN", "final_rms": True},
    {"normalization_type": "LN", "parallel_attn_mlp": True, "output_logits_soft_cap": 0.5, "eps": 0.3, "lr": 0.1},
    {"normalization_type": "LN", "attention_dir": "bidirectional", "attn_scale": 5.0, "dtype": "torch.float64"},
    {"normalization_type": "LN", "use_local_attn": True, "window_size": 3, "attn_types": ["global", "local"]},
])  # fmt: skip
@torch.no_grad()
def test_models_of_transformer_lens(tmp_path, config):
    fields: dict[str, Any] = SIZES | {"act_fn": "gelu", "attn_only": False} | config
    fields["normalization_type"] = fields.pop("normalization", fields.get("normalization_type"))
    if fields.pop("shortformer_pos", False):
        fields["positional_embedding_type"] = "shortformer"
    fields["d_mlp"] = None if fields["attn_only"] else 12
    described = {fields.pop(name, None) for name in ("lr", "dtype")}  # the training, and the file
    assert described
    fields |= {"keys": "full"} if fields.pop("attention_dir", "causal") == "bidirectional" else {}
    model = HookedTransformer(TransformerConfig(**fields), seed=1)
    weights = {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}
    weights["unembed.b_U"] = torch.zeros(D_VOCAB)
    model.load_state_dict(weights)
    mask = {"blocks.0.attn.mask": torch.ones(9, 9, dtype=torch.bool), "blocks.0.attn.IGNORE": torch.tensor(-1e5)}
    written = {name: weight for name, weight in weights.items() if name != "unembed.b_U"} | mask
    folder = write_lens(tmp_path / "own", written, **config)
    assert torch.equal(open_plain(folder)(token_ids(0)), model(token_ids(0)))
    assert open_plain(folder, first_n_layers=1).cfg.n_layers == 1
    del written["blocks.1.attn.W_Q"]
    with pytest.raises(ValueError, match=r"blocks.1.attn.W_Q"):
        open_plain(write_lens(tmp_path / "spoilt", written, **config))


@torch.no_grad()
def test_othello_gpt_in_the_names_of_mingpt(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {"tok_emb.weight": draw(D_VOCAB, 8), "pos_emb": draw(1, 9, 8), "head.weight": draw(D_VOCAB, 8)}
    weights |= {f"ln_f.{kind}": draw(8) for kind in ("weight", "bias")}
    shapes = {"ln1": (8,), "ln2": (8,), "mlp.0": (12, 8), "mlp.2": (8, 12)}
    shapes |= {f"attn.{name}": (8, 8) for name in ("query", "key", "value", "proj")}
    for layer in range(2):
        for name, shape in shapes.items():
            weights[f"blocks.{layer}.{name}.weight"] = draw(*shape)
            weights[f"blocks.{layer}.{name}.bias"] = draw(shape[0])
        weights[f"blocks.{layer}.attn.mask"] = torch.ones(1, 1, 9, 9)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (8,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    tokens = token_ids(0)
    stream = weights["tok_emb.weight"][tokens] + weights["pos_emb"][:, : tokens.shape[1]]
    for layer in range(2):
        block = f"blocks.{layer}"
        read = norm(stream, f"{block}.ln1")
        q, k, v = (
            linear(read, f"{block}.attn.{name}").unflatten(-1, (2, 4)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        stream = stream + linear(z, f"{block}.attn.proj")
        stream = stream + linear(F.gelu(linear(norm(stream, f"{block}.ln2"), f"{block}.mlp.0")), f"{block}.mlp.2")
    expected = norm(stream, "ln_f") @ weights["head.weight"].T
    folder = write_lens(tmp_path / "othello", weights, architecture="mingpt", normalization="LN")
    torch.testing.assert_close(open_plain(folder)(tokens), expected, atol=1e-5, rtol=1e-5)
    processed = HookedTransformer.from_pretrained(folder)(tokens)
    torch.testing.assert_close(processed.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_the_first_models_are_transposed(tmp_path):
    model = HookedTransformer(TransformerConfig(**SIZES, act_fn="gelu", normalization_type="LN"), seed=1)
    old = {name.replace("ln_final", "norm").replace("ln", "norm"): w for name, w in model.state_dict().items()}
    old = {name: w.mT if "W_" in name else w for name, w in old.items()}
    folder = write_lens(tmp_path / "SoLU_2L_v10_old", old, normalization="LN")
    assert torch.equal(open_plain(folder)(token_ids(0)), model(token_ids(0)))


def test_files_and_checkpoints_of_transformer_lens(tmp_path, monkeypatch):
    model = HookedTransformer(TransformerConfig(**SIZES, act_fn="gelu", normalization_type="LN"), seed=1)
    folder = write_lens(tmp_path / "own", model.state_dict(), normalization="LN")
    (folder / "checkpoints").mkdir()
    for step in (10, 200, 3000):
        fresh = HookedTransformer(model.cfg, seed=step)
        torch.save(fresh.state_dict(), folder / "checkpoints" / f"own_{step}.pth")
    for which in ({"checkpoint_index": 1}, {"checkpoint_value": 200}):
        assert torch.equal(open_plain(folder, **which).W_E, HookedTransformer(model.cfg, seed=200).W_E)
    with pytest.raises(ValueError, match=r"checkpoint_value=11 is not one of .*own: \[10, 200, 3000\]"):
        open_plain(folder, checkpoint_value=11)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.*")]
    monkeypatch.setattr(lens_files.HfApi, "list_repo_files", lambda api, name, **options: names)
    monkeypatch.setattr(lens_files, "hf_hub_download", lambda name, file, **options: str(folder / file))
    opened = open_plain("solu-1l", checkpoint_index=-1, local_files_only=True)
    assert torch.equal(opened.W_E, HookedTransformer(model.cfg, seed=3000).W_E)
    torch.save({name: weight.bfloat16() for name, weight in model.state_dict().items()}, folder / "final.pth")
    assert (open_plain(folder, dtype=None).cfg.dtype, open_plain(folder).cfg.dtype) == (torch.bfloat16, torch.float32)
    torch.save({"blocks.0.attn.W_Q": print}, folder / "final.pth")
    with pytest.raises(ValueError, match="not a checkpoint of tensors and plain data"):
        open_plain(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_or_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="device='cuda' cannot be used"):
        open_plain(tmp_path, device="cuda")
    with pytest.raises(ValueError, match=r"model_name=.*nothing' is not a folder"):
        open_plain(tmp_path / "nothing")
