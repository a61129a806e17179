"""Layers with a state as plain loops: prompt by prompt, head by head, position by position."""

import torch
from torch import Tensor

from mechicl.models.transformer.recurrent import Recurrence


def head_by_loop(
    attn: Recurrence, h: int, streams: tuple[Tensor, Tensor, Tensor], states_set: dict[int, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The output `[pos d_model]` of a head without the bias, and its states `[pos d_key d_value]`.

    Args:
        streams: what queries, keys (with gates and steps) and values read, `[pos d_model]` each.
        states_set: states `[d_key d_value]` that replace the computed ones, by position.
    """
    cfg, names = attn.cfg, "QKV"
    n_pos, dtype = streams[0].shape[0], streams[0].dtype
    state, states, outs = None, [], []

    def projected(t: int, i: int) -> Tensor:
        out = streams[i][t] @ getattr(attn, f"W_{names[i]}")[h]
        return out + getattr(attn, f"b_{names[i]}")[h] if cfg.attn_bias else out

    for t in range(n_pos):
        width = cfg.conv_width
        q, k, v = (projected(t, i) for i in range(3))
        if width:  # the last tap is the position itself
            q, k, v = (
                torch.stack([
                    attn.W_conv[i, h, :, width - 1 - back] * projected(t - back, i) for back in range(min(width, t + 1))
                ]).sum(0)
                for i in range(3)
            )  # fmt: skip
        k = k / k.norm() if cfg.normalize_keys else k
        e, gate, step = streams[1][t], torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype)
        if cfg.gate != "none":
            gate = 1 / (1 + torch.exp(-(e @ attn.W_gate[h] + attn.b_gate[h])))
        if cfg.attention != "gated_linear":
            raw = e @ attn.W_step[h] + attn.b_step[h]
            step = torch.log(1 + torch.exp(raw)) if cfg.attention == "mamba2" else 1 / (1 + torch.exp(-raw))
        if cfg.attention == "mamba2":
            gate = torch.exp(-step * torch.exp(attn.A_log[h]))
        if cfg.keys == "context" and t == n_pos - 1:
            gate, step = torch.ones_like(gate), 0 * step
        write = torch.cat([k, v]) if cfg.attention == "mesa" else v
        decayed = torch.zeros(1, 1, dtype=dtype) if state is None else torch.diag(gate.expand(len(k))) @ state
        if cfg.attention == "delta" and state is not None:
            write = write - decayed.T @ k
        state = decayed + step * torch.outer(k, write)
        if states_set and t in states_set:
            state = states_set[t]
        states.append(state)
        q = cfg.score_scale * q
        if cfg.attention == "mesa":
            ridge = torch.diag(torch.log(1 + torch.exp(attn.ridge[h])))
            z = state[:, len(k) :].T @ torch.linalg.inv(state[:, : len(k)] + ridge) @ q
        else:
            z = state.T @ q
        if cfg.attention == "mamba2":
            z = z + attn.skip[h] * v
        outs.append(cfg.damping * z @ attn.W_O[h])
    return torch.stack(outs), torch.stack(states)


def layer_by_loop(attn: Recurrence, x: Tensor, states_set: dict[int, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The output `[batch pos d_model]` and states `[batch head pos d_key d_value]` of a layer.

    Args:
        states_set: states `[batch head d_key d_value]` that replace the computed ones, by position.
    """
    outs, all_states = [], []
    for b, stream in enumerate(x):
        heads = [
            head_by_loop(attn, h, (stream, stream, stream), {t: state[b, h] for t, state in (states_set or {}).items()})
            for h in range(attn.cfg.n_heads)
        ]
        outs.append(torch.stack([out for out, _ in heads]).sum(0))
        all_states.append(torch.stack([states for _, states in heads]))
    bias = attn.cfg.damping * attn.b_O if attn.cfg.attn_bias else 0
    return torch.stack(outs) + bias, torch.stack(all_states)
