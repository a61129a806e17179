"""torch's optimisers without the guards against torch's compiler.

The guards load the compiler, which takes nearly as long as loading torch and mechicl together. Nothing here compiles an
optimiser, so they have no effect otherwise.
"""

import inspect

import torch


class Unguarded(torch.optim.Optimizer):
    """An optimiser whose methods do not load torch's compiler."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Adam(Unguarded, torch.optim.Adam):
    """The same steps as torch's Adam."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class LBFGS(Unguarded, torch.optim.LBFGS):
    """The same steps as torch's LBFGS."""
