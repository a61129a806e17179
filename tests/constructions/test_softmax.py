"""Two softmax heads against a step of gradient descent."""

import math

import numpy as np
import pytest
from hypothesis import assume, given

from mechicl import constructions
from tests.constructions.reference import at_query, cases, quick


def two_heads(step_size, score_scale, sink, n_context):
    """Both softmaxes written out; the sink is one more key with value 0."""

    def predict(xs, ys, query):
        out = np.zeros(ys.shape[1])
        for sign in (1, -1) if len(xs) or sink else ():
            weights = [math.exp(sign * score_scale * (x @ query)) for x in xs]
            extra = math.exp(sink) if sink else 0.0
            normaliser = extra if sink else n_context
            for weight, y in zip(weights, ys, strict=True):
                out += sign * step_size * normaliser / (2 * score_scale) * weight * y / (sum(weights) + extra)
        return out

    return predict


@quick
@given(cases())
def test_it_is_two_softmax_heads(case):
    assume(case.n_context)
    for sink in (True, False):
        model = constructions.softmax_gradient_descent(**case.sizes, step_size=0.1, score_scale=0.2, sink=sink)
        height = model.cfg.sink_score if sink else 0.0
        expected = at_query(case.prompts, two_heads(0.1, 0.2, height, case.n_context))
        scale = 0.1 * case.prompts.context.ys.abs().sum().item()  # of the terms, which may cancel
        np.testing.assert_allclose(model.predict(case.prompts).detach().numpy(), expected, rtol=0, atol=1e-12 * scale)
        assert (model.cfg.n_layers, model.cfg.n_heads) == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score_scale": 0.0}, "score_scale must be"),
        ({"score_scale": -1.0}, "score_scale must be"),
        ({"step_size": math.inf}, "step_size must be"),
        ({"n_context": 0}, "n_context must be"),
        ({"score_scale": math.nan}, "score_scale must be a finite number, got nan"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        constructions.softmax_gradient_descent(
            **{"x_dim": 3, "n_context": 4, "step_size": 0.1, "score_scale": 0.1, **change}
        )
