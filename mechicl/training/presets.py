"""Ready-made training runs; every field can be overridden on the command line.

Sections and figures without a paper's name are those of von Oswald et al. 2023.
"""

from typing import Any

from mechicl.models import LSTMConfig, TableConfig, TransformerConfig
from mechicl.tasks import (
    Conjunctions,
    DecisionTrees,
    FixedTasks,
    GaussianClusters,
    LinearRegression,
    LogisticRegression,
    MarkovChains,
    MixedRegression,
    Parities,
    QuadraticRegression,
    ReluNetworks,
    RepeatedTokens,
    SineRegression,
    SparseLinearRegression,
    TableClassification,
    TableRegression,
    TaskPool,
)
from mechicl.tasks.topics import TopicClassification
from mechicl.training.config import TrainingConfig
from mechicl.training.curriculum import Curriculum, Ramp

# von Oswald et al. 2023, Fig. 2: one layer, N = N_x = 10, batch 2048, Adam 1e-3, clip 10, five seeds.
_LSA = TrainingConfig(
    task=LinearRegression(x_dim=10, n_context=10),
    model=TransformerConfig(x_dim=10, n_context=10, n_layers=1),
    seeds=(0, 1, 2, 3, 4), steps=10_000, batch_size=2048, learning_rate=1e-3, schedule="cosine", eval_every=50,
    n_snapshots=40,
)  # fmt: skip
_LOOPED = _LSA.replace(model=_LSA.model.replace(n_layers=2, recurrent=True))
# A.12: more than two layers take half the learning rate, and tokens are clipped.
_DEEP_LSA = _LSA.replace(
    model=_LSA.model.replace(token_clip=10.0), seeds=(0, 1, 2, 3), batch_size=1024, learning_rate=5e-4, n_snapshots=0
)
# Not the paper's: Adam is still at 2 to 5 times the loss of tuned GD++ after 40,000 steps. Gradients are clipped at
# about their median norm: rare batches have a hundred times that, which would set SOAP, like Adam, far back.
_SOAP_LSA = _DEEP_LSA.replace(
    optimizer="soap", learning_rate=1e-2, warmup_steps=100, gradient_clip=0.1, batch_size=512, save_every=250
)
# A.9: square matrices, as everywhere in the paper.
_SOFTMAX = _LSA.replace(model=_LSA.model.replace(attention="softmax", d_head=11))

# Garg et al. 2022, appendix A, which Fu et al. 2024 follow: GPT-2 on interleaved Gaussian prompts, all points' loss,
# batch 64, Adam 1e-4, 500,000 steps; one more dimension and two more points every 2,000 steps.
_GPT2_12L = TrainingConfig(
    task=LinearRegression(x_dim=20, n_context=40, inputs="gaussian"),
    model=TransformerConfig(
        x_dim=20, n_context=40, prompt_format="interleaved", n_layers=12, n_heads=8, d_model=256, d_mlp=1024,
        attention="softmax", normalization_type="LN", act_fn="gelu_new",
    ),
    steps=500_000, batch_size=64, learning_rate=1e-4, gradient_clip=None, eval_every=5000, save_every=5000,
    curriculum=Curriculum(dims=Ramp(5, 20, 1, 2000), points=Ramp(11, 41, 2, 2000)),
)  # fmt: skip
# A small version of the 12 layers, for two cores and about an hour.
_GPT2_8L = _GPT2_12L.replace(
    task=LinearRegression(x_dim=5, n_context=20, inputs="gaussian"),
    model=_GPT2_12L.model.replace(x_dim=5, n_context=20, n_layers=8, n_heads=4, d_model=64, d_mlp=256),
    steps=20_000, learning_rate=1e-3, schedule="cosine", warmup_steps=500, gradient_clip=1.0, eval_every=250,
    save_every=250, curriculum=Curriculum(dims=Ramp(2, 5, 1, 1000), points=Ramp(9, 21, 4, 1000)),
)  # fmt: skip
# From small to the paper's 12 layers: layers, width and dimensions grow together, and so does the number of points.
_GPT2_MEDIUM = _GPT2_8L.replace(
    task=LinearRegression(x_dim=10, n_context=20, inputs="gaussian"),
    model=_GPT2_12L.model.replace(x_dim=10, n_context=20, d_model=128, d_mlp=512),
    learning_rate=5e-4, curriculum=Curriculum(dims=Ramp(3, 10, 1, 500)),
)  # fmt: skip
# Between gpt2-8l and the paper's size, with the paper's width of heads. One length of prompts, so that steps are
# compiled once.
_GPT2_8L_D10 = _GPT2_8L.replace(
    task=LinearRegression(x_dim=10, n_context=30, inputs="gaussian"),
    model=_GPT2_12L.model.replace(x_dim=10, n_context=30, n_layers=8, n_heads=4, d_model=128, d_mlp=512),
    seeds=(0, 1, 2), steps=60_000, batch_size=128, learning_rate=7e-4, warmup_steps=1000, eval_every=1000,
    save_every=2000, curriculum=Curriculum(dims=Ramp(2, 10, 1, 2000)),
)  # fmt: skip


