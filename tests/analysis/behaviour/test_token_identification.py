import math
from typing import Any

import pytest
import torch

from mechicl import algorithms, viz
from mechicl.analysis import identify_on_tokens
from mechicl.learners import TokenAlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import MarkovChains

TASK = MarkovChains(d_vocab=3, n_ctx=9)


def test_divergences_by_a_plain_loop():
    cfg = TransformerConfig(prompt_format="token_ids", d_vocab=3, n_ctx=9, n_layers=1, n_heads=1, d_model=8, d_head=4,
                            attention="softmax", initializer_range=0.5)  # fmt: skip
    model = HookedTransformer(cfg)
    result = identify_on_tokens(model, TASK, n_prompts=6, seed=4, progress=False)
    sequences = TASK.sample(6, seed=4)
    probabilities = model(sequences.read).detach().double().softmax(-1)
    bigram = algorithms.bigram_bayes(sequences, d_vocab=3).exp()
    for i in range(6):
        for t in range(9):
            p, q = probabilities[i, t].tolist(), bigram[i, t].tolist()
            expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            assert math.isclose(result.divergences["bigram"][t, i].item(), expected, abs_tol=1e-9)
    assert result.points == tuple(range(1, 10))


@pytest.mark.parametrize("name", ["bigram", "unigram", "uniform"])
def test_each_reference_is_recognised(name):
    result = identify_on_tokens(algorithms.references(TASK)[name], TASK, n_prompts=50, memory=1e5, progress=False)
    assert result.best == name
    assert result.divergence(name).mean < 1e-12
    assert result.gap(list(result.divergences)[1]).low > 0


def test_the_table_the_text_and_the_picture():
    bigram = algorithms.references(TASK)["bigram"]
    also = {"sharper": TokenAlgorithmLearner(algorithms.bigram_bayes, {"d_vocab": 3, "concentration": 0.5})}
    result = identify_on_tokens(bigram, TASK, also=also, n_prompts=50, progress=False)
    assert list(result.divergences)[:2] == ["bigram", "sharper"]
    table = result.to_dataframe()
    assert list(table.name) == list(result.divergences)
    assert table.divergence.is_monotonic_increasing
    assert "after 9 tokens" in str(result)
    figure: Any = viz.plot(result)
    drawn = {trace.name: trace for trace in figure.data if trace.name}
    assert list(drawn["sharper"].y) == pytest.approx([each.mean for each in result.curve("sharper")])


def test_tokens_of_probability_0_contribute_nothing():
    def sure(sequences):
        logs = torch.full((*sequences.read.shape, 3), -torch.inf)
        logs[..., 0] = 0
        return logs

    result = identify_on_tokens(TokenAlgorithmLearner(sure), TASK, n_prompts=5, progress=False)
    assert result.divergence("uniform").mean == pytest.approx(math.log(3))
