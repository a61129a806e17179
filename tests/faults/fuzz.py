"""Every public function is called with arguments that are nearly right; it answers rightly, or says what is wrong.

Functions are found by introspection: whatever a package's `__all__` names, and the public members of the modules that
`import mechicl` shows. A valid call is made from the annotations first; then one argument or two are changed.
"""

import copy
import dataclasses
import dis
import enum
import importlib
import inspect
import itertools
import math
import numbers
import os
import pkgutil
import random
import re
import time
import traceback
import typing
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import mechicl
from mechicl.learners import Trajectory
from mechicl.statistics import Result
from tests.faults.makers import LARGEST_DEFAULT, SMALL, WORLDS, Makers
from tests.faults.mutations import OurError, choose
from tests.faults.part import MIB, Outcome, Part, forget_highest, highest, limit_memory, resident, run_apart

ROOT = str(Path(mechicl.__file__).parent)
LEFT_OUT = {
    "mechicl.checkpoints.push": "sends to the network",
    "mechicl.text.load_texts": "reads from the network",
    "mechicl.interop.load_language_model": "reads from the network",
    "mechicl.reports.report": "takes minutes: its parts are called one by one",
    "mechicl.reports.write_report": "takes minutes: its parts are called one by one",
    "mechicl.viz.init_notebook": "is for a notebook",
    "mechicl.viz.save": "starts a browser",
    "mechicl.constructions.certificates_table": "takes a minute",
}
"""What is not called, and why."""
TRIES = 14
"""Valid calls are looked for so often."""
SHOWN_OF_A_VALUE = 60
"""Characters of it that an error has to have."""
BASE_SECONDS, SECONDS = 6.0, 20.0
LARGEST = 1024 * MIB
OWN_ERRORS = (
    ValueError,
    TypeError,
    OSError,
    IndexError,
    NotImplementedError,
    FloatingPointError,
    ImportError,
    KeyError,
)


class What(enum.StrEnum):
    RIGHT = "right: as the valid call"
    ACCEPTED = "accepted, no oracle"
    WARNED = "warned"
    NAMED = "named error"
    USERS = "the user's own error"
    UNNAMED = "our error, but it names neither argument nor value"
    RAW = "raw error"
    TAKEN = "bad argument accepted"
    NAN = "NaN without a word"
    WRONG = "WRONG: another result"
    LARGE = "over 1 GB"


GOOD = {What.RIGHT, What.ACCEPTED, What.WARNED, What.NAMED, What.USERS}
NEVER = (What.WRONG, What.LARGE, "too slow", "died")
SHARE = 0.99


@dataclass
class Target:
    """A public function, a class that is called, or a method, and a valid call of it.

    Attributes:
        name: as users write it.
        function: what is called; a method still takes `self`.
        of_class: whose instances `self` is.
        world: of the valid call's arguments.
        picked: by parameter, which of its candidates the valid call has.
        known: how many results there were then; later ones are no candidates, or others would be picked.
        trouble: why there is no valid call.
    """

    name: str
    function: Callable[..., Any]
    of_class: type | None = None
    world: str = ""
    picked: dict[str, int] | None = None
    known: int = 0
    trouble: str = ""
    hints: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, inspect.Parameter] = field(default_factory=dict)


def find_targets() -> list[Target]:
    """Everything public that can be called."""
    shown = {f"mechicl.{name}" for name in mechicl._SUBMODULES}
    names = [
        module.name for module in pkgutil.walk_packages(mechicl.__path__, "mechicl.")
        if module.ispkg or module.name in shown
    ]  # fmt: skip
    targets: dict[int, Target] = {}
    for module_name in sorted(names, key=lambda name: (name.count("."), name)):
        if module_name.startswith("mechicl.cli"):
            continue
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None)
        if public is None and module_name in shown:
            public = [
                name for name, each in vars(module).items()
                if not name.startswith("_") and getattr(each, "__module__", "") == module_name
            ]  # fmt: skip
        for name in sorted(public or ()):
            _add(targets, f"{module_name}.{name}", getattr(module, name))
    return [_read(target) for target in sorted(targets.values(), key=lambda each: each.name)]


