"""`HookedLSTM`: the recurrent learner that transformers are compared with, with the same interface."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn as nn
from einops import repeat
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechicl.base.arguments import Count, Natural, checked
from mechicl.base.precision import at_least_float32
from mechicl.base.threads import holds_models
from mechicl.models.config_checks import OwnConfig
from mechicl.models.prompted import PromptedModel
from mechicl.models.transformer.norms import BlockPart
from mechicl.prompts import Interleaved, Prompts

LSTMState = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class LSTMConfig(OwnConfig):
    """Every choice that makes a `HookedLSTM`. Prompts are always interleaved.

    Attributes:
        x_dim: dimension of the inputs.
        y_dim: dimension of the targets.
        n_context: number of context points; longer prompts fit too.
        n_layers: number of LSTM layers.
        d_model: width of the hidden state, in every layer.
        dtype: "float32", "float64", "bfloat16" or "float16".
        device: device of a new model; the model keeps it up to date.

    Example:
        >>> LSTMConfig(x_dim=5, n_context=20, n_layers=4, d_model=96).n_ctx
        41
    """

    x_dim: Count
    y_dim: Count = 1
    n_context: Natural
    n_layers: Count = 1
    d_model: Count
    dtype: str = "float32"
    device: str = "cpu"

    architecture = "lstm"
    prompt_format = "interleaved"
    keys = "causal"  # in the transformers' terms
    one_pass = True

    @property
    def format(self) -> Interleaved:
        """The prompt format object."""
        return Interleaved(x_dim=self.x_dim, y_dim=self.y_dim)

    @property
    def d_token(self) -> int:
        """Width of a token."""
        return self.format.d_token


class LSTMBlock(BlockPart):
    """One LSTM layer, in torch's kernel and layout.

    Weights: W_ih, W_hh `[gate * d_model, d_model]`, b_ih, b_hh `[gate * d_model]`, with the gates in torch's order:
    input, forget, cell, output. The cell state has no hook point, since the kernel does not let it be replaced.
    """

    def __init__(self, d_model: int):
        super().__init__()
        gates = 4 * d_model
        self.add_weights(W_ih=(gates, d_model), W_hh=(gates, d_model), b_ih=(gates,), b_hh=(gates,))
        self.add_hooks("resid_pre", "resid_post")

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Compute the hidden states at all positions."""
        return self.hook_resid_post(self.run(self.hook_resid_pre(stream), self.start(stream))[0])

    def start(self, stream: Float[Tensor, "batch pos d_model"]) -> LSTMState:
        """Return the hidden and cell state before the first token `[1 batch d_model]`: zeros."""
        zeros = stream.new_zeros(1, len(stream), stream.shape[2])
        return zeros, zeros

    def run(self, stream: Float[Tensor, "batch pos d_model"], state: LSTMState) -> tuple[Tensor, LSTMState]:
        """Compute the hidden states at all positions, and both states after the last, without hooks."""
        # in half precision the states would collect rounding errors
        weights = [at_least_float32(weight) for weight in (self.W_ih, self.W_hh, self.b_ih, self.b_hh)]
        inputs, state = at_least_float32(stream), (at_least_float32(state[0]), at_least_float32(state[1]))
        # "training" without dropout changes no value, and lets cuDNN differentiate in eval mode too
        hidden, *after = torch.lstm(inputs, state, weights, True, 1, 0.0, True, False, True)
        return hidden.contiguous().to(stream.dtype), (after[0], after[1])

    def scan(self, stream: Float[Tensor, "batch pos d_model"], stops: list[int]) -> tuple[Tensor, LSTMState]:
        """Compute hidden states, and both states `[batch stop d_model]` after ascending numbers of tokens."""
        state, parts, states = self.start(stream), [stream[:, :0]], []
        for first, stop in zip([0, *stops], stops, strict=False):
            if stop > first:
                part, state = self.run(stream[:, first:stop], state)
                parts.append(part)
            states.append(state)
        hidden, cell = (torch.cat(part).transpose(0, 1) for part in zip(*states, strict=True))
        return torch.cat(parts, dim=1), (hidden, cell)

    def step(self, queries: Float[Tensor, "batch stop query d_model"], states: LSTMState) -> Tensor:
        """Compute the hidden state after one more token, separately for each query, from the states after each stop."""
        n_queries = queries.shape[2]
        hidden, cell = (repeat(part, "batch stop d -> 1 (batch stop query) d", query=n_queries) for part in states)
        outputs, _ = self.run(queries.flatten(0, 2)[:, None], (hidden, cell))
        return outputs.view(queries.shape)


