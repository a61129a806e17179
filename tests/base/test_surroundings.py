"""Standard surroundings of calls: nested, in several threads, and restored after errors."""

from typing import Any

import pytest
import torch

from mechicl.base.arguments import checked
from mechicl.base.surroundings import are_standard, standard_surroundings


@pytest.fixture
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@checked
def made(fails: bool = False) -> torch.Tensor:
    if fails:
        raise KeyError("of the function")
    assert made_inside().dtype == torch.float32
    return torch.zeros(2)


@checked
def made_inside() -> torch.Tensor:
    return torch.arange(2) / 3


def test_calls_are_in_standard_surroundings_which_end_with_them(float64):
    with torch.device("meta"), torch.inference_mode():
        result = made()
        assert (result.dtype, result.device.type, result.is_inference()) == (torch.float32, "cpu", False)
        with pytest.raises(KeyError):
            made(fails=True)
        assert torch.zeros(2).is_meta
        assert torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() == torch.float64
    assert not are_standard()


def test_the_last_of_several_blocks_restores_the_default_dtype(float64):
    first, second = standard_surroundings(), standard_surroundings()  # as of two threads
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_default_dtype() == torch.float32
    second.__exit__(None, None, None)
    assert torch.get_default_dtype() == torch.float64


def test_gradients_are_not_turned_on():
    with torch.no_grad():
        assert not made().requires_grad
        assert are_standard()
    with torch.inference_mode(), standard_surroundings():
        assert not torch.is_grad_enabled()
        assert not torch.zeros(1).is_inference()