def _gpt2_small(n_layers: int, width: int, x_dim: int) -> TrainingConfig:
    """A GPT-2 style model below the size of gpt2-8l, with 4 points a dimension like it."""
    return _GPT2_8L.replace(
        task=_GPT2_8L.task.replace(x_dim=x_dim, n_context=4 * x_dim),
        model=_GPT2_8L.model.replace(
            x_dim=x_dim, n_context=4 * x_dim, n_layers=n_layers, d_model=width, d_mlp=4 * width
        ),
        seeds=(0, 1, 2), steps=10_000, curriculum=Curriculum(dims=Ramp(2, x_dim, 1, 1000)),
    )  # fmt: skip


# Fu et al. 2024, B.3: half of the covariance's eigenvalues are 100, the others 1, in a random basis for each prompt.
# The inputs are scaled so that targets keep the variance that they have with unit covariance.
_ILL_CONDITIONED = _GPT2_8L.task.replace(
    eigenvalues=(100.0, 100.0, 1.0, 1.0, 1.0), eigenbasis="per_task", input_scale=(5 / 203) ** 0.5
)

# Section 4: alternate tokens with concatenated positions of width 20; softmax first, because two linear layers do not
# learn to copy. Larger initial weights than the paper's, with which the plateau is shorter.
_COPY = TrainingConfig(
    task=LinearRegression(x_dim=10, n_context=10),
    model=TransformerConfig(
        x_dim=10, n_context=10, prompt_format="interleaved", n_layers=2, attention="softmax,linear", keys="context",
        positional_embedding_type="sinusoidal", read_in="identity", read_out="identity", initializer_range=0.1,
    ),
    seeds=tuple(range(8)), steps=20_000, batch_size=256, learning_rate=2e-3, schedule="cosine", warmup_steps=200,
    gradient_clip=1.0, eval_every=100, n_snapshots=20,
)  # fmt: skip

_COPY_DENSE = _COPY.replace(
    seeds=(1, 2, 3, 4, 5, 7), steps=2300, schedule="constant", eval_every=10, eval_prompts=1000, log_every=500,
    n_snapshots=25, snapshots_between=(1300, 1900),
)  # fmt: skip

# A.7: an embedding into 40 dimensions, a residual MLP of 160 GELU units on each token, then one linear layer. The
# control has gradient descent on the last dimension in that layer's place. Initial weights of a size with which the MLP
# is not linear at the start.
_SINE = TrainingConfig(
    task=SineRegression(),
    model=TransformerConfig(
        x_dim=1, n_context=10, d_model=40, d_mlp=160, mlp_location="input", act_fn="gelu", read_in="linear",
        read_out="identity", normalize_by_context=True, score_scale=1 / 39, initializer_range=0.15,
    ),
    seeds=(0, 1, 2), steps=40_000, batch_size=512, learning_rate=5e-3, schedule="cosine", warmup_steps=200,
    eval_every=100,
)  # fmt: skip

# A.11, Fig. 15: many seeds, a constant rate, and a fine curve; initial weights with the deviation 0.002 that A.12
# prints, a seventh of what the other presets have, which read it as the factor of a fan-in scaling.
_PHASES = _LSA.replace(
    model=_LSA.model.replace(initializer_range=0.002), seeds=tuple(range(10)), steps=5000, schedule="constant",
    eval_every=20, n_snapshots=0,
)  # fmt: skip

