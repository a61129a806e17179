import importlib
import inspect
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

import mechicl
from mechicl import algorithms, checkpoints
from mechicl.base.arguments import NO_DOORS, ArgumentError, checked, checked_from_outside
from mechicl.base.warning import warn
from mechicl.models import HookedLSTM, LayeredModel, LSTMConfig
from mechicl.prompts import Prompts, prompt_format

PROMPTS = Prompts(torch.ones(2, 4, 3, dtype=torch.float64), torch.ones(2, 4, 1, dtype=torch.float64))


@checked
def measure(
    values: Float[Tensor, "prompt point"],
    targets: Float[Tensor, "prompt point"] | None = None,
    *more: int,
    n: int = 1,
    scale: float = 1.0,
    steps: int | Sequence[int] = 1,
    method: Literal["zero", "mean", "resample"] = "zero",
    names: Mapping[str, Sequence[float]] | None = None,
    function: Callable[[Tensor], Tensor] | None = None,
    path: str | Path = ".",
    tensor: Tensor | None = None,
    seed: int = 0,
    model: torch.nn.Module | None = None,
    **others: bool,
) -> tuple[Any, ...]:
    """Returns what it gets."""
    return values, targets, more, n, scale, steps, method, names, function, path, tensor, model, others


VALUES = torch.ones(2, 3)


