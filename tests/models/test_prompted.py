"""What a model says of the memory that its passes take, against what they take."""

from typing import Any

import pytest
import torch

from mechicl.models import LSTMConfig, ModelConfig, TransformerConfig, build
from tests.analysis.interventions.test_runs import peak
from tests.strategies import random_prompts

SIZE: dict[str, Any] = {"x_dim": 5, "n_context": 20, "n_layers": 2}
GPT: dict[str, Any] = SIZE | {"prompt_format": "interleaved", "d_model": 64, "n_heads": 4, "attention": "softmax"}


@pytest.mark.parametrize(
    "cfg",
    [
        TransformerConfig(**SIZE, n_heads=4, dtype="float64"),
        TransformerConfig(**SIZE, d_head=40),
        TransformerConfig(x_dim=5, n_context=100, n_layers=2),
        TransformerConfig(**SIZE, attention="softmax", d_head=6, n_heads=2, sink="learned", keys="causal"),
        TransformerConfig(**SIZE, attention="relu", keys="causal", normalize_by_context=True),
        TransformerConfig(**GPT, d_mlp=256, normalization_type="LN", act_fn="gelu_new"),
        TransformerConfig(**GPT, momentum=0.5),
        LSTMConfig(**SIZE, d_model=96),
    ],
)
def test_bytes_per_prompt_is_an_upper_estimate_of_the_measured_peak(cfg: ModelConfig):
    model, n = build(cfg), 32
    prompts = random_prompts(cfg, batch=n)
    with torch.no_grad():
        quick = max(peak(lambda: model.predict(prompts))[0], peak(lambda: model.predict_prefixes(prompts))[0]) / n
        with model.hooks(fwd_hooks=[("hook_embed", lambda x, hook: None)]):
            hooked = peak(lambda: model(prompts))[0] / n
    assert quick <= model.bytes_per_prompt(prompts)
    assert hooked <= model.bytes_per_prompt(prompts) <= 3 * hooked  # and not so far above that analyses crawl
