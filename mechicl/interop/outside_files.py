"""Files of other projects, which anybody may have written: plain YAML, and tensors as `torch.save` writes them.

Both are read with bounds: what a file of a few bytes could make of itself, by references to its own parts, compression
or views that repeat an element, is refused before anything of that size is made.
"""

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import torch
import yaml

from mechicl.base.checks import is_whole
from mechicl.base.files import check_file, read_bytes

MOST_YAML = 32 * 2**10
"""Bytes of a YAML file that are read; configs have one or two thousand."""
MOST_STRUCTURE = 2**20
"""Bytes that may say how a checkpoint's tensors are put together; a model with its optimiser takes a tenth of that."""
MOST_RECORDS = 2**20
"""Bytes of a checkpoint's table of contents."""


class _PlainLoader(yaml.SafeLoader):
    """YAML without references: each part is written out, so that what is read is no larger than the file."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"it refers to another part (*{self.peek_event().anchor}), which is not read")
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("it merges mappings (<<), which is not read")


def read_yaml(path: Path) -> Any:
    """Plain data of a YAML file: no objects, no references, at most 32 KiB.

    Raises:
        FileNotFoundError: no such file.
        ValueError: anything else.
    """
    data = read_bytes(path, MOST_YAML)
    try:
        return yaml.load(data.decode("utf-8"), _PlainLoader)
    except Exception as error:  # whatever the parser trips over, in one kind of error
        raise ValueError(f"{path} is no plain YAML: {error or type(error).__name__}") from error


def read_torch_file(path: Path) -> Any:
    """What `torch.save` wrote, if that is tensors and plain data: nothing in the file is executed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: anything else in it, the format from before torch 1.6, compressed or missing parts, or tensors with
            more elements than the file holds.
    """
    check_file(path)
    try:
        with zipfile.ZipFile(_checked_archive(path)) as archive:
            _check_structure(archive, path.stat().st_size)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler refuses, in one kind of error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is no checkpoint of tensors and plain data: {reason}") from error


# ---- the archive ----

END, END_64, POINTER_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")


def _checked_archive(path: Path) -> Path:
    """An archive whose table of contents is where all readers look for it, and of a size that is read."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = size - END.size
        end = _read_at(file, END, start)
        if end is None or end[0] != b"PK\x05\x06" or end[7]:
            raise ValueError("it is no zip archive, as torch.save writes it since version 1.6")
        n_bytes, offset = end[5], end[6]
        pointer = _read_at(file, POINTER_64, start - POINTER_64.size)
        if pointer is not None and pointer[0] == b"PK\x06\x07":
            start -= POINTER_64.size + END_64.size
            end = _read_at(file, END_64, start)
            if end is None or end[0] != b"PK\x06\x06" or pointer[2] != start:
                raise ValueError("its table of contents is damaged")
            n_bytes, offset = end[8], end[9]
        if offset + n_bytes != start or n_bytes > MOST_RECORDS:
            raise ValueError(f"its table of contents is damaged, or has more than {MOST_RECORDS:,} bytes")
    return path


def _read_at(file: IO[bytes], form: struct.Struct, offset: int) -> tuple[Any, ...] | None:
    if offset < 0:
        return None
    file.seek(offset)
    return form.unpack(file.read(form.size))


