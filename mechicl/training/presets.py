"""Ready-made training runs; every field can be overridden on the command line."""

from mechicl.models import TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.training.config import TrainingConfig

PRESETS: dict[str, TrainingConfig] = {
    # von Oswald et al. 2023, Fig. 2: one layer, N = N_x = 10, batch 2048, Adam 1e-3, clip 10, five seeds.
    "lsa-1l": TrainingConfig(
        task=LinearRegression(x_dim=10, n_context=10),
        model=TransformerConfig(x_dim=10, n_context=10, n_layers=1),
        seeds=(0, 1, 2, 3, 4),
        steps=10_000,
        batch_size=2048,
        learning_rate=1e-3,
        schedule="cosine",
        eval_every=50,
        n_snapshots=40,
    ),
    # Nertinger, Table 1, row "linear", kappa = 1, no noise: Gaussian inputs, d = 5, n = 20.
    "lsa-1l-gaussian": TrainingConfig(
        task=LinearRegression(x_dim=5, n_context=20, inputs="gaussian"),
        model=TransformerConfig(x_dim=5, n_context=20, n_layers=1),
        seeds=(0, 1, 2, 3, 4),
        steps=10_000,
        batch_size=2048,
        learning_rate=1e-3,
        schedule="cosine",
        eval_every=50,
        n_snapshots=20,
    ),
}
"""Name to run. `mechicl train NAME` trains it."""

SUMMARIES: dict[str, str] = {
    "lsa-1l": "one layer of linear attention on uniform inputs (von Oswald et al. 2023, Fig. 2)",
    "lsa-1l-gaussian": "one layer of linear attention on Gaussian inputs (Nertinger, Table 1)",
}
"""Name to a line for the command line's help."""
