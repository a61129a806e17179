"""Arguments for any public function, made from its annotations: small models, prompts, tasks, tensors, results."""

import collections.abc
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import pandas as pd
import torch
from jaxtyping import AbstractArray
from torch import Tensor

from mechicl import algorithms, constructions, tasks
from mechicl.analysis import match
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import AlgorithmLearner
from mechicl.models import LSTMConfig, TransformerConfig, build
from mechicl.statistics import Result
from mechicl.statistics.grids import GridTable
from mechicl.tasks import LinearRegression, MarkovChains, RepeatedTokens, TopicClassification
from mechicl.text import TEXT_TASKS, topic_tokenizer
from mechicl.training import TrainingConfig
from tests.faults.models import make_models
from tests.faults.results import make_results

WORLDS = ("regression", "tokens", "softmax", "checkpoint", "texts")
SIZES = {
    "prompt": 6, "point": 5, "x": 2, "y": 1, "step": 3, "layer": 2, "head": 2, "query": 4, "sample": 12, "pos": 8,
    "other_sample": 9, "parameter": 2, "seed": 2, "query_pos": 4, "key_pos": 4, "batch": 6,
}  # fmt: skip
"""Of axes, by their names in annotations; 3 for others."""
NUMBERS: dict[str, int | float] = {
    "x_dim": 2, "n_context": 4, "y_dim": 1, "steps": 2, "d_vocab": 5, "n_ctx": 8, "layer": 0, "seed": 0, "level": 0.95,
    "step_size": 0.1, "alpha": 0.05, "gamma": 0.05, "penalty": 0.1, "index": 0, "n": 4, "n_prompts": 16,
    "largest_eigenvalue": 1.0, "scale": 1.0, "clip": 1.0, "score_scale": 2.0, "low": 0.5, "high": 2.0,
}  # fmt: skip
"""By the names of parameters; 2 and 0.5 for others."""
WORDS: dict[str, tuple[Any, ...]] = {
    "component": ("z",), "name": ("a name", "lsa-1l"), "kind": ("labels", "K"), "family": ("gd++",),
    "attention": ("linear",), "act_fn": ("relu",), "x": ("x",), "y": ("y",), "value": ("value",), "split": ("train",),
    "text": ("a text",), "source": ("x",), "target": ("total",), "left": ("x",), "right": ("y",),
}  # fmt: skip
"""By the names of parameters; "word" for others."""
PLAIN: dict[Any, Any] = {
    torch.device: torch.device("cpu"), torch.dtype: torch.float64, torch.Size: torch.Size([3, 4]),
    np.ndarray: np.ones((6, 5, 2)), range: range(1, 2), slice: slice(0, 4),
}  # fmt: skip
"""By annotation."""
LIKE_MODELS = ("model", "a", "b", "learner", "untrained", "models", "estimator")
LIKE_PROMPTS = ("prompts", "clean", "corrupted", "reference", "fitting", "held_out", "sources", "input", "tokens")
LARGEST_DEFAULT = 100
"""Numbers of prompts, steps and the like whose default is larger are made small."""
SMALL = 16
KINDS_OF_CALLABLES: tuple[Callable[..., Any], ...] = (
    lambda *values, **options: values[0],
    lambda *values, **options: values[0].flatten(1).sum(1),
    lambda *values, **options: 0.0,
    lambda *values, **options: None,
)