# Nertinger, section 4.1: all nine kinds of prompts, ten seeds each, at once. The targets' noise is on the context.
# About half of the random starts on ill-conditioned inputs end in a local minimum: more seeds than the paper's five.
_NERTINGER_TASKS = tuple(
    LinearRegression(
        x_dim=5, n_context=20, inputs="gaussian", condition_number=condition_number, eigenbasis="shared",
        noise_std=noise_variance**0.5, query_noise=False,
    )
    for condition_number in (1.0, 10.0, 100.0)
    for noise_variance in (0.0, 0.1, 0.3)
)  # fmt: skip
_NERTINGER = TrainingConfig(
    task=_NERTINGER_TASKS[0],
    more_tasks=_NERTINGER_TASKS[1:],
    model=TransformerConfig(x_dim=5, n_context=20, d_head=12, normalize_by_context=True, initializer_range=0.2),
    seeds=tuple(range(10)), steps=5000, batch_size=256, learning_rate=3e-3, schedule="cosine", warmup_steps=200,
    eval_every=100, n_snapshots=12,
)  # fmt: skip

# Small enough for minutes on one core; one dimension more every 250 steps saves most of the plateau.
_SMALL = _GPT2_8L.replace(
    model=_GPT2_8L.model.replace(n_layers=3, n_heads=2, d_model=48, d_mlp=192), steps=4000, learning_rate=2e-3,
    curriculum=Curriculum(dims=Ramp(2, 5, 1, 250)), eval_prompts=500,
)  # fmt: skip
# Raventós et al. 2023, section 2, in small: noise on all targets, and the loss of all points. Theirs have 8 layers of
# width 128, and 500,000 steps without a curriculum.
_POOL = _SMALL.replace(
    task=TaskPool(n_tasks=8), model=_SMALL.model.replace(x_dim=8, n_context=15), seeds=(0, 1, 2), steps=5000,
    curriculum=Curriculum(dims=Ramp(2, 8, 1, 250)),
)  # fmt: skip
# Garg et al. 2022, section 5, and Bai et al. 2023, whose prompts have 20 dimensions, in 5 dimensions.
_FUNCTION_CLASSES = {
    "sparse": SparseLinearRegression(x_dim=5, n_context=20, sparsity=2),
    "quadratic": QuadraticRegression(x_dim=5, n_context=20),
    "relu": ReluNetworks(x_dim=5, n_context=20, n_hidden=20),
    "trees": DecisionTrees(x_dim=5, n_context=40, depth=2),
    "logistic": LogisticRegression(x_dim=5, n_context=20, weight_scale=2.0),
    "mixed-ridge": MixedRegression(x_dim=5, n_context=20),
}


# Layers with a state, on the prompts of gpt2-8l: one layer of the size of lsa-1l on paired prompts, and four layers
# without MLPs on interleaved ones. Small and short, so that all of them fit into an hour of one core.
_STATEFUL = ("delta", "gated_linear", "mamba2", "mesa")
_STATE_1L = TrainingConfig(
    task=_GPT2_8L.task,
    model=TransformerConfig(x_dim=5, n_context=20, n_layers=1), seeds=(0, 1, 2), steps=1500, batch_size=256,
    learning_rate=5e-3, schedule="cosine", warmup_steps=100, gradient_clip=1.0, eval_every=100,
)  # fmt: skip
_DELTA_4L = _STATE_1L.replace(
    model=TransformerConfig(
        x_dim=5, n_context=20, prompt_format="interleaved", n_layers=4, n_heads=2, d_model=24, attention="delta",
        normalization_type="LN", positional_embedding_type="none", score_scale=1.0,
    ),
    batch_size=64, learning_rate=4e-3, curriculum=Curriculum(dims=Ramp(2, 5, 1, 100)), save_every=500,
)  # fmt: skip
# To pair targets with inputs, a token has to read the one before it. DeltaNet learns to without help, softmax attention
# by positions, and the others by the convolution that they are published with: without it, and from small initial
# weights, gated linear attention and Mamba-2 stay near a prediction of 0 for hundreds of steps.
_CONVOLVED_4L = _DELTA_4L.replace(
    model=_DELTA_4L.model.replace(initializer_range=0.2, conv_width=4), steps=2000, learning_rate=1e-2, save_every=250
)


# ---- tokens, Boolean functions and classes ----

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


def _replaced(base: TrainingConfig, model: dict[str, Any], **changes: Any) -> TrainingConfig:
    return base.replace(model=base.model.replace(**model), **changes)


