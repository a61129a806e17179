"""A second device on a machine that has none: tensors that say they are on it, and whose values are real.

They hold a tensor of the CPU and call themselves "meta", the one device name that torch's autograd knows everywhere.
What a GPU would refuse is refused: an operation on tensors of both devices, their memory as a numpy array. What a GPU
allows is allowed: copies, single numbers, indices that are on the CPU. So code that forgets a device fails here too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
ACROSS = ("aten::_to_copy", "aten::copy_", "aten::to", "aten::set_.source_Tensor", "aten::lift_fresh")
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_")


class Pretended(Tensor):
    """A tensor on the pretended device."""

    inner: Tensor
    is_meta = False  # "meta" would mean that there are no values

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Pretended":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of the pretended device to numpy: use Tensor.cpu() first")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __repr__(self, **kwargs: Any) -> str:
        return f"Pretended({self.inner!r})"


class PretendDevice(TorchDispatchMode):
    """While it lasts, tensors are made on the pretended device where that is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class FromNumbers(TorchFunctionMode):
    """Tensors made of numbers, which torch makes without asking the dispatcher for a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    name = func._schema.name
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type == DEVICE.type:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if there and name not in ACROSS:
        _check_together(name, args, leaves)
    out = func(*tree_map(_real, args), **tree_map(_real, kwargs))
    on_it = bool(there)
    if asked is not None:
        on_it = torch.device(asked).type == DEVICE.type
    elif name == "aten::copy_":
        on_it = isinstance(args[0], Pretended)
    if not on_it:
        return out
    wrappers = {id(leaf.inner): leaf for leaf in there}  # what is changed in place stays the same tensor

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, Pretended):
            return leaf
        return wrappers[id(leaf)] if id(leaf) in wrappers else Pretended(leaf)

    return tree_map(wrap, out)


def _real(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, Pretended) else leaf


def _check_together(name: str, args: Any, leaves: list[Tensor]) -> None:
    if name in INDEXING and isinstance(args[0], Pretended):
        leaves = [args[0], *(leaf for leaf in tree_leaves(args[2:]) if isinstance(leaf, Tensor))]
    if any(not isinstance(leaf, Pretended) and leaf.ndim > 0 for leaf in leaves):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} got the pretended device and cpu"
        )


@contextmanager
def pretend_device() -> Iterator[torch.device]:
    """A context in which "meta" is a device like a GPU; random numbers there are those of the CPU."""
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # swapped data would lose it
    try:
        with PretendDevice(), FromNumbers():
            yield DEVICE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
