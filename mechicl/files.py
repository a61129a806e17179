"""Files that are whole or not there: atomic writes, and reads that never execute what they find."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file by new contents so that a crash at any moment leaves the old or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_json(path: Path, data: Any) -> None:
    """JSON, atomically. Numbers that are not finite are refused: they are no JSON."""
    write_bytes(path, json_bytes(data))


def json_bytes(data: Any) -> bytes:
    """Data as the JSON that `write_json` writes.

    Raises:
        TypeError: something that JSON has no form for.
        ValueError: a number that is not finite.
    """
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Tensors as safetensors, atomically."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(contiguous, metadata=dict(metadata) if metadata else None))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # endless nesting and numbers of 5,000 digits included
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


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
