"""Calls of every public function with nearly correct arguments: a right result, or an error that names the argument.

Functions are found by introspection. A valid call is made from the annotations; then an argument or two are changed.
"""

import copy
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import os
import pkgutil
import random
import re
import time
import traceback
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mechicl
from mechicl.algorithms.stepwise import StepwiseAlgorithm
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.statistics import Result
from tests import every_call
from tests.comparing import has_nan, nearly_differing
from tests.every_call import CALLS
from tests.faults.mutations import UserError, choose
from tests.faults.own_calls import predict_with_recurrent_layers, report_on, train_with_a_clamp
from tests.faults.runner import DIED, MIB, SLOW, Campaign, Outcome, limit_memory, measured, run_apart
from tests.faults.values import WORLDS, Values

ROOT = str(Path(mechicl.__file__).parent)
LEFT_OUT = {
    "mechicl.checkpoints.push": "uses the network", "mechicl.text.load_texts": "uses the network",
    "mechicl.interop.load_language_model": "uses the network", "mechicl.reports.report": "takes minutes",
    "mechicl.viz.init_notebook": "is for a notebook", "mechicl.viz.save": "starts a browser",
}  # fmt: skip
"""Functions that are not called, and the reason."""
TRIES, BASE_SECONDS = 14, 6.0  # of finding a valid call, and the seconds that it may take
LARGEST = 1024 * MIB
LARGE_NUMBER, SMALL_NUMBER = 100, 16  # larger defaults, as of numbers of prompts, are replaced by the small number
SHARE = 0.97
OWN_ERRORS = (ValueError, TypeError, OSError, LookupError, NotImplementedError, FloatingPointError, ImportError)
RETURN_INPUTS = ("state_dict", "read_weight_products", "query_of")  # NaN if the weights or the state are
EMPTY = inspect.Parameter.empty


class Kind(enum.StrEnum):
    """The outcome of a call."""

    RIGHT = "right: as the valid call"
    ACCEPTED = "accepted, not compared"
    WARNED = "warned"
    NAMED = "named error"
    USERS = "the user's own error"
    HUGE = "a huge result, as requested: out of memory, or over 20 s"
    UNNAMED = "our error, but it names neither argument nor value"
    RAW = "raw error"
    TAKEN = "bad argument accepted"
    NAN = "NaN without a warning"
    WRONG = "WRONG: another result"
    LARGE = "over 1 GB"


GOOD = {Kind.RIGHT, Kind.ACCEPTED, Kind.WARNED, Kind.NAMED, Kind.USERS, Kind.HUGE}
NEVER = (Kind.WRONG, Kind.LARGE, SLOW, DIED)