def _add(targets: dict[int, Target], name: str, member: Any) -> None:
    if inspect.isfunction(member):
        targets.setdefault(id(inspect.unwrap(member)), Target(name, member))
    if not inspect.isclass(member) or not member.__module__.startswith("mechicl."):
        return
    plain = not issubclass(member, Result | BaseException | enum.Enum) and not inspect.isabstract(member)
    if plain and not getattr(member, "_is_protocol", False) and "__init__" in dir(member):
        targets.setdefault(id(member), Target(name, member))
    if getattr(member, "_is_protocol", False) or issubclass(member, BaseException):
        return
    for key in dir(member):
        method = inspect.getattr_static(member, key)
        plain = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        if key.startswith("_") or not inspect.isfunction(plain) or not plain.__module__.startswith("mechicl."):
            continue
        if inspect.isabstract(member) and getattr(plain, "__isabstractmethod__", False):
            continue  # nothing can be made that has it
        if plain is method:
            targets.setdefault(id(inspect.unwrap(plain)), Target(f"{name}.{key}", plain, member))
        else:
            targets.setdefault(id(inspect.unwrap(plain)), Target(f"{name}.{key}", getattr(member, key)))


def _read(target: Target) -> Target:
    function = target.function.__init__ if inspect.isclass(target.function) else target.function
    try:
        target.hints = typing.get_type_hints(inspect.unwrap(getattr(function, "__func__", function)))
    except (NameError, TypeError):
        target.hints = {}
    try:
        parameters = inspect.signature(target.function).parameters
    except (ValueError, TypeError) as error:
        target.trouble = f"no signature: {error}"
        return target
    target.parameters = {
        name: each for name, each in parameters.items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and not (name == "self" and target.of_class)
    }  # fmt: skip
    return target


# ---- valid calls ----


def candidates(makers: Makers, target: Target, name: str, world: str) -> list[Any]:
    """Values of a parameter, small ones in place of large defaults."""
    if name == "self":
        assert target.of_class is not None
        kind = target.of_class
        return makers._pooled(world, lambda each: isinstance(each, kind))
    parameter = target.parameters[name]
    default = parameter.default
    if name == "progress":
        return [False]
    if default is not parameter.empty:
        if isinstance(default, int) and not isinstance(default, bool) and default > LARGEST_DEFAULT:
            return [SMALL, default]
        return [default, *makers.candidates(target.hints.get(name, parameter.empty), name, world)]
    return makers.candidates(target.hints.get(name, parameter.empty), name, world)


