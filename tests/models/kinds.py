"""One small model of each kind, for tests of what all kinds share."""

from collections.abc import Callable
from typing import Any

import mechicl
from mechicl.models import HookedLSTM, HookedTransformer, LSTMConfig, TransformerConfig
from mechicl.tasks import LinearRegression
from tests.models.modules import NanoGPT, seeded

TASK = LinearRegression(x_dim=2, n_context=5)
GPT2 = TransformerConfig(
    x_dim=2, n_context=5, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_mlp=16, attention="softmax",
    normalization_type="LN",
)  # fmt: skip
PARTS: dict[str, Any] = {
    "layers": "blocks.{}", "attention": {"z": "blocks.{}.attn.proj", "n_heads": 4}, "mlp": "blocks.{}.mlp",
}  # fmt: skip
OURS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: HookedTransformer(GPT2),
    "looped": lambda: HookedTransformer(GPT2.replace(recurrent=True)),
    "linear": lambda: HookedTransformer(TransformerConfig(x_dim=2, n_context=5, n_layers=2)),
    "lstm": lambda: HookedLSTM(LSTMConfig(x_dim=2, n_context=5, n_layers=2, d_model=6)).eval(),
}
KINDS = OURS | {"wrapped": lambda: mechicl.wrap(seeded(NanoGPT, d_in=2), encode="interleaved", **PARTS)}
