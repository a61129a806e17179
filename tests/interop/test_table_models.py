"""Models of tables that others made: an estimator as a learner, and the module inside it opened by `wrap`.

The module has the structure of TabPFN v2 (Hollmann et al. 2025): rows first, layers with attention between features,
attention between items (test rows read training rows only) and an MLP, and labels of the training rows as an argument.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mechicl import analysis, wrap
from mechicl.interop import from_sklearn
from mechicl.models import Reading
from mechicl.prompts import Prompts
from mechicl.tasks import TableRegression


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.self_attn_between_features = nn.MultiheadAttention(width, 2, batch_first=True)
        self.self_attn_between_items = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, state: Tensor, n_train: int) -> Tensor:  # [batch row feature width]
        cells = state.flatten(0, 1)
        state = state + self.self_attn_between_features(cells, cells, cells)[0].view_as(state)
        cells = state.transpose(1, 2).flatten(0, 1)
        read = self.self_attn_between_items(cells, cells[:, :n_train], cells[:, :n_train])[0]
        state = state + read.unflatten(0, (len(state), -1)).transpose(1, 2)
        return state + self.mlp(state)


class TabularModel(nn.Module):
    def __init__(self, width: int = 8, n_layers: int = 2):
        super().__init__()
        self.encoder, self.y_encoder = nn.Linear(1, width), nn.Linear(2, width)
        self.transformer_encoder: Any = nn.Module()
        self.transformer_encoder.layers = nn.ModuleList(Layer(width) for _ in range(n_layers))
        self.decoder = nn.Linear(width, 1)

    def forward(
        self, x: Tensor, y: Tensor
    ) -> Tensor:  # [row batch feature] and [train_row batch] to [test_row batch 1]
        known = torch.arange(len(x)) < len(y)
        padded = torch.cat([y, y.new_zeros(len(x) - len(y), y.shape[1])])
        labels = self.y_encoder(torch.stack([padded, (~known).to(y)[:, None].expand_as(padded)], -1))
        state = torch.cat([self.encoder(x[..., None]), labels[:, :, None]], 2).transpose(0, 1)
        for layer in self.transformer_encoder.layers:
            state = layer(state, len(y))
        return self.decoder(state[:, len(y) :, -1]).transpose(0, 1)


class TabularRegressor:
    """The estimator of a user: fit keeps the table, predict runs the module on it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model_ = TabularModel().double().eval()

    def fit(self, xs: np.ndarray, ys: np.ndarray) -> "TabularRegressor":
        self.xs, self.ys = torch.from_numpy(xs), torch.from_numpy(ys)
        return self

    def predict(self, xs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            rows = torch.cat([self.xs, torch.from_numpy(xs)])[:, None]
            return self.model_(rows, self.ys[:, None])[:, 0, 0].numpy()


def encode(prompts: Prompts) -> Tensor:
    """A row for each point, with its label last; the query's is 0, and is not read."""
    labels = torch.cat([prompts.ys[:, :-1], torch.zeros_like(prompts.ys[:, -1:])], dim=1)
    return torch.cat([prompts.xs, labels], dim=2)


def call(module: Any, tokens: Tensor) -> Tensor:
    rows = tokens.transpose(0, 1)
    return module(rows[..., :-1], rows[:-1, :, -1])[-1]


def opened(estimator: TabularRegressor) -> Any:
    return wrap(
        estimator.model_, encode=Reading(encode, call=call), layers="transformer_encoder.layers.{}",
        mlp="transformer_encoder.layers.{}.mlp", name="tabular model",
    )  # fmt: skip


PROMPTS = TableRegression(x_dim=3, n_context=6).sample(4, seed=0, dtype=torch.float64)
OTHERS = Prompts(PROMPTS.xs, PROMPTS.ys.roll(1, 0))


def test_the_estimator_and_the_opened_module_predict_the_same():
    estimator = TabularRegressor()
    torch.testing.assert_close(opened(estimator).predict(PROMPTS), from_sklearn(estimator).predict(PROMPTS))


def test_cells_of_the_opened_module_are_patched():
    estimator: Any = TabularRegressor()
    model = opened(estimator)
    swept = analysis.patch(model, PROMPTS, OTHERS, "cell_post", {"layer": [0], "pos": [2, 6], "column": [0, 3]})
    layer = estimator.model_.transformer_encoder.layers[0]

    def run(prompts: Prompts, change: Any = None) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        hook = layer.register_forward_hook(
            lambda module, args, output: kept.append(output) or (change and change(output))
        )
        with torch.no_grad():
            predicted = call(estimator.model_, encode(prompts))
        hook.remove()
        return predicted, kept[0]

    source = run(PROMPTS)[1]
    for i, row in enumerate((2, 6)):
        for j, column in enumerate((0, 3)):

            def change(output: Tensor, row: int = row, column: int = column) -> Tensor:
                changed = output.clone()
                changed[:, row, column] = source[:, row, column]
                return changed

            assert swept.predictions is not None
            torch.testing.assert_close(swept.predictions[0, i, j], run(OTHERS, change)[0], rtol=0, atol=1e-12)
    assert swept.predictions is not None
    assert swept.unpatched is not None
    assert (swept.predictions[0, 1, 1] - swept.unpatched).abs().max() > 1e-6


def test_mlps_of_the_opened_module_are_ablated():
    swept = analysis.ablate(opened(TabularRegressor()), PROMPTS, "mlp_out", ("layer",), method="zero")
    assert (swept.effect() != 0).any(-1).all()
