"""Objects in separate processes, so that settings of one library do not affect another.

`python -m benchmarks.apart` is such a process: it makes one object and calls its methods as they come, a line of JSON
each. Between calls it waits, and takes nothing.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OF_THREADS = ("OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_", "XLA_FLAGS")
ONE_CORE = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}  # fmt: skip


class NoPeerError(ImportError):
    """A library to compare with is not installed."""


class Apart:
    """An object of this package in a separate process, without environment variables about threads.

    Args:
        make: "module:name" of what is called with `options`; a module without a dot is one of this package.
        ours: mechicl is loaded first, and sets what it sets; otherwise torch is, and mechicl sets nothing.
        one_core: bound to one of the cores, with one thread of each library.
        environment: further environment variables.

    Raises:
        NoPeerError: something that it needs is not installed.
        RuntimeError: another error there; with its words.
    """

    def __init__(
        self, make: str, *, ours: bool = False, one_core: bool = False, environment: Mapping[str, str] | None = None,
        **options: Any,
    ):  # fmt: skip
        self.make = make
        command = [sys.executable, "-m", "benchmarks.apart", make, json.dumps(options), "mechicl" if ours else "torch"]
        variables = {key: value for key, value in os.environ.items() if not key.startswith(OF_THREADS)}
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "analyses"), str(ROOT)])
        variables |= environment or {}
        if one_core:
            variables |= ONE_CORE
            command.append("one-core")
        self._process = subprocess.Popen(
            command, env=variables, cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._answer()  # made
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method in the process and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, args]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.make} ended with {self._process.wait()}")
        answer = json.loads(line)
        if "missing" in answer:
            raise NoPeerError(f"{self.make} cannot be measured here: {answer['missing']}")
        if "error" in answer:
            raise RuntimeError(f"{self.make}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def peers(make: Mapping[str, Callable[[], Apart]]) -> Iterator[dict[str, Apart]]:
    """All that can be had, by name, until the end; what is not installed is left out, with a sentence."""
    with ExitStack() as stack:
        made = {}
        for name, start in make.items():
            try:
                made[name] = start()
            except NoPeerError as error:
                print(f"left out: {name}: {error}", flush=True)
                continue
            stack.callback(made[name].close)
        yield made


def main() -> None:
    """Make what the command names, and do what comes over the standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stderr, answers go to stdout

    def answer(**words: Any) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    make, options, first, *one_core = sys.argv[1:]
    if one_core and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    module, name = make.split(":")
    module = module if "." in module else f"benchmarks.{module}"
    try:
        importlib.import_module(first)
        made = getattr(importlib.import_module(module), name)(**json.loads(options))
        answer(value=None)
        for line in sys.stdin:
            method, args = json.loads(line)
            answer(value=getattr(made, method)(*args))
    except ImportError as error:
        answer(missing=str(error))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    main()
