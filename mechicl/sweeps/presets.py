"""Ready-made sweeps: `mechicl sweep NAME`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mechicl.models import TransformerConfig
from mechicl.sweeps.sweep import Sweep
from mechicl.tasks import FixedTasks, LinearRegression, RepeatedTokens, TaskPool
from mechicl.training import PRESETS, TrainingConfig


@dataclass(frozen=True, eq=False)
class SweepPreset:
    """A ready-made sweep: a line of help, the arguments of `Sweep`, and the measure."""

    summary: str
    config: TrainingConfig | str
    over: Mapping[str, Any]
    measure: Any = None
    together: int = 8

    def sweep(self) -> Sweep:
        """The sweep itself."""
        return Sweep(self.config, self.over, together=self.together)


# Raventós et al. 2023 in very small: as many points as dimensions, so that the pool helps, pairs as tokens, so that
# nothing has to be copied first, and the query's loss.
_POOL = TrainingConfig(
    task=TaskPool(x_dim=4, n_context=4, n_tasks=8, noise_std=0.5),
    model=TransformerConfig(
        x_dim=4, n_context=4, n_layers=2, n_heads=2, d_model=32, d_mlp=64, attention="softmax",
        normalization_type="LN", act_fn="gelu_new", read_in="linear", read_out="linear",
    ),
    steps=3000, batch_size=128, optimizer="soap", learning_rate=5e-3, schedule="cosine", warmup_steps=200,
    gradient_clip=1.0, eval_every=250, n_snapshots=6, snapshots_between=(500, 3000),
)  # fmt: skip
_FEW = (2, 8, 32, 128)

# SOAP, because Adam leaves deep linear layers far from what they can do; looped ones take a smaller rate.
_DEPTH = PRESETS["lsa-5l"].resized(x_dim=5, n_context=10).replace(batch_size=256, steps=1000, eval_every=100)

# Attention alone, as in Edelman et al. 2024, at a constant rate, so that phases are not those of the schedule.
_MARKOV = PRESETS["markov-2l-attention"]
_MARKOV = _MARKOV.replace(
    task=_MARKOV.task.replace(n_ctx=32), model=_MARKOV.model.replace(n_ctx=32), steps=2000, schedule="constant",
    eval_every=50, eval_prompts=500, n_snapshots=40,
)  # fmt: skip

# One layer and an MLP on fixed prompts, all of them in each step, at a constant rate.
_FIXED = PRESETS["lsa-1l-mlp-tasks8192"]
_FIXED = _FIXED.replace(
    task=FixedTasks(LinearRegression(x_dim=5, n_context=5), 512),
    model=_FIXED.model.replace(x_dim=5, n_context=5), steps=2000, batch_size=512,
    eval_prompts=2000,
)  # fmt: skip

_INDUCTION = PRESETS["induction-2l"].replace(
    task=RepeatedTokens(d_vocab=16, n_ctx=24, min_period=4, max_period=12),
    model=TransformerConfig(
        prompt_format="token_ids", d_vocab=16, n_ctx=24, n_layers=2, n_heads=2, d_model=32, attn_only=True,
        normalization_type=None, attn_bias=False, read_bias=False, initializer_range=0.05,
    ),
    steps=2000, batch_size=32, learning_rate=2e-3, schedule="constant", eval_prompts=200, n_snapshots=0,
)  # fmt: skip

# A softmax, then a linear layer on alternate tokens, small, and at a constant rate.
_COPYING = PRESETS["copy-2l"].resized(x_dim=3)
_COPYING = _COPYING.replace(
    steps=2500, batch_size=128, learning_rate=3e-3, schedule="constant", warmup_steps=100, n_snapshots=0,
    eval_every=25, eval_prompts=1000,
)  # fmt: skip

# One softmax layer on the prompts of the depth sweep.
_SINK = PRESETS["softmax-2h"].resized(x_dim=5, n_context=10)
_SINK = _SINK.replace(steps=2000, batch_size=256, learning_rate=3e-3, n_snapshots=0, eval_every=100)


SWEEPS: dict[str, SweepPreset] = {
    "diversity": SweepPreset(
        "numbers of tasks in a pool, 2 to 2^14: the pool's Bayes learner or ridge (Raventós et al. 2023)",
        _POOL,
        {"task.n_tasks": (2, 4, 8, 16, 32, 128, 512, 2048, 16384), "seed": range(5)},
        "pool",
        together=45,
    ),
    **{
        f"diversity-{name}": SweepPreset(
            f"{words}, fewer numbers of tasks", _POOL,
            {axis: values, "task.n_tasks": _FEW, "seed": range(3)}, "pool", together=12,
        )
        for name, words, axis, values in (
            ("points", "the same with 2 points in place of 4", "n_context", (2,)),
            ("noise", "the same with a fifth of the noise", "task.noise_std", (0.1,)),
            ("dimensions", "the same in 2 dimensions in place of 4", "x_dim", (2,)),
            ("draws", "the same with other draws of the pool", "task.seed", (1, 2)),
        )
    },
    # whole trainings of other lengths, with the rate's fall at their end, and not snapshots of one
    "diversity-steps": SweepPreset(
        "the same with half the steps, and with twice as many, with 8 and 16 tasks", _POOL,
        {
            "steps": {
                n: {"steps": n, "n_snapshots": 0, "snapshots_between": None} for n in (1500, 6000)
            },
            "task.n_tasks": (8, 16), "seed": range(3),
        },
        "pool", together=6,
    ),
    "depth": SweepPreset(
        "linear layers, looped or not, compared with the best first-order and second-order learners of their depth",
        _DEPTH,
        {
            "weights": {
                "independent": {"model.recurrent": False},
                "looped": {"model.recurrent": True, "learning_rate": 3e-3},
            },
            "model.n_layers": (1, 2, 3, 4, 5, 6, 8, 10), "seed": range(3),
        },
        "depth",
    ),
    "markov": SweepPreset(
        "counting tokens, then pairs of them: phases of training on Markov chains (Edelman et al. 2024)",
        _MARKOV,
        {"model.n_layers": (1, 2), "seed": range(8)},
        ("markov", "transition"),
    ),
    "induction": SweepPreset(
        "when induction is learned, by heads and kinds of positions (Elhage et al. 2021)",
        _INDUCTION,
        {
            "model.n_heads": (1, 2, 4), "model.positional_embedding_type": ("none", "standard", "rotary"),
            "seed": range(3),
        },
        "transition",
    ),
    "induction-context": SweepPreset(
        "when induction is learned, by the length of the context",
        _INDUCTION,
        {
            # in task and model, with repeated segments of up to half of the context
            "n_ctx": {n: {"task.n_ctx": n, "task.max_period": n // 2, "model.n_ctx": n} for n in (16, 24, 48)},
            "model.positional_embedding_type": ("standard", "rotary"), "seed": range(3),
        },
        "transition",
    ),
    "grokking": SweepPreset(
        "fixed tasks, learned by heart before new ones are solved? By width of the MLP and scale of initial weights",
        _FIXED,
        {"model.d_mlp": (64, 256, 1024), "model.initializer_range": (0.1, 0.3, 0.6), "seed": range(3)},
        "fitting",
    ),
    "copying": SweepPreset(
        "when targets are copied on alternate tokens, by positions and number of points (von Oswald et al. 2023)",
        _COPYING,
        {
            "model.positional_embedding_type": ("none", "sinusoidal", "one_hot"), "n_context": (4, 8, 16),
            "seed": range(3),
        },
        ("copying", "descent"),
    ),
    "sink": SweepPreset(
        "softmax heads against a step of gradient descent, with and without a sink, by heads and their width",
        _SINK,
        {
            "sink": {
                "none": {"model.sink": "none"},
                "learned": {"model.sink": "learned"},
                "learned from 4": {"model.sink": "learned", "model.sink_score": 4.0},
            },
            "model.n_heads": (1, 2, 4), "model.d_head": (3, 12), "seed": range(5),
        },
        "descent",
    ),
}  # fmt: skip
"""Ready-made sweeps by name, each a `SweepPreset`: `SWEEPS[name].sweep().run(folder, SWEEPS[name].measure)`."""
