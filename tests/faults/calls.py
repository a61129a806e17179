"""Calls of every public function with nearly correct arguments: a right result, or an error that names the argument.

Functions are found by introspection. A valid call is one that they get while the calls of `every_call.py` run, or has
arguments seen there; then an argument or two are changed.
"""

import dataclasses
import enum
import inspect
import itertools
import os
import random
import re
import sys
import time
import traceback
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Never

import numpy as np
import torch
from torch import Tensor

import mechicl
from mechicl.algorithms.stepwise import StepwiseAlgorithm
from mechicl.base.arguments import fits
from mechicl.learners import Trajectory
from mechicl.prompts import Prompts
from mechicl.statistics import Result
from tests import every_call
from tests.comparing import has_nan, nearly_differing
from tests.every_call import CALLS
from tests.faults.mutations import UserError, choose
from tests.faults.own_calls import predict_with_recurrent_layers, report_on, train_with_a_clamp
from tests.faults.runner import DIED, MIB, SLOW, Campaign, Outcome, limit_memory, measured, run_apart
from tests.public import exported

ROOT = str(Path(mechicl.__file__).parent)
LEFT_OUT = {
    "mechicl.checkpoints.push": "uses the network", "mechicl.text.load_texts": "uses the network",
    "mechicl.interop.load_language_model": "uses the network", "mechicl.reports.report": "takes minutes",
    "mechicl.viz.init_notebook": "is for a notebook", "mechicl.viz.save": "starts a browser",
}  # fmt: skip
"""Functions that are not called, and the reason."""
BASE_SECONDS = 6.0  # that a valid call may take
SEEN_OF_A_TYPE = 4
LARGEST = 1024 * MIB
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
    """A public function, class or method (which takes `self`), and a valid call, or the trouble with it."""

    name: str
    function: Callable[..., Any]
    of_class: type | None = None
    valid: dict[str, Any] | None = None
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

    def names(self) -> list[str]:
        """Return the names of the arguments, `self` first."""
        return [*(["self"] if self.of_class else []), *self.parameters]

    def fitting(self, seen: list[Any]) -> dict[str, Any] | None:
        """Return values that fit the required arguments, each the first of those seen, or None."""
        required = [name for name in self.names() if name == "self" or self.parameters[name].default is EMPTY]
        found = {name: [value for value in seen if fits(value, self.hints.get(name, Never))][:1] for name in required}
        return {name: values[0] for name, values in found.items()} if all(found.values()) else None


def find_targets() -> list[Target]:
    """Find everything public that can be called: all of `__all__`, and the public methods of public classes."""
    targets: dict[int, Target] = {}

    def add(name: str, function: Any, of_class: type | None = None) -> None:
        targets.setdefault(id(inspect.unwrap(function)), Target(name, function, of_class))

    for name, member in exported():
        if inspect.isfunction(member):
            add(name, member)
        if not inspect.isclass(member) or not member.__module__.startswith("mechicl."):
            continue
        if getattr(member, "_is_protocol", False) or issubclass(member, BaseException):
            continue
        if not issubclass(member, Result | enum.Enum) and not inspect.isabstract(member):
            add(name, member)
        for key in dir(member):
            method = inspect.getattr_static(member, key)
            plain = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            is_public = not key.startswith("_") and inspect.isfunction(plain)
            if key == "step" and issubclass(member, StepwiseAlgorithm):
                continue  # the library calls it, as it calls a module's forward; users call `advance`
            if is_public and plain.__module__.startswith("mechicl.") and not hasattr(plain, "__isabstractmethod__"):
                owner = next(each for each in member.__mro__ if key in vars(each)) if plain is method else None
                add(f"{name}.{key}", plain if owner else getattr(member, key), owner)
    return sorted(targets.values(), key=lambda each: each.name)


def watch_calls(targets: list[Target]) -> list[Any]:
    """Run the calls of `every_call.py`; keep the arguments of each function's first call, and return some objects seen.

    Calls inside the library count, too.
    """
    wanted, seen = {_code(target): target for target in targets}, dict[type, list[Any]]()

    def keep(value: Any) -> None:
        known = seen.setdefault(type(value), [])
        if len(known) < SEEN_OF_A_TYPE:
            known.append(value)

    def watch(frame: FrameType, event: str, result: Any) -> None:
        target = wanted.get(frame.f_code)
        if target is not None and event == "call" and target.valid is None:
            target.valid = {name: frame.f_locals[name] for name in target.names()}
        elif target is not None and event == "return":
            for value in (*frame.f_locals.values(), result):
                keep(value)

    world = every_call.world()
    for value in vars(world).values():
        keep(value)
    sys.setprofile(watch)
    try:
        for call in CALLS.values():
            call(world)
    finally:
        sys.setprofile(None)
    return [value for values in seen.values() for value in values]


def _code(target: Target) -> CodeType | None:
    function = target.function.__init__ if inspect.isclass(target.function) else target.function
    return getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)


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
        everything = [target for target in find_targets() if target.name not in LEFT_OUT]
        random.Random(f"targets {self.seed}").shuffle(everything)
        if self.sampled:
            everything = [target for target in everything if target.of_class is None][: self.sample]
        self._check_calls(everything, watch_calls(everything))
        self.targets = [target for target in [*everything, *OWN] if target.valid is not None]
        self.without = [target for target in everything if target.valid is None]
        print(f"  a valid call of {sum(not target.trouble for target in self.targets)} of {len(everything) + len(OWN)} "
              f"functions, classes and methods; others: {sum(bool(target.trouble) for target in self.targets)} whose "
              "results are not compared", flush=True)  # fmt: skip

    def _check_calls(self, targets: list[Target], seen: list[Any]) -> None:
        """Repeat each valid call in a separate process; functions that were not called get arguments that fit."""
        for target in targets:
            target.valid = target.valid or target.fitting(seen)
        called = [target for target in targets if target.valid is not None]
        for number, outcome in run_apart(
            lambda i: self._repeat(called[i]), range(len(called)), workers=self.workers, seconds=4 * BASE_SECONDS
        ):
            called[number].trouble = "" if outcome.good else outcome.text or outcome.kind
            if outcome.kind == SLOW:
                called[number].valid = None

    def _repeat(self, target: Target) -> Outcome:
        started = time.monotonic()
        target.call(target.valid or {})
        seconds = time.monotonic() - started
        return Outcome("found", True) if seconds < BASE_SECONDS else Outcome(SLOW, False, f"it takes {seconds:.0f} s")

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        target = self.targets[number % len(self.targets)]
        valid = target.valid or {}
        given, changed, texts, kinds, error = dict(valid), list[str](), list[str](), set[str](), None
        names = [*target.parameters] or (["self"] if target.of_class else [])
        for name in rng.sample(names, min(len(names), rng.choice((1, 1, 1, 1, 2)))):
            value = valid[name] if name in valid else target.parameters[name].default
            mutation = choose(rng, value, target.hints.get(name, EMPTY), only_its_kind=name == "self")
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
