"""Examples in docstrings outside of `mechicl.analysis`, whose own test runs them with a model."""

import doctest
import importlib

import pytest
import torch

from mechicl import algorithms, analysis, constructions, tasks
from mechicl.checkpoints import load
from mechicl.prompts import TokenSequences

NAMES = {
    "torch": torch,
    "algorithms": algorithms,
    "constructions": constructions,
    "load": load,
    "TokenSequences": TokenSequences,
}
NAMES |= {name: getattr(tasks, name) for name in tasks.__all__}
MODULES = (
    "algorithms.boolean",
    "algorithms.markov",
    "algorithms.stepwise.copying",
    "algorithms.stepwise.inverses",
    "analysis.behaviour.token_identification",
    "base.threads",
    "constructions.compression",
    "constructions.supports",
    "interop.tracr",
    "learners.token_learners",
    "tasks.boolean_functions",
    "tasks.gaussian_clusters",
    "tasks.token_sequences",
    "tasks.sampling",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run(name):
    module = importlib.import_module(f"mechicl.{name}")
    names = NAMES | {each: getattr(analysis, each) for each in analysis.__all__}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(module, extraglobs=names, optionflags=options)
    assert results.attempted > 0
    assert results.failed == 0