# ---- what is refused, and in which words ----


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("x",), {}, r"measure\(\): values must be a tensor of floats \[prompt point\], got 'x'"),
        ((VALUES[0],), {}, r"values must be a tensor of floats \[prompt point\], got a tensor of float32 \[3\]"),
        ((VALUES.int(),), {}, r"values must be a tensor of floats .*, got a tensor of int32 \[2, 3\]"),
        ((VALUES.numpy(),), {}, r"got an array of float32 \[2, 3\]; torch\.from_numpy makes a tensor of it"),
        ((VALUES, None, 1, "2"), {}, r"more\[1\] must be an int, got '2'"),
        ((VALUES,), {"n": 1.0}, r"n must be an int, got 1\.0"),
        ((VALUES,), {"n": True}, r"n must be an int, got True"),
        ((VALUES,), {"n": 2**63}, r"n must be smaller than 2\*\*63, got 9223372036854775808"),
        ((VALUES,), {"n": -(10**400)}, r"n must be smaller than 2\*\*63, got -1000"),
        ((VALUES,), {"seed": 2**64}, r"seed must be smaller than 2\*\*64, got 18446744073709551616"),
        ((VALUES,), {"scale": "1"}, r"scale must be a number, got '1'"),
        ((VALUES,), {"scale": math.nan}, r"scale must be a finite number, got nan"),
        ((VALUES,), {"scale": np.float32("nan")}, r"scale must be a finite number, got nan"),
        ((VALUES,), {"scale": 1j}, r"scale must be a number, got 1j"),
        ((VALUES,), {"steps": [1, 2.5]}, r"steps must be an int or a sequence of ints, got the list \[1, 2\.5\]"),
        ((VALUES,), {"method": "Zero"}, r"method must be 'zero', 'mean' or 'resample', got 'Zero'"),
        ((VALUES,), {"method": None}, r"method must be 'zero', 'mean' or 'resample', got None"),
        ((VALUES,), {"names": {"a": [math.nan], 3: [1.0]}}, r"must be a dictionary of strings to a sequence of num"),
        ((VALUES,), {"function": 3}, r"function must be a function or None, got 3"),
        ((VALUES,), {"path": 3}, r"path must be a string or Path, got 3"),
        ((VALUES,), {"path": "a\0"}, r"path must be a path that a file can have, got 'a\\x00'"),
        ((VALUES,), {"path": Path("\ud800")}, r"path must be a path that a file can have, got '\\ud800'"),
        ((VALUES,), {"other": 3}, r"other must be True or False, got 3"),
        ((VALUES * math.inf,), {}, r"values has 6 of 6 values that are not finite: NaN or infinite"),
        ((VALUES,), {"tensor": torch.tensor([1j])}, r"tensor must be real, got a tensor of complex64 \[1\]"),
        ((VALUES,), {"tensor": torch.ones(3, device="meta")}, r"tensor is on the device 'meta'"),
        ((VALUES,), {"tensor": torch.ones(3).to_sparse()}, r"tensor is sparse, got a tensor of float32"),
        ((VALUES,), {"tensor": torch.ones(1).expand(2**40)}, r"tensor has 1\.1e\+12 elements, which repeat"),
        ((VALUES,), {"steps": torch.ones(1).long().expand(2**40)}, r"steps must be an int or a sequence of ints"),
        ((VALUES,), {"model": torch.nn.Linear(2, 1, device="meta")}, r"model has its weights on the device 'meta'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_name_the_value_and_what_is_allowed(arguments, options, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        measure(*arguments, **options)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)
    assert len(str(caught.value)) < 400


AS_USERS_HAVE_IT = """
import torch
from jaxtyping import Float
from torch import Tensor
from mechicl.algorithms import ridge
from mechicl.base.arguments import checked

@checked
def measure(values: Float[Tensor, "prompt point"], targets: Float[Tensor, "prompt point"] | None = None) -> None:
    pass

measure(torch.ones(2, 3), torch.ones(2, 3))
measure(torch.ones(2, 5))
for call in (
    lambda: measure(torch.ones(2, 3), torch.ones(2, 2)),
    lambda: measure(),
    lambda: ridge(None, penlty=1.0),
):
    try:
        call()
    except TypeError as error:
        print(error)
"""


def test_axes_mean_the_same_in_all_arguments_and_pythons_own_errors_stay():
    """In a process without the checks of our tests, each of which has axes of its own."""
    done = subprocess.run([sys.executable, "-c", AS_USERS_HAVE_IT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "measure(): targets must be a tensor of floats [prompt point] or None that fits values a tensor of float32 "
        "[2, 3], got a tensor of float32 [2, 2]",
        "measure() missing 1 required positional argument: 'values'",
        "ridge() got an unexpected keyword argument 'penlty'",
    ]


# ---- what is taken ----


def test_numbers_of_numpy_count_as_pythons_and_arrays_of_one_axis_as_sequences():
    got = measure(VALUES, None, np.int64(4), n=np.int32(3), scale=np.float32(0.5), steps=np.arange(3))  # type: ignore[arg-type]
    assert got[2:6] == ((4,), 3, 0.5, [0, 1, 2])
    assert [type(value) for value in got[2:6]] == [tuple, int, float, list]
    assert measure(VALUES, steps=[np.int64(1), 2])[5] == [1, 2]  # type: ignore[list-item]
    assert measure(VALUES, steps=torch.tensor([1, 2]))[5] == [1, 2]  # type: ignore[arg-type]
    assert measure(VALUES, scale=3)[4] == 3
    assert measure(VALUES, scale=np.array(0.5), n=torch.tensor(3))[3:5] == (3, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"scale must be a number, got a tensor"):  # its gradient would get lost
        measure(VALUES, scale=torch.tensor(0.5, requires_grad=True))  # type: ignore[arg-type]
    assert measure(VALUES, names={"a": np.linspace(0, 1, 2)})[7] == {"a": [0.0, 1.0]}  # type: ignore[dict-item]


def test_what_fits_arrives_as_it_is():
    names, function, path = {"a": [1.0]}, torch.relu, Path("x")
    got = measure(VALUES, VALUES, 5, names=names, function=function, path=path, tensor=VALUES, other=True)
    assert got[0] is VALUES
    assert got[7] is names
    assert got[8] is function
    assert got[9] is path
    assert got[-1] == {"other": True}
    assert measure(VALUES[:0])[0].shape == (0, 3)


def test_gradients_and_transforms_of_torch_pass_through():
    @checked
    def loss(values: Float[Tensor, "point"]) -> Tensor:
        return values.square().sum()

    values = torch.arange(3.0)
    torch.testing.assert_close(torch.func.grad(loss)(values), 2 * values)
    torch.testing.assert_close(torch.func.vmap(loss)(values[None]), values.square().sum()[None])


def test_infinite_numbers_are_taken_where_they_are_no_tensor():
    assert measure(VALUES, scale=math.inf)[4] == math.inf


# ---- the doors of the packages ----


DOORS = ("algorithms", "algorithms.stepwise", "checkpoints", "constructions", "models", "tasks")
"""Some of the packages whose functions check their arguments."""
MODULES = ("learners", "prompts")
"""Modules that do, and have no `__all__`."""


def public() -> list[tuple[str, Any]]:
    """Functions and classes in the `__all__` of those packages, by name."""
    members = {}
    for package in DOORS:
        module = importlib.import_module(f"mechicl.{package}")
        for name in module.__all__:
            member = getattr(module, name)
            if getattr(member, "__module__", "").startswith("mechicl."):
                members[f"{package}.{name}"] = member
    for name in MODULES:
        module = importlib.import_module(f"mechicl.{name}")
        for key, member in vars(module).items():
            if getattr(member, "__module__", "") == module.__name__ and not key.startswith("_"):
                members[f"{name}.{key}"] = member
    return sorted(members.items())


def test_every_public_function_and_method_checks_what_it_is_given():
    unchecked = []
    for path, member in public():
        if inspect.isfunction(member) and not hasattr(member, "_checks_arguments"):
            unchecked.append(path)
        if inspect.isclass(member) and not getattr(member, "_is_protocol", False):
            methods = [m for n, m in vars(member).items() if inspect.isfunction(m) and not n.startswith("_")]
            unchecked += [
                f"{path}.{m.__name__}" for m in methods
                if not hasattr(m, "_checks_arguments") and m.__name__ not in NO_DOORS
            ]  # fmt: skip
    assert len(public()) > 120
    assert unchecked == []


def test_public_functions_are_pickled_by_the_name_that_users_have():
    assert pickle.loads(pickle.dumps(algorithms.ridge)) is algorithms.ridge
    assert pickle.loads(pickle.dumps(checkpoints.load)) is checkpoints.load
    assert inspect.signature(algorithms.ridge).parameters["penalty"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: algorithms.ridge(PROMPTS, penalty="0.1"), r"ridge\(\): penalty must be a number, got '0\.1'"),  # type: ignore[arg-type]
        (lambda: algorithms.nearest_neighbours(PROMPTS, n_neighbours=1.5), r"n_neighbours must be an int, got 1\.5"),  # type: ignore[arg-type]
        (lambda: algorithms.ols(PROMPTS.xs), r"prompts must be Prompts, got a tensor of float64 \[2, 4, 3\]"),  # type: ignore[arg-type]
        (lambda: mechicl.load(3), r"load\(\): name must be a string or Path, got 3"),  # type: ignore[arg-type]
        (lambda: PROMPTS.split("2"), r"Prompts\.split\(\): size must be an int, got '2'"),  # type: ignore[arg-type]
        (lambda: prompt_format("Paired", x_dim=2, y_dim=1), r"name must be 'paired' or 'interleaved', got 'Paired'"),  # type: ignore[arg-type]
        (lambda: model().predict(PROMPTS.xs), r"predict\(\): prompts must be Prompts, got a tensor of float64"),  # type: ignore[arg-type]
        (lambda: model().reset_parameters("1"), r"HookedLSTM\.reset_parameters\(\): seed must be an int, got '1'"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_typos_are_told_by_the_functions_that_users_call(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def model() -> HookedLSTM:
    return HookedLSTM(LSTMConfig(x_dim=3, n_context=3, d_model=4, dtype="float64"))


def test_methods_of_models_take_numpys_numbers_as_seeds():
    one, other = model(), model()
    one.reset_parameters(np.int64(3))  # type: ignore[arg-type]
    other.reset_parameters(3)
    torch.testing.assert_close(one.embed, other.embed, rtol=0, atol=0)


def test_what_a_kind_of_model_does_not_define_is_said():
    class Unfinished(LayeredModel):
        """Has nothing of its own."""

    with pytest.raises(NotImplementedError, match=r"Unfinished does not define encode\(prompts\)"):
        Unfinished().encode(PROMPTS)


def test_calls_from_within_the_library_pass_without_a_look():
    outside: dict[str, Any] = {}
    inside: dict[str, Any] = {"__name__": "mechicl.somewhere", "double": checked_from_outside(double)}
    for names in (outside, inside):
        names.setdefault("double", checked_from_outside(double))
        exec("def call(): return double('2')", names)
    assert inside["call"]() == "22"
    with pytest.raises(ArgumentError, match=r"double\(\): number must be an int, got '2'"):
        outside["call"]()


def double(number: int) -> int:
    return 2 * number


# ---- warnings ----


def test_a_model_with_undefined_weights_is_taken_with_a_warning_at_the_users_line():
    undefined = torch.nn.Linear(2, 3)
    with torch.no_grad():
        undefined.weight[0, 1] = math.nan
    with pytest.warns(RuntimeWarning, match=r"measure\(\): model has weights that are not finite, first 1 of 6 in wei"):
        assert measure(VALUES, model=undefined)[-2] is undefined


def test_predictions_that_are_not_finite_come_with_a_warning():
    undefined = model()
    torch.nn.init.constant_(undefined.unembed_bias, math.inf)
    for predict, n in ((undefined.predict, 2), (undefined.predict_prefixes, 8)):
        with pytest.warns(RuntimeWarning, match=rf"{n} of {n} predictions are not finite"):
            assert predict(PROMPTS).isinf().all()


def test_a_warning_points_at_the_line_that_called_the_library():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        algorithms.gradient_descent(PROMPTS, 2, step_size=100.0)
        warn("from here")
    assert [warning.filename for warning in caught] == [__file__, __file__]


def test_ids_are_a_tensor_of_ints():
    @checked
    def count(ids: Int[Tensor, "prompt pos"]) -> int:
        return ids.numel()

    assert count(torch.ones(2, 3, dtype=torch.long)) == 6
    with pytest.raises(ArgumentError, match=r"ids must be a tensor of ints \[prompt pos\], got a tensor of float32"):
        count(VALUES)
