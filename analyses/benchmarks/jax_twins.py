"""Training of linear transformers in jax and optax, in the strongest form that we know: the library does not need it.

One program for all steps: `jit` around `scan`, prompts drawn inside, weights and moments donated, `vmap` over seeds.
Same prompts, loss, clipping and Adam as `mechicl train` with linear attention. On a CPU, drawing the prompts is most of
a step, and how they are drawn decides: see `DRAWS`.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Weights = dict[str, jax.Array]
"""`q`, `k`, `v`, `o`: `[layer d_in d_out]`, tokens being rows."""


def initial_weights(key: jax.Array, n_layers: int, width: int, repeats: int = 1) -> Weights:
    """As in von Oswald et al. 2023."""
    std = math.sqrt(0.002 / n_layers / repeats / width)
    keys = jax.random.split(key, 4)
    return {
        name: std * jax.random.truncated_normal(k, -2, 2, (n_layers, width, width))
        for name, k in zip("qkvo", keys, strict=True)
    }


# -- prompts --


def draw(key: jax.Array, batch_size: int, n_context: int, x_dim: int) -> tuple[jax.Array, jax.Array]:
    """Inputs `[prompt point x]` and weights `[prompt x]`, as one would write it."""
    for_inputs, for_weights = jax.random.split(key)
    xs = jax.random.uniform(for_inputs, (batch_size, n_context + 1, x_dim), minval=-0.5, maxval=0.5)
    return xs, jax.random.normal(for_weights, (batch_size, x_dim))


def draw_flat(key: jax.Array, batch_size: int, n_context: int, x_dim: int) -> tuple[jax.Array, jax.Array]:
    """The same as vectors that are then given their shape: XLA makes those of counters up to four times as fast."""
    for_inputs, for_weights = jax.random.split(key)
    xs = jax.random.uniform(for_inputs, (batch_size * (n_context + 1) * x_dim,), minval=-0.5, maxval=0.5)
    ws = jax.random.normal(for_weights, (batch_size * x_dim,))
    return xs.reshape(batch_size, n_context + 1, x_dim), ws.reshape(batch_size, x_dim)


DRAWS: dict[str, tuple[Callable, str]] = {"unsafe_rbg": (draw, "unsafe_rbg"), "threefry": (draw_flat, "threefry2x32")}


# -- losses --


def tokens_and_target(xs: jax.Array, ws: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens `[prompt point d_token]`, the query's label being 0, and that label `[prompt]`."""
    ys = jnp.einsum("bnd,bd->bn", xs, ws)
    return jnp.concatenate([xs, ys[..., None]], axis=2).at[:, -1, -1].set(0), ys[:, -1]


def loss_plain(weights: Weights, xs: jax.Array, ws: jax.Array) -> jax.Array:
    """Every layer computes queries, keys, values and scores for every token."""
    tokens, target = tokens_and_target(xs, ws)
    for q, k, v, o in zip(*(weights[name] for name in "qkvo"), strict=True):
        context = tokens[:, :-1]
        scores = jnp.einsum("bnd,bmd->bnm", tokens @ q, context @ k)
        tokens = tokens + scores @ (context @ v) @ o
    return jnp.square(-tokens[:, -1, -1] - target).mean()


def loss_quick(weights: Weights, xs: jax.Array, ws: jax.Array, *, by_moments: bool) -> jax.Array:
    """Q Kᵀ and V O once for all prompts; of the last layer the one number that is read.

    Args:
        by_moments: the associative form, XᵀX first, without scores.
    """
    tokens, target = tokens_and_target(xs, ws)
    query_key, value_out = weights["q"] @ weights["k"].mT, weights["v"] @ weights["o"]
    for a, b in zip(query_key[:-1], value_out[:-1], strict=True):
        context = tokens[:, :-1]
        if by_moments:
            moments = jnp.einsum("bnd,bne->bde", context, context)
            tokens = tokens + jnp.einsum("bnd,bde->bne", tokens @ a, moments @ b)
        else:
            tokens = tokens + jnp.einsum("bnd,bmd->bnm", tokens @ a, context) @ (context @ b)
    context, query, read = tokens[:, :-1], tokens[:, -1], value_out[-1, :, -1]
    if by_moments:
        moments = jnp.einsum("bnd,bne->bde", context, context)
        update = jnp.einsum("bd,bde,e->b", query @ query_key[-1], moments, read)
    else:
        update = (jnp.einsum("bnd,bd->bn", context, query @ query_key[-1]) * (context @ read)).sum(1)
    return jnp.square(-query[:, -1] - update - target).mean()


