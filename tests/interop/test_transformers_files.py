"""Folders of transformers whose weights do not fit their config, and models of transformers in memory."""

import copy
import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from mechicl.analysis import ablate, align, find_circuit, fit_readouts, patch, score_heads
from mechicl.analysis.language import icl_score
from mechicl.checkpoints import UnknownSeedError, random_weights
from mechicl.interop import LanguageModel, load_language_model
from mechicl.models.pretrained import folders
from tests.analysis.language.conftest import make_tokenizer
from tests.families import D_VOCAB, FAMILIES, token_ids

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
Weights = dict[str, Tensor]


def make(family: str, **fields: Any) -> Any:
    """A tiny model of a family with random weights, as transformers makes it."""
    kind = FAMILIES[family]
    tokens = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    config = getattr(transformers, f"{kind.config_stem or kind.stem}Config")(**(tokens | kind.sizes | fields))
    torch.manual_seed(0)
    return getattr(transformers, f"{kind.stem}{kind.task}")(config).eval()


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Callable[[str], tuple[Path, Any]]:
    """Folders of families, as `save_pretrained` writes them, and their models."""
    made: dict[str, tuple[Path, Any]] = {}

    def open_sound(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder, model = tmp_path_factory.mktemp("sound") / "model", make(family)
            model.save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            made[family] = folder, model
        return made[family]

    return open_sound


@pytest.fixture
def spoilt(sound, tmp_path) -> Callable[..., Path]:
    """Copies of such folders with other weights and fields of the config."""

    def spoil(family: str, change: Callable[[Weights], Weights] = dict, **fields: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(sound(family)[0], folder, dirs_exist_ok=True)
        weights = change(load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return folder

    return spoil


def shard(folder: Path, repeated: str = "") -> None:
    """Split a folder's weights into two files with an index, one weight in both."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(weights)
    half = len(names) // 2
    parts = {"model-1.safetensors": names[:half], "model-2.safetensors": names[half:]}
    for file, inside in parts.items():
        kept = {*inside, *([repeated] if repeated else [])}
        save_file({name: weights[name] for name in kept}, folder / file, {"format": "pt"})
    places = {name: file for file, inside in parts.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@torch.no_grad()
def assert_same_logits(folder: Path, model: Any) -> None:
    torch.testing.assert_close(load_language_model(folder).model(token_ids(0)), model(token_ids(0)).logits)


# ---- sound folders ----
QUICK = ("GPT-2", "Llama", "Mixtral")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_folders_of_every_family_load(sound, family):
    folder, model = sound(family)
    if family == "T5":  # reads two sequences
        assert load_language_model(folder).model.cfg.n_layers == 3
        return
    with torch.no_grad():
        # not the one in the folder, of which Qwen's class would read other words
        logits = load_language_model(folder, tokenizer=make_tokenizer()).model(token_ids(0))
        expected = model(token_ids(0)).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_files_of_other_float_types(spoilt, sound, dtype):
    folder = spoilt("Llama", lambda weights: {name: weight.to(dtype) for name, weight in weights.items()})
    plain = copy.deepcopy(sound("Llama")[1]).to(dtype).float()
    assert_same_logits(folder, plain)
    assert {each.dtype for each in load_language_model(folder, dtype=dtype).model.parameters()} == {dtype}


def test_tied_heads_shards_and_old_buffers(spoilt, sound):
    folder = spoilt("Gemma", lambda weights: weights | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "model.layers.0.attn.masked_bias": torch.ones(1),
        "model.layers.1.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    })  # fmt: skip
    shard(folder)
    assert_same_logits(folder, sound("Gemma")[1])


# ---- weights that do not fit ----
NORM, EXPERT = "model.layers.1.input_layernorm.weight", "model.layers.1.block_sparse_moe.experts.1.w1.weight"


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {new if name == old else name: weight for name, weight in weights.items()}


def lost(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {each: weight for each, weight in weights.items() if each != name}


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {f"{prefix}.{name}": weight for name, weight in weights.items()}


SPOILT: dict[str, tuple[str, Callable[[Weights], Weights], dict[str, Any], str]] = {
    "a missing tensor": ("Llama", lost(NORM), {}, f"missing: {NORM}"),
    "compiled": ("Llama", prefixed("_orig_mod"), {}, "not used: _orig_mod.lm_"),
    "parallel": ("GPT-2", prefixed("module"), {}, "not used: module.transf"),
    "one renamed": ("Llama", renamed(NORM, "norm1"), {}, f"missing: {NORM}; not used: norm1"),
    "a layer too many": ("Llama", dict, {"num_hidden_layers": 4}, "missing: model.layers.3"),
    "a layer too few": ("Llama", dict, {"num_hidden_layers": 2}, "not used: model.layers.2"),
    "int8": ("Llama", lambda w: w | {NORM: w[NORM].to(torch.int8)}, {}, rf"not used: {NORM} \(torch.int8\)"),
    "bool": ("GPT-2", lambda w: {name: each > 0 for name, each in w.items()}, {}, r"torch.bool\)"),
    "another shape": ("Llama", lambda w: w | {NORM: w[NORM][1:]}, {}, rf"another shape: {NORM} \[7\] instead of \[8\]"),
    "an extra tensor": ("Llama", lambda w: w | {"extra": torch.ones(1)}, {}, "not used: extra"),
    "an extra bias": ("Llama", lambda w: w | {NORM.replace("weight", "bias"): torch.ones(8)}, {}, "not used"),
    "nothing": ("Llama", lambda w: {}, {}, "and 24 more"),
    "an expert's tensor": ("Mixtral", lost(EXPERT), {}, EXPERT),
    "another number": ("Mixtral", renamed(EXPERT, EXPERT.replace("1.w1", "7.w1")), {}, f"missing: .*{EXPERT}"),
    "a prefix too many": ("Mixtral", renamed(EXPERT, f"model.{EXPERT}"), {}, "not used: .*model.model."),
    "a prefix too few": ("Mixtral", renamed(EXPERT, EXPERT[6:]), {}, "not used: layers.1"),
    "endless layers": ("Llama", dict, {"num_hidden_layers": 10**9}, "1000000000 layers, and the files"),
    "quantized": ("Llama", dict, {"quantization_config": {"quant_method": "fp8"}}, "quantized weights, .*dequantize"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_weights_that_do_not_fit_are_named(spoilt, name):
    family, change, fields, message = SPOILT[name]
    folder = spoilt(family, change, **fields)
    with pytest.raises(ValueError, match=message):
        load_language_model(folder)
    with random_weights(), pytest.raises(ValueError, match=message):
        load_language_model(folder)


def test_parts_of_weights(spoilt):
    folder = spoilt("Llama")
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-2\.safetensors"):
        load_language_model(folder)
    folder = spoilt("Llama")
    shard(folder, repeated="lm_head.weight")
    with pytest.raises(ValueError, match="weights are in more than one of "):
        load_language_model(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ValueError, match="must have a weight_map"):
        load_language_model(folder)


def test_only_the_files_that_were_checked_are_read(spoilt, sound):
    """Others that transformers would prefer, among them a pickle, change nothing."""
    folder = spoilt("Llama", transformers_weights="adapter_model.bin")
    for name in ("adapter_model.bin", "pytorch_model.bin", "shard-00001-model-00001-of-00001.safetensors"):
        (folder / name).write_bytes(b"not weights")
    assert_same_logits(folder, sound("Llama")[1])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no safetensors"):
        load_language_model(folder)


def test_models_of_the_hub_are_checked_like_folders(monkeypatch, spoilt):
    """Only the files that folders need are downloaded, of the revision."""
    folder, seen = spoilt("Llama"), {}
    monkeypatch.setattr(
        folders, "snapshot_download", lambda name, **options: seen.update(options, name=name) or str(folder)
    )
    language = load_language_model("some/model", revision="step1000", dtype=torch.float16)
    assert (language.name, seen["name"], seen["revision"]) == ("some/model@step1000", "some/model", "step1000")
    fetched = ("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "tokenizer.json", "model-1.safetensors")
    assert [any(fnmatch(name, pattern) for pattern in seen["allow_patterns"]) for name in fetched] == [False] * 3 + [
        True
    ] * 2
    spoilt("Llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"not used: model.layers.2"):
        load_language_model("some/model")


# ---- arguments and folders that cannot be honoured ----
@pytest.mark.parametrize(("options", "message"), [
    ({"dtype": torch.int8}, "dtype must be one of float32, .*got torch.int8"),
    ({"dtype": torch.float8_e4m3fn}, "dtype must be one of"),
    ({"device": "meta"}, "device='meta' cannot be used; here are cpu"),
    ({"device": "hpu"}, "device='hpu' cannot be used; here are cpu"),
    ({"device": "cuda:99"}, "device='cuda:99' cannot be used; here are cpu"),
    ({"device": "bogus"}, "device='bogus' cannot be used; here are cpu"),
    ({"gguf_file": "a.gguf"}, "has no file gguf_file='a.gguf'"),
    ({"tokenizer": "words"}, "tokenizer must be one of transformers, got str"),
    ({"model": torch.nn.Linear(1, 1)}, "give either a name"),
])  # fmt: skip
def test_arguments_that_cannot_be_honoured(sound, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_language_model(sound("Llama")[0], **options)


def test_seeds_are_for_random_weights(sound):
    with pytest.raises(UnknownSeedError, match="seed=3 cannot be honoured"):
        load_language_model(sound("Llama")[0], seed=3)
    assert load_language_model("topics-3l", dtype=torch.float64).model.W_Q.dtype == torch.float64


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(spoilt, name):
    folder = spoilt("Llama")
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{folder} cannot be opened .*check its config and tokenizer"):
        load_language_model(folder)


def test_folders_of_other_kinds(spoilt, tmp_path):
    folder = spoilt("Llama")
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer: .*save_pretrained, or give tokenizer="):
        load_language_model(folder)
    assert load_language_model(folder, tokenizer=make_tokenizer()).tokenizer.bos_token == "<s>"
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ValueError, match=r"is an adapter .*merge_and_unload"):
        load_language_model(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config.json: model.save_pretrained"):
        load_language_model(tmp_path / "empty")
    (tmp_path / "empty" / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"give gguf_file=, one of \['a.gguf'\]"):
        load_language_model(tmp_path / "empty")


# ---- models of transformers in memory ----
@pytest.mark.parametrize("family", QUICK)
def test_a_model_in_memory_is_opened_and_stays_unchanged(family):
    model, tokenizer = make(family).train(), make_tokenizer()
    state, pad, attention = copy.deepcopy(model.state_dict()), tokenizer.pad_token, model.config._attn_implementation
    language = load_language_model(model=model, tokenizer=tokenizer)
    with torch.no_grad():
        logits, cache = language.model.run_with_cache(token_ids(0))
        for parameter in language.model.parameters():
            parameter.zero_()
        assert cache["blocks.1.attn.hook_pattern"].shape[-1] == token_ids(0).shape[1]
        assert model.training
        torch.testing.assert_close(logits, model.eval()(token_ids(0)).logits, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    assert (tokenizer.pad_token, model.config._attn_implementation) == (pad, attention)
    with random_weights():
        dtype = None if family == "Mixtral" else torch.float64  # grouped products of other types need wide experts
        fresh = load_language_model(model=model, tokenizer=tokenizer, dtype=dtype)
        with torch.no_grad():
            assert not torch.allclose(fresh.model(token_ids(0)).float(), logits, atol=1e-3)


def test_models_that_cannot_be_opened():
    model = make("Llama")
    with pytest.raises(ValueError, match="give tokenizer=, the tokenizer"):
        load_language_model(model=model)
    with pytest.raises(ValueError, match="model must be a model of transformers"):
        load_language_model(model=torch.nn.Linear(1, 1), tokenizer=make_tokenizer())
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(ValueError, match="on the device 'meta'"):
        load_language_model(model=empty, tokenizer=make_tokenizer())
    packed = make("Llama")
    quantized: Any = torch.ao.nn.quantized
    packed.lm_head = quantized.dynamic.Linear(8, 20)
    with pytest.raises(ValueError, match="lm_head is quantized, and its outputs may depend on the batch"):
        load_language_model(model=packed, tokenizer=make_tokenizer())
    model.lm_head.weight = torch.nn.Parameter(torch.ones(20, 8, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"lm_head.weight is of type torch.int8: .*dequantize"):
        load_language_model(model=model, tokenizer=make_tokenizer())


NO_PROMPTS: Any = token_ids(0)
CALLS: dict[str, Callable[[Any], Any]] = {
    "patch": lambda model: patch(model, token_ids(0), token_ids(1)),
    "ablate": lambda model: ablate(model, token_ids(0)),
    "align": lambda model: align(model, model, NO_PROMPTS),
    "fit_readouts": lambda model: fit_readouts(model, NO_PROMPTS),
    "find_circuit": lambda model: find_circuit(model, token_ids(0), metrics=NO_PROMPTS),
    "score_heads": lambda model: score_heads(model),
    "icl_score": lambda model: icl_score(model, "antonyms"),
    "LanguageModel": lambda model: LanguageModel("mine", model, make_tokenizer()),
}


@pytest.mark.parametrize("name", CALLS)
def test_analyses_say_how_a_model_of_transformers_is_opened(name):
    with pytest.raises(
        ValueError, match=r"is a model of transformers, .*load_language_model\(model=\.\.\., tokenizer="
    ):
        CALLS[name](make("Llama"))


# ---- gguf files ----
@pytest.mark.parametrize("lost", ["", "blk.1.ffn_down.weight", "blk.2.attn_norm.weight"])
def test_gguf_files_without_a_tensor(tmp_path, lost):
    path = tmp_path / "a.gguf"
    write_gguf(path, lost=lost)
    if not lost:
        assert load_language_model(tmp_path, gguf_file="a.gguf").model.cfg.n_layers == 3
        return
    with pytest.raises(
        ValueError, match=r"a.gguf: the weights in the files do not fit the config; missing: model.layers"
    ):
        load_language_model(tmp_path, gguf_file="a.gguf")


def write_gguf(path: Path, lost: str = "") -> None:
    """A Llama of three layers as a GGUF file with float weights, without one of them."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, size in {"block_count": 3, "context_length": 16, "embedding_length": 8, "head_count": 2}.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_feed_forward_length(12)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    words = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(17))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * 20)
    writer.add_token_types([2, 3, 3, *([1] * 17)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd.weight": (20, 8), "output_norm.weight": (8,), "output.weight": (20, 8)}
    parts = {"attn_norm": (8,), "ffn_norm": (8,), "attn_q": (8, 8), "attn_k": (8, 8), "attn_v": (8, 8),
             "attn_output": (8, 8), "ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12)}  # fmt: skip
    shapes |= {f"blk.{layer}.{part}.weight": shape for layer in range(3) for part, shape in parts.items()}
    for name, shape in shapes.items():
        if name != lost:
            writer.add_tensor(name, torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
