"""Ready-made training runs on tasks of tokens, Boolean functions and classes."""

from mechicl.models import TransformerConfig
from mechicl.tasks import Conjunctions, GaussianClusters, MarkovChains, Parities, RepeatedTokens
from mechicl.tasks.topics import TopicClassification
from mechicl.training.config import TrainingConfig

# Elhage et al. 2021: two layers, attention only, no norms, so that the circuits are products of weights.
_INDUCTION = TrainingConfig(
    task=RepeatedTokens(d_vocab=64, n_ctx=48, min_period=4, max_period=24),
    model=TransformerConfig(
        prompt_format="token_ids", d_vocab=64, n_ctx=48, n_layers=2, n_heads=2, d_model=64, d_head=32,
        attn_only=True, normalization_type=None, attn_bias=False, read_bias=False, initializer_range=0.05,
    ),
    seeds=(0, 1, 2), steps=10_000, batch_size=64, learning_rate=1e-3, schedule="cosine", warmup_steps=100,
    gradient_clip=1.0, eval_every=25, eval_prompts=500, n_snapshots=10,
)  # fmt: skip
# Edelman et al. 2024, with learned positions in place of relative ones. The plateau of unigrams is passed within
# hundreds of steps.
_MARKOV = TrainingConfig(
    task=MarkovChains(d_vocab=3, n_ctx=48),
    model=TransformerConfig(
        prompt_format="token_ids", d_vocab=3, n_ctx=48, n_layers=2, n_heads=2, d_model=32, d_head=16, d_mlp=128,
        attention="softmax", normalization_type="LN", act_fn="gelu", initializer_range=0.1,
    ),
    steps=4000, batch_size=64, learning_rate=3e-3, schedule="cosine", warmup_steps=100, gradient_clip=1.0,
    eval_every=100, eval_prompts=1000, n_snapshots=10,
)  # fmt: skip
# Attention alone, as in the paper, and no norms, so that circuits are products of weights.
_MARKOV_ATTENTION = _MARKOV.replace(
    model=TransformerConfig(
        prompt_format="token_ids", d_vocab=3, n_ctx=48, n_layers=2, n_heads=2, d_model=32, d_head=16, attn_only=True,
        attention="softmax", normalization_type=None, initializer_range=0.1,
    )
)  # fmt: skip

# Small enough for two cores; repeated words teach it to look back and copy before labels do.
_TOPICS = TrainingConfig(
    task=TopicClassification(n_ctx=64, share_repeated=0.3),
    model=TransformerConfig(
        prompt_format="token_ids", d_vocab=TopicClassification().d_vocab, n_ctx=64, n_layers=3, n_heads=4, d_model=64,
        d_mlp=256, attention="softmax", normalization_type="LN", initializer_range=0.05,
    ),
    seeds=(0, 1, 2), steps=3000, batch_size=64, learning_rate=1e-3, schedule="cosine", warmup_steps=200,
    gradient_clip=1.0, eval_every=50, eval_prompts=500, save_every=250,
)  # fmt: skip
# Dai et al. 2023, section 5, eq. 11: attention adds earlier values with powers of η, which sum to 1 for η = 1/2, as the
# weights of plain attention do.
_TOPICS_MOMENTUM = _TOPICS.replace(model=_TOPICS.model.replace(momentum=0.5, momentum_over="values"))

# Bhattamishra et al. 2024 train GPT-2 style models on all points' loss; in small, for two cores.
_CONJUNCTIONS = TrainingConfig(
    task=Conjunctions(x_dim=8, n_context=30),
    model=TransformerConfig(
        x_dim=8, n_context=30, prompt_format="interleaved", n_layers=4, n_heads=4, d_model=64, d_mlp=256,
        attention="softmax", normalization_type="LN", act_fn="gelu_new",
    ),
    steps=4000, batch_size=64, learning_rate=1e-3, schedule="cosine", warmup_steps=200, gradient_clip=1.0,
    eval_every=100, eval_prompts=500,
)  # fmt: skip
_PARITIES = _CONJUNCTIONS.replace(
    task=Parities(x_dim=6, n_context=30, degree=2), model=_CONJUNCTIONS.model.replace(x_dim=6)
)
# Reddy 2024: two layers, the query's loss. Few classes are memorised; for many the context is read.
_CLUSTERS = TrainingConfig(
    task=GaussianClusters(x_dim=16, n_context=8, n_labels=4, burstiness=2),
    model=TransformerConfig(
        x_dim=16, y_dim=4, n_context=8, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=64, d_mlp=256,
        attention="softmax", normalization_type="LN", act_fn="gelu_new",
    ),
    steps=2000, batch_size=128, learning_rate=1e-3, schedule="cosine", warmup_steps=200, gradient_clip=1.0,
    loss="query", eval_every=100, eval_prompts=1000,
)  # fmt: skip
# Singh et al. 2023, in small: in-context learning comes first and vanishes. Two prompts in five have independent
# points, and mostly only the weights can classify their query. x and y share a token, so that one layer can compare the
# query with the points.
_TRANSIENT = TrainingConfig(
    task=GaussianClusters(n_classes=256, bursty_share=0.6),
    model=TransformerConfig(
        x_dim=16, y_dim=4, n_context=8, n_layers=1, n_heads=2, d_model=24, d_head=12, d_mlp=96, attention="softmax",
        normalization_type="LN", read_in="linear", read_out="linear", initializer_range=0.1,
    ),
    steps=3000, batch_size=128, learning_rate=3e-3, warmup_steps=100, gradient_clip=1.0, eval_every=100,
    eval_prompts=1000, n_snapshots=3, snapshots_between=(300, 3000),
)  # fmt: skip

DISCRETE: dict[str, TrainingConfig] = {
    "induction-2l": _INDUCTION,
    "markov-2l": _MARKOV,
    "markov-2l-attention": _MARKOV_ATTENTION,
    "conjunctions-4l": _CONJUNCTIONS,
    "parities-4l": _PARITIES,
    "clusters-32": _CLUSTERS.replace(task=_CLUSTERS.task.replace(n_classes=32)),
    "clusters-2048": _CLUSTERS.replace(task=_CLUSTERS.task.replace(n_classes=2048)),
    "clusters-transient": _TRANSIENT,
    "topics-3l": _TOPICS,
    "topics-3l-momentum": _TOPICS_MOMENTUM,
}
"""Name to run."""
