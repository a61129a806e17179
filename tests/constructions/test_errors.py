"""Faulty arguments of constructions: the error names the argument, or the reason why a model is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from analyses.support.proofs import mov, mul, total
from mechicl import constructions
from mechicl.constructions import Head, Layer, Stream, assemble, compress, hide, weights_circuit
from mechicl.constructions.operations import aff, div
from mechicl.constructions.vocabulary import Hidden
from tests.constructions.reference import random_model, random_prompts

make: Any = constructions
any_div: Any = div
EYE, IDS = torch.eye(3), torch.zeros(2, 6, dtype=torch.long)
NAN, INF = math.nan, math.inf
SIZES = {"x_dim": 3, "y_dim": 2, "n_context": 6}
REQUIRED: dict[str, dict[str, Any]] = {  # by construction
    "gradient_descent": {**SIZES, "step_size": 0.1},
    "gd_plus_plus": {**SIZES, "step_size": 0.1, "gamma": 0.0},
    "preconditioned_gd": {"x_dim": 3, "n_context": 4, "preconditioner": EYE},
    "kernel_gradient_descent": {"weights": torch.ones(2, 3), "n_context": 4, "step_size": 0.1},
    "softmax_gradient_descent": {**SIZES, "step_size": 0.1, "score_scale": 0.1},
    "linear_optimum": {"covariance": torch.eye(2), "n_context": 4},
    "newton": {**SIZES, "steps": 2, "alpha": 0.1},
    "copy_targets": {**SIZES},
    "copy_then_gradient_descent": {**SIZES, "step_size": 0.1},
    "induction": {"d_vocab": 4, "n_ctx": 6, "n_heads": 2},
    "known_models": {},
}
FAULTS: list[tuple[str, dict[str, Any], str]] = [  # construction, changed arguments, and what the message names
    *((name, {"steps": 0}, "steps") for name in REQUIRED if "descent" in name and "softmax" not in name),
    *((name, {"step_size": value}, "step_size") for name in REQUIRED if "descent" in name for value in (NAN, INF)),
    ("gradient_descent", {"initial_weights": torch.zeros(3, 1)}, "initial_weights"),
    ("gd_plus_plus", {"gamma": [0.1, NAN], "steps": 2}, r"gamma\[1\]"),
    ("gd_plus_plus", {"step_size": [0.1] * 4, "steps": 3}, "step_size"),
    *(("preconditioned_gd", {"preconditioner": each}, "preconditioner")
      for each in (torch.eye(2), [], NAN * EYE, [EYE, EYE])),
    ("preconditioned_gd", {"preconditioner": [EYE, torch.eye(2)], "steps": 2}, "preconditioner"),
    ("kernel_gradient_descent", {"act_fn": "nonsense"}, "act_fn='nonsense'"),
    ("softmax_gradient_descent", {"score_scale": 0.0}, "score_scale"),
    ("linear_optimum", {"noise_variance": -0.1}, "noise_variance"),
    ("linear_optimum", {"covariance": torch.tensor([[1.0, 0.5], [0.0, 1.0]])}, "covariance must be symmetric"),
    ("linear_optimum", {"covariance": torch.tensor([[1.0, 2.0], [2.0, 1.0]])}, "covariance .*semidefinite"),
    ("linear_optimum", {"covariance": torch.tensor([[NAN, 0.0], [0.0, 1.0]])}, "covariance has 1 of 4 values"),
    ("linear_optimum", {"covariance": torch.zeros(2, 2)}, "covariance must not be 0"),
    *((name, {"attention": "other"}, "attention") for name in ("newton", "copy_targets")),
    ("copy_targets", {"y_dim": 2**31}, "width must be at most 16384"),
    *(("induction", {name: value}, name)
      for name, value in (("n_ctx", 1), ("previous_token_head", 2), ("induction_head", 2), ("score_scale", 0.0))),
    ("known_models", {"noise": 0.1}, "hidden=True"),
]  # fmt: skip
STREAM = Stream(x=3, y=1, position=5, target=3, scratch=1)
X, Y, TO_Y = STREAM.read("x"), STREAM.read("y"), STREAM.write("y")
STEP, UNIT = Head(X, X, Y, TO_Y), Hidden(Y, TO_Y)
DIV: dict[str, Any] = {"scratch": "scratch", "low": 1.0, "high": 2.0, "steps": 2}


def assembled(stream: Stream = STREAM, layers: Any = ((STEP,),), **options: Any):
    return assemble(stream, layers, n_context=3, **options)


def compressed(**changes: Any) -> Any:
    model = make.induction(d_vocab=4, n_ctx=6)
    return compress(model, changes.pop("ids", IDS), **({"d_model": 8} | changes))


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Stream(x=3, y=-1), "y must be an int of at least 0"),
    (lambda: STREAM.read("z"), r"name must be one of \['x', 'y'"),
    (lambda: Head(X, Y, Y, TO_Y), "query and key"),
    (lambda: Head(X, X, X, TO_Y), "value and output"),
    (lambda: Hidden(X, TO_Y), "read, write and bias"),
    (lambda: assembled(layers=[[], []]), "layers"),
    (lambda: assembled(Stream(y=1, x=3)), "stream must begin with"),
    (lambda: assembled(Stream(x=2, y=1)), "width 3"),
    (lambda: assembled(layers=[Layer([STEP], UNIT)], input_mlp=UNIT), "input_mlp"),
    *((lambda moves=moves: mov(STREAM, "x", "x", moves), "moves")
      for moves in ([], [(0, 5)], [(-1, 2)], [(0, 1), (2, 1)])),
    (lambda: mov(STREAM, "x", "y", [(0, 1)]), "'x' and 'y' must have the same dimension, got 3 and 1"),
    (lambda: aff(STREAM, {"x": torch.ones(1, 1)}, "y"), r"weights of 'x' must be \[source target\] = \(3, 1\)"),
    (lambda: aff(STREAM, {"x": torch.ones(3, 1)}, "y", act_fn="gelu"), "act_fn"),
    (lambda: mul(STREAM, "x", "target", "y"), "dimension"),
    *((lambda changes=changes: any_div(STREAM, "x", "y", "target", **(DIV | changes)), "steps must be >= 0")
      for changes in ({"low": 0.0}, {"low": 3.0}, {"low": NAN}, {"high": INF}, {"steps": -1})),
    *((lambda target=target: any_div(STREAM, "x", "y", target, **DIV), "dimension") for target in ("y", "scratch")),
    (lambda: any_div(STREAM, "x", "y", "target", **(DIV | {"scratch": "y"})), "scratch"),
    (lambda: total(STREAM, "x", "y", n_positions=5), "'x' and 'y' must have the same dimension"),
    *((lambda name=name: getattr(make, name)(**REQUIRED[name]).predict(random_prompts(n_context=7)),
       "15 positions, but this model has 13") for name in ("copy_targets", "copy_then_gradient_descent")),
    (lambda: make.online_gradient_descent(x_dim=3, n_context=7, step_size=0.1, discount=1.2), "discount must be"),
    (lambda: make.recursive_least_squares(x_dim=3, n_context=7, penalty=0.0), "penalty must be"),
    (lambda: make.discounted_averaging(x_dim=3, n_context=0), "n_context must be"),
    (lambda: hide(random_model(), distractors=0, junk_prompts=random_prompts()), "junk_prompts"),
    *((lambda config=config: hide(random_model(**config)), next(iter(config))) for config in (
        {"gated_mlp": True, "d_mlp": 5}, {"attn_bias": True}, {"read_bias": True},
        {"normalization_type": "RMSPre"}, {"token_clip": 3.0})),
    (lambda: hide(random_model(positional_embedding_type="rotary", d_head=4)), "rotary"),
    (lambda: compressed(d_model=19), "at most the model's 18, got 19"),
    (lambda: compressed(ids=IDS[:0]), "prompts"),
    (lambda: compress(random_model(normalization_type="LN"), random_prompts(), d_model=4), "normalization_type"),
    (lambda: weights_circuit(random_model(normalization_type="LNPre")), "normalization_type='LNPre'"),
    (lambda: weights_circuit(random_model(token_clip=3.0)), r"token_clip=3\.0"),
    (lambda: make.weights_circuit(torch.nn.Linear(2, 2)), "HookedTransformer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "named"),
    [*CALLS, *((lambda n=n, c=c: getattr(make, n)(**(REQUIRED[n] | c)), named) for n, c, named in FAULTS)],
)
def test_errors_name_the_argument_or_the_reason(call: Callable[[], Any], named: str):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
