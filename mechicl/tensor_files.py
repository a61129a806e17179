"""Tensors in safetensors files: written atomically, read without executing anything."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mechicl.files import write_bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Tensors as safetensors, atomically."""
    write_bytes(path, tensor_bytes(tensors, metadata))


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Tensors as the safetensors file that `write_tensors` writes."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(contiguous, metadata=dict(metadata) if metadata else None)


def signed(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata with "sha256", a digest of themselves and of the tensors: names, types, shapes, every bit."""
    digest = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        if name != "sha256":
            digest.update(repr((name, text)).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, str(tensor.dtype), list(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return {**metadata, "sha256": digest.hexdigest()}


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is truncated, damaged or of another format. Pickles are never opened.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        with open(path, "rb") as file:
            start = file.read(4)
        pickled = start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or start == b"PK\x03\x04"
        hint = "it looks like a pickle, which is never loaded" if pickled else "truncated or damaged?"
        raise ValueError(f"{path} is not a readable safetensors file ({hint}): {error}") from error
