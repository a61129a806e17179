"""Three modules of plain torch, opened as the page on any model does: numbers and true sentences."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import mechicl
from mechicl import analysis
from mechicl.tasks import LinearRegression
from tests.models.modules import Encoder, NanoGPT

pytestmark = pytest.mark.slow
TASK = LinearRegression(x_dim=3, n_context=4)
QUIET: dict[str, Any] = {"progress": False}


class Recurrent(nn.Module):
    """Torch's GRU, layer by layer."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.read_in, self.head = nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))

    def forward(self, tokens):
        x = self.read_in(tokens)
        for block in self.blocks:
            x = block(x)[0]
        return self.head(x)


ATTENTION = {
    "nanoGPT": {"out": "blocks.{}.attn", "fused": "blocks.{}.attn", "n_heads": 4},
    "GRU": None,
    "nn.MultiheadAttention": "blocks.{}.self_attn",
}


@pytest.fixture(params=list(ATTENTION))
def kind(request) -> str:
    return request.param


@pytest.fixture
def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    modules = {"nanoGPT": lambda: NanoGPT(fused=True), "GRU": Recurrent, "nn.MultiheadAttention": Encoder}
    return modules[kind]().eval()


@pytest.fixture
def model(kind: str, net: nn.Module):
    return mechicl.wrap(net, encode="interleaved", layers="blocks.{}", attention=ATTENTION[kind])


def test_the_report_on_ones_own_model_states_task_and_best_learner(model, tmp_path):
    page = mechicl.report(model, TASK, tmp_path / "report", n_prompts=64, **QUIET)
    text = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", page.read_text(), flags=re.DOTALL)
    opening = text[: text.index("Loss by context length")]
    for fact in ("inputs uniform on [-1/2, 1/2]", "no noise", "best known learner", "looks untrained"):
        assert fact in opening
    assert "No number was published" not in text


def test_a_list_of_models_is_taken_where_a_checkpoint_is(model, kind):
    prompts = TASK.sample(8, seed=0)
    if kind == "GRU":
        with pytest.raises((TypeError, ValueError), match="attention"):
            analysis.score_heads_over_training([model], ["target_to_input"], prompts=prompts, **QUIET)
    else:
        found = analysis.score_heads_over_training([model, model], ["target_to_input"], prompts=prompts, **QUIET)
        assert found.steps == (0, 1)
        _, cache = model.run_with_cache(prompts)
        patterns = torch.stack([cache["pattern", layer] for layer in range(2)])  # [layer prompt head query key]
        best = patterns[..., [1, 3, 5, 7], [0, 2, 4, 6]].mean((1, 3)).max()
        torch.testing.assert_close(found.scores["target_to_input"], best.expand(2, 1))
    losses = analysis.measure_over_training(
        [model, model], lambda each: {"error": (each.predict(prompts) - prompts.query.ys).square()[:, 0]}, **QUIET
    )
    assert losses.quantities["error"].shape == (2, 8)
