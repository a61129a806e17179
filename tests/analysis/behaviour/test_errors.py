"""Errors and warnings name the argument or the cause."""

import math
from typing import Any

import pytest
import torch

from mechicl import algorithms, analysis
from mechicl.algorithms import averaging, gradient_descent, newton, ols
from mechicl.analysis import behaviour as b
from mechicl.analysis import (
    identify,
    identify_on_tokens,
    match,
    regret,
)
from mechicl.analysis.behaviour.alignment import similarity_of_errors, similarity_of_weights
from mechicl.analysis.behaviour.growth import fit_growth
from mechicl.learners import AlgorithmFamily, AlgorithmLearner, TokenAlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.tasks import LinearRegression, MarkovChains, Parities, RepeatedTokens
from tests.analysis.behaviour.conftest import Constant

NEWTON = AlgorithmLearner(algorithms.newton, {"steps": [1, 2]})

THREE_INPUTS, CHAINS = LinearRegression(x_dim=3, n_context=4), MarkovChains(d_vocab=3, n_ctx=9)
PROMPTS = THREE_INPUTS.sample(6, seed=0, dtype=torch.float64)
OLS = AlgorithmLearner(ols)
BROKEN = AlgorithmLearner(lambda prompts: (prompts.query.xs * math.nan).sum(1, keepdim=True))
NOT_FINITE = AlgorithmFamily(lambda prompts, scale: prompts.query.ys * scale, "scale", (-math.inf, math.inf))
UNIFORM, WIDE = (TokenAlgorithmLearner(algorithms.uniform_tokens, {"d_vocab": n}) for n in (3, 4))
QUIET: Any = {"n_prompts": 10, "progress": False}


class Short:
    """A learner that predicts one point too few."""

    def predict(self, prompts):
        return prompts.ys[:, -1]

    def predict_prefixes(self, prompts):
        return prompts.ys[:, 1:]


def also(learner):
    return identify(OLS, THREE_INPUTS, also={"mine": learner}, steps=1, with_limits=False, **QUIET)


def ranking(n: int = 6):
    return match(newton(PROMPTS[:n], [3]), NEWTON, PROMPTS[:n])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("call", "named"), [
    (lambda: analysis.align(Constant(), Constant(), PROMPTS), "Constant.predict is not differentiable"),
    (lambda: b.regressed_weights(OLS, PROMPTS, torch.ones(2, 3)), r"queries must be \[query x\] with x = 3"),
    (lambda: analysis.measure_shifted_losses({}, THREE_INPUTS), "at least one learner and one scale"),
    # ---- matches ----
    (lambda: match(NEWTON, NEWTON, PROMPTS[:0]), "at least one prompt"),
    (lambda: match(newton(PROMPTS, [1]), NEWTON, PROMPTS[:3]), "is not of Prompts"),
    (lambda: match(AlgorithmLearner(algorithms.nearest_neighbours), OLS, PROMPTS, similarity="weights"), "linear"),
    (lambda: ranking().growth([1, 2, 9]), "row must be one of 3; got 1"),
    (lambda: fit_growth([1, 2, 3, 4, 5], [0, 1, 2, 3, 4]), "at least 5 different layers with steps >= 1"),
    (lambda: b.rank_families({}), "at least one match"),
    (lambda: b.rank_families({"all": ranking(), "few": ranking(4)}), "'few' is of other layers"),
    (lambda: b.rank_families({"a": ranking()}).minus("a", "Chebyshev"), "family must be one of 'a'; got 'Cheb"),
    (lambda: similarity_of_errors(ols(PROMPTS), ols(PROMPTS), PROMPTS[:5]), r"by OLS are not of Prompts\(n_pro"),
    (lambda: similarity_of_errors(ols(PROMPTS), ols(PROMPTS, at="query"), PROMPTS), "4 errors a prompt, the other"),
    (lambda: similarity_of_weights(ols(PROMPTS), ols(PROMPTS)), "OLS has no weights"),
    (lambda: similarity_of_weights(*(ols(p, with_weights=True) for p in (PROMPTS, PROMPTS[:5]))), "different prom"),
    # ---- identification ----
    (lambda: identify(OLS, THREE_INPUTS.replace(n_context=0), **QUIET), "n_context"),
    (lambda: identify(BROKEN, THREE_INPUTS, **QUIET), "AlgorithmLearner does not predict finite"),
    (lambda: also(BROKEN), "'mine' predicts numbers that are not finite"),
    (lambda: also(AlgorithmLearner(lambda prompts: prompts.query.xs)), "got the shape"),
    (lambda: also(NOT_FINITE), "'mine' predicts no finite numbers for any of its 2"),
    (lambda: identify_on_tokens(UNIFORM, RepeatedTokens(d_vocab=3, n_ctx=9, max_period=4)), "also="),
    (lambda: identify_on_tokens(UNIFORM, CHAINS, also={"w": WIDE}, **QUIET), "'w' predicts 4 tokens, and the net"),
    (lambda: identify_on_tokens(UNIFORM, CHAINS, **QUIET).gap("other"), "learner must be one of 'uniform'"),
    # ---- regret ----
    (lambda: regret(OLS, THREE_INPUTS, references="newton"), "references must be one of .*; got 'newton'"),
    (lambda: regret(OLS, THREE_INPUTS, loss="errors"), "targets that are ±1 or one-hot"),
    (lambda: regret(UNIFORM, CHAINS, loss="errors"), "'nats'"),
    (lambda: regret(OLS, THREE_INPUTS, also={"short": Short()}, **QUIET), "'short', given .* must return"),
    (lambda: regret(OLS, THREE_INPUTS, also={"ols": OLS}, **QUIET), "two learners are called 'ols'"),
    (lambda: regret(OLS, THREE_INPUTS, **QUIET).curve("other"), "learner must be one of .*; got 'other'"),
    # ---- tuning ----
    (lambda: b.tuned_descent(PROMPTS, 1, gamma=True), "γ has no effect"),
    (lambda: b.tuned_clipped_descent(PROMPTS[:0], 2, 10.0, gamma=True), "tuning needs prompts"),
    (lambda: b.tuned_clipped_descent(Prompts(0 * PROMPTS.xs, PROMPTS.ys), 2, 9.0), "inputs are not all 0"),
])  # fmt: skip
def test_errors_name_the_argument_or_the_cause(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()


def test_identify_warns_of_models_that_predict_no_better_than_0():
    quick: Any = {"steps": 1, "with_limits": False, "progress": False}
    untrained = HookedTransformer(TransformerConfig(x_dim=3, n_context=4, attention="softmax", d_model=8))
    with pytest.warns(UserWarning, match=r"loss on this LinearRegression is .* times that of predicting 0: it"):
        result = identify(untrained, THREE_INPUTS, n_prompts=60, **quick)
    assert "looks untrained" in str(result)
    foreign = AlgorithmLearner(gradient_descent, {"steps": 1, "step_size": 0.1})  # made for inputs with variance 1
    with pytest.warns(UserWarning, match="trained on another task"):
        identify(foreign, THREE_INPUTS.replace(input_scale=0.2), n_prompts=60, **quick)
    good = identify(AlgorithmLearner(averaging), LinearRegression(x_dim=2, n_context=20), n_prompts=10, **quick)
    assert "untrained" not in good.note
    flat = AlgorithmLearner(lambda prompts: 0.0 * prompts.query.xs.sum(1, keepdim=True) + 0.3)
    with pytest.warns(UserWarning, match="Parities"):
        assert "; " in identify(flat, Parities(x_dim=4, n_context=6), steps=1, n_prompts=20, progress=False).note
