"""Values for the arguments of any public function, found by its annotations: small models, prompts, tasks, results."""

import collections.abc
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import numpy as np
import pandas as pd
import torch
from sklearn.dummy import DummyRegressor
from torch import Tensor

from mechicl import algorithms, analysis, constructions, tasks
from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent, Runs
from mechicl.algorithms.stepwise.base import INPUTS, OF_INPUTS, TARGETS
from mechicl.analysis.behaviour import identify_on_tokens
from mechicl.analysis.causes import SubspaceFit, fit_subspace
from mechicl.analysis.dynamics import find_transitions, score_heads_over_training
from mechicl.analysis.finetuning import draw_texts
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from mechicl.analysis.layers import ols_weights
from mechicl.base.annotations import is_array, parts_of
from mechicl.base.arguments import fits
from mechicl.checkpoints import load_checkpoint
from mechicl.interop import from_sklearn
from mechicl.learners import AlgorithmLearner
from mechicl.models import LSTMConfig, TransformerConfig, build, wrap
from mechicl.prompts import Prompts, TokenSequences
from mechicl.statistics import Result
from mechicl.statistics.grids import GridTable
from mechicl.sweeps import Sweep
from mechicl.tasks import LinearRegression, MarkovChains, RepeatedTokens, TopicClassification
from mechicl.text import TEXT_TASKS, load_texts, topic_tokenizer
from mechicl.training import SOAP, TrainingConfig
from tests.models.modules import NanoGPT

WORLDS = ("regression", "tokens", "softmax", "checkpoint", "texts")
"""Groups of values that fit together."""
SIZES = {
    "prompt": 6, "point": 5, "x": 2, "y": 1, "step": 3, "layer": 2, "head": 2, "query": 4, "sample": 12, "pos": 8,
    "other_sample": 9, "parameter": 2, "seed": 2, "query_pos": 4, "key_pos": 4, "batch": 6,
}  # fmt: skip
"""Sizes of axes by name; 3 for others."""
NUMBERS: dict[str, float] = {
    "x_dim": 2, "n_context": 4, "y_dim": 1, "steps": 2, "d_vocab": 5, "n_ctx": 8, "layer": 0, "seed": 0, "level": 0.95,
    "step_size": 0.1, "alpha": 0.05, "gamma": 0.05, "penalty": 0.1, "index": 0, "n": 4, "n_prompts": 16,
    "scale": 1.0, "clip": 1.0, "score_scale": 2.0, "low": 0.5, "high": 2.0,
}  # fmt: skip
"""Numbers by the names of parameters; 2 and 0.5 for others."""
STRINGS: dict[str, tuple[str, ...]] = {
    "component": ("z",), "name": ("a name", "lsa-1l"), "kind": ("labels", "K"), "family": ("gd++",),
    "split": ("train",), "attention": ("linear",), "act_fn": ("relu",), "x": ("x",), "y": ("y",), "value": ("value",),
    "text": ("a text",), "source": ("x",), "target": ("total",), "left": ("x",), "right": ("y",),
}  # fmt: skip
"""Strings by the names of parameters; "word" for others."""
PLAIN: dict[Any, list[Any]] = {
    torch.device: [torch.device("cpu")], torch.dtype: [torch.float64], torch.Size: [torch.Size([3, 4])],
    np.ndarray: [np.ones((6, 5, 2))], range: [range(1, 2)], slice: [slice(0, 4)], None: [None], type(None): [None],
    bool: [False, True], torch.Generator: [torch.Generator().manual_seed(0)],
}  # fmt: skip
FUNCTIONS: list[Callable[..., Any]] = [
    lambda *values, **options: values[0],
    lambda *values, **options: values[0].flatten(1).sum(1),
    lambda *values, **options: 0.0,
    lambda *values, **options: None,
]
VARIABLES = (*INPUTS, *TARGETS, *OF_INPUTS, "prediction")  # of the states of stepwise algorithms
BY_NAME: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("model", "a", "b", "learner", "untrained", "models", "estimator"),
        lambda each: isinstance(each, torch.nn.Module) or hasattr(each, "predict"),
    ),
    **dict.fromkeys(
        ("prompts", "clean", "corrupted", "reference", "fitting", "held_out", "sources", "input", "tokens"),
        lambda each: isinstance(each, Prompts | TokenSequences | Tensor),
    ),
    **dict.fromkeys(("table", "grid"), lambda each: isinstance(each, pd.DataFrame | GridTable)),
    "task": lambda each: hasattr(each, "sample"),
    "result": lambda each: isinstance(each, Result),
    "tokenizer": lambda each: hasattr(each, "encode") and not isinstance(each, torch.nn.Module),
}
"""Values for parameters without an annotation, by name."""