class Makers:
    """What arguments are made of: objects by the world that they fit together in, and results of earlier calls."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pool: list[tuple[str, Any]] = []
        self.known: int | None = None  # only the first so many of the pool are candidates
        task = LinearRegression(x_dim=2, n_context=4)
        prompts = task.sample(6, seed=0).to(dtype=torch.float64)
        for step_size in (0.1, 0.2):
            construction = constructions.gradient_descent(x_dim=2, n_context=4, step_size=step_size, steps=2)
            self.pool.append(("regression", construction))
        descent = AlgorithmLearner(algorithms.gradient_descent, {"steps": [0, 1, 2], "step_size": 0.1})
        self.pool += [("regression", each) for each in (task, prompts, descent, descent.trajectory(prompts))]
        words = RepeatedTokens(d_vocab=5, n_ctx=8, min_period=2, max_period=4)
        sequences = words.sample(6, seed=0)
        self.pool += [("tokens", each) for each in (constructions.induction(d_vocab=5, n_ctx=8), words, sequences)]
        self.pool += [("tokens", sequences.ids), ("tokens", MarkovChains(d_vocab=3, n_ctx=8))]
        sizes: dict[str, Any] = {"x_dim": 2, "n_context": 4, "n_layers": 2, "d_model": 6}
        softmax = TransformerConfig(
            **sizes, prompt_format="interleaved", attention="softmax", read_in="linear", read_out="linear", n_heads=2,
            initializer_range=0.3, d_mlp=4, attn_only=False,
        )  # fmt: skip
        models = [build(softmax, seed=0).eval(), build(softmax, seed=1).eval(), build(LSTMConfig(**sizes)).eval()]
        self.pool += [("softmax", each) for each in (*models, prompts, task)]
        checkpoint = load_checkpoint("lsa-1l")
        self.pool += [("checkpoint", each) for each in (checkpoint, checkpoint.best, checkpoint.task)]
        self.pool.append(("checkpoint", checkpoint.task.sample(6, seed=0)))
        config = TrainingConfig(task=task, model=softmax, steps=2, batch_size=4, eval_prompts=8, cpu=True)
        self.pool += [("regression", each) for each in (softmax, config, *self._tables())]
        self.pool += [("checkpoint", checkpoint.select([0])), ("regression", make_models()[3].model)]
        self.pool += [("regression", match(descent, descent, prompts)), ("texts", TEXT_TASKS["sst2"])]
        texts = TopicClassification()
        self.pool += [("texts", each) for each in (texts, texts.sample(4, seed=0), topic_tokenizer())]
        self.pool += make_results(models[0], config)
        for kind in (getattr(tasks, name) for name in tasks.__all__):
            try:
                if inspect.isclass(kind):
                    self.pool.append(("regression", kind()))
            except (TypeError, ValueError):  # it needs arguments
                continue

    def _tables(self) -> list[Any]:
        frame = pd.DataFrame({"x": [1.0, 2.0, 1.0, 2.0], "y": [1, 1, 2, 2], "value": [0.1, 0.2, 0.3, 0.4]})
        return [frame.assign(seed=0), GridTable(frame.assign(seed=[0, 0, 1, 1]), ("x", "y", "seed"))]

    def add(self, world: str, result: Any) -> None:
        """Keep a result for functions that take such."""
        for each in result if isinstance(result, tuple) else (result,):
            if type(each).__module__.startswith("mechicl."):
                known = sum(type(other) is type(each) for _, other in self.pool)
                if known < 4:
                    self.pool.append((world, each))

    # ---- values for an annotation ----

    def candidates(self, hint: Any, name: str, world: str) -> list[Any]:
        """Values that an argument may have, those of a world first."""
        origin, parts = get_origin(hint), get_args(hint)
        if hint is inspect.Parameter.empty or hint is Any or hint is object:
            return self._unannotated(name, world)
        if isinstance(hint, TypeVar):
            return self.candidates(hint.__bound__ or Any, name, world)
        if origin in (Union, types.UnionType):
            made = [each for part in parts for each in self.candidates(part, name, world)]
            return sorted(made, key=lambda each: self._foreign(each, world))
        if origin is Literal:
            return list(parts)
        if hint is None or hint is type(None):
            return [None]
        if hint is bool:
            return [False, True]
        if hint is int:
            return [int(NUMBERS.get(name, 2)), 1, 3]
        if hint is float:
            return [float(NUMBERS.get(name, 0.5)), 1.0]
        if hint is str:
            return [*WORDS.get(name, ("word",)), "query"]
        if hint is Path:
            return [self.folder / "made"]
        if hint is Tensor or (inspect.isclass(hint) and issubclass(hint, AbstractArray)):
            return self._tensors(hint)
        if inspect.isclass(hint) and hint in PLAIN:
            return [PLAIN[hint]]
        if hint is torch.Generator:
            return [torch.Generator().manual_seed(0)]
        if origin is collections.abc.Callable or hint is collections.abc.Callable:
            return list(KINDS_OF_CALLABLES)
        if origin is tuple or hint is tuple:
            return self._tuples(parts, name, world)
        if origin is not None and inspect.isclass(origin) and issubclass(origin, Mapping):
            return [{"a": each} for each in self.candidates(parts[1] if parts else Any, name, world)]
        if origin is not None and inspect.isclass(origin) and issubclass(origin, Iterable):
            singular = name.removesuffix("s")
            made = self.candidates(parts[0] if parts else Any, singular, world)
            return [[each, made[(i + 1) % len(made)]] for i, each in enumerate(made)] + [[each] for each in made[:2]]
        if inspect.isclass(hint):
            return self._pooled(world, lambda each: _is(each, hint))
        return []

    def _foreign(self, value: Any, world: str) -> int:
        """0 for an object of a world, 2 for one of another, 1 for what belongs to none."""
        worlds = {where for where, each in self.pool if each is value}
        return 1 if not worlds else 0 if world in worlds else 2

    def _pooled(self, world: str, fits: Callable[[Any], bool]) -> list[Any]:
        there = [(where != world, i, each) for i, (where, each) in enumerate(self.pool[: self.known]) if fits(each)]
        return [each for *_, each in sorted(there, key=lambda one: one[:2])]

    def _unannotated(self, name: str, world: str) -> list[Any]:
        if name in LIKE_MODELS:
            return self._pooled(world, lambda each: isinstance(each, torch.nn.Module) or hasattr(each, "predict"))
        if name in LIKE_PROMPTS:
            return self._pooled(world, lambda each: type(each).__name__ in ("Prompts", "TokenSequences", "Tensor"))
        if name == "task":
            return self._pooled(world, lambda each: hasattr(each, "sample"))
        if name in ("table", "grid"):
            return self._pooled(world, lambda each: isinstance(each, pd.DataFrame | GridTable))
        if name == "result":
            return self._pooled(world, lambda each: isinstance(each, Result))
        if name == "tokenizer":
            return self._pooled(world, lambda each: hasattr(each, "encode") and not isinstance(each, torch.nn.Module))
        if name in NUMBERS:
            return [NUMBERS[name]]
        return [*self._pooled(world, lambda each: True), {"a": 1}, "word", 1, None]

    def _tuples(self, parts: tuple[Any, ...], name: str, world: str) -> list[Any]:
        if not parts or parts[-1] is Ellipsis:
            made = self.candidates(parts[0] if parts else Any, name.removesuffix("s"), world)
            return [(made[0], made[-1]), (made[0],)] if made else []
        made = [self.candidates(part, name, world) for part in parts]
        return [tuple(each[0] for each in made)] if all(made) else []

    def _tensors(self, hint: Any) -> list[Tensor]:
        axes = getattr(hint, "dim_str", "prompt").split()
        kind = getattr(hint, "__name__", "Float").partition("[")[0]
        out = []
        for extra in (0, 1):
            sizes = [size + extra * (axis not in SIZES) for axis in axes for size in _sizes(axis)]
            generator = torch.Generator().manual_seed(len(sizes) + extra)
            if kind.startswith(("Int", "UInt")):
                out.append(torch.randint(0, 4, sizes, generator=generator))
                continue
            values = 0.1 + torch.rand(sizes, generator=generator, dtype=torch.float64)
            if kind.startswith("Bool"):
                out.append(values > 0.6)
                continue
            if len(sizes) > 1 and axes[-1] == axes[-2]:  # square: a covariance, a kernel
                values = values @ values.mT + torch.eye(sizes[-1], dtype=torch.float64)
            out.append(values)
        return out


def _sizes(axis: str) -> list[int]:
    name = axis.lstrip("#*?").partition("=")[0]
    if axis == "...":
        return [3]
    if name.isdigit():
        return [int(name)]
    if axis.partition("=")[2].isdigit():
        return [int(axis.partition("=")[2])]
    if name in SIZES or name.isidentifier():
        return [SIZES.get(name, 3)]
    try:
        return [int(eval(name, {}, collections.defaultdict(lambda: 3, SIZES)))]  # "pos-1"
    except (SyntaxError, NameError, TypeError):
        return [3]


def _is(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that is not checked at run time
        members = [name for name in vars(kind) if not name.startswith("_")]
        return bool(members) and all(hasattr(value, name) for name in members)


def is_allowed(value: Any, hint: Any) -> bool:
    """Whether a plain value is what an annotation says, as far as that can be told."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is inspect.Parameter.empty or hint is Any or hint is object or isinstance(hint, TypeVar):
        return True
    if origin in (Union, types.UnionType):
        return any(is_allowed(value, part) for part in parts)
    if origin is Literal:
        return any(value is each or (type(value) is type(each) and value == each) for each in parts)
    if hint is None or hint is type(None):
        return value is None
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, int | float)
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return isinstance(value, Tensor)
    if origin in (collections.abc.Callable,) or hint is collections.abc.Callable:
        return callable(value)
    kind = origin or hint
    if not inspect.isclass(kind) or not _is(value, kind):
        return False
    if isinstance(value, str) and kind is not str:  # a sequence of strings, but seldom meant
        return bool(parts) and parts[0] in (str, Any)
    if parts and isinstance(value, Sequence):
        return all(is_allowed(each, parts[0]) for each in value)
    return True
