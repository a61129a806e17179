"""RASP programs with known circuits, each verified against plain Python, for searches to be measured on.

python analyses/rasp_programs.py                    # compiles all of them, runs them on random inputs and compares
"""

import time
from functools import cache
from typing import Any
from unittest import mock

import haiku
import numpy as np
import torch
from rasp_library import PROGRAMS, Program
from tracr.compiler.compiling import compile_rasp_to_model

from mechicl.interop import CompiledTransformer, from_tracr
from mechicl.models.opening.sites import list_edges

NAMES = tuple(PROGRAMS)


@cache
def compile_program(name: str, *, dtype: torch.dtype = torch.float64) -> CompiledTransformer:
    """One of the programs as a model, compiled when it is first asked for.

    Raises:
        KeyError: no program of this name; see `NAMES`.
    """
    return from_tracr(compile_by_tracr(PROGRAMS[name]), dtype=dtype)


def compile_by_tracr(program: Program) -> Any:

    def zeros(_: Any, shape: Any, dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    # four fifths of the time would go into random initial weights, which tracr sets to zero afterwards
    with mock.patch.object(haiku.initializers.VarianceScaling, "__call__", zeros):
        return compile_rasp_to_model(program.build(), set(program.words), program.length, causal=program.causal)


def random_texts(program: Program, *, n: int, seed: int) -> list[list[Any]]:
    generator = np.random.default_rng(seed)
    lengths = np.repeat(np.arange(1, program.length + 1), n)
    return [[program.words[i] for i in generator.integers(len(program.words), size=length)] for length in lengths]


def wrong_values(name: str, *, n: int = 20, seed: int = 0) -> list[str]:
    """List inputs, n of every length, on which a compiled program differs from plain Python."""
    program, model, wrong = PROGRAMS[name], compile_program(name), []
    for text in random_texts(program, n=n, seed=seed):
        values, expected = model.decode_outputs(model(model.encode_words(text)))[0], program.compute(text)
        pairs = [pair for pair in zip(values, expected, strict=True) if pair[1] is not None]
        if not all(a == b or (isinstance(a, float) and abs(a - b) < 1e-6) for a, b in pairs):
            wrong.append(f"{text}: {values}, but {expected}")
    return wrong


def main() -> None:
    n_right = 0
    for name in NAMES:
        start = time.perf_counter()
        model = compile_program(name)
        seconds, wrong = time.perf_counter() - start, wrong_values(name)
        size = f"{model.cfg.n_layers} x {model.cfg.n_heads}, {model.cfg.d_model:3d} wide"
        edges = f"{len(model.true_circuit.edges):3d} of {len(list_edges(model)):4d} edges"
        print(f"{name:26s} {size:16s} {edges}  {seconds:5.2f} s  {wrong[0] if wrong else 'right'}", flush=True)
        n_right += not wrong
    print(f"{n_right} of {len(NAMES)} programs right")


if __name__ == "__main__":
    main()