def _check_structure(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse an archive whose parts are compressed or overlap, or whose tensors have more elements than it holds."""
    parts = archive.infolist()
    names = {part.filename.lower() for part in parts}  # torch's reader does not tell small letters from capitals
    if not parts or len(names) < len(parts):
        raise ValueError("parts of it have the same name, or it is empty")
    if any(part.compress_type != zipfile.ZIP_STORED or part.compress_size != part.file_size for part in parts):
        raise ValueError("parts of it are compressed: torch.save compresses nothing")
    if sum(part.file_size for part in parts) > size:
        raise ValueError("its parts are larger than the file")
    folder = parts[0].filename.partition("/")[0]
    structure = archive.getinfo(f"{folder}/data.pkl")
    if structure.file_size > MOST_STRUCTURE:
        raise ValueError(f"its structure (data.pkl) has {structure.file_size:,} bytes; {MOST_STRUCTURE:,} are read")
    sizes = {part.filename.removeprefix(f"{folder}/data/"): part.file_size for part in parts}
    with archive.open(structure) as file:
        rehearsal = _Rehearsal(file, sizes)
        rehearsal.load()
    if rehearsal.n_bytes > sum(sizes.values()):
        raise ValueError("its tensors share their numbers, and would take more memory than the file")


class _Kind(NamedTuple):
    """A type of stored numbers. It cannot be called, unlike torch's."""

    dtype: torch.dtype


class _Storage(NamedTuple):
    dtype: torch.dtype
    n_elements: int


class _Tensor:
    """What stands for a tensor."""

    __slots__ = ()


KINDS = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
_PYTHONS: Any = pickle._Unpickler  # type: ignore[attr-defined]  # in Python: no number in a file makes it allocate
_WORDS = (
    pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT,
    pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.EMPTY_TUPLE,
    pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.GLOBAL,
    pickle.REDUCE, pickle.BINPERSID,
)  # fmt: skip
"""What `torch.save` writes, but for the two that `_Rehearsal` looks at itself."""


class _Rehearsal(_PYTHONS):
    """Goes through the structure of a checkpoint as torch will, with figures in the place of tensors.

    Only what `torch.save` needs for dictionaries of tensors is known, and none of it computes or allocates anything.
    """

    def __init__(self, file: Any, sizes: Mapping[str, int]):
        super().__init__(file)
        self.sizes, self.n_bytes = sizes, 0

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _empty
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._check_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _check_parameter
        if module == "torch" and name in KINDS:
            return _Kind(KINDS[name])
        raise ValueError(f"it holds {module}.{name}, which is neither tensors nor plain data")

    def persistent_load(self, pid: Any) -> _Storage:
        word, kind, key, _, n_elements = pid
        if word != "storage" or not isinstance(kind, _Kind) or not isinstance(key, str) or not is_whole(n_elements):
            raise ValueError("it refers to something that is no storage of numbers")
        if self.sizes.get(key, -1) != n_elements * kind.dtype.itemsize:
            raise ValueError(f"data/{key} has {self.sizes.get(key, 0):,} bytes for {n_elements:,} elements")
        return _Storage(kind.dtype, n_elements)

    def _check_tensor(
        self, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
    ) -> _Tensor:
        numbers = (offset, *size, *stride)
        if not isinstance(storage, _Storage) or metadata or not all(is_whole(n) and n >= 0 for n in numbers):
            raise ValueError("a tensor in it is made of something else than a storage and sizes")
        n_elements = math.prod(size)
        if n_elements > storage.n_elements or any(n > 1 and step == 0 for n, step in zip(size, stride, strict=True)):
            raise ValueError(f"a tensor in it repeats elements: its storage has {storage.n_elements:,}")
        self.n_bytes += n_elements * storage.dtype.itemsize
        return _Tensor()

    def load_build(self) -> None:
        self.stack.pop()  # attributes, which torch.save notes of a state dict: versions of its parts
        if not isinstance(self.stack[-1], OrderedDict):
            raise ValueError("it gives attributes to something else than a dictionary")

    def load_setitems(self) -> None:
        items = self.pop_mark()
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str | int) for key in items[::2]):
            raise ValueError("a dictionary in it has keys that are neither words nor numbers")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def load_setitem(self) -> None:
        self.metastack.append(self.stack[:-2])
        self.stack = self.stack[-2:]
        self.load_setitems()

    dispatch: ClassVar[dict[int, Any]] = {word[0]: _PYTHONS.dispatch[word[0]] for word in _WORDS}
    dispatch |= {pickle.BUILD[0]: load_build, pickle.SETITEMS[0]: load_setitems, pickle.SETITEM[0]: load_setitem}


def _empty() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _check_parameter(data: Any, requires_grad: Any, hooks: Any) -> _Tensor:
    if not isinstance(data, _Tensor):
        raise ValueError("a parameter in it is no tensor")
    return data
