"""Checks that the configs of all models share: dtypes, devices, and data from files."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar, cast

import torch

from mechicl.base.arguments import ArgumentError, check_fields, checked

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
Config = TypeVar("Config")


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype in `DTYPES`; of any other "torch.int64" and the like, which no model has."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def require(condition: object, message: str) -> None:
    """Refuse (ValueError) a config that does not meet a condition."""
    if not condition:
        raise ValueError(message)


def check_dtype_and_device(cfg: Any) -> None:
    """Refuse (ValueError) a config with an unknown dtype or device."""
    require(cfg.dtype in DTYPES, f"dtype={cfg.dtype!r} is not one of {list(DTYPES)}")
    try:
        torch.device(cfg.device)
    except RuntimeError as error:
        raise ValueError(f"device={cfg.device!r} is not a device: {str(error).splitlines()[0]}") from error


def check_device(device: str | torch.device | None, *, may_be_meta: bool = False) -> None:
    """Refuse a device that is not there, or that has no values; None is the default one."""
    try:
        if device is not None and torch.empty(0, device=device).is_meta and not may_be_meta:
            raise RuntimeError("weights on it have no values")
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        names = ["cpu", *(f"{accelerator}:{i}" for i in range(torch.accelerator.device_count()))]
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"device={str(device)!r} cannot be used; here are {', '.join(names)} ({reason})") from error


def read_config(kind: type[Config], data: dict[str, Any]) -> Config:
    """Make a config dataclass from plain JSON data, which may come from outside."""
    require(isinstance(data, Mapping), f"{kind.__name__} takes a mapping of its fields, got {type(data).__name__}")
    unknown = sorted(map(str, set(data) - {field.name for field in dataclasses.fields(cast(Any, kind))}))
    require(not unknown, f"{kind.__name__} has no field {unknown}")
    return kind(**data)


class OwnConfig:
    """Base of the configs of models other than transformers of tokens: frozen dataclasses with x_dim, y_dim, dtype.

    A subclass sets `architecture`, its name in saved data, and has a `format`.
    """

    architecture: ClassVar[str]
    y_dim: int
    dtype: str

    def __post_init__(self) -> None:
        check_fields(self)
        check_dtype_and_device(self)

    @property
    def d_out(self) -> int:
        """Width of the model's outputs."""
        return self.y_dim

    @property
    def n_ctx(self) -> int:
        """Number of positions of a prompt with `n_context` points."""
        return cast(Any, self).format.n_tokens(cast(Any, self).n_context)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return DTYPES[self.dtype]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return dataclasses.replace(cast(Any, self), **changes)

    def unfilled(self) -> Self:
        """Return the config, in which no default depends on other fields; see `TransformerConfig.unfilled`."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but the device, and the architecture, as plain JSON data."""
        fields = dataclasses.fields(cast(Any, self))
        return {
            "architecture": self.architecture,
            **{f.name: getattr(self, f.name) for f in fields if f.name != "device"},
        }

    @classmethod
    @checked
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Make the config that `to_dict` wrote."""
        if isinstance(data, Mapping):
            architecture = data.get("architecture", cls.architecture)
            require(architecture == cls.architecture, f"architecture={architecture!r} is not {cls.architecture!r}")
            data = {name: value for name, value in data.items() if name != "architecture"}
        return read_config(cls, data)
