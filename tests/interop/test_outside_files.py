"""Files of other projects: nothing in them is executed, and anything but plain data and tensors is refused."""

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

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
