import pytest
import torch

from mechicl import algorithms
from mechicl.learners import squared_errors
from mechicl.tasks import ReluNetworks

from .reference import make_prompts

OPTIONS = {"n_hidden": 7, "steps": 12, "learning_rate": 0.05}


@pytest.mark.parametrize("y_dim", [1, 2])
def test_it_is_pytorchs_network_and_adam_trained_on_each_prefix_alone(y_dim):
    prompts = make_prompts(y_dim=y_dim)
    everything = algorithms.network_descent(prompts, **OPTIONS)
    assert everything.steps == (12,)
    generator = torch.Generator().manual_seed(0)
    values = [
        2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
        for shape in ((4, 7), (1, 7), (7, y_dim), (1, y_dim))
    ]
    for n in range(3):
        for t in (1, 4, 7):
            first, second = torch.nn.Linear(4, 7), torch.nn.Linear(7, y_dim)
            network = torch.nn.Sequential(first, torch.nn.ReLU(), second).double()
            with torch.no_grad():
                first.weight.copy_(values[0].T / 2)
                first.bias.copy_(values[1][0] / 2)
                second.weight.copy_(values[2].T / 7**0.5)
                second.bias.copy_(values[3][0] / 7**0.5)
            optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
            for _ in range(12):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(network(prompts.xs[n, :t]), prompts.ys[n, :t]).backward()
                optimizer.step()
            torch.testing.assert_close(everything.predictions[0, n, t], network(prompts.xs[n, t]), rtol=1e-7, atol=1e-9)


def test_without_a_context_it_predicts_zero_and_the_query_alone_and_parts_agree(monkeypatch):
    prompts = make_prompts()
    whole = algorithms.network_descent(prompts, **OPTIONS).predictions
    assert whole[0, :, 0].abs().max() == 0
    query = algorithms.network_descent(prompts, **OPTIONS, at="query").predictions
    torch.testing.assert_close(query, whole[:, :, -1:])
    monkeypatch.setattr("mechicl.algorithms.spectra.CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(algorithms.network_descent(prompts, **OPTIONS).predictions, whole)
    assert algorithms.network_descent(prompts[:0], **OPTIONS).predictions.shape == (1, 0, 8, 1)
    with torch.no_grad():
        single = algorithms.network_descent(prompts.to(torch.float32), **OPTIONS)
    assert single.predictions.dtype == torch.float32
    again = algorithms.network_descent(prompts, **OPTIONS, seed=1).predictions
    assert not torch.allclose(again, whole)


def test_training_fits_networks_better_than_neighbours_do():
    task = ReluNetworks(x_dim=4, n_context=40, n_hidden=20)
    prompts = task.sample(100, seed=0)
    losses = {name: squared_errors(each, prompts).mean() for name, each in algorithms.references(task).items()}
    assert next(iter(losses)) == "network descent"
    assert losses["network descent"] < 0.8 * losses["3 nearest neighbours"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"n_hidden": 0}, "n_hidden"), ({"steps": -1}, "steps"), ({"learning_rate": 0.0}, "learning_rate")],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        algorithms.network_descent(make_prompts(), **options)
