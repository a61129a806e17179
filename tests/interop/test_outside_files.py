"""Files of other projects: nothing in them is executed, and anything but plain data and tensors is refused."""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from mechicl.base.tensor_files import read_torch_file
from mechicl.interop import load_garg
from mechicl.interop.garg import load_garg_state
from tests.bounds import make_no_file


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 20_000, "a: " + "9" * 20_000, "a: !!python/object/apply:os.getcwd []", "a: \x00"],
    ids=lambda value: value[:12],
)  # fmt: skip
def test_yaml_with_anything_but_plain_data_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml is not plain YAML"):
        load_garg(tmp_path)


# ---- checkpoints of torch ----
def archive(path: Path, structure: bytes) -> Path:
    """A file in torch's format with a structure of one's own."""
    with zipfile.ZipFile(path, "w") as file:
        for name, data in {"data.pkl": structure, "version": b"3\n", "byteorder": b"little"}.items():
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
    (b"", ""),
], ids=["class", "storage", "empty"])  # fmt: skip
def test_structures_other_than_tensors_and_plain_data_are_refused(tmp_path, structure, message):
    path = archive(tmp_path / "state.pt", structure)
    with pytest.raises(ValueError, match=f"state.pt is not a checkpoint of tensors.*({message})"):
        read_torch_file(path)


def saved(path: Path, data) -> Path:
    torch.save(data, path)
    return path


@pytest.mark.parametrize("change", ["before", "cut"])
def test_a_damaged_archive_is_refused(tmp_path, change):
    path = saved(tmp_path / "state.pt", {"a": torch.zeros(3)})
    data = path.read_bytes()
    path.write_bytes({"before": b"x" * 64 + data, "cut": data[:-30]}[change])
    with pytest.raises(ValueError, match="not a checkpoint"):
        read_torch_file(path)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    make_no_file(tmp_path / "state.pt", kind)
    with pytest.raises(ValueError, match=r"state\.pt"):
        load_garg_state(tmp_path / "state.pt")
    (tmp_path / "state.pt").unlink()
    make_no_file(tmp_path / "config.yaml", kind)
    with pytest.raises(ValueError, match=r"config\.yaml"):
        load_garg(tmp_path)


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
@pytest.mark.parametrize(("change", "message"), [
    ({"n_layer": 2}, r"missing: _backbone\.h\.1\."),
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
    with pytest.raises(ValueError, match=message):
        load_garg(tmp_path)
