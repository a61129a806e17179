import pytest
import torch

from mechicl.tasks import GaussianClusters

TASK = GaussianClusters(x_dim=32, n_context=8, n_classes=20, n_labels=4, burstiness=2, within_class_noise=0.01)


def classes_of(task, prompts):
    """The nearest known class of each point."""
    return torch.cdist(prompts.xs.flatten(0, 1).double(), task.means).argmin(-1).view(len(prompts), -1)


def test_known_classes_are_bursty_and_have_their_labels():
    prompts = TASK.sample(200, seed=0)
    classes = classes_of(TASK, prompts)
    assert torch.equal(prompts.ys.argmax(-1), TASK.labels[classes])
    for row in classes.tolist():
        assert sorted(row[:-1].count(each) for each in set(row[:-1])) == [2, 2, 2, 2]
        assert row[-1] in row[:-1]
    assert any(row[0] != row[1] for row in classes.tolist())  # in random order


def test_the_query_is_absent_or_labels_are_swapped():
    absent = TASK.replace(classes="absent")
    prompts = absent.sample(200, seed=0)
    classes = classes_of(TASK, prompts)
    assert all(row[-1] not in row[:-1] for row in classes.tolist())
    assert torch.equal(prompts.ys.argmax(-1), TASK.labels[classes])
    swapped = TASK.replace(classes="swapped").sample(200, seed=0)
    classes, labels = classes_of(TASK, swapped), swapped.ys.argmax(-1)
    assert (labels != TASK.labels[classes]).all()
    for row, given in zip(classes.tolist(), labels.tolist(), strict=True):
        assert given[-1] == given[row.index(row[-1])]


def test_new_classes_are_not_those_of_training_and_their_labels_are_random():
    prompts = TASK.replace(classes="new").sample(2000, seed=0)
    assert torch.cdist(prompts.xs[:, -1].double(), TASK.means).amin() > 0.3
    query = (prompts.xs[:, :-1] - prompts.xs[:, -1:]).square().sum(-1)
    nearest = query.argmin(-1)
    assert torch.equal(prompts.ys[torch.arange(2000), nearest], prompts.ys[:, -1])
    assert ((query < 0.1).sum(-1) == 2).all()
    assert torch.allclose(prompts.ys[:, -1].mean(0), torch.full((4,), 0.25), atol=0.04)


def test_moments_of_inputs():
    task = GaussianClusters(x_dim=5, n_classes=9, n_labels=2, within_class_noise=0.8, classes="new")
    xs = task.sample(20_000, seed=0).xs
    assert torch.allclose(xs.var((0, 1)), torch.full((5,), 1 / 5), rtol=0.03)
    one = GaussianClusters(x_dim=5, n_context=2, burstiness=2, n_classes=2, n_labels=2, within_class_noise=0.8)
    xs = one.replace(classes="new").sample(20_000, seed=0).xs  # all three points of one class
    covariance = (xs[:, 0] * xs[:, 2]).mean(0)
    assert torch.allclose(covariance, torch.full((5,), 1 / (1 + 0.8**2) / 5), atol=0.006)


def test_zipf_and_burstiness():
    task = TASK.replace(zipf_exponent=1.0, bursty_share=0.0)
    counts = torch.bincount(classes_of(TASK, task.sample(4000, seed=0)).flatten(), minlength=20)
    assert torch.allclose(counts / counts.sum(), task.frequencies.float(), atol=0.01)
    assert task.frequencies[0] / task.frequencies[9] == pytest.approx(10)
    assert not torch.equal(TASK.means, TASK.replace(class_seed=1).means)
    half = classes_of(TASK, TASK.replace(bursty_share=0.5).sample(2000, seed=0)).tolist()
    bursty = sum(sorted(row[:-1].count(each) for each in set(row[:-1])) == [2, 2, 2, 2] for row in half)
    assert 0.45 < bursty / 2000 < 0.56
    first = classes_of(TASK, TASK.replace(zipf_exponent=1.0, burstiness=8).sample(4000, seed=0))[:, 0]
    assert (first == 0).double().mean() == pytest.approx(task.frequencies[0].item(), abs=0.03)