class Values:
    """A pool of values, each with the world that it belongs to, and candidates for arguments."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pool = list(_values())

    def add(self, world: str, result: Any) -> None:
        """Keep a result for functions that take its type."""
        for each in result if isinstance(result, tuple) else (result,):
            known = sum(type(other) is type(each) for _, other in self.pool)
            if type(each).__module__.startswith("mechicl.") and known < 4:
                self.pool.append((world, each))

    def pooled(self, world: str, fit: Callable[[Any], bool]) -> list[Any]:
        """Return the pool's values that pass a test, those of a world first."""
        found = [(where != world, each) for where, each in self.pool if fit(each)]
        return [each for _, each in sorted(found, key=lambda pair: pair[0])]

    def candidates(self, hint: Any, name: str, world: str) -> list[Any]:
        """Return values for a parameter with an annotation, those of a world first."""
        if isinstance(hint, TypeVar):
            hint = hint.__bound__ or Any
        if hint is inspect.Parameter.empty or hint is Any or hint is object:
            if name in BY_NAME:
                return self.pooled(world, BY_NAME[name])
            others = [*self.pooled(world, lambda each: True), {"a": 1}, "word", 1, None]
            return [NUMBERS[name]] if name in NUMBERS else others
        made = [each for part in parts_of(hint) for each in self._of_type(part, name, world)]
        foreign = [each for where, each in self.pool if where != world]
        return sorted(made, key=lambda each: any(each is other for other in foreign))

    def _of_type(self, hint: Any, name: str, world: str) -> list[Any]:
        kind, arguments = get_origin(hint) or hint, get_args(hint)
        if kind is Literal:
            return list(arguments)
        if kind in (int, float):
            return [kind(NUMBERS.get(name, 2 if kind is int else 0.5)), kind(1), kind(3)]
        if kind is str:
            return [*STRINGS.get(name, ("word",)), "query"]
        if kind is Path:
            return [self.folder / "made"]
        if hint is Tensor or is_array(hint):
            return [_tensor(hint, extra) for extra in (0, 1)]
        if kind is collections.abc.Callable:
            return FUNCTIONS
        if kind in PLAIN:
            return PLAIN[kind]
        if not inspect.isclass(kind):
            return []
        if issubclass(kind, Mapping) and arguments:
            keys = VARIABLES if name in ("state", "readers", "context", "query") else ("a",)
            return [dict.fromkeys(keys, each) for each in self.candidates(arguments[1], name, world)]
        if kind is tuple and arguments and arguments[-1] is not Ellipsis:
            parts = [self.candidates(each, name, world) for each in arguments]
            return [tuple(each[0] for each in parts)] if all(parts) else []
        if issubclass(kind, Iterable) and (arguments or kind is tuple):
            made = self.candidates(arguments[0] if arguments else Any, name.removesuffix("s"), world)
            collect: Callable[[list[Any]], Any] = tuple if kind is tuple else list
            pairs = [[each, made[(i + 1) % len(made)]] for i, each in enumerate(made)]
            return [collect(each) for each in [*pairs, *([each] for each in made[:2])]]
        return self.pooled(world, lambda each: fits(each, hint))


def _tensor(hint: Any, extra: int) -> Tensor:
    """Make a random tensor of an annotated shape, with one more entry on axes of free size."""
    axes = getattr(hint, "dim_str", "prompt").split()
    sizes = [_size(axis, extra) for axis in axes]
    kind, generator = getattr(hint, "__name__", "Float"), torch.Generator().manual_seed(len(sizes) + extra)
    if kind.startswith(("Int", "UInt")):
        return torch.randint(0, 4, sizes, generator=generator)
    values = 0.1 + torch.rand(sizes, generator=generator, dtype=torch.float64)
    if kind.startswith("Bool"):
        return values > 0.6
    if len(sizes) > 1 and axes[-1] == axes[-2]:  # a covariance or a kernel
        return values @ values.mT + torch.eye(sizes[-1], dtype=torch.float64)
    return values


def _size(axis: str, extra: int) -> int:
    name, _, size = axis.lstrip("#*?").partition("=")
    if (size or name).isdigit():
        return int(size or name)
    base, _, less = name.partition("-")  # "pos-1"
    return SIZES.get(base, 3 + extra * (name not in SIZES)) - int(less or 0)


