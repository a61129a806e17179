"""Hostile files of other projects give a named error, quickly, in little memory."""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from mechicl.base.outside_files import MOST_STRUCTURE, MOST_YAML, read_torch_file, read_yaml
from mechicl.interop import load_garg
from mechicl.interop.garg import load_garg_state
from tests.bounds import bounded, make_no_file

# ---- YAML ----
NINE = [", ".join([f"*a{i}"] * 9) for i in range(11)]
ALIASES = "\n".join(["a0: &a0 [x]", *(f"a{i + 1}: &a{i + 1} [{nine}]" for i, nine in enumerate(NINE))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{i + 1}: &a{i + 1} {{<<: [{nine}]}}" for i, nine in enumerate(NINE))])


@pytest.mark.parametrize(("text", "message"), [
    (ALIASES, r"references \(\*a0\)"),
    (MERGES, r"references \(\*a0\)"),
    ("&a [*a]", r"references \(\*a\)"),
    ("model: {<<: {n_embd: 3}}", "merging mappings"),
    ("a: " + "[" * 20_000, "not plain YAML: it has more than 500 brackets"),
    ("a: " + "9" * 20_000, "not plain YAML"),
    ("a: 2001-99-99", "not plain YAML"),
    ("a: !!bool perhaps", "not plain YAML"),
    ("a: !!int ''", "not plain YAML"),
    ("a: !!python/object/apply:os.getcwd []", "not plain YAML"),
    ("a: \x00", "not plain YAML"),
    ("x" * (MOST_YAML + 1), "read up to 32,768"),
], ids=lambda value: value[:12])  # fmt: skip
def test_hostile_yaml_is_refused(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with bounded(), pytest.raises(ValueError, match=f"config.yaml .*{message}"):
        read_yaml(path)


def test_the_largest_yaml_takes_bounded_time(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("[" + "1," * (MOST_YAML // 2 - 1) + "]")
    with bounded():
        assert read_yaml(path) == [1] * (MOST_YAML // 2 - 1)


def test_plain_yaml_is_what_the_library_reads(tmp_path):
    data = {"model": {"n_embd": 3, "family": "gpt2", "parts": [1, 2.5, None, True, "a: b"]}, "when": "2001-01-01"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(data))
    assert read_yaml(tmp_path / "config.yaml") == data


# ---- checkpoints of torch ----
def archive(path: Path, structure: bytes, parts: dict[str, bytes] | None = None, compress: bool = False) -> Path:
    """A file in torch's format with a structure of one's own."""
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, data in {"data.pkl": structure, "version": b"3\n", "byteorder": b"little", **(parts or {})}.items():
            file.writestr(f"state/{name}", data)
    return path


class Call:
    """Pickled as a call of something."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize(("structure", "message"), [
    (pickle.dumps(Call(os.getcwd), 2), "getcwd"),
    (b"\x80\x02ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R.", "FloatStorage|REDUCE|reduce|callable"),
    (b"(" * MOST_STRUCTURE + b"x", r"data\.pkl has 1,048,577 bytes"),
    (b"", ""),
], ids=["class", "storage", "size", "empty"])  # fmt: skip
def test_structures_other_than_tensors_and_plain_data_are_refused(tmp_path, structure, message):
    path = archive(tmp_path / "state.pt", structure)
    with bounded(), pytest.raises(ValueError, match=f"state.pt is not a checkpoint of tensors.*({message})"):
        read_torch_file(path)


BASE = torch.zeros(10**4)


def saved(path: Path, data) -> Path:
    torch.save(data, path)
    return path


@pytest.mark.parametrize(("data", "message"), [
    ({"a": torch.zeros(1).expand(10**6, 10**4)}, "repeat or share"),
    ({str(i): BASE.view(-1) for i in range(100)}, "repeat or share"),
    ({"a": torch.zeros(3).to_sparse()}, "sparse"),
    ({"a": torch.zeros(10**6, device="meta")}, "meta"),
    ({"a": torch.complex(torch.zeros(2), torch.zeros(2))}, "complex"),
])  # fmt: skip
def test_tensors_with_more_elements_than_the_file_are_refused(tmp_path, data, message):
    path = saved(tmp_path / "state.pt", data)
    with bounded(), pytest.raises(ValueError, match=f"state.pt is not a checkpoint of tensors.*{message}"):
        read_torch_file(path)


def test_parts_of_another_size_than_the_structure_says_are_refused(tmp_path):
    whole = saved(tmp_path / "whole.pt", {"a": torch.zeros(100)})
    with zipfile.ZipFile(whole) as file:
        structure = next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    for data in (b"", b"\0" * 399, b"\0" * 401):
        with pytest.raises(ValueError, match=rf"record size \({len(data)} bytes\) does not match"):
            read_torch_file(archive(tmp_path / "cut.pt", structure, {"data/0": data}))


def test_compressed_parts_are_refused(tmp_path):
    """100 MB of zeros in 100 kB."""
    path = archive(tmp_path / "state.pt", b"\x80\x02}.", {"data/0": bytes(10**8)}, compress=True)
    assert path.stat().st_size < 10**6
    with bounded(), pytest.raises(ValueError, match="compressed"):
        read_torch_file(path)


@pytest.mark.parametrize("change", ["before", "cut"])
def test_a_damaged_archive_is_refused(tmp_path, change):
    path = saved(tmp_path / "state.pt", {"a": torch.zeros(3)})
    data = path.read_bytes()
    path.write_bytes({"before": b"x" * 64 + data, "cut": data[:-30]}[change])
    with pytest.raises(ValueError, match="zip archive"):
        read_torch_file(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    make_no_file(tmp_path / "state.pt", kind)
    with bounded(), pytest.raises(ValueError, match=r"state\.pt"):
        load_garg_state(tmp_path / "state.pt")
    (tmp_path / "state.pt").unlink()
    make_no_file(tmp_path / "config.yaml", kind)
    with bounded(), pytest.raises(ValueError, match=r"config\.yaml"):
        load_garg(tmp_path)


def test_the_format_before_torch_1_6_is_refused(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "state.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"not a checkpoint .*zip archive"):
        read_torch_file(tmp_path / "state.pt")


def test_what_training_scripts_save_comes_back(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    dtypes = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    kinds = {name: torch.arange(4).to(getattr(torch, name)) for name in dtypes}
    data = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2**40, "loss": 0.25, "done": True,
        "part": torch.arange(12.0).view(3, 4)[1:, ::2], "weight": torch.nn.Parameter(torch.ones(2)), **kinds,
        "empty": torch.zeros(0, 3), "words": ["a", None, ("b", 3)],
    }  # fmt: skip
    read = read_torch_file(saved(tmp_path / "state.pt", data))
    assert list(read) == list(data)
    for name in ("step", "loss", "done", "words"):
        assert read[name] == data[name]
    for name in ("part", "weight", "empty", *kinds):
        assert torch.equal(read[name], data[name])
        assert read[name].dtype == data[name].dtype
    for name, weight in model.state_dict().items():
        assert torch.equal(read["model"][name], weight)
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(read["optimizer"]["state"][i][key], value) for key, value in state.items())


# ---- runs of the in-context-learning code ----
def test_a_weight_under_many_names_is_refused(tmp_path):
    """A file of one layer could otherwise be a model of a thousand."""
    names = ["_read_in.weight", *(f"_backbone.h.{layer}.mlp.c_fc.weight" for layer in range(100))]
    with pytest.raises(ValueError, match=r"state\.pt is smaller than its weights"):
        load_garg_state(saved(tmp_path / "state.pt", dict.fromkeys(names, BASE)))


@pytest.mark.parametrize(("change", "message"), [
    ({"n_layer": 10**6}, r"n_layer=1000000, but the state dict has"),
    ({"n_embd": 20_000}, r"_read_in\.weight must be \(20000, 2\)"),
    ({"n_positions": 10**9}, r"wpe\.weight must be \(2000000000, 8\)"),
    ({"n_dims": 10**100}, "n_dims must be an int"),
])  # fmt: skip
def test_a_config_that_claims_more_than_the_weights_is_refused(tmp_path, change, message):
    config = {"n_dims": 2, "n_positions": 3, "n_embd": 8, "n_layer": 1, "n_head": 2}
    sizes = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 32), "mlp.c_proj": (32, 8)}
    weights = {f"_backbone.h.0.{name}.weight": torch.zeros(*size) for name, size in sizes.items()}
    weights |= {f"_backbone.h.0.{name}.bias": torch.zeros(size[1]) for name, size in sizes.items()}
    weights |= {f"_backbone.{name}.{part}": torch.zeros(8) for name in ("h.0.ln_1", "h.0.ln_2", "ln_f")
                for part in ("weight", "bias")}  # fmt: skip
    weights |= {"_read_in.weight": torch.zeros(8, 2), "_read_in.bias": torch.zeros(8)}
    weights |= {"_read_out.weight": torch.zeros(1, 8), "_read_out.bias": torch.zeros(1)}
    weights |= {"_backbone.wpe.weight": torch.zeros(6, 8)}
    torch.save(weights, tmp_path / "state.pt")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": config}))
    assert load_garg(tmp_path)[0].cfg.n_layers == 1
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": config | change}))
    with bounded(), pytest.raises(ValueError, match=message):
        load_garg(tmp_path)