_TABLE_SIZES: dict[str, Any] = {"x_dim": 4, "n_context": 128, "n_queries": 32, "varied": True, "missing": 0.1}
_TABLES = TrainingConfig(
    task=TableRegression(**_TABLE_SIZES),
    model=TableConfig(x_dim=4, n_context=128, n_layers=3, n_heads=4, d_model=48),
    steps=1500, batch_size=32, optimizer="soap", learning_rate=3e-3, schedule="cosine", warmup_steps=100,
    gradient_clip=1.0, eval_every=250, eval_prompts=64, log_every=50, save_every=100, compile=False, routes="rule",
)  # fmt: skip

PRESETS: dict[str, TrainingConfig] = {
    "lsa-1l": _LSA,
    # Fig. 2, centre right: as many points as dimensions; initial weights of the deviation that A.12 prints, since from
    # larger ones three of five seeds in 5 dimensions end in a local minimum
    **{
        f"lsa-1l-d{d}": _replaced(
            _LSA.resized(x_dim=d, n_context=d), {"initializer_range": 0.002}, seeds=tuple(range(n_seeds)),
            batch_size=batch, steps=3000, n_snapshots=0,
        )
        for d, batch, n_seeds in ((5, 1024, 5), (20, 512, 3), (40, 256, 3))
    },
    # Nertinger, Table 1, row "linear", kappa = 1, no noise: Gaussian inputs, d = 5, n = 20.
    "lsa-1l-gaussian": _LSA.replace(
        task=LinearRegression(x_dim=5, n_context=20, inputs="gaussian"),
        model=TransformerConfig(x_dim=5, n_context=20, n_layers=1), n_snapshots=20,
    ),
    "lsa-2l-looped": _LOOPED,
    # Fig. 9: more than two layers, so tokens are clipped
    "lsa-3l-looped": _replaced(
        _DEEP_LSA, {"n_layers": 3, "recurrent": True}, seeds=(0, 1, 2), batch_size=512, steps=6000, learning_rate=1e-3
    ),
    # A.10 reads γ off models for these numbers of points; long prompts are smoother and need fewer of them
    **{
        f"lsa-2l-looped-n{n}": _LOOPED.resized(n_context=n).replace(n_snapshots=0, batch_size=batch, steps=steps)
        for n, batch, steps in ((25, 2048, 10_000), (50, 2048, 10_000), (100, 512, 6_000))
    },
    "lsa-10l-looped": _replaced(_SOAP_LSA, {"n_layers": 10, "recurrent": True}, learning_rate=3e-3, save_every=1000),
    "lsa-5l": _replaced(_SOAP_LSA, {"n_layers": 5}),
    "lsa-12l-mlp": _replaced(
        _SOAP_LSA, {"n_layers": 12, "n_heads": 4, "d_mlp": 44}, seeds=(0, 1, 2), batch_size=256, steps=2500
    ),
    "softmax-1h": _SOFTMAX,
    "softmax-2h": _replaced(_SOFTMAX, {"n_heads": 2}),
    "softmax-2h-sink": _replaced(_SOFTMAX, {"n_heads": 2, "sink": "learned"}),
    "lsa-1l-ln": _replaced(_LSA, {"normalization_type": "LN"}, batch_size=1024),
    "lsa-2l-ln": _replaced(
        _LSA, {"n_layers": 2, "normalization_type": "LN", "skip_first_norm": True}, batch_size=1024
    ),
    "copy-2l": _COPY,
    "copy-2l-one-hot": _replaced(
        _COPY, {"positional_embedding_type": "one_hot"}, seeds=(0, 1, 2, 3, 4), steps=12_000
    ),
    "copy-2l-linear": _replaced(_COPY, {"attention": "linear"}, seeds=(0, 1, 2, 3, 4), n_snapshots=0),
    # what comes first, reading the next token or the fall of the loss: a constant rate, the six of eight seeds of
    # copy-2l whose loss falls early, and weights every 25 steps of that time
    "copy-2l-dense": _COPY_DENSE,
    # the other two, until they have copied
    "copy-2l-late": _COPY.replace(seeds=(0, 6), steps=6000, schedule="constant", n_snapshots=0),
    "copy-2l-linear-dense": _replaced(
        _COPY_DENSE, {"attention": "linear"}, seeds=(0, 2, 4), steps=4000, n_snapshots=33,
        snapshots_between=(1300, 3700),
    ),
    "nertinger-linear": _NERTINGER,
    **{
        f"nertinger-leaky-relu-{slope}": _replaced(_NERTINGER, {"attention": "leaky_relu", "attention_slope": slope})
        for slope in (0.75, 0.5, 0.25)
    },
    "nertinger-relu": _replaced(_NERTINGER, {"attention": "relu"}),
    "nertinger-softmax": _NERTINGER.replace(
        model=TransformerConfig(
            x_dim=5, n_context=20, d_head=12, attention="softmax", score_scale=1.0, initializer_range=0.2
        )
    ),
    "sine-lsa": _SINE,
    "sine-gd": _replaced(_SINE, {"attention_weights": "gradient_descent"}),
    "lsa-1l-phases": _PHASES,
    "lsa-1l-2h-phases": _replaced(_PHASES, {"n_heads": 2}),
    # A.12, Fig. 16: full-batch descent on a fixed set of tasks, in five draws of it
    **{
        f"lsa-1l-tasks{n}": _LSA.replace(
            task=FixedTasks(_LSA.task, n), more_tasks=tuple(FixedTasks(_LSA.task, n, seed) for seed in range(1, 5)),
            seeds=seeds, batch_size=n, steps=steps, schedule="constant", eval_every=100, n_snapshots=12,
        )
        # the more tasks, the sooner it converges, and the less seeds differ
        for n, seeds, steps in ((128, (0, 1, 2), 5000), (512, (0, 1), 1500), (2048, (0, 1), 1500), (8192, (0,), 1000))
    },
    # Fig. 15, right: a wide MLP and large initial weights, with which the block memorises before it attends
    "lsa-1l-mlp-tasks8192": _replaced(
        _LSA, {"d_mlp": 2048, "initializer_range": 0.3}, task=FixedTasks(_LSA.task, 8192), seeds=(0, 1, 2),
        batch_size=4096, steps=2000, schedule="constant", eval_every=20, log_every=20, n_snapshots=0,
    ),
    "gpt2-12l": _GPT2_12L,
    "gpt2-12l-1h": _replaced(_GPT2_12L, {"n_heads": 1}),
    "gpt2-12l-medium": _GPT2_MEDIUM,
    "gpt2-8l-d10": _GPT2_8L_D10,
    "gpt2-8l": _GPT2_8L,
    "gpt2-6l": _gpt2_small(n_layers=6, width=48, x_dim=4),
    "gpt2-4l": _gpt2_small(n_layers=4, width=32, x_dim=3),
    "gpt2-8l-1h": _replaced(_GPT2_8L, {"n_heads": 1}),
    "gpt2-8l-ill": _GPT2_8L.replace(task=_ILL_CONDITIONED),
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
    **{
        f"{name}-3l": _replaced(_SMALL, {"n_context": task.n_context}, task=task)
        for name, task in _FUNCTION_CLASSES.items()
    },
    # the pool is learned only after regression: after 5000 steps some seeds are still as near to ridge as to dMMSE
    "pool-8": _POOL.replace(steps=20_000),
    "pool-8192": _POOL.replace(task=_POOL.task.replace(n_tasks=8192)),
    # Fu et al. 2024, A.2 and B.6, in small: the same prompts and the same training as the transformer's.
    "lstm-4l": _GPT2_8L.replace(model=LSTMConfig(x_dim=5, n_context=20, n_layers=4, d_model=96)),
    # many rows to predict in each table: a batch has a thousand targets
    "table-regression": _TABLES,
    "table-classification": _TABLES.replace(
        task=TableClassification(**_TABLE_SIZES), model=_TABLES.model.replace(y_dim=3, predicts="classes")
    ),
    **{f"{kind.replace('_', '-')}-1l": _replaced(_STATE_1L, {"attention": kind}) for kind in _STATEFUL},
    "delta-4l": _DELTA_4L,
    "gated-linear-4l": _replaced(_CONVOLVED_4L, {"attention": "gated_linear"}),
    "mamba2-4l": _replaced(_CONVOLVED_4L, {"attention": "mamba2"}),
    # its steps take longer, and it needs fewer
    "mesa-4l": _replaced(_CONVOLVED_4L, {"attention": "mesa"}, steps=1000),
    "softmax-4l": _replaced(
        _CONVOLVED_4L,
        {"attention": "softmax", "conv_width": 0, "positional_embedding_type": "standard", "score_scale": None},
    ),
}  # fmt: skip
"""Ready-made `TrainingConfig`s by name. `mechicl train NAME` trains one; their help is in mechicl/cli/presets.json."""
