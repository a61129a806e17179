"""Results of analyses at small size, for the functions that take or draw such, and for their own methods."""

from collections.abc import Iterator
from typing import Any

import torch
from sklearn.dummy import DummyRegressor

from mechicl import constructions
from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent, Runs
from mechicl.analysis import (
    FineTuning,
    Lens,
    find_circuit,
    fine_tune,
    identify,
    interchange,
    probe,
    regret,
    sample_sources,
)
from mechicl.analysis.behaviour import identify_on_tokens
from mechicl.analysis.causes import fit_subspace
from mechicl.analysis.dynamics import find_transitions, score_heads_over_training
from mechicl.analysis.finetuning import draw_texts, prompt_shots
from mechicl.analysis.layers import ols_weights
from mechicl.analysis.weights import view_kernel
from mechicl.checkpoints import load_checkpoint
from mechicl.interop import from_sklearn
from mechicl.sweeps import Sweep
from mechicl.tasks import LinearRegression, MarkovChains
from mechicl.text import TEXT_TASKS, load_texts
from mechicl.training import SOAP

QUIET: dict[str, Any] = {"progress": False}


def make_results(softmax: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """Of each kind one, with the world that it belongs to."""
    task = LinearRegression(x_dim=2, n_context=4)
    prompts = task.sample(12, seed=0)
    exact = constructions.gradient_descent(x_dim=2, n_context=4, step_size=0.1, steps=2)
    descent = ResidualDescent(2, step_size=0.1)
    hypothesis = Hypothesis(descent)
    sources = sample_sources(task, prompts, seed=1)
    yield "regression", hypothesis
    yield "regression", interchange(exact, hypothesis, prompts, sources, **QUIET)
    yield "regression", Runs(descent, descent.states(prompts), descent.states(sources))
    few = {"n_fitting": 8, "n_prompts": 8, "iterations": 2, "restarts": 0}
    yield "regression", fit_subspace(exact, hypothesis, "residual", task, layers=1, dims=1, **few, **QUIET)
    yield "regression", find_circuit(exact, prompts, **QUIET)
    named = identify(exact, task, n_prompts=64, with_limits=False, **QUIET)
    yield from (("regression", each) for each in (named, named.matches[0]))
    yield "regression", regret(exact, task, n_prompts=8, **QUIET)
    yield "regression", find_transitions([1, 2, 3, 4], [[1.0, 1.0], [1.0, 0.9], [0.1, 0.8], [0.1, 0.2]])
    yield "regression", Lens(softmax).errors(prompts)
    yield "regression", from_sklearn(DummyRegressor())
    yield "regression", SOAP(torch.zeros(2, 12, requires_grad=True), [torch.Size([3, 4])], lr=0.1)
    yield "regression", Sweep(config, {"seed": range(2)})
    yield "softmax", probe(softmax, {"ols": ols_weights}, prompts, task.sample(12, seed=1), **QUIET)
    shots = prompt_shots(softmax, prompts[:1])
    yield "softmax", shots
    yield "softmax", fine_tune(softmax, shots, FineTuning(learning_rate=0.01), **QUIET)
    one_layer = load_checkpoint("lsa-1l")
    read = one_layer.task.sample(4, seed=0)
    yield "checkpoint", view_kernel(one_layer.best, read.query.xs[:3], read)
    chains = MarkovChains(d_vocab=3, n_ctx=8)
    yield "tokens", identify_on_tokens(constructions.induction(d_vocab=3, n_ctx=8), chains, n_prompts=8, **QUIET)
    snapshots = load_checkpoint("induction-2l")
    yield "tokens", snapshots.snapshots
    yield "tokens", score_heads_over_training(snapshots, n_prompts=4)
    yield "texts", load_texts("farm", "train", n_texts=20)
    yield "texts", draw_texts(TEXT_TASKS["farm"], n_demonstrations=4, n_held_out=4, n_queries=4)