def _values() -> Iterator[tuple[str, Any]]:
    """Yield models, prompts, tasks, and a result of each kind, with their worlds."""
    task, quiet = LinearRegression(x_dim=2, n_context=4), typing.cast(dict[str, Any], {"progress": False})
    prompts = task.sample(6, seed=0).to(dtype=torch.float64)
    exact, other = (
        constructions.gradient_descent(x_dim=2, n_context=4, step_size=size, steps=2) for size in (0.1, 0.2)
    )
    descent = AlgorithmLearner(algorithms.gradient_descent, {"steps": [0, 1, 2], "step_size": 0.1})
    wrapped = wrap(
        NanoGPT(d_in=3).eval(), encode="paired", layers="blocks.{}", attention={"out": "blocks.{}.attn"},
        mlp="blocks.{}.mlp",
    )  # fmt: skip
    sizes: dict[str, Any] = {"x_dim": 2, "n_context": 4, "n_layers": 2, "d_model": 6}
    softmax_config = TransformerConfig(
        **sizes, prompt_format="interleaved", attention="softmax", read_in="linear", read_out="linear", n_heads=2,
        initializer_range=0.3, d_mlp=4, attn_only=False,
    )  # fmt: skip
    config = TrainingConfig(task=task, model=softmax_config, steps=2, batch_size=4, eval_prompts=8, cpu=True)
    frame = pd.DataFrame({"x": [1.0, 2.0, 1.0, 2.0], "y": [1, 1, 2, 2], "value": [0.1, 0.2, 0.3, 0.4]})
    grid = GridTable(frame.assign(seed=[0, 0, 1, 1]), ("x", "y", "seed"))
    for each in (exact, other, task, prompts, descent, descent.trajectory(prompts), softmax_config, config,
                 frame.assign(seed=0), grid, wrapped, analysis.match(descent, descent, prompts)):  # fmt: skip
        yield "regression", each
    for kind in (getattr(tasks, name) for name in tasks.__all__):
        if inspect.isclass(kind):
            try:
                yield "regression", kind()
            except (TypeError, ValueError):  # it has required arguments
                continue
    held_out = task.sample(12, seed=0)
    hypothesis, sources = Hypothesis(ResidualDescent(2, step_size=0.1)), analysis.sample_sources(task, held_out, seed=1)
    steps, few = hypothesis.algorithm, SubspaceFit(n_fitting=8, n_prompts=8, iterations=2, restarts=0)
    named = analysis.identify(exact, task, n_prompts=64, with_limits=False, **quiet)
    softmax = build(softmax_config, seed=0).eval()
    for each in (
        hypothesis, analysis.interchange(exact, hypothesis, held_out, sources, **quiet),
        Runs(steps, steps.states(held_out), steps.states(sources)),
        fit_subspace(exact, hypothesis, "residual", task, layers=1, dims=1, fit=few, **quiet),
        analysis.find_circuit(exact, held_out, **quiet), named, named.matches[0],
        analysis.regret(exact, task, n_prompts=8, **quiet),
        find_transitions([1, 2, 3, 4], [[1.0, 1.0], [1.0, 0.9], [0.1, 0.8], [0.1, 0.2]]),
        analysis.Lens(softmax).errors(held_out), from_sklearn(DummyRegressor()), Sweep(config, {"seed": range(2)}),
        SOAP(torch.zeros(2, 12, requires_grad=True), [torch.Size([3, 4])], lr=0.1),
    ):  # fmt: skip
        yield "regression", each
    shots = prompt_shots(softmax, held_out[:1])
    for each in (
        softmax, build(softmax_config, seed=1).eval(), build(LSTMConfig(**sizes)).eval(), prompts, task, shots,
        analysis.fine_tune(softmax, shots, analysis.FineTuning(learning_rate=0.01), **quiet),
        analysis.probe(softmax, {"ols": ols_weights}, held_out, task.sample(12, seed=1), **quiet),
    ):  # fmt: skip
        yield "softmax", each
    repeated, chains = RepeatedTokens(d_vocab=5, n_ctx=8, min_period=2, max_period=4), MarkovChains(d_vocab=3, n_ctx=8)
    sequences, snapshots = repeated.sample(6, seed=0), load_checkpoint("induction-2l")
    for each in (
        constructions.induction(d_vocab=5, n_ctx=8), repeated, sequences, sequences.ids, chains, snapshots.snapshots,
        identify_on_tokens(constructions.induction(d_vocab=3, n_ctx=8), chains, n_prompts=8, **quiet),
        score_heads_over_training(snapshots, n_prompts=4),
    ):  # fmt: skip
        yield "tokens", each
    checkpoint = load_checkpoint("lsa-1l")
    read = checkpoint.task.sample(6, seed=0)
    for each in (checkpoint, checkpoint.best, checkpoint.task, read, checkpoint.select([0])):
        yield "checkpoint", each
    topics = TopicClassification()
    for each in (
        topics, topics.sample(4, seed=0), topic_tokenizer(), TEXT_TASKS["sst2"],
        load_texts("farm", "train", n_texts=20),
        draw_texts(TEXT_TASKS["farm"], n_demonstrations=4, n_held_out=4, n_queries=4),
    ):  # fmt: skip
        yield "texts", each
