import subprocess
import sys

import pytest
import torch
from torch import Tensor

from mechicl.base import optimizers


def steps_of(kind: type[torch.optim.Optimizer], **options) -> Tensor:
    """Weights after seven steps down a loss of fourth order."""
    weights = torch.linspace(-2, 2, 15).reshape(3, 5).requires_grad_()
    optimizer = kind([weights], **options)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = ((weights - 1) ** 4).sum() + weights.square().sum()
        value.backward()
        return value

    for _ in range(7):
        optimizer.step(loss)  # type: ignore[arg-type]
    return weights.detach()


@pytest.mark.parametrize(
    ("name", "options"), [("Adam", {"lr": 0.1, "fused": True}), ("Adam", {"lr": 0.1}), ("LBFGS", {"lr": 0.5})]
)
def test_steps_are_the_same_bits_as_those_of_torch(name, options):
    assert torch.equal(steps_of(getattr(optimizers, name), **options), steps_of(getattr(torch.optim, name), **options))


def test_steps_do_not_load_the_compiler_of_torch():
    code = (
        "import sys, torch; from mechicl.base.optimizers import Adam; w = torch.ones(2, requires_grad=True); "
        "a = Adam([w]); w.sum().backward(); a.step(); a.zero_grad(); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
