"""Ridge regressions from running sums against numpy's normal equations on the whole data."""

import numpy as np
import pytest
import torch

from mechicl.analysis.layers.linear_maps import RidgeSums


def _data(n_sites: int, n_prompts: int, n_samples: int, n_features: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n_sites, n_prompts, n_samples, n_features, generator=generator, dtype=torch.float64)
    features = features + 30  # a mean that is large against the spread
    mixing = torch.randn(n_features, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(n_sites, n_prompts, n_samples, 2, generator=generator, dtype=torch.float64)
    return features, features @ mixing + noise


def _ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    mean, target_mean = x.mean(0), y.mean(0)
    centred = x - mean
    covariance = centred.T @ centred / len(x)
    scale = np.trace(covariance) / x.shape[1]
    weights = np.linalg.solve(covariance + penalty * scale * np.eye(x.shape[1]), centred.T @ (y - target_mean) / len(x))
    return weights, target_mean - mean @ weights


@pytest.mark.parametrize(("n_prompts", "n_samples", "penalty", "batch"), [(8, 1, 2.0, 1), (20, 3, 1e-3, 7)])
def test_weights_are_numpys_however_the_prompts_are_batched(n_prompts, n_samples, penalty, batch):
    features, targets = _data(2, n_prompts, n_samples, 3, seed=0)
    sums = RidgeSums(folds=4)
    for start in range(0, n_prompts, batch):
        sums.add(features[:, start : start + batch], targets[:, start : start + batch])
    maps = sums.solve([penalty])
    for site in range(2):
        weights, bias = _ridge(features[site].flatten(0, 1).numpy(), targets[site].flatten(0, 1).numpy(), penalty)
        np.testing.assert_allclose(maps.weights[site], weights, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(maps.bias[site], bias, rtol=1e-8, atol=1e-7)


def test_validation_errors_are_those_of_maps_fitted_without_the_fold():
    features, targets = _data(1, 23, 2, 3, 5)
    sums = RidgeSums(folds=3)
    sums.add(features, targets)
    penalties = [1e-6, 1.0]
    maps = sums.solve(penalties)
    for i, penalty in enumerate(penalties):
        total = 0.0
        for fold in range(3):
            held = np.arange(23) % 3 == fold
            x, y = (a[0][~held].flatten(0, 1).numpy() for a in (features, targets))
            weights, bias = _ridge(x, y, penalty)
            predicted = features[0][held].flatten(0, 1).numpy() @ weights + bias
            total = total + ((predicted - targets[0][held].flatten(0, 1).numpy()) ** 2).sum(0)
        np.testing.assert_allclose(maps.validation_errors[i, 0].numpy(), total / 46, rtol=1e-7)
    best = maps.validation_errors[:, 0].argmin(0)
    assert maps.penalties[0].tolist() == [penalties[i] for i in best.tolist()]


def test_features_that_do_not_vary_or_repeat_are_no_obstacle():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 40, 1, 2, generator=generator, dtype=torch.float64)
    features = torch.cat([x, x, torch.full_like(x, 7.0)], dim=-1)
    targets = x.sum(-1, keepdim=True) * 3 + 1
    sums = RidgeSums()
    sums.add(features, targets)
    maps = sums.solve([0.0])
    predicted = features @ maps.weights[:, None] + maps.bias
    torch.testing.assert_close(predicted, targets, atol=1e-8, rtol=0)
