"""Published models of tables with random weights: estimators as learners, and their modules opened by `wrap`."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mechicl import analysis, wrap
from mechicl.interop import from_sklearn
from mechicl.models import Reading
from mechicl.prompts import Prompts
from mechicl.tasks import TableRegression
from tests.tools import imported

pytestmark = pytest.mark.slow

PROMPTS = TableRegression(x_dim=3, n_context=12).sample(4, seed=0, dtype=torch.float64)
OTHERS = Prompts(PROMPTS.xs, PROMPTS.ys.roll(1, 0))
N_OUT = 9  # quantiles or bins


def encode(prompts: Prompts) -> Tensor:
    """A row for each point, with its label last; the query's is 0, and is not read."""
    labels = torch.cat([prompts.ys[:, :-1], torch.zeros_like(prompts.ys[:, -1:])], dim=1)
    return torch.cat([prompts.xs, labels], dim=2)


class TabPFN:
    """TabPFN v2 (Hollmann et al. 2025): a stream for each cell, rows first, labels of training rows as an argument."""

    layers, component, axes = "blocks.{}", "cell_post", {"layer": [0], "pos": [2, 12], "column": [0, 2]}

    def __init__(self) -> None:
        v2 = imported("tabpfn.architectures.tabpfn_v2")
        for alias in [name for name in sys.modules if name.startswith("tabpfn.model.")]:
            del sys.modules[alias]  # which warns code that looks through all modules, as inspect does
        torch.manual_seed(0)
        self.config = v2.TabPFNV2Config(max_num_classes=0, num_buckets=N_OUT, emsize=16, nlayers=2, nhead=2)
        self.module: Any = v2.TabPFNV2(config=self.config, n_out=N_OUT).double().eval()
        for weight in self.module.blocks.parameters():
            if not weight.any():  # layers begin as the identity
                nn.init.normal_(weight, std=0.3)

    @staticmethod
    def call(module: Any, tokens: Tensor) -> Tensor:
        rows = tokens.transpose(0, 1)
        return module(rows[..., :-1], rows[:-1, :, -1])[-1]

    def estimator(self, monkeypatch: pytest.MonkeyPatch, _: Any) -> Any:
        monkeypatch.setenv("TABPFN_DISABLE_TELEMETRY", "1")
        tabpfn, bars = imported("tabpfn"), imported("tabpfn.architectures.shared.bar_distribution")
        settings = imported("tabpfn.inference_config").InferenceConfig.get_default(
            "regression", imported("tabpfn.constants").ModelVersion.V2
        )
        specs = tabpfn.ModelSpecs(
            self.module.float(), self.config, settings,
            bars.FullSupportBarDistribution(torch.linspace(-3, 3, N_OUT + 1)),
        )  # fmt: skip
        return tabpfn.TabPFNRegressor(model_path=specs, n_estimators=1, device="cpu")


class TabICL:
    """TabICL (Qu et al. 2025): columns and rows are embedded first; its last transformer has a stream for each row."""

    layers, component, axes = "icl_predictor.tf_icl.blocks.{}", "resid_post", {"layer": [0], "pos": [2, 12]}

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.config = {
            "max_classes": 0, "num_quantiles": N_OUT, "embed_dim": 16, "col_num_blocks": 1, "col_nhead": 2,
            "col_num_inds": 4, "row_num_blocks": 1, "row_nhead": 2, "row_num_cls": 2, "icl_num_blocks": 2,
            "icl_nhead": 2, "zero_init": False,
        }  # fmt: skip
        self.module: Any = imported("tabicl._model.tabicl").TabICL(**self.config).double().eval()

    @staticmethod
    def call(module: Any, tokens: Tensor) -> Tensor:
        return module(tokens[..., :-1], tokens[:, :-1, -1])[:, -1]

    def estimator(self, _: Any, folder: Any) -> Any:
        torch.save({"config": self.config, "state_dict": self.module.float().state_dict()}, folder / "random.ckpt")
        return imported("tabicl").TabICLRegressor(model_path=folder / "random.ckpt", n_estimators=1, device="cpu")


@pytest.fixture(params=[TabPFN, TabICL])
def published(request: pytest.FixtureRequest) -> Any:
    return request.param()


def opened(published: Any) -> Any:
    return wrap(
        published.module, encode=Reading(encode, call=published.call), layers=published.layers,
        decode=lambda outputs: outputs.mean(-1, keepdim=True), name=type(published).__name__,
    )  # fmt: skip


def test_streams_of_the_opened_module_are_patched(published: Any):
    swept = analysis.patch(opened(published), PROMPTS, OTHERS, published.component, published.axes)
    layer = published.module.get_submodule(published.layers.format(0))

    def run(prompts: Prompts, place: tuple[Any, ...] = (), source: Tensor | None = None) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []

        def see(_: Any, __: Any, output: Any) -> Any:
            stream = (output[0] if isinstance(output, tuple) else output).clone()
            kept.append(stream.clone())
            if source is not None:
                stream[place] = source[place]
            return (stream, *output[1:]) if isinstance(output, tuple) else stream

        with torch.no_grad(), layer.register_forward_hook(see):
            return published.call(published.module, encode(prompts)).mean(-1, keepdim=True), kept[0]

    source = run(PROMPTS)[1]
    columns = [(column,) for column in published.axes.get("column", ())] or [()]
    places = [(slice(None), pos, *column) for pos in published.axes["pos"] for column in columns]
    expected = torch.stack([run(OTHERS, place, source)[0] for place in places])
    assert swept.predictions is not None
    assert swept.unpatched is not None
    torch.testing.assert_close(swept.predictions.flatten(0, -3), expected, rtol=0, atol=1e-12)
    assert (expected[-1] - swept.unpatched).abs().max() > 1e-6


def test_an_estimator_is_a_learner(published: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    estimator = published.estimator(monkeypatch, tmp_path)
    expected = [
        estimator.fit(xs[:-1].numpy(), ys[:-1, 0].numpy()).predict(xs[-1:].numpy())
        for xs, ys in zip(PROMPTS.xs, PROMPTS.ys, strict=True)
    ]
    found = from_sklearn(estimator).predict(PROMPTS)
    torch.testing.assert_close(found, torch.tensor(np.array(expected), dtype=found.dtype), rtol=1e-5, atol=1e-6)
    assert found.std() > 0
