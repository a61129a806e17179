import copy
import dataclasses
import enum
import functools
import inspect
import math
import pickle
import re
import subprocess
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from beartype.door import is_bearable
from jaxtyping import Float
from torch import Tensor

from mechicl import algorithms, checkpoints
from mechicl.base.arguments import (
    _CONFS,
    ArgumentError,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    at_least,
    between,
    check_fields,
    checked,
    fits,
)
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedLSTM, LSTMConfig
from mechicl.prompts import Prompts

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


# ---- refused arguments ----
@pytest.mark.parametrize(("arguments", "options", "message"), [
    (("x",), {}, r"measure\(\): values must be a tensor of floats \[prompt point\], got 'x'"),
    ((VALUES.int(),), {}, r"values must be a tensor of floats .*, got a tensor of int32 \[2, 3\]"),
    ((VALUES.numpy(),), {}, r"got an array of float32 \[2, 3\]; torch\.from_numpy makes a tensor of it"),
    ((VALUES, None, 1, "2"), {}, r"more\[1\] must be an int, got '2'"),
    ((VALUES,), {"n": 1.0}, r"n must be an int, got 1\.0"),
    ((VALUES,), {"n": True}, r"n must be an int, got True"),
    ((VALUES,), {"n": 2**64}, r"n must be an int, got 18446744073709551616"),
    ((VALUES,), {"scale": "1"}, r"scale must be a number, got '1'"),
    ((VALUES,), {"scale": math.nan}, r"scale must be a finite number, got nan"),
    ((VALUES,), {"scale": np.float32("nan")}, r"scale must be a number, got .*nan"),
    ((VALUES,), {"steps": [1, 2**64]}, r"steps must be an int or a sequence of ints, got the list \[1, 1844674"),
    ((VALUES,), {"names": {"a": {3: 1.0}}}, r"names\['a'\] must be a sequence of numbers, got the dict"),
    ((VALUES,), {"method": "Zero"}, r"method must be 'zero', 'mean' or 'resample', got 'Zero'"),
    ((VALUES,), {"names": {3: [1.0]}}, r"the keys of names must be strings, got 3"),
    ((VALUES,), {"function": 3}, r"function must be a function or None, got 3"),
    ((VALUES,), {"function": {"a": 1}}, r"function must be a function or None, got the dict \{'a': 1\}"),
    ((VALUES,), {"method": {"a": 1}}, r"method must be 'zero', 'mean' or 'resample', got the dict \{'a': 1\}"),
    ((VALUES,), {"path": "a\0"}, r"path must be a valid path, got 'a\\x00'"),
    ((VALUES,), {"path": Path("\ud800")}, r"path must be a valid path, got '\\ud800'"),
    ((VALUES,), {"other": 3}, r"other must be True or False, got 3"),
    ((VALUES * math.inf,), {}, r"values has 6 of 6 values that are not finite: NaN or infinite"),
    ((VALUES,), {"tensor": torch.tensor([1j])}, r"tensor must be real, got a tensor of complex64 \[1\]"),
    ((VALUES,), {"tensor": torch.ones(3, device="meta")}, r"tensor is on the device 'meta'"),
    ((VALUES,), {"tensor": torch.ones(3).to_sparse()}, r"tensor is sparse, got a tensor of float32"),
    ((VALUES,), {"tensor": torch.ones(1).expand(2**40)}, r"tensor has 1\.1e\+12 elements, which repeat"),
    ((VALUES,), {"model": torch.nn.Linear(2, 1, device="meta")}, r"model has its weights on the device 'meta'"),
])  # fmt: skip
def test_errors_name_the_argument_the_value_and_the_allowed_values(arguments, options, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        measure(*arguments, **options)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)
    assert len(str(caught.value)) < 400


WITHOUT_TEST_CHECKS = """
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


def test_axes_are_shared_by_all_arguments_and_python_reports_its_own_errors():
    """In another process, because the annotation checks of the tests bind axes separately."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TEST_CHECKS], capture_output=True, text=True, check=True)
    hint = ". Did you mean"  # of Python 3.13
    assert [line.partition(hint)[0] for line in done.stdout.splitlines()] == [
        "measure(): targets must be a tensor of floats [prompt point] or None that fits values a tensor of float32 "
        "[2, 3], got a tensor of float32 [2, 2]",
        "measure() missing 1 required positional argument: 'values'",
        "ridge() got an unexpected keyword argument 'penlty'",
    ]


