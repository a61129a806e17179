"""Untrusted files of other projects: plain YAML, and tensors as `torch.save` writes them.

`torch.load(weights_only=True)` runs no code from a file, but a file of a few bytes can still make it take hours
(hashing nested tuples) or all memory (constructors with a size, views that repeat an element, compression). So the
sizes and the instructions of a file are checked before it is loaded.
"""

import pickletools
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
ALLOWED = {
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    "torch DoubleStorage", "torch FloatStorage", "torch HalfStorage", "torch BFloat16Storage", "torch LongStorage",
    "torch IntStorage", "torch ShortStorage", "torch CharStorage", "torch ByteStorage", "torch BoolStorage",
}  # fmt: skip
"""Names that the pickle of a checkpoint may refer to."""
TEXT, WHOLE = ("BINUNICODE",), ("BININT", "BININT1", "BININT2", "LONG1")
TUPLES = ("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
INSTRUCTIONS = {
    *TEXT, *WHOLE, *TUPLES, "PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL",
    "REDUCE", "BUILD", "BINPERSID",
}  # fmt: skip
"""Instructions that `torch.save` writes for tensors and plain data."""


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
    """Read plain data from a YAML file: no objects, no references, at most 32 KiB.

    Raises:
        FileNotFoundError: no such file.
        ValueError: anything else.
    """
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
        _check_structure(reader.get_record("data.pkl"))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        if _bytes_of_tensors(loaded) > size:
            raise ValueError("its tensors repeat or share their elements, and would take more memory than the file")
    except Exception as error:  # whatever is refused
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is not a checkpoint of tensors and plain data: {reason}") from error
    return loaded


def _check_structure(structure: bytes) -> None:
    """Simulate a pickle's instructions on a stack that contains their names instead of values.

    Refuse (ValueError) instructions and names that `torch.save` does not write for tensors and plain data, and keys
    that take long to hash.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for instruction, argument, _ in pickletools.genops(structure):
        name = instruction.name
        if name not in INSTRUCTIONS:
            raise ValueError(f"its structure has the instruction {name}, which torch.save does not write")
        if name == "GLOBAL" and argument not in ALLOWED:
            raise ValueError(f"{str(argument).replace(' ', '.')} is neither a tensor nor plain data")
        if name == "MARK":
            marks.append(len(stack))
        elif name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[argument])
        else:
            taken = instruction.stack_before
            marked = pickletools.markobject in taken
            start = marks.pop() - taken.index(pickletools.markobject) if marked else len(stack) - len(taken)
            values = stack[start:]
            del stack[start:]
            stack += [_after(name, argument, values)] * len(instruction.stack_after)


def _after(name: str, argument: Any, values: list[Any]) -> Any:
    """Return the simulated result of an instruction: a list for a tuple, a name for any other value."""
    if name in ("SETITEM", "SETITEMS") and not all(key in TEXT + WHOLE for key in values[1::2]):
        raise ValueError("it has a dictionary with keys that are neither strings nor ints")
    if name == "BINPERSID" and not (isinstance(values[0], list) and values[0][2:3] == [*TEXT]):
        raise ValueError("it refers to an object that is not a storage of numbers")
    if name == "REDUCE" and values[0] == "collections OrderedDict" and values[1] != []:
        raise ValueError("it calls OrderedDict with arguments")
    if name == "BUILD" and values[0] != "collections OrderedDict()":
        raise ValueError("it sets attributes of an object that is not a dictionary")
    if name in TUPLES:
        return values
    if name == "GLOBAL":
        return argument
    if name == "REDUCE":
        return f"{values[0]}()"
    return values[0] if values else name


def _bytes_of_tensors(loaded: Any) -> int:
    """Count the bytes of all tensors in nested containers, as if none shared memory."""
    ahead, seen, n_bytes = [loaded], set(), 0
    while ahead:
        value = ahead.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            n_bytes += value.nbytes
        elif isinstance(value, dict):
            ahead += value.values()
        elif isinstance(value, list | tuple):
            ahead += value
    return n_bytes
