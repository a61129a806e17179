"""Untrusted files of other projects: plain YAML, and tensors as `torch.save` writes them (no code is run).

Sizes of parts are checked before loading, those of tensors after it (views repeat elements, parts compress).
"""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from mechicl.base.files import check_file, read_bytes

MOST_YAML = 32 * 2**10
"""Largest YAML file in bytes; configs have one or two thousand."""
MOST_BRACKETS = 500
"""Most brackets in a YAML file; the parser's time grows with the square of the nesting."""
MOST_CHECKPOINT = 2**32
"""Largest checkpoint in bytes."""
MOST_STRUCTURE = 2**20
"""Largest pickle in a checkpoint, in bytes; a model with its optimizer takes a tenth of that."""


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader without references, so that the data are not larger than the file."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"references (*{self.peek_event().anchor}) are not supported")
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("merging mappings (<<) is not supported")


def read_yaml(path: Path) -> Any:
    """Read plain data from a YAML file: no objects, no references, at most 32 KiB; ValueError for anything else."""
    data = read_bytes(path, MOST_YAML)
    try:
        if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:
            raise yaml.YAMLError(f"it has more than {MOST_BRACKETS} brackets")
        return yaml.load(data.decode("utf-8"), _PlainLoader)
    except Exception as error:  # whatever stops the parser
        raise ValueError(f"{path} is not plain YAML: {error or type(error).__name__}") from error


def read_torch_file(path: Path) -> Any:
    """Read tensors and plain data that `torch.save` wrote; nothing in the file is executed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file contains anything else, is of the format before torch 1.6, has compressed or missing parts,
            or tensors with more elements than the file.
    """
    check_file(path, MOST_CHECKPOINT)
    size = path.stat().st_size
    try:
        reader = torch._C.PyTorchFileReader(str(path))  # as in torch.load, so that both see the same parts
        if sum(map(reader.get_record_size, reader.get_all_records())) > size:
            raise ValueError("its parts are compressed or overlap: they are larger than the file")
        if (n_bytes := reader.get_record_size("data.pkl")) > MOST_STRUCTURE:
            raise ValueError(f"data.pkl has {n_bytes:,} bytes; at most {MOST_STRUCTURE:,} are read")
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if _bytes_of_tensors(loaded) > size:
            raise ValueError("its tensors repeat or share their elements, and would take more memory than the file")
    except Exception as error:  # whatever is refused
        # without torch's advice to load it anyway
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "weights_only" not in line]
        reason = (lines or [type(error).__name__])[0].partition(". Please")[0]
        raise ValueError(f"{path} is not a checkpoint of tensors and plain data: {reason}") from error
    return loaded


def _bytes_of_tensors(loaded: Any) -> int:
    """Count the bytes of all tensors in nested containers, as if none shared memory; refuse unusual tensors."""
    ahead, seen, n_bytes = [loaded], set(), 0
    while ahead:
        value = ahead.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.is_meta or value.is_complex():
                raise ValueError("it has sparse or complex tensors, or some on the device meta")
            n_bytes += value.nbytes
        elif isinstance(value, dict):
            ahead += value.values()
        elif isinstance(value, list | tuple):
            ahead += value
    return n_bytes
