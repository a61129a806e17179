"""A search against fine-tuning at each of its settings."""

import dataclasses
import math

import pytest
import torch

from mechicl.analysis.finetuning import METHODS, FineTuning, fine_tune, search_tuning
from mechicl.analysis.finetuning.forward_passes import linearized_outputs
from mechicl.analysis.finetuning.hyperparameter_search import TuningSearch
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from tests.analysis.finetuning.oracles import model_on_tokens, score_and_loss, token_shots
from tests.analysis.interventions.oracles import inputs, model_of


@pytest.mark.parametrize(("kind", "method"), [*(("softmax", method) for method in METHODS), ("gpt2", "plain")])
def test_a_search_is_fine_tuning_at_each_setting(kind, method):
    model, shots = model_on_tokens(kind), token_shots(queries=(2, 1, 2))
    rates, epochs = (0.01, 0.1), (2, 1)
    settings = FineTuning(method=method, examples_per_step=2)
    search = search_tuning(model, shots, settings, learning_rates=rates, epochs=epochs, memory=1.3e5)
    assert (search.learning_rates, search.epochs, search.tuning) == (rates, (1, 2), settings)
    assert search.score.shape == search.loss.shape == (2, 2, 3)
    for i, rate in enumerate(rates):
        for j, n in enumerate(search.epochs):
            tuned = fine_tune(model, shots, dataclasses.replace(settings, learning_rate=rate, epochs=n))
            for q, (tokens, target) in enumerate(zip(shots.zero_shot, shots.targets, strict=True)):
                if method == "linearized":
                    outputs = linearized_outputs(model, tokens[None], tuned.changes)[0]
                else:
                    with tuned.applied(model), torch.no_grad():
                        outputs = model(tokens[None])[0, -1]
                score, loss = score_and_loss(outputs.numpy(), target, shots.choices)
                assert search.score[i, j, q] == score
                assert search.loss[i, j, q].item() == pytest.approx(loss, rel=1e-6)
    table = search.to_dataframe()
    assert table["learning_rate"].tolist() == [0.01, 0.01, 0.1, 0.1]
    assert table["epoch"].tolist() == [1, 2, 1, 2]


nan, inf = math.nan, math.inf
TABLES = {
    "score": ([[0.0, 0.5], [1.0, 0.5]], [[0.1, 0.1], [9.0, 0.1]], (1, 0), True),
    "tie, by loss": ([[0.5, 0.5], [0.5, 0.2]], [[0.3, 0.2], [0.25, 0.1]], (0, 1), True),
    "tie, by order": ([[0.5, 0.5], [0.5, 0.5]], [[0.3, 0.2], [0.2, 0.2]], (0, 1), True),
    "NaN": ([[nan, 0.2], [0.1, nan]], [[nan, 5.0], [0.1, nan]], (0, 1), True),
    "no finite loss": ([[1.0, 0.2], [1.0, 0.1]], [[nan, 5.0], [inf, 0.1]], (0, 1), True),
    "errors": ([[-4.0, -1.0], [-0.5, -3.0], [-1.0, -1.0]], [[4.0, 1.0], [0.5, 3.0], [1.0, 1.0]], (1, 0), False),
    "one rate": ([[0.1, 0.9]], [[0.1, 0.1]], (0, 1), True),
    "one rate, one epoch": ([[0.9, 0.1]], [[0.1, 0.1]], (0, 0), False),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_the_best_of_a_search(name):
    scores, losses, (rate, epoch), at_edge = TABLES[name]
    settings = FineTuning(method="per_layer", examples_per_step=3)
    score, loss = (torch.tensor(table, dtype=torch.float64)[..., None].expand(-1, -1, 3) for table in (scores, losses))
    rates = (0.1, 0.2, 0.3)[: len(scores)]
    search = TuningSearch(rates, (1, 4), score, loss, settings)
    assert search.best == FineTuning(rates[rate], (1, 4)[epoch], "key_value", "per_layer", 3)
    assert search.at_edge == at_edge


@pytest.mark.parametrize(
    ("method", "epochs"), [("plain", (1,)), ("plain", (1, 2)), ("linearized", (5,)), ("per_layer", (1, 2))]
)
def test_divergence(method, epochs):
    model = model_of("linear")
    shots = prompt_shots(model, inputs(model, 0, 1), "unlabelled")
    with pytest.raises(ValueError, match=r"diverged at all learning rates \(1e\+200, 1e\+250\): try lower ones"):
        search_tuning(model, shots, FineTuning(method=method), learning_rates=(1e200, 1e250), epochs=epochs)
    search = search_tuning(model, shots, FineTuning(method=method), learning_rates=(1e200, 1e-3), epochs=epochs)
    assert search.score[0].isnan().all()
    assert search.loss[0].isnan().all()
    assert search.score[1].isfinite().all()
    assert search.best.learning_rate == 1e-3
    with pytest.raises(ValueError, match=r"diverged at learning_rate=1e\+200: take a lower one"):
        fine_tune(model, shots, FineTuning(1e200, epochs=5, method=method))


def test_a_grid_grows_where_its_best_lies_on_an_edge():
    score = torch.zeros(3, 2, 1, dtype=torch.float64)
    loss = torch.tensor([[3.0, 3.0], [2.0, 2.0], [1.5, 1.0]], dtype=torch.float64)[..., None]
    search = TuningSearch((0.1, 0.3, 1.0), (1, 4), score, loss, FineTuning())
    assert search.at_edge
    assert search.wider() == ((0.1, 0.3, 1.0, 3.3), (1, 4, 16))
    assert dataclasses.replace(search, loss=loss.flip(0)).wider() == ((0.033, 0.1, 0.3, 1.0), (1, 4, 16))
    inside = dataclasses.replace(search, loss=loss[[0, 2, 1]].flip(1))
    assert not inside.at_edge
    assert inside.wider() == ((0.1, 0.3, 1.0), (1, 4))


def test_the_best_by_loss_where_scores_differ():
    score = torch.tensor([[0.9, 0.5]], dtype=torch.float64)[..., None]
    loss = torch.tensor([[0.4, 0.3]], dtype=torch.float64)[..., None]
    search = TuningSearch((0.1,), (1, 4), score, loss, FineTuning())
    assert search.best.epochs == 1
    assert dataclasses.replace(search, choose_by="loss").best.epochs == 4


def test_a_search_that_widens_is_the_search_of_the_wider_grid():
    model, shots = model_on_tokens("softmax"), token_shots(queries=(2, 1))
    narrow = search_tuning(model, shots, learning_rates=(1e-5, 1e-4), epochs=(1, 2), choose_by="loss", progress=False)
    assert narrow.at_edge
    rates, epochs = narrow.wider()
    wide = search_tuning(model, shots, learning_rates=rates, epochs=epochs, progress=False)
    grown = search_tuning(
        model, shots, learning_rates=(1e-5, 1e-4), epochs=(1, 2), choose_by="loss", widen=1, progress=False
    )
    assert (grown.learning_rates, grown.epochs) == (rates, epochs)
    torch.testing.assert_close(grown.loss, wide.loss)