# ---- accepted arguments ----
def test_numbers_of_numpy_count_as_pythons_and_arrays_of_one_axis_as_sequences():
    got = measure(VALUES, None, np.int64(4), n=np.int32(3), scale=np.float32(0.5), steps=np.arange(3))  # type: ignore[arg-type]
    assert got[2:6] == ((4,), 3, 0.5, [0, 1, 2])
    assert [type(value) for value in got[2:6]] == [tuple, int, float, list]
    assert measure(VALUES, steps=[np.int64(1), 2])[5] == [1, 2]  # type: ignore[list-item]
    assert measure(VALUES, steps=torch.tensor([1, 2]))[5] == [1, 2]  # type: ignore[arg-type]
    assert measure(VALUES, scale=3)[4] == 3
    assert measure(VALUES, scale=math.inf)[4] == math.inf
    assert measure(VALUES, scale=np.array(0.5), n=torch.tensor(3))[3:5] == (3, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"scale must be a number, got a tensor"):  # its gradient would be lost
        measure(VALUES, scale=torch.tensor(0.5, requires_grad=True))  # type: ignore[arg-type]
    assert measure(VALUES, names={"a": np.linspace(0, 1, 2)})[7] == {"a": [0.0, 1.0]}  # type: ignore[dict-item]


def test_gradients_and_transforms_of_torch_pass_through():
    @checked
    def loss(values: Float[Tensor, "point"]) -> Tensor:
        return values.square().sum()

    values = torch.arange(3.0)
    torch.testing.assert_close(torch.func.grad(loss)(values), 2 * values)
    torch.testing.assert_close(torch.func.vmap(loss)(values[None]), values.square().sum()[None])


def test_elements_of_a_long_list_are_all_checked():
    values = [1.0] * 1000
    for i in (0, 500, 999):
        with pytest.raises(ArgumentError, match="shares must be a sequence of numbers"):
            average([*values[:i], "1", *values[i + 1 :]])  # type: ignore[list-item]
        with pytest.raises(ArgumentError, match=rf"shares\[{i}\] must be a finite number, got nan"):
            average([*values[:i], math.nan, *values[i + 1 :]])
    assert average(values) == 1.0


@pytest.mark.parametrize("kind", [list, tuple, deque, UserList])
def test_every_element_of_every_kind_of_collection_is_checked(kind):
    assert average(kind([1.0] * 200)) == 1.0
    for wrong in ("1", math.nan, None):
        with pytest.raises(ArgumentError, match="shares"):
            average(kind([*[1.0] * 200, wrong]))
    for mapping in (dict, UserDict, MappingProxyType):
        values = dict.fromkeys(range(200), 1.0)
        assert fits(mapping(values), Mapping[int, float])
        assert not fits(mapping(values | {3: "1"}), Mapping[int, float])
        assert not fits(mapping(values | {"3": 1.0}), Mapping[int, float])
    assert fits(range(10**12), Sequence[Natural])
    assert not any(fits(range(-1, 1000), Sequence[Natural]) for _ in range(20))
    assert not any(fits(range(1000, -2, -1), Sequence[Natural]) for _ in range(20))


@checked
def average(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)


@pytest.mark.parametrize("least", range(4))
@pytest.mark.parametrize("collection", [list, Sequence, tuple])
def test_collections_of_different_ranges_are_different_annotations(collection, least):
    element = Annotated[int, at_least(least)]

    def total(values):
        return sum(values)

    total.__annotations__["values"] = tuple[element, ...] if collection is tuple else collection[element]
    check = checked(total)
    assert check([least, 5]) == least + 5
    with pytest.raises(ArgumentError, match=f"at least {least}"):
        check([least - 1, 5])


@checked(undefined=True)
def largest(values: Sequence[float], others: Float[Tensor, "n"] | None = None) -> float:
    return max(values)


OF_ALL_KINDS = [
    *(0, True, 2**64, -(2**64), 0.5, math.nan, math.inf, np.float64(0.5), np.float64("nan"), np.int64(1), "a", "b"),
    *(
        None,
        enum.StrEnum("Choice", ["a"])("a"),
        torch.ones(2),
        torch.ones(2, 2),
        torch.ones(2, dtype=torch.int),
        PROMPTS,
    ),
]
QUICK = [float, int, bool, str, Literal["a"], Literal["a", 1], Float[Tensor, "n"], Tensor, Prompts, float | None]


@pytest.mark.parametrize("undefined", [False, True])
@pytest.mark.parametrize("hint", QUICK, ids=str)
def test_quick_tests_agree_with_beartype(hint: Any, undefined: bool):
    for value in OF_ALL_KINDS:
        assert fits(value, hint, undefined) == is_bearable(value, hint, conf=_CONFS[undefined]), value


def test_undefined_values_are_accepted_if_the_decorator_allows_them():
    assert math.isnan(largest([math.nan], torch.full((2,), math.nan)))
    with pytest.raises(ArgumentError, match="values must be a sequence of numbers, got the list \\['1'\\]"):
        largest(["1"])  # type: ignore[list-item]


