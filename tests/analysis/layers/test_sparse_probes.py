"""Probes of a few neurons, against plain numpy and planted labels."""

from typing import Any

import numpy as np
import pytest
import torch

from mechicl.analysis.layers import probe_neurons
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.viz import plot

CFG = TransformerConfig(
    prompt_format="token_ids", d_vocab=20, n_ctx=6, n_layers=2, n_heads=2, d_model=8, d_mlp=200, attention="softmax",
    normalization_type="RMS", initializer_range=0.5, dtype="float64",
)  # fmt: skip
IDS = torch.randint(20, (120, 6), generator=torch.Generator().manual_seed(0))


def test_probes_are_those_of_plain_loops():
    model, labels = HookedTransformer(CFG), IDS[:, -1] % 3 == 0  # a third of the prompts
    result = probe_neurons(model, IDS, labels, ks=(1, 3), seed=5)
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(5)).numpy()
    fitted, held_out = order[:60], order[60:]
    _, cache = model.run_with_cache(IDS)
    y = np.where(labels.numpy(), 1.0, -1.0)
    for layer in range(2):
        x = cache[f"blocks.{layer}.mlp.hook_post"][:, -1].detach().numpy()
        means = [np.array([x[[i for i in fitted if y[i] == side], n].mean() for n in range(200)]) for side in (1, -1)]
        middle = (means[0] + means[1]) / 2
        squares = [((x[[i for i in fitted if y[i] == side]] - middle) ** 2).mean(0) for side in (1, -1)]
        spread = np.sqrt((squares[0] + squares[1]) / 2)
        best = np.argsort(-np.abs(means[0] - means[1]) / spread)
        assert result.neurons[layer].tolist() == best[:3].tolist()
        for place, k in enumerate((1, 3)):
            z = (x[:, best[:k]] - middle[best[:k]]) / spread[best[:k]]
            scale = np.array([(1 / (y[fitted] == y[i]).sum() / 2) ** 0.5 for i in fitted])
            rows = np.concatenate([scale[:, None] * z[fitted], 0.1 * np.eye(k)])  # the penalty as more rows
            slopes = np.linalg.lstsq(rows, np.concatenate([scale * y[fitted], np.zeros(k)]), rcond=None)[0]
            assert result.correct[layer, place].tolist() == [float((z[i] @ slopes) * y[i] > 0) for i in held_out]
    table = result.to_dataframe()
    assert list(table["k"]) == [1, 3, 1, 3]
    assert plot(result).data


def test_selection_among_many_neurons_does_not_help_for_random_labels():
    model, other = HookedTransformer(CFG), HookedTransformer(CFG.replace(initializer_range=0.1))
    shares = []
    for seed in range(8):
        labels = torch.rand(len(IDS), generator=torch.Generator().manual_seed(seed)) < 0.5
        result = probe_neurons(model, IDS, labels, ks=(4,), untrained=other, seed=seed)
        assert result.untrained is not None
        shares.append(torch.stack([result.correct, result.control, result.untrained]).mean((1, 2, 3)))
    # 960 predictions of each kind, correlated between the two layers
    torch.testing.assert_close(torch.stack(shares).mean(0), torch.full((3,), 0.5).double(), atol=0.07, rtol=0)


def test_a_planted_dimension_is_found():
    model = HookedTransformer(CFG)
    sign = torch.where(torch.arange(20) % 4 > 0, 1.0, -1.0).double()
    with torch.no_grad():
        model.embed.W_E[:, 5] = 20 * sign
    result = probe_neurons(model, IDS, sign[IDS[:, -1]] > 0, "resid_post", ks=(1, 8))
    accuracy, control = result.correct.mean(-1), result.control.mean(-1)
    assert result.neurons[:, 0].tolist() == [5, 5]
    assert (accuracy > 0.95).all()
    assert (control < 0.68).all()


@pytest.mark.parametrize(("change", "named"), [
    ({"tokens": IDS[:7], "labels": IDS[:7, 0] < 10}, "needs 8 prompts or more"),
    ({"labels": IDS[:, 0] < 0}, "at least 2 prompts of each class"),
    ({"component": "resid_post", "ks": (9,)}, "ks must be at most 8"),
])  # fmt: skip
def test_what_cannot_be_probed_is_refused(change: dict[str, Any], named: str):
    given: dict[str, Any] = {"tokens": IDS, "labels": IDS[:, 0] < 10} | change
    with pytest.raises(ValueError, match=named):
        probe_neurons(HookedTransformer(CFG), **given)