def arguments(makers: Makers, target: Target, world: str, picked: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of a valid call; those with defaults are left out, but for large ones."""
    return {name: candidates(makers, target, name, world)[index] for name, index in picked.items()}


def call(target: Target, given: Mapping[str, Any]) -> Any:
    """Call it, and what it yields too."""
    first = [name for name, each in target.parameters.items() if each.kind is each.POSITIONAL_ONLY]
    positional = [given["self"]] if "self" in given else []
    positional += [given[name] for name in first if name in given]
    named = {
        name: value for name, value in given.items()
        if name != "self" and name not in first
    }  # fmt: skip
    result = target.function(*positional, **named)
    if isinstance(result, AbstractContextManager) and not isinstance(result, torch.nn.Module):
        with result:
            return None
    return list(itertools.islice(result, 5)) if isinstance(result, Iterator) else result


def pick(makers: Makers, target: Target, attempt: int, rng: random.Random) -> tuple[str, dict[str, int]] | str:
    """A world, and which of its candidates each parameter has; or the name of a parameter that there are none for."""
    world = WORLDS[attempt % len(WORLDS)]
    picked = {}
    for name in (["self"] if target.of_class else []) + list(target.parameters):
        parameter = target.parameters.get(name)
        default = parameter.default if parameter is not None else inspect.Parameter.empty
        large = isinstance(default, int) and not isinstance(default, bool) and default > LARGEST_DEFAULT
        if default is not inspect.Parameter.empty and not large and name != "progress":
            continue
        n = len(candidates(makers, target, name, world))
        if not n:
            return name
        picked[name] = 0 if attempt < len(WORLDS) else min(int(rng.expovariate(0.7)), n - 1)
    return world, picked


# ---- the campaign ----


class Fuzz(Part):
    """Arguments that are nearly right."""

    name = "fuzz"
    bar = "fuzzed calls: right, or a named error in 99%; none wrong, none over 20 s, none over 1 GB"
    n = 5000
    sample = 60
    seconds = SECONDS

    def prepare(self) -> None:
        warnings.simplefilter("ignore")
        os.chdir(self.folder)
        self.makers = Makers(self.folder)
        everything = [target for target in find_targets() if target.name not in LEFT_OUT]
        rng = random.Random(f"targets {self.seed}")
        rng.shuffle(everything)
        if self.sampled:
            everything = [target for target in everything if target.of_class is None][: self.sample]
        self.targets = everything
        for _ in range(1 if self.sampled else 3):  # results of some are arguments of others
            self._look_for_calls([target for target in self.targets if target.picked is None])
        called = [target for target in self.targets if target.picked is not None]
        print(f"  {len(called)} of {len(self.targets)} public functions, classes and methods have a valid call")
        for target in self.targets:  # the others are called with what fits each parameter alone: there is no oracle
            if target.picked is None and not target.trouble.startswith("a valid call takes"):
                picked = pick(self.makers, target, 0, rng)
                if not isinstance(picked, str):
                    target.world, target.picked, target.known = *picked, len(self.makers.pool)
        self.without = [target for target in self.targets if target.picked is None]
        self.targets = [target for target in self.targets if target.picked is not None]
        print(f"  {len(self.targets) - len(called)} more have arguments that fit one by one")

    def _look_for_calls(self, targets: list[Target]) -> None:
        known = len(self.makers.pool)
        for number, outcome in run_apart(
            lambda i: self._find_call(targets[i]),
            range(len(targets)),
            workers=self.workers,
            seconds=TRIES * BASE_SECONDS / 2,
        ):
            target = targets[number]
            if not outcome.good:
                target.trouble = outcome.words or outcome.kind
                continue
            attempt = int(outcome.words)
            picked = pick(self.makers, target, attempt, random.Random(f"{target.name} {attempt}"))
            assert not isinstance(picked, str)
            target.world, target.picked, target.known = *picked, known
            target.trouble = ""
        for target in targets:  # in order, whichever was found first
            if target.picked is not None:
                try:
                    self.makers.add(target.world, call(target, _with_copy_of_self(self._arguments(target))))
                except Exception as error:
                    target.picked, target.trouble = None, f"another outcome when repeated: {error!r}"

    def _find_call(self, target: Target) -> Outcome:
        trouble = target.trouble
        started = time.monotonic()
        for attempt in range(TRIES):
            picked = pick(self.makers, target, attempt, random.Random(f"{target.name} {attempt}"))
            if isinstance(picked, str):
                return Outcome("no valid call", False, f"nothing fits {picked}: {target.hints.get(picked)}")
            before = time.monotonic()
            try:
                call(target, arguments(self.makers, target, *picked))
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"[:300]
                if time.monotonic() - started > TRIES * BASE_SECONDS / 4:
                    break
                continue
            if time.monotonic() - before > BASE_SECONDS:
                return Outcome("slow", False, f"a valid call takes {time.monotonic() - before:.0f} s")
            return Outcome("found", True, str(attempt))
        return Outcome("no valid call", False, trouble)

    def _arguments(self, target: Target) -> dict[str, Any]:
        assert target.picked is not None
        self.makers.known = target.known
        try:
            return arguments(self.makers, target, target.world, target.picked)
        finally:
            self.makers.known = None

    def run(self, number: int, rng: random.Random, folder: Path) -> Outcome:
        target = self.targets[number % len(self.targets)]
        self.makers.folder = folder
        valid = self._arguments(target)
        given, changed, kinds, words = dict(valid), [], [], []
        names = [*target.parameters] or (["self"] if target.of_class else [])  # of nothing at all, there is one call
        for name in rng.sample(names, min(len(names), rng.choice((1, 1, 1, 1, 2)))):
            values = [valid[name]] if name in valid else candidates(self.makers, target, name, target.world)
            if not values:
                continue
            for _ in range(10):
                hint = target.hints.get(name, inspect.Parameter.empty)
                mutation = choose(rng, values[0], hint, only_its_kind=name == "self")
                if mutation is None:
                    break
                try:
                    given[name] = mutation.make()
                    if name == "self" and target.of_class and not isinstance(given[name], target.of_class):
                        given[name] = valid[name]  # a method is always called of its own class
                        continue
                except Exception as error:
                    if _passed_through_ours(error):  # what it is made of refuses it already
                        said = [f"{name}: {mutation.words}"]
                        return self._judged_error(number, target, [name], values[:1], said, error)
                    continue
                changed.append(name)
                words.append(f"{name}: {mutation.words}")
                kinds.append(mutation.kind)
                break
        group = f"{target.name}({changed[0] if changed else ''})"
        said = f"{number}: {target.name}({'; '.join(words)})"
        same = set(kinds) <= {"same"} and not target.trouble
        expected = _reseeded(lambda: call(target, valid)) if same else None
        forget_highest()
        begins = resident()
        limit_memory(LARGEST + 256 * MIB)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = _reseeded(lambda: call(target, given))
            except Exception as error:
                values = [each[name] for each in (given, valid) for name in changed if name in each]
                return self._judged_error(number, target, changed, values, words, error)
        grown = (highest() - begins) / MIB
        warned = bool(caught)
        said = f"{said} -> {_shown(result)}{f'; warned: {caught[0].message}' if caught else ''}"[:1500]

        def outcome(what: What) -> Outcome:
            return Outcome(what, what in GOOD, said, group, mebibytes=grown)

        if grown > LARGEST / MIB:
            return outcome(What.LARGE)
        if same:
            if alike(expected, result):
                return outcome(What.RIGHT)
            again = _reseeded(lambda: call(target, valid))  # some are not to be repeated: they draw, or go on
            return outcome(What.WRONG if alike(expected, again) else What.ACCEPTED)
        if warned:
            return outcome(What.WARNED)
        if has_nan(result) and not target.trouble and not has_nan(_reseeded(lambda: call(target, valid))):
            # A result may hold undefined values, as its class says: what reads them out of it need not warn of them.
            # Where all arguments are defined, a NaN that the documentation announces (a cosine with 0) has its word.
            put = any(_is_undefined_result(given[name]) for name in changed if name in given)
            # so may what a class is made of (a model whose training diverged): computing with it is what is heard of
            put = put or inspect.isclass(target.function)
            announced = "NaN" in f"{target.function.__doc__}{type(result).__doc__}"
            defined = not any(has_nan(given[name]) for name in changed if name in given)
            return outcome(What.ACCEPTED if put or (announced and defined) else What.NAN)
        return outcome(What.TAKEN if "bad" in kinds else What.ACCEPTED)

    def _judged_error(
        self, number: int, target: Target, changed: list[str], values: list[Any], words: list[str], error: Exception
    ) -> Outcome:
        group = f"{target.name}({changed[0] if changed else ''})"
        what = judge_error(error, [] if target.trouble else changed, values)
        said = f"{number}: {target.name}({'; '.join(words)}) -> {type(error).__name__}: {_words_of(error)}"[:800]
        if what not in GOOD:
            said += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
        return Outcome(what, what in GOOD, said, group)

    def passes(self, outcomes: Sequence[Outcome]) -> bool:
        share = sum(outcome.good for outcome in outcomes) / max(len(outcomes), 1)
        return share >= SHARE and not any(outcome.kind in NEVER for outcome in outcomes)

    def summary(self, outcomes: Sequence[Outcome]) -> list[str]:
        """The share that is good, and who is worst."""
        good = sum(outcome.good for outcome in outcomes)
        lines = [f"  {good / max(len(outcomes), 1):.2%} right, named or without an oracle; bar {SHARE:.0%}"]
        by_group: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            if not outcome.good:
                by_group[outcome.group.partition("(")[0]].append(outcome)
        lines += ["  worst:"] * bool(by_group)
        for name, bad in sorted(by_group.items(), key=lambda one: (-len(one[1]), one[0]))[:40]:
            example = " ".join(bad[0].words.split())[:170]
            lines.append(f"  {len(bad):4d}  {name}: {bad[0].kind}; {example}")
        lines += [f"  not called: {target.name}: {' '.join(target.trouble.split())[:150]}" for target in self.without]
        return lines


def _with_copy_of_self(given: dict[str, Any]) -> dict[str, Any]:
    """Methods may change what they are of."""
    try:
        return {**given, "self": copy.deepcopy(given["self"])} if "self" in given else given
    except (TypeError, RuntimeError):
        return given


def _reseeded(function: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return function()


# ---- what came of it ----


def judge_error(error: Exception, names: Sequence[str], values: Sequence[Any]) -> What:
    """Whether an error is ours, and says what is wrong."""
    if isinstance(error, OurError):
        return What.USERS
    words = _words_of(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in words or "Unable to allocate" in words:
        return What.LARGE
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return What.RAW
    code = last.tb_frame.f_code
    raised = code.co_filename.startswith(ROOT) and code.co_code[last.tb_lasti] in (
        dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"],
    )  # fmt: skip
    if isinstance(error, OSError) and error.filename is not None:
        return What.NAMED
    if not raised or not isinstance(error, OWN_ERRORS):
        return What.RAW
    said = words.lower()
    hinted = {
        part for name in names for part in (name, name.replace("_", " "), name.rstrip("s"), name.rpartition("_")[2])
    }
    for value in itertools.chain.from_iterable(map(_with_what_it_holds, values)):
        hinted.add(type(value).__name__.lower())
        if isinstance(value, str | int | float | complex | bytes | np.generic | type(None)):
            hinted.add(repr(value).lower()[:SHOWN_OF_A_VALUE])
        if isinstance(value, Tensor | np.ndarray):
            hinted |= {"tensor", "dtype", str(value.dtype).lower(), *map(str, value.shape)}
        if isinstance(value, torch.nn.Module):
            hinted |= {"model", "weight", "module"}
        if dataclasses.is_dataclass(value):
            hinted |= {each.name for each in dataclasses.fields(value)}
        if isinstance(value, list | tuple | dict | set):
            hinted.add(str(len(value)))
    cut = {word for word in hinted if len(word) == SHOWN_OF_A_VALUE}  # of a long value, whose end is not looked for
    named = not names or any(re.search(rf"(?<!\w){re.escape(word)}s?(?!\w)", said) for word in hinted if word)
    named = named or any(word in said for word in cut)
    return What.NAMED if named else What.UNNAMED


def _with_what_it_holds(value: Any, depth: int = 3) -> list[Any]:
    """A value, and those in it if it is a list or a dictionary: an error may name a field of one of these."""
    parts = list(itertools.islice(value.values(), 20)) if isinstance(value, Mapping) else []
    parts += value[:20] if isinstance(value, list | tuple) else []
    return [value, *(each for part in parts for each in _with_what_it_holds(part, depth - 1))] if depth else [value]


def _is_undefined_result(value: Any) -> bool:
    return any(
        isinstance(each, Result | Trajectory) and has_nan(each, infinite=True) for each in _with_what_it_holds(value)
    )


def _passed_through_ours(error: BaseException) -> bool:
    return any(frame.filename.startswith(ROOT) for frame in traceback.extract_tb(error.__traceback__))


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(no words)"


def _shown(value: Any) -> str:
    try:
        return " ".join(repr(value).split())[:200]
    except Exception as error:
        return f"a {type(value).__name__} without a repr: {type(error).__name__}"


def _parts(value: Any) -> list[Any] | None:
    """What a value is made of; None for one that is compared as it is."""
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, Mapping):
        return list(value.values())[:200]
    if isinstance(value, list | tuple | set):
        return list(value)[:200]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name, None) for each in dataclasses.fields(value)]
    return None


def has_nan(value: Any, depth: int = 0, *, infinite: bool = False) -> bool:
    """Whether there is a NaN anywhere in it, or an infinity where these count too."""
    if isinstance(value, Tensor):
        if value.is_meta or value.is_sparse:
            return False
        return bool((~value.detach().isfinite() if infinite else value.detach().isnan()).any())
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "fc":
            return False
        return bool((~np.isfinite(value) if infinite else np.isnan(value)).any())
    if isinstance(value, float):
        return math.isnan(value) or (infinite and math.isinf(value))
    parts = _parts(value) if depth < 6 else None
    return any(has_nan(part, depth + 1, infinite=infinite) for part in parts or ())


def alike(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether two results are the same up to rounding, as far as they can be compared."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return False
        if not a.is_floating_point():
            return bool((a == b).all())
        return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(a, bool | str) or isinstance(b, bool | str) or a is None or b is None:
        return bool(a == b) or (isinstance(a, str) and "/" in a)  # paths of folders differ
    if isinstance(a, numbers.Real | np.number) and isinstance(b, numbers.Real | np.number):
        return math.isclose(float(a), float(b), rel_tol=1e-4, abs_tol=1e-6) or (
            math.isnan(float(a)) and math.isnan(float(b))
        )
    if isinstance(a, pd.DataFrame) and isinstance(b, pd.DataFrame):
        return a.shape == b.shape
    parts, others = (_parts(a), _parts(b)) if depth < 6 else (None, None)
    if parts is None or others is None:
        return type(a) is type(b)
    return len(parts) == len(others) and all(alike(x, y, depth + 1) for x, y in zip(parts, others, strict=True))
