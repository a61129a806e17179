"""Tensors in safetensors files, written atomically, and in files of `torch.save`; reading never executes anything."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mechicl.base.files import check_file, write_bytes

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Data types by their names in headers."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, atomically."""
    write_bytes(path, tensor_bytes(tensors, metadata))


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Encode tensors as a safetensors file."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(contiguous, metadata=dict(metadata) if metadata else None)


def signed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Add "sha256" to metadata: a digest of the metadata and of the tensors' names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        if name != "sha256":
            digest.update(repr((name, text)).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, str(tensor.dtype), list(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return {**metadata, "sha256": digest.hexdigest()}


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata of a safetensors file, without executing anything.

    Raises FileNotFoundError, or ValueError for a file that is damaged, not regular, or of another format.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def read_outline(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read only the header of a safetensors file: tensors on torch's "meta" device, without values, and metadata."""
    with _opened(path) as file:
        outline = {}
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            if part.get_dtype() not in TYPES:
                raise ValueError(f"{name} has the type {part.get_dtype()}, which is not one of {sorted(TYPES)}")
            outline[name] = torch.empty(part.get_shape(), dtype=TYPES[part.get_dtype()], device="meta")
        return outline, dict(file.metadata() or {})


def read_torch_file(path: Path) -> Any:
    """Read tensors and plain data that `torch.save` wrote; ValueError for a file with anything else."""
    check_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is refused
        # without torch's advice to load it anyway
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "weights_only" not in line]
        reason = (lines or [type(error).__name__])[0].partition(". Please")[0]
        raise ValueError(f"{path} is not a checkpoint of tensors and plain data: {reason}") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    check_file(path)
    with open(path, "rb") as file:
        start = file.read(8)
    pickled = start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or start[:4] == b"PK\x03\x04"
    hint = "it looks like a pickle, which is never loaded" if pickled else "truncated or damaged?"
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({hint}): {error}") from error