LOSSES = {"plain": loss_plain}
LOSSES |= {name: partial(loss_quick, by_moments=name == "moments") for name in ("folded", "moments")}
FORMS = [(loss, drawn) for loss in LOSSES for drawn in DRAWS]


# -- training --


def optimizer(learning_rate: float) -> optax.GradientTransformation:
    """The norm of all gradients clipped at 10, Adam."""
    return optax.chain(optax.clip_by_global_norm(10.0), optax.adam(learning_rate))


class Twin:
    """A compiled run of `steps` steps, to be called repeatedly; each call continues from the last.

    Args:
        form: names of a loss and of a way to draw.
        n_seeds: as many models at once by `vmap`; None for one, without.
        repeats: how many times all layers run, one after another.
        seed: of the first model.
    """

    def __init__(
        self, form: tuple[str, str], *, n_layers: int, steps: int, batch_size: int, x_dim: int = 10,
        n_context: int = 10, learning_rate: float = 1e-3, n_seeds: int | None = None, repeats: int = 1, seed: int = 0,
    ):  # fmt: skip
        one_pass, (sample, generator) = LOSSES[form[0]], DRAWS[form[1]]
        adam = optimizer(learning_rate)

        def loss(weights: Weights, xs: jax.Array, ws: jax.Array) -> jax.Array:
            return one_pass({name: jnp.concatenate([weight] * repeats) for name, weight in weights.items()}, xs, ws)

        def start(seed: jax.Array) -> Any:
            key, for_weights = jax.random.split(jax.random.key(seed, impl=generator))
            weights = initial_weights(for_weights, n_layers, x_dim + 1, repeats)
            return weights, adam.init(weights), key

        def step(state: Any, _: None) -> Any:
            weights, moments, key = state
            key, now = jax.random.split(key)
            xs, ws = sample(now, batch_size, n_context, x_dim)
            value, gradient = jax.value_and_grad(loss)(weights, xs, ws)
            updates, moments = adam.update(gradient, moments, weights)
            return (optax.apply_updates(weights, updates), moments, key), value

        def run(state: Any) -> Any:
            return jax.lax.scan(step, state, None, length=steps)

        self.steps = steps
        if n_seeds is None:
            self.state = start(jnp.array(seed))
        else:
            run, self.state = jax.vmap(run), jax.vmap(start)(seed + jnp.arange(n_seeds))
        self.loss: Any = jax.jit(loss if n_seeds is None else jax.vmap(loss, (0, None, None)))
        self._run: Any = jax.jit(run, donate_argnums=0).lower(self.state).compile()

    def losses(self) -> jax.Array:
        """Return the loss of each of the next steps, `[step]` or `[seed step]`."""
        self.state, losses = jax.block_until_ready(self._run(self.state))
        return losses

    def steps_per_second(self, steps: int) -> float:
        """Return the seconds of about n steps, without compilation."""
        n_calls = max(1, round(steps / self.steps))
        started = time.perf_counter()
        for _ in range(n_calls):
            self.losses()
        return n_calls * self.steps / (time.perf_counter() - started)


class Quickest:
    """The form that is quickest where this process runs."""

    def __init__(self, n_trials: int = 3, **options: Any):
        twins = {form: Twin(form, **options) for form in FORMS}
        speeds = dict.fromkeys(FORMS, 0.0)
        for _ in range(n_trials):
            for form, twin in twins.items():
                speeds[form] = max(speeds[form], twin.steps_per_second(twin.steps))
        self.chosen = max(speeds, key=speeds.__getitem__)
        self.steps_per_second = twins[self.chosen].steps_per_second

    def form(self) -> str:
        return ", ".join(self.chosen)


class ToResult:
    """Trainings up to a held-out loss, on prompts in a file, in the form that is quickest here; compilation counts."""

    def __init__(self, prompts: str, **options: Any):
        held_out = np.load(prompts)
        self.xs, self.ws, self.options = held_out["xs"], held_out["ws"], options
        quickest = Quickest(steps=25, **options)
        self.chosen, self.form = quickest.chosen, quickest.form

    def seconds_to(self, target: float, seed: int, every: int) -> tuple[float, int]:
        """Return the seconds of a training until all models' losses are at most `target`, and its steps."""
        jax.clear_caches()
        started = time.perf_counter()
        twin, steps = Twin(self.chosen, steps=every, seed=seed, **self.options), 0
        reached = jnp.array(False)
        while not reached.all():
            twin.losses()
            steps += every
            reached |= twin.loss(twin.state[0], self.xs, self.ws) <= target
        return time.perf_counter() - started, steps


usual = partial(Twin, ("plain", "unsafe_rbg"))
"""As one would write it first, with the generator that jax recommends for speed."""