class HookedLSTM(PromptedModel):
    """A stack of LSTM layers on interleaved prompts, with the interface of `HookedTransformer`.

    Tokens are read in linearly, each layer's hidden states are the next one's inputs, and a linear map with a bias
    makes predictions of the last one's at the x tokens. Hook points, all `[batch pos d_model]`: `hook_embed`,
    `blocks.{l}.hook_resid_pre` (the layer's inputs) and `blocks.{l}.hook_resid_post` (its hidden states).
    Source: Fu et al. 2024, A.2 and B.6; the read-in has no bias, since the first layer has one.

    torch has no rule to vectorise its LSTM, nor cuDNN a second derivative: on a GPU, Hessians need the CPU.

    Args:
        cfg: the configuration.

    Example:
        >>> model = HookedLSTM(LSTMConfig(x_dim=5, n_context=20, n_layers=4, d_model=96))
        >>> prompts = LinearRegression(x_dim=5, n_context=20).sample(4, seed=0)
        >>> model.predict(prompts).shape
        torch.Size([4, 1])
    """

    cfg: LSTMConfig
    vectorizes: ClassVar[bool] = False

    @checked
    def __init__(self, cfg: LSTMConfig, *, seed: int = 0):
        super().__init__()
        self.cfg = cfg
        with torch.device(cfg.device):
            self.embed = nn.Parameter(torch.zeros(cfg.d_token, cfg.d_model))
            self.hook_embed = HookPoint()
            self.blocks = nn.ModuleList(LSTMBlock(cfg.d_model) for _ in range(cfg.n_layers))
            self.unembed = nn.Parameter(torch.zeros(cfg.d_model, cfg.d_out))
            self.unembed_bias = nn.Parameter(torch.zeros(cfg.d_out))
        self.setup()
        self.to(device=cfg.device, dtype=cfg.torch_dtype)
        self.reset_parameters(seed)

    @checked
    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw new weights, the same for the same seed.

        Matrices are uniform within `±1 / sqrt(fan_in)`, as in torch's LSTM; biases are 0, except the forget gates',
        which are 1, so that states last from the start (Jozefowicz et al. 2015).
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.is_meta:
                continue
            if weight.ndim == 2:
                fan_in = self.cfg.d_token if name == "embed" else self.cfg.d_model
                # the same numbers for every device and dtype
                fresh = 2 * torch.rand(weight.shape, generator=generator, dtype=torch.float32, device="cpu") - 1
                weight.copy_(fresh / math.sqrt(fan_in))
            else:
                weight.zero_()
        for block in self.blocks:
            block.b_ih[self.cfg.d_model : 2 * self.cfg.d_model] = 1.0

    @holds_models
    def embed_tokens(self, tokens: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """Compute the input of the first layer from tokens, by the linear read-in."""
        self._check_tokens(tokens)
        return self.hook_embed(tokens @ self.embed)

    def read_out(self, residual: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row d_out"]:
        """Compute outputs from the last layer's hidden states."""
        self._check_width(residual)
        return residual @ self.unembed + self.unembed_bias

    def _run_blocks(self, residual: Tensor, layers: range, positions: slice, *, to_outputs: bool) -> Tensor:
        for layer in layers:
            residual = self.blocks[layer](residual)
        return self.read_out(residual[:, positions]) if to_outputs else residual[:, positions]

    def _numbers_per_position(self, n_pos: int) -> int:
        # four gates before and after their activation, the stream before and after the layer, and, where torch computes
        # an LSTM step by step (without oneDNN's kernels), states and outputs twice
        return 14 * self.cfg.d_model

    def _query_streams_by_sharing(self, prompts: Prompts, queries: Tensor, points: range) -> Iterator[Tensor]:
        # a query's hidden state is one step on from the state that the tokens before it have left
        stream = self.embed_tokens(self.encode(prompts))
        hidden = self._query_tokens(queries) @ self.embed
        stops = [self.cfg.format.n_tokens(t) - 1 for t in points]
        yield hidden
        for block in self.blocks:
            stream, states = block.scan(stream, stops)
            hidden = block.step(hidden, states)
            yield hidden