def test_subclasses_of_str_are_strings():
    kinds = enum.StrEnum("Kind", ["zero"])
    assert measure(VALUES, method=kinds.zero)[6] == "zero"  # type: ignore[arg-type,attr-defined]


# ---- ranges and fields ----
@dataclasses.dataclass(frozen=True)
class Settings:
    """One field of each constraint."""

    count: Count = 1
    natural: Natural = 0
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    fraction: Fraction = 0.5
    width: Annotated[int, at_least(2)] | None = None
    slope: Annotated[float, between(-1, 1)] = 0.0
    sizes: tuple[Count, ...] = ()

    def __post_init__(self):
        check_fields(self)


@pytest.mark.parametrize(("field", "bad", "allowed"), [
    ("count", 0, "an int of at least 1"),
    ("count", True, "an int of at least 1"),
    ("natural", -1, "an int of at least 0"),
    ("positive", 0.0, "a number that is positive and finite"),
    ("positive", math.inf, "a number that is positive and finite"),
    ("non_negative", -1e-9, "a number of at least 0"),
    ("fraction", 1.5, "a number from 0 to 1"),
    ("width", 1, "an int of at least 2 or None"),
    ("sizes", (3, 0), "a tuple of an int of at least 1"),
])  # fmt: skip
def test_fields_are_checked_against_their_constraints(field, bad, allowed):
    with pytest.raises(ArgumentError, match=re.escape(f"Settings(): {field} must be {allowed}, got ")):
        Settings(**{field: bad})


def test_fields_take_lists_for_tuples_and_numpys_numbers():
    settings = Settings(sizes=[3, np.int64(4)], positive=2, count=np.int32(3))  # type: ignore[arg-type]
    assert settings == Settings(sizes=(3, 4), positive=2, count=3)
    assert [type(each) for each in (settings.sizes, settings.sizes[1], settings.count)] == [tuple, int, int]


# ---- decorated functions in use ----
def test_decorated_functions_are_ordinary_functions():
    copied = copy.deepcopy(checkpoints.load)
    assert copied is checkpoints.load
    assert functools.partial(average, [1.0, 3.0])() == 2.0
    with pytest.raises(ArgumentError, match="shares"):
        functools.partial(average, "13")()  # type: ignore[arg-type]

    class Base:
        @checked
        def double(self, number: int) -> int:
            return 2 * number

    class Derived(Base):
        def double(self, number: int) -> int:
            return super().double(number) + 1

    assert Derived().double(2) == 5
    with pytest.raises(ArgumentError, match=r"Base\.double\(\): number must be an int, got '2'"):
        Derived().double("2")  # type: ignore[arg-type]


def test_compiled_code_runs_through_a_decorated_function():
    @checked
    def scale(values: Float[Tensor, "n"], by: float) -> Tensor:
        return values * by

    compiled = torch.compile(lambda values: scale(values, 2.0), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_public_functions_are_pickled_by_the_name_that_users_have():
    assert pickle.loads(pickle.dumps(algorithms.ridge)) is algorithms.ridge
    assert pickle.loads(pickle.dumps(checkpoints.load)) is checkpoints.load
    assert inspect.signature(algorithms.ridge).parameters["penalty"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(("call", "message"), [
    (lambda: algorithms.ridge(PROMPTS, penalty="0.1"), r"ridge\(\): penalty must be a number .*got '0\.1'"),  # type: ignore[arg-type]
    (lambda: algorithms.nearest_neighbours(PROMPTS, n_neighbours=1.5), r"n_neighbours must be an int .*got 1\.5"),  # type: ignore[arg-type]
    (lambda: algorithms.ols(PROMPTS.xs), r"prompts must be Prompts.*, got a tensor of float64 \[2, 4, 3\]"),  # type: ignore[arg-type]
    (lambda: AlgorithmLearner(3), r"AlgorithmLearner\(\): algorithm must be a function, got 3"),  # type: ignore[arg-type]
    (lambda: PROMPTS.split("2"), r"Prompts\.split\(\): size must be an int of at least 1, got '2'"),  # type: ignore[arg-type]
])  # fmt: skip
def test_public_functions_report_typos(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


# ---- warnings ----
def test_predictions_that_are_not_finite_come_with_a_warning():
    undefined = HookedLSTM(LSTMConfig(x_dim=3, n_context=3, d_model=4, dtype="float64"))
    torch.nn.init.constant_(undefined.unembed_bias, math.inf)
    for predict, n in ((undefined.predict, 2), (undefined.predict_prefixes, 8)):
        with pytest.warns(RuntimeWarning, match=rf"{n} of {n} predictions are not finite"):
            assert predict(PROMPTS).isinf().all()
