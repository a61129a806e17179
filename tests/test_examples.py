"""Examples in docstrings; those of `mechicl.analysis` are tested in test_architecture.py."""

import doctest
import importlib

import pytest
import torch

from mechicl import algorithms, analysis, constructions, tasks
from mechicl.checkpoints import load
from mechicl.prompts import TokenSequences

NAMES = {
    "torch": torch, "algorithms": algorithms, "constructions": constructions, "load": load,
    "TokenSequences": TokenSequences, **{name: getattr(tasks, name) for name in tasks.__all__},
}  # fmt: skip
MODULES = (
    "algorithms.boolean", "algorithms.markov", "algorithms.stepwise.copying", "algorithms.stepwise.inverses",
    "analysis.behaviour.token_identification", "base.threads", "constructions.compression", "constructions.supports",
    "interop.tracr", "learners.token_learners", "tasks.boolean_functions", "tasks.gaussian_clusters",
    "tasks.sampling", "tasks.token_sequences",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run(name):
    module = importlib.import_module(f"mechicl.{name}")
    names = NAMES | {each: getattr(analysis, each) for each in analysis.__all__}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(module, extraglobs=names, optionflags=options)
    assert results.attempted > 0
    assert results.failed == 0
