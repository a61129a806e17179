"""Layers with a state instead of attention: gated linear attention, DeltaNet, Mamba-2's SSD and the Mesa layer.

Each head keeps a matrix `S` `[d_key d_value]`. At each position t it decays by a gate a, takes in the key k and value v
of the position with the step size b, and is read by the query q (score_scale included):

- "gated_linear": `S_t = diag(a_t) S_{t-1} + k_t v_tᵀ`, `z_t = S_tᵀ q_t` (Yang et al. 2024);
- "mamba2": the same with `a_t = exp(-b_t A)` and the write scaled by b: `S_t = a_t S_{t-1} + b_t k_t v_tᵀ`,
  `z_t = S_tᵀ q_t + D v_t` (Dao & Gu 2024; queries are their C, keys B, values x, steps Δ);
- "delta": `S_t = D_t - b_t k_t (k_tᵀ D_t - v_tᵀ)` with `D_t = diag(a_t) S_{t-1}`, `z_t = S_tᵀ q_t` (Yang et al. 2024;
  with gates Yang et al. 2025): a step of gradient descent on `|k_tᵀ S - v_tᵀ|² / 2`;
- "mesa": `G_t = a_t G_{t-1} + b_t k_t k_tᵀ`, `R_t = a_t R_{t-1} + b_t k_t v_tᵀ`, `z_t = R_tᵀ (G_t + Λ)⁻¹ q_t`:
  regularised least squares (von Oswald et al. 2025). Its state is `[G R]`, `[d_key d_key + d_value]`.

`Recurrence.states` is this definition, position by position. `read_in_chunks` computes all z by products of matrices,
as attention does; runs take it unless the states are hooked. Tensors are `[batch head pos d]` here, gates
`[batch head pos 1]` or `[batch head pos d_key]`, steps `[batch head pos 1]`.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from mechicl.base.precision import at_least_float32
from mechicl.models.layered import has_torch_hooks
from mechicl.models.transformer.attention import ALL, NOTHING_ELSE, Attention, Run
from mechicl.models.transformer.config import TransformerConfig

CHUNK, CHUNK_OF_KEY_GATES = 64, 16
"""Positions that are computed at once; fewer where each pair of positions has a decay in each dimension."""


class Recurrence(Attention):
    """A layer whose heads keep a state; the kind is the config's `attention`, see the module.

    Weights beyond those of `Attention`: with gates, `W_gate` `[head d_model 1 or d_head]` and `b_gate`, of which the
    gate is the sigmoid; unless gated linear, `W_step` `[head d_model 1]` and `b_step`, of which the step size is the
    sigmoid, or the softplus in "mamba2"; there also `A_log` `[head]` with `A = exp(A_log)` and `skip` `[head]`, D; in
    "mesa" `ridge` `[head d_head]`, of which the softplus is Λ's diagonal. Gates and steps read the keys' stream. With a
    `conv_width`, `W_conv` `[3 head d_head width]` has the filters of queries, keys and values; the last tap is the
    position itself.

    Hooks: `hook_q`, `hook_k`, `hook_v`, `hook_z` as in attention, `hook_gate` `[batch pos head 1 or d_key]`,
    `hook_step` `[batch pos head 1]` and, on request (`use_attn_state`), `hook_state` `[batch head pos d_key d_value]`,
    the state after each position. A hook that changes states at some positions sets them there; the states after them
    follow by the recurrence. In half precision gates, steps and states are float32: their errors would add up.

    With keys "context" the query's gate is 1 and its step 0: it reads the context's state and writes nothing.
    """

    own_hooks: ClassVar[tuple[str, ...]] = ("gate", "step")

    def __init__(self, cfg: TransformerConfig):
        super().__init__(cfg)
        heads, width = cfg.n_heads, cfg.d_head if cfg.gate == "key" else 1
        shapes: dict[str, tuple[int, ...]] = {}
        if cfg.gate != "none":
            shapes |= {"W_gate": (heads, cfg.d_model, width), "b_gate": (heads, width)}
        if cfg.attention != "gated_linear":
            shapes |= {"W_step": (heads, cfg.d_model, 1), "b_step": (heads, 1)}
        if cfg.attention == "mamba2":
            shapes |= {"A_log": (heads,), "skip": (heads,)}
        if cfg.attention == "mesa":
            shapes["ridge"] = (heads, cfg.d_head)
        if cfg.conv_width:
            shapes["W_conv"] = (3, heads, cfg.d_head, cfg.conv_width)
        self.add_weights(**shapes)

    @torch.no_grad()
    def reset_gates(self) -> None:
        """Start with states that last: gates of 0.98, steps of 0.5 (0.05 in "mamba2"), Λ = 1, A = 1 and D = 1."""
        starts = {
            "b_gate": 4.0, "b_step": -3.0 if self.cfg.attention == "mamba2" else 0.0, "A_log": 0.0, "skip": 1.0,
            "ridge": softplus_inverse(1.0),
        }  # fmt: skip
        for name, start in starts.items():
            if name in self._parameters:
                getattr(self, name).fill_(start)

    # ---- from streams to z ----

    def mix(
        self, query_input: Tensor, key_input: Tensor, value_input: Tensor, run: Run = NOTHING_ELSE
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Compute each head's z from the streams; every hook fires."""
        q = self.hook_q(self.project(query_input, "Q"))
        k = self.hook_k(self.normalized(self.project(key_input, "K")))
        v = self.hook_v(self.project(value_input, "V"))
        gate, step = self.gates(key_input)
        gate = self.hook_gate(torch.ones_like(step) if gate is None else gate)
        if has_torch_hooks(self.hook_gate) and not bool(((gate >= 0) & (gate <= 1)).all()):
            limits = f"{gate.min().item():.3g} to {gate.max().item():.3g}"
            raise ValueError(f"gates must be in [0, 1], and a hook at hook_gate returned values from {limits}")
        dtype, tensors = v.dtype, (q, k, v, gate, self.hook_step(step))
        q, k, v, gate, step = map(_by_head, tensors)
        if self.cfg.use_attn_state and has_torch_hooks(self.hook_state):
            z = self.read(self._hooked_states(k, v, gate, step), self.cfg.score_scale * q, v)
        else:
            z = self.read_in_chunks(q, k, v, gate, step)
        return self.hook_z(rearrange(z, "batch head pos d -> batch pos head d").to(dtype))

    def project(self, x: Tensor, which: str) -> Float[Tensor, "batch pos head d_head"]:
        """Compute queries, keys or values, and convolve them over positions if the config requires it."""
        projected, width = super().project(x, which), self.cfg.conv_width
        if not width:
            return projected
        windows = F.pad(projected, (0, 0, 0, 0, width - 1, 0)).unfold(1, width, 1)
        return (at_least_float32(windows) * self.W_conv["QKV".index(which)]).sum(-1).to(projected.dtype)

    def normalized(self, k: Tensor) -> Tensor:
        """Divide keys by their length, if the config requires it."""
        return F.normalize(at_least_float32(k), dim=-1).to(k.dtype) if self.cfg.normalize_keys else k

    def gates(self, x: Float[Tensor, "batch pos *head d_model"]) -> tuple[Tensor | None, Tensor]:
        """Compute gates `[batch pos head 1 or d_key]` and steps `[batch pos head 1]`; None for gates of 1."""
        cfg, gate = self.cfg, None
        reads = "batch pos model" if x.ndim == 3 else "batch pos head model"

        def project(name: str) -> Tensor:
            weight, bias = getattr(self, f"W_{name}"), getattr(self, f"b_{name}")
            return at_least_float32(einsum(x, weight, f"{reads}, head model d -> batch pos head d")) + bias

        if cfg.gate != "none":
            gate = project("gate").sigmoid()
        if cfg.attention == "gated_linear":
            step = at_least_float32(x.new_ones(*x.shape[:2], cfg.n_heads, 1))
        else:
            step = F.softplus(project("step")) if cfg.attention == "mamba2" else project("step").sigmoid()
        if cfg.attention == "mamba2":
            gate = (-step * self.A_log.exp()[:, None]).exp()
        if cfg.keys == "context":  # the query, which is last, writes nothing
            writes = (torch.arange(x.shape[1], device=x.device) < x.shape[1] - 1)[:, None, None]
            step = torch.where(writes, step, 0.0)
            gate = None if gate is None else torch.where(writes, gate, 1.0)
        return gate, step

    # ---- the definition ----

    def written(self, k: Tensor, v: Tensor) -> Tensor:
        """Return what is written to the state with the key: the value, in "mesa" the key too."""
        return torch.cat([k, v], dim=-1) if self.cfg.attention == "mesa" else v

    def update(self, state: Tensor, k: Tensor, v: Tensor, gate: Tensor, step: Tensor) -> Tensor:
        """Compute the state `[... d_key d_value]` after one more position, whose tensors are `[... d]`."""
        state = gate[..., None] * state
        if self.cfg.attention == "delta":
            v = v - (k[..., None, :] @ state)[..., 0, :]
        return state + (step * k)[..., :, None] * v[..., None, :]

    def states(
        self, k: Tensor, v: Tensor, gate: Tensor, step: Tensor, edit: Callable[[Tensor, int], Tensor] | None = None
    ) -> Float[Tensor, "batch head pos d_key d_value"]:
        """Compute the state after each position, one after the other; `edit(state, position)` may change each."""
        v = self.written(k, v)
        state, states = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
        for t in range(k.shape[2]):
            state = self.update(state, k[:, :, t], v[:, :, t], gate[:, :, t], step[:, :, t])
            state = state if edit is None else edit(state, t)
            states.append(state)
        return torch.stack(states, dim=2)

    def read(self, states: Float[Tensor, "batch head row d_key d_value"], q: Tensor, v: Tensor) -> Tensor:
        """Compute z of queries `[batch head row d_key]` from the state at each; v is for the skip of "mamba2"."""
        if self.cfg.attention == "mesa":
            second, states = states.split([q.shape[-1], v.shape[-1]], dim=-1)
            q = self.solve(second, q)
        z = (q[..., None, :] @ states)[..., 0, :]
        return z + self.skip[:, None, None] * v if self.cfg.attention == "mamba2" else z

    def solve(self, second: Float[Tensor, "*batch d_key d_key"], q: Float[Tensor, "*batch d_key"]) -> Tensor:
        """Compute `(G + Λ)⁻¹ q` of "mesa"."""
        ridge = F.softplus(self.ridge)[:, None].diag_embed()  # [head 1 d_key d_key]
        return torch.linalg.solve(second + ridge, q[..., None])[..., 0]

    def _hooked_states(self, k: Tensor, v: Tensor, gate: Tensor, step: Tensor) -> Tensor:
        """The states with `hook_state`: changed ones are set, those after them computed from them."""
        computed = self.states(k, v, gate, step)
        changed = torch.ones((), dtype=torch.bool, device=k.device)
        given = computed.clone()
        if given.requires_grad:
            # Unchanged states reach k, v and the gates through the recurrence below; through `given` it would be twice.
            given.register_hook(lambda gradient: gradient * changed[..., None, None])
        hooked = self.hook_state(given)
        if hooked.shape != computed.shape:
            raise ValueError(f"a state must stay {list(computed.shape)} [batch head pos d_key d_value], "
                             f"got {list(hooked.shape)} from a hook at hook_state")  # fmt: skip
        changed = (hooked != computed).flatten(-2).any(-1)

        def set_changed(state: Tensor, t: int) -> Tensor:
            at_hook = hooked[:, :, t]
            # adds 0, with the hook's gradient, so that `attribute` sees all effects of the state
            return torch.where(changed[:, :, t, None, None], at_hook, state + (at_hook - at_hook.detach()))

        return self.states(k, v, gate, step, set_changed)

    # ---- the same by products of matrices ----

    def read_in_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, step: Tensor, rows: slice = ALL
    ) -> Float[Tensor, "batch head row d_value"]:
        """Compute z at the positions `rows`, chunk by chunk; gates are 1 if None."""
        n_pos, length = k.shape[2], CHUNK_OF_KEY_GATES if self.cfg.gate == "key" else CHUNK
        q, values = self.cfg.score_scale * q, self.written(k, v)
        if n_pos <= length:
            return self._chunk(q, k, values, gate, step, None, rows)[0]
        parts, state = [], None
        for start in range(0, n_pos, length):
            here = slice(start, start + length)
            part = (q[:, :, here], k[:, :, here], values[:, :, here])
            z, state = self._chunk(*part, None if gate is None else gate[:, :, here], step[:, :, here], state, ALL)
            parts.append(z)
        return torch.cat(parts, dim=2)[:, :, rows]

    def _chunk(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, step: Tensor, state: Tensor | None, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """z at some rows of a chunk, and the state after it.

        With the decay γ_ts from s to t (the product of the gates after s, up to t), the state is `S_t = γ_t0 S_0 +
        Σ_{s<=t} γ_ts k_s u_sᵀ`. For sums, u is the step times the value. In "delta" it is the step times the value's
        error, `u_t = b_t (v_t - (γ_t0 S_0)ᵀ k_t - Σ_{s<t} γ_ts <k_s, k_t> u_s)`: a triangular system (Yang et al.
        2024, "DeltaNet", section 3.2).
        """
        inner, since = decays(k, gate)
        if self.cfg.attention == "delta":
            system = (step * decayed_products(k, k, inner)).tril(-1)
            errors = v if state is None else v - (since * k) @ state
            u = torch.linalg.solve_triangular(system, step * errors, upper=False, unitriangular=True)
        else:
            u = step * v
        after = (inner[..., -1, :, :] * k).mT @ u
        if state is not None:
            after = after + since[..., -1, :, None] * state
        inner, since, q = inner[..., rows, :, :], since[..., rows, :], q[:, :, rows]
        if self.cfg.attention == "mesa":
            d_key = k.shape[-1]
            products = (k[..., :, None] * u[..., None, :d_key]).flatten(-2)
            second = (inner[..., 0] @ products).unflatten(-1, (d_key, d_key))
            if state is not None:
                second = second + since[..., None] * state[..., None, :, :d_key]
            q, u = self.solve(second, q), u[..., d_key:]
            state = None if state is None else state[..., d_key:]
        z = decayed_products(q, k, inner) @ u
        if state is not None:
            z = z + (since * q) @ state
        return z + self.skip[:, None, None] * v[:, :, rows] if self.cfg.attention == "mamba2" else z, after

    def fast(self, x: Float[Tensor, "batch pos d_model"], rows: slice, columns: slice) -> Tensor:
        """Compute the layer's output at some positions and dimensions, without hooks or damping."""
        q, k, v = self.project(x, "Q"), self.normalized(self.project(x, "K")), self.project(x, "V")
        gate, step = self.gates(x)
        gate = None if gate is None else _by_head(gate)
        z = self.read_in_chunks(_by_head(q), _by_head(k), _by_head(v), gate, _by_head(step), rows).to(x.dtype)
        out = einsum(z, self.W_O[..., columns], "batch head pos d, head d model -> batch pos model")
        return out + self.b_O[columns] if self.cfg.attn_bias else out


def _by_head(tensor: Float[Tensor, "batch pos head d"]) -> Float[Tensor, "batch head pos d"]:
    return rearrange(at_least_float32(tensor), "batch pos head d -> batch head pos d")


def decays(k: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the decay from each position s to each t, `[... t s d]`, 0 for s > t, and from before the first to t."""
    n_pos = k.shape[-2]
    causal = torch.ones(n_pos, n_pos, dtype=torch.bool, device=k.device).tril()
    if gate is None:
        return causal[..., None].to(k), k.new_ones(n_pos, 1)
    # in logarithms: a product of gates may underflow where the quotient of two products does not
    log = gate.clamp(min=torch.finfo(gate.dtype).tiny).log().to(torch.float64).cumsum(-2)
    between = (log[..., :, None, :] - log[..., None, :, :]).masked_fill(~causal[..., None], -math.inf)
    return between.to(k.dtype).exp(), log.to(k.dtype).exp()


def decayed_products(a: Tensor, b: Tensor, decay: Float[Tensor, "... t s d"]) -> Float[Tensor, "... t s"]:
    """Compute `Σ_d a_td b_sd γ_tsd`; the decays' last axis may be 1."""
    if decay.shape[-1] == 1:
        return (a @ b.mT) * decay[..., 0]
    return torch.einsum("...td,...sd,...tsd->...ts", a, b, decay)


def softplus_inverse(value: float) -> float:
    """Return the number whose softplus is a positive value."""
    return value + math.log(-math.expm1(-value))