@dataclass
class Target:
    """A public function, class or method (which takes `self`), and a valid call, or the trouble with finding one."""

    name: str
    function: Callable[..., Any]
    of_class: type | None = None
    valid: dict[str, Any] | None = None
    world: str = WORLDS[0]
    trouble: str = ""
    hints: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, inspect.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        function = self.function.__init__ if inspect.isclass(self.function) else self.function
        try:
            self.hints = typing.get_type_hints(inspect.unwrap(getattr(function, "__func__", function)))
            parameters = inspect.signature(self.function).parameters
        except (NameError, TypeError, ValueError) as error:
            self.trouble, parameters = str(error), {}
        self.parameters = {
            name: each for name, each in parameters.items()
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and not (name == "self" and self.of_class)
        }  # fmt: skip
        if self.of_class:
            self.hints["self"] = self.of_class

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function; enter a context manager, and take the first values of an iterator."""
        kinds = {name: each.kind for name, each in self.parameters.items()}
        first = [name for name in arguments if kinds.get(name, "self") in ("self", inspect.Parameter.POSITIONAL_ONLY)]
        named = {name: each for name, each in arguments.items() if name not in first}
        torch.manual_seed(0)
        result = self.function(*(arguments[name] for name in first), **named)
        if isinstance(result, AbstractContextManager) and not isinstance(result, torch.nn.Module):
            with result:
                return None
        return list(itertools.islice(result, 5)) if isinstance(result, Iterator) else result

    def default(self, name: str) -> Any:
        return self.parameters[name].default if name in self.parameters else EMPTY

    def candidates(self, values: Values, name: str, world: str) -> list[Any]:
        """Return valid values of a parameter."""
        default = self.default(name)
        if name == "progress":
            return [False]
        if _is_large(default):
            return [SMALL_NUMBER, default]
        found = values.candidates(self.hints.get(name, EMPTY), name, world)
        return found if default is EMPTY else [default, *found]

    def arguments(self, values: Values, attempt: int) -> tuple[str, dict[str, Any]]:
        """Choose a world and arguments; the choice depends on the attempt, and leaves out most defaults."""
        rng, world, chosen = random.Random(f"{self.name} {attempt}"), WORLDS[attempt % len(WORLDS)], {}
        for name in [*(["self"] if self.of_class else []), *self.parameters]:
            default = self.default(name)
            if default is not EMPTY and not _is_large(default) and name != "progress":
                continue
            found = self.candidates(values, name, world)
            if not found:
                raise LookupError(f"nothing fits {name}: {self.hints.get(name)}")
            chosen[name] = found[0 if attempt < len(WORLDS) else min(int(rng.expovariate(0.7)), len(found) - 1)]
        return world, chosen


def _is_large(default: Any) -> bool:
    return isinstance(default, int) and default > LARGE_NUMBER


def find_targets() -> list[Target]:
    """Find everything public that can be called: all of `__all__`, and the public methods of public classes."""
    targets: dict[int, Target] = {}

    def add(name: str, function: Any, of_class: type | None = None) -> None:
        targets.setdefault(id(inspect.unwrap(function)), Target(name, function, of_class))

    packages = [each.name for each in pkgutil.walk_packages(mechicl.__path__, "mechicl.") if each.ispkg]
    for package in sorted(packages, key=lambda name: (name.count("."), name)):
        module = importlib.import_module(package) if not package.startswith("mechicl.cli") else None
        for name in sorted(getattr(module, "__all__", ())):
            member: Any = getattr(module, name)
            if inspect.isfunction(member):
                add(f"{package}.{name}", member)
            if not inspect.isclass(member) or not member.__module__.startswith("mechicl."):
                continue
            if getattr(member, "_is_protocol", False) or issubclass(member, BaseException):
                continue
            if not issubclass(member, Result | enum.Enum) and not inspect.isabstract(member):
                add(f"{package}.{name}", member)
            for key in dir(member):
                method = inspect.getattr_static(member, key)
                plain = method.__func__ if isinstance(method, classmethod | staticmethod) else method
                is_public = not key.startswith("_") and inspect.isfunction(plain)
                if key == "step" and issubclass(member, StepwiseAlgorithm):
                    continue  # the library calls it, as it calls a module's forward; users call `advance`
                if is_public and plain.__module__.startswith("mechicl.") and not hasattr(plain, "__isabstractmethod__"):
                    name_of = f"{package}.{name}.{key}"
                    add(name_of, plain, member) if plain is method else add(name_of, getattr(member, key))
    return sorted(targets.values(), key=lambda each: each.name)


OWN = [
    Target(f"tests.{function.__name__}", function, valid=valid)
    for function, valid in (
        (predict_with_recurrent_layers, {"attention": "gated_linear", "n_layers": 2, "n_heads": 2, "seed": 0}),
        (predict_with_recurrent_layers, {"attention": "delta", "conv_width": 2, "normalize_keys": True, "seed": 0}),
        (predict_with_recurrent_layers, {"attention": "mamba2", "conv_width": 3, "n_heads": 2, "seed": 0}),
        (predict_with_recurrent_layers, {"attention": "mesa", "n_heads": 1, "gate": "none", "seed": 0}),
        (train_with_a_clamp, {"component": "z", "layer": 0, "head": 1, "method": "value", "value": 0.5}),
        (train_with_a_clamp, {"component": "pattern", "layer": 1, "method": "freeze", "snapshot": 0, "steps": (1, 3)}),
        (train_with_a_clamp, {"component": "mlp_out", "layer": 0, "pos": (0, 2), "method": "mean"}),
        (report_on, {"checkpoint": "model", "n_prompts": 8}),
    )
]


class Calls(Campaign):
    """Valid calls with an argument or two changed."""

    name = "calls"
    bar = f"faulty calls: right, or a named error, in {SHARE:.0%}; none wrong, over 20 s or over 1 GB"
    n, sample, seconds = 5000, 60, 20.0

    def prepare(self) -> None:
        warnings.simplefilter("ignore")
        os.chdir(self.folder)
        self.values = Values(self.folder)
        everything = [target for target in find_targets() if target.name not in LEFT_OUT]
        random.Random(f"targets {self.seed}").shuffle(everything)
        if self.sampled:
            everything = [target for target in everything if target.of_class is None][: self.sample]
        everything += OWN
        self._record_calls([target for target in everything if target.of_class is None])
        for _ in range(1 if self.sampled else 3):  # results of some are arguments of others
            self._find_calls([target for target in everything if target.valid is None])
        n_found = sum(target.valid is not None for target in everything)
        for target in everything:  # others get arguments that fit one by one; their results are not compared
            if target.valid is None and not target.trouble.startswith("a valid call takes"):
                try:
                    target.world, target.valid = target.arguments(self.values, 0)
                except LookupError:
                    continue
        self.targets = [target for target in everything if target.valid is not None]
        self.without = [target for target in everything if target.valid is None]
        print(f"  a valid call of {n_found} of {len(everything)} functions, classes and methods; others: "
              f"{len(self.targets) - n_found} with arguments that fit one by one", flush=True)  # fmt: skip

    def _record_calls(self, targets: list[Target]) -> None:
        """Take the arguments of the calls that `every_call.py` writes down."""
        arguments = dict[str, dict[str, Any]]()
        for target in targets:
            package, _, short = target.name.rpartition(".")
            call = CALLS.get(target.name.removeprefix("mechicl."))
            if call is None or inspect.isclass(target.function) or "." in target.function.__qualname__:
                continue

            @functools.wraps(target.function)
            def record(*args: Any, target: Target = target, **options: Any) -> Any:
                bound = inspect.signature(target.function).bind(*args, **options)
                arguments.setdefault(target.name, dict(bound.arguments))
                return target.function(*args, **options)

            with pytest.MonkeyPatch.context() as patch:
                for module in (importlib.import_module(package), every_call):
                    if hasattr(module, short):
                        patch.setattr(module, short, record)
                call(every_call.world())
            if target.name in arguments:
                target.valid = arguments[target.name]

    def _find_calls(self, targets: list[Target]) -> None:
        found = {}
        searches = range(len(targets))
        for number, outcome in run_apart(
            lambda i: self._search(targets[i]), searches, workers=self.workers, seconds=TRIES * 3.0
        ):
            targets[number].trouble = "" if outcome.good else outcome.text or outcome.kind
            if outcome.good:
                found[number] = targets[number].arguments(self.values, int(outcome.text))
        for number, (world, arguments) in sorted(found.items()):
            target, own = targets[number], dict(arguments)
            try:
                if "self" in own:  # methods may change it
                    own["self"] = copy.deepcopy(own["self"])
                self.values.add(world, target.call(own))
                target.world, target.valid = world, arguments
            except Exception as error:
                target.trouble = f"another outcome when repeated: {error!r}"

    def _search(self, target: Target) -> Outcome:
        started, trouble = time.monotonic(), ""
        for attempt in range(TRIES):
            before = time.monotonic()
            try:
                target.call(target.arguments(self.values, attempt)[1])
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"[:300]
                if isinstance(error, LookupError) or time.monotonic() - started > TRIES * 1.5:
                    break
                continue
            if time.monotonic() - before > BASE_SECONDS:
                return Outcome("slow", False, f"a valid call takes {time.monotonic() - before:.0f} s")
            return Outcome("found", True, str(attempt))
        return Outcome("no valid call", False, trouble)

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        target = self.targets[number % len(self.targets)]
        self.values.folder, valid = folder, target.valid or {}
        given, changed, texts, kinds, error = dict(valid), list[str](), list[str](), set[str](), None
        names = [*target.parameters] or (["self"] if target.of_class else [])
        for name in rng.sample(names, min(len(names), rng.choice((1, 1, 1, 1, 2)))):
            values = [valid[name]] if name in valid else target.candidates(self.values, name, target.world)
            hint = target.hints.get(name, EMPTY)
            mutation = choose(rng, values[0], hint, only_its_kind=name == "self") if values else None
            if mutation is None:
                continue
            changed.append(name)
            texts.append(f"{name}: {mutation.text}")
            try:
                new = mutation.make()
            except Exception as refused:  # such as Prompts with a NaN
                error = refused
                break
            if name != "self" or isinstance(new, target.of_class or object):
                given[name] = new
                kinds.add(mutation.kind)
        compared = kinds <= {"same"} and not target.trouble
        expected = target.call(valid) if compared and error is None else None
        result, text, outcome = None, f"{target.name}({'; '.join(texts)})", Outcome("", False, group=target.name)
        (folder / "call").write_text(text, errors="replace")
        limit_memory(LARGEST + 256 * MIB)
        with measured(outcome), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if error is None:
                try:
                    result = target.call(given)
                except Exception as raised:
                    error = raised
        if error is not None and not texts:
            kind = Kind.ACCEPTED
        elif error is not None:
            values = [each[name] for each in (given, valid) for name in changed if name in each]
            conflicting = [name for name in target.parameters if len(name) > 4]
            kind = judge_error(error, [] if target.trouble else changed + conflicting, values)
            kind = Kind.HUGE if kind == Kind.LARGE and "huge" in text else kind
        elif outcome.mebibytes > LARGEST / MIB:
            kind = Kind.LARGE
        elif compared and (not nearly_differing(expected, result) or nearly_differing(expected, target.call(valid))):
            kind = Kind.RIGHT  # or calls that draw anew, which cannot be compared
        elif compared:
            kind = Kind.WRONG
        elif caught:
            kind = Kind.WARNED
        elif has_nan(result) and not target.trouble and not has_nan(target.call(valid)):
            kind = Kind.ACCEPTED if self._nan_is_announced(target, [given.get(name) for name in changed]) else Kind.NAN
        else:
            kind = Kind.TAKEN if "bad" in kinds else Kind.ACCEPTED
        end = _text(result) if error is None else f"{type(error).__name__}: {_text(error)}"
        outcome.kind, outcome.good, outcome.text = kind, kind in GOOD, f"{text} -> {end:.600}"
        if error is not None and not outcome.good:
            outcome.text += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
        return outcome

    def explain(self, number: int, outcome: Outcome) -> None:
        """Add the call that was killed or died; those that request something huge may."""
        call = self.folder / str(number) / "call"
        outcome.text = f"{call.read_text() if call.exists() else ''} {outcome.text}"
        outcome.group = self.targets[number % len(self.targets)].name
        if "huge" in outcome.text:
            outcome.kind, outcome.good = Kind.HUGE, True

    def _nan_is_announced(self, target: Target, changed: list[Any]) -> bool:
        """Tell whether NaN is a documented result, or comes from a result, a class or weights that may contain it."""
        if inspect.isclass(target.function) or any(isinstance(each, Result | Trajectory) for each in changed):
            return True
        is_documented = "NaN" in (target.function.__doc__ or "") and not has_nan(changed)
        return is_documented or target.name.endswith(RETURN_INPUTS)

    def passes(self, outcomes: Sequence[Outcome]) -> bool:
        n_good = sum(outcome.good for outcome in outcomes)
        return n_good >= SHARE * len(outcomes) and not any(outcome.kind in NEVER for outcome in outcomes)

    def summary(self, outcomes: Sequence[Outcome]) -> list[str]:
        kinds = {each.name: "methods" if each.of_class else "classes" if inspect.isclass(each.function) else "functions"
                 for each in self.targets}  # fmt: skip
        lines = []
        for kind in ("functions", "classes", "methods"):
            some = [outcome.good for outcome in outcomes if kinds.get(outcome.group) == kind]
            lines.append(f"  {sum(some) / max(len(some), 1):.1%} of {len(some)} calls of {kind} good")
        worst = Counter(outcome.group for outcome in outcomes if not outcome.good).most_common(60)
        lines += [f"  {n:4d}  {name}" for name, n in worst]
        return lines + [f"  not called: {each.name}: {' '.join(each.trouble.split())[:150]}" for each in self.without]


# ---- judgement ----
def judge_error(error: Exception, names: Sequence[str], values: Sequence[Any]) -> Kind:
    """Tell whether an error is raised by our code and names an argument or its value."""
    text, frames = _text(error).lower(), traceback.extract_tb(error.__traceback__)
    if isinstance(error, UserError) or "<lambda>()" in text:  # a user's function with other parameters
        return Kind.USERS
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "unable to allocate" in text:
        return Kind.LARGE
    if isinstance(error, OSError) and error.filename is not None:
        return Kind.NAMED
    is_ours = bool(frames) and frames[-1].filename.startswith(ROOT) and "raise" in (frames[-1].line or "")
    if not is_ours or not isinstance(error, OWN_ERRORS):
        return Kind.RAW
    hints = {part for name in names for part in (name, name.replace("_", " "), name.rstrip("s"), name.split("_")[-1])}
    for value in itertools.chain.from_iterable(map(_with_elements, values)):
        hints.add(type(value).__name__)
        if isinstance(value, str | int | float | complex | bytes | np.generic | None):
            hints |= {repr(value)[:60], str(value)[:60]}
        elif isinstance(value, Tensor | np.ndarray):
            hints |= {"tensor", "dtype", str(value.dtype), *map(str, value.shape)}
        elif isinstance(value, torch.nn.Module):
            hints |= {"model", "weight", "module"}
        elif isinstance(value, Prompts):
            hints |= {"xs", "ys", "position"}
        elif dataclasses.is_dataclass(value):
            hints |= {each.name for each in dataclasses.fields(value)}
        elif isinstance(value, list | tuple | dict | set):
            hints.add(str(len(value)))
    is_named = any(re.search(rf"(?<!\w){re.escape(hint.lower())}", text) for hint in hints if hint)
    return Kind.NAMED if is_named or not names else Kind.UNNAMED


def _with_elements(value: Any, depth: int = 3) -> list[Any]:
    """Return a value, and the elements of lists and dictionaries: an error may name a field of one of them."""
    elements = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    parts = list(elements)[:20] if depth > 1 else []
    return [value, *(each for part in parts for each in _with_elements(part, depth - 1))]


def _text(value: Any) -> str:
    try:
        return " ".join((str(value) if isinstance(value, BaseException) else repr(value)[:200]).split())
    except Exception as error:
        return f"{type(value).__name__} without a repr: {type(error).__name__}"
