"""`HookedTransformer`: prompts in, predictions out, every activation on a TransformerLens hook."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
import torch.nn as nn
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from transformer_lens import TransformerLensKeyValueCache
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_protocol import TransformerLensModelWithWeights
from transformers import PreTrainedTokenizerBase

from mechicl.base.annotations import described
from mechicl.base.arguments import ArgumentError, checked
from mechicl.base.threads import holds_models
from mechicl.models.layered import has_torch_hooks
from mechicl.models.prompted import on_right
from mechicl.models.transformer.attention import Attention, Run, soft_cap
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.config_rules import RECURRENT
from mechicl.models.transformer.fast import ALL, fast_block, fast_norm
from mechicl.models.transformer.layers import LEARNED, MLP, Block, Embed, PosEmbed, TiedUnembed, Unembed
from mechicl.models.transformer.lens_config import current_names, read_lens_config
from mechicl.models.transformer.lens_pretrained import LensPretrained
from mechicl.models.transformer.norms import LayerNorm
from mechicl.models.transformer.queries import query_streams
from mechicl.models.transformer.recurrent import CHUNK_OF_KEY_GATES, Recurrence
from mechicl.prompts import Prompts


class StateDictError(ValueError, RuntimeError):
    """Weights whose names or shapes do not fit a model."""


class HookedTransformer(LensPretrained):
    """A transformer on prompts whose activations can be read and replaced.

    It has the hook names, shapes and methods of TransformerLens (`run_with_cache`, `run_with_hooks`, `hooks`,
    `cfg`, `W_Q` ...) and satisfies its `TransformerLensModel` protocol. One trap: tools that read the number of
    positions off the last axis of the tokens see the token width instead.

    Without hooks, the forward pass takes quicker routes that agree to float precision, and computes only the positions
    that are read. Every name in `hook_dict` fires in every full pass.

    Args:
        cfg: the configuration; or one in TransformerLens' names, see `HookedTransformerConfig`.
        tokenizer: tokenizer of `transformers`, for models of token ids; without it the model reads no texts.
        move_to_device: ignored: a model is made on its config's device.
        default_padding_side: side on which shorter texts are padded; by default the tokenizer's.
        seed: seed of the initial weights; by default the config's, else 0.
        initial_weights: W_0 `[x y]` of paired prompts, whose query token is `(x, -x W_0)`; 0 by default.

    Example:
        >>> model = HookedTransformer(TransformerConfig(x_dim=10, n_context=10))
        >>> prompts = LinearRegression().sample(4, seed=0)
        >>> outputs, cache = model.run_with_cache(model.encode(prompts))
        >>> cache["blocks.0.attn.hook_pattern"].shape
        torch.Size([4, 1, 11, 11])
    """

    stream_labels: tuple[str, ...] | None = None  # names of the stream's dimensions, if any
    initial_weights: Tensor

    @checked(undefined=True)
    def __init__(
        self,
        cfg: TransformerConfig | Mapping[str, Any] | Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        move_to_device: bool = True,
        default_padding_side: Literal["left", "right"] | None = None,
        *,
        seed: int | None = None,
        initial_weights: Float[Tensor, "x y"] | None = None,
    ):
        super().__init__()
        self.cfg = cfg = read_lens_config(cfg)
        with torch.device(cfg.device):
            if cfg.prompt_format == "paired":
                self.register_buffer("initial_weights", torch.zeros(cast(int, cfg.x_dim), cfg.y_dim))
            self.embed = Embed(cfg)
            self.hook_embed = HookPoint()
            if cfg.positional_embedding_type in (*LEARNED, "one_hot", "sinusoidal"):
                self.pos_embed = PosEmbed(cfg)
                self.hook_pos_embed = HookPoint()
            if cfg.mlp_location == "input":
                self.input_mlp = MLP(cfg)
                self.hook_input_mlp_out = HookPoint()
            self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layers))
            self._tie_blocks()
            if cfg.positional_embedding_type == "shortformer":
                for block in self.blocks:
                    vars(block.attn)["shortformer"] = (self.pos_embed, self.hook_pos_embed)  # not parts of it
            kind = cfg.normalization_type
            kind = str(kind).replace("LN", "RMS") if cfg.final_rms else kind
            self.ln_final = LayerNorm(cfg, kind=kind) if cfg.final_norm else nn.Identity()
            self.unembed = TiedUnembed(cfg, self.embed) if cfg.tie_word_embeddings else Unembed(cfg)
        self.setup()
        self.to(device=cfg.device, dtype=cfg.torch_dtype)
        self.reset_parameters(cfg.seed or 0 if seed is None else seed)
        if tokenizer is not None:
            self.set_tokenizer(tokenizer, default_padding_side)
        if initial_weights is not None:
            self._set_initial_weights(initial_weights)
        self.eval()  # it has no modes, but TransformerLens' tools require eval mode since version 4

    @torch.no_grad()
    @checked(undefined=True)
    def reset_parameters(self, seed: int) -> None:
        """Draw new weights, the same for the same seed: matrices random, biases 0, norm weights 1 (see the config)."""
        cfg, generator = self.cfg, torch.Generator().manual_seed(seed)
        matrices = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_gate", "W_step", "W_pos")
        deviations: dict[str, float] = dict.fromkeys(matrices, cfg.initializer_range)
        deviations["W_E"] = 1 / math.sqrt(cfg.d_model if cfg.prompt_format == "token_ids" else cfg.d_token)
        deviations["W_U"] = 1 / math.sqrt(cfg.d_model)
        deviations["W_conv"] = max(cfg.conv_width, 1) ** -0.5
        constants = {"w": 1.0, "sink": cfg.sink_score, "step_size": cfg.initializer_range}
        # both ends are drawn first: the order decides which numbers a seed gives to which weights
        ends = ("embed.", "pos_embed.", "unembed.")
        for name, weight in sorted(self.named_parameters(), key=lambda named: not named[0].startswith(ends)):
            leaf = name.rsplit(".", 1)[-1].removeprefix("_")
            if weight.is_meta:
                continue
            if leaf in deviations:
                # the same numbers for every device and dtype
                fresh = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
                nn.init.trunc_normal_(fresh, a=-2, b=2, generator=generator)
                weight.copy_(deviations[leaf] * fresh)
            else:
                weight.fill_(constants.get(leaf, 0.0))
        for part in self.modules():
            if isinstance(part, Recurrence):
                part.reset_gates()

    # ---- tokens in, outputs out ----

    def _run_blocks(
        self, residual: Tensor, layers: range, positions: slice, *, to_outputs: bool, run: Run | None = None
    ) -> Tensor:
        if self._is_hooked() or not layers:
            for layer in layers:
                # a user's replacement may take the stream only
                residual = self.blocks[layer](residual, *(() if run is None else (run,)))
            # hooks of the final norm see all positions
            if to_outputs and any(map(has_torch_hooks, (*self.ln_final.modules(), *self.unembed.modules()))):
                return self.read_out(residual)[:, positions]
            return self.read_out(residual[:, positions]) if to_outputs else residual[:, positions]
        for layer in layers[:-1]:
            residual = fast_block(self.blocks[layer], residual, ALL, run=run)
        # the last block computes these positions only, and the y-dimensions only if nothing else is read
        last = self.blocks[layers[-1]]
        if to_outputs and self.cfg.reads_only_y:
            return -fast_block(last, residual, positions, self.cfg.y_slot, run)
        residual = fast_block(last, residual, positions, run=run)
        return self.read_out(residual) if to_outputs else residual

    def _plan_run(
        self, tokens: Tensor, attention_mask: Tensor | None, cache: TransformerLensKeyValueCache | None
    ) -> Run | None:
        if cache is not None:
            n_before, n_texts = cache.previous_attention_mask.shape[1], len(cache.previous_attention_mask)
            if (len(cache.entries), n_texts) != (self.cfg.n_layers, len(tokens)):
                raise ValueError(
                    f"past_kv_cache is of {len(cache.entries)} layers and {n_texts} texts, the run of "
                    f"{self.cfg.n_layers} layers and {len(tokens)} texts"
                )
            mask = tokens.new_ones(tokens.shape[:2]) if attention_mask is None else attention_mask.to(tokens.device)
            if mask.shape[1] == n_before + tokens.shape[1]:  # of the earlier positions, too
                mask = mask[:, n_before:]
            attention_mask = cache.append_attention_mask(mask.int())
            run = Run(None if attention_mask.all() else attention_mask.bool(), cache, n_before)
        elif attention_mask is None or attention_mask.all() or (self.cfg.keys == "causal" and on_right(attention_mask)):
            return None  # no padding, or none that a token sees
        else:
            run = Run(attention_mask.bool().to(tokens.device))
        if self.cfg.prompt_format != "token_ids" or self._recurrent or self.cfg.momentum:
            raise ValueError(
                "attention_mask may only hide padding on the right with causal keys, and there is no past_kv_cache, "
                "for models of points, recurrent layers and momentum attention"
            )
        n_pos = run.n_before + tokens.shape[1]
        if run.tokens is not None and run.tokens.shape != (len(tokens), n_pos):
            raise ValueError(f"attention_mask must be {[len(tokens), n_pos]}, got {list(run.tokens.shape)}")
        return run

    def _numbers_per_position(self, n_pos: int) -> int:
        # The tensors alive at once at the peak of a block, which tests compare with a measured peak: the stream,
        # normalized and updated; q, k, v and z, or two products of the stream's width if they are folded; the MLP
        # before and after its activation; scores before and after masking, sink and softmax.
        cfg = self.cfg
        heads = cfg.n_heads * (4 * cfg.d_head + 2 * cfg.d_model + 4 * n_pos)
        if self._recurrent:  # decays in each dimension; outer products, sums and copies for the solver
            width = cfg.d_head if "mesa" in cfg.attention else 4 * CHUNK_OF_KEY_GATES
            heads += 3 * cfg.n_heads * width * cfg.d_head
        return 4 * cfg.d_model + heads + 2 * (cfg.d_mlp or 0)

    @holds_models
    def embed_tokens(
        self, tokens: Tensor, positions: range | Tensor | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Compute the residual stream before the first block: read-in, positions, input MLP.

        Args:
            tokens: continuous tokens `[batch pos d_token]`, or token ids `[batch pos]`.
            positions: position of each token in the prompt; by default 0, 1, ...
        """
        cfg = self.cfg
        self._check_tokens(tokens)
        embedded = self.embed(tokens)
        if embedded is tokens and self._is_hooked():  # hooks may change it in place
            embedded = embedded.clone()
        residual = self.hook_embed(embedded)
        if hasattr(self, "pos_embed"):
            # a copy for each prompt, so that a hook may change some of them in place
            rows = self.pos_embed.rows(range(residual.shape[1]) if positions is None else positions).to(residual)
            rows = rows.expand(residual.shape).clone()
            if cfg.positional_embedding_type != "shortformer":  # there the attention reads them
                residual = residual + self.hook_pos_embed(rows)
        if cfg.mlp_location == "input":
            residual = residual + self.hook_input_mlp_out(self.input_mlp(residual))
        return residual

    @holds_models
    def read_out(self, residual: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row d_out"]:
        """Compute outputs from the final residual stream: final norm, then minus the y-dimensions or a linear map."""
        self._check_width(residual)
        normed = self.ln_final(residual) if self._is_hooked() else fast_norm(self.ln_final, residual)
        return soft_cap(self.unembed(normed), self.cfg.output_logits_soft_cap)

    def _check_tokens(self, tokens: Tensor) -> None:
        if self.cfg.prompt_format != "token_ids":
            super()._check_tokens(tokens)
        elif not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(f"tokens must be ids [batch pos] (int64 or int32), got {described(tokens)}")
        elif tokens.is_meta and not self.W_U.is_meta:
            raise ValueError("tokens are on the device 'meta', where tensors have no values")

    # ---- other queries ----

    def _query_streams_by_sharing(self, prompts: Prompts, queries: Tensor, points: range) -> Iterator[Tensor]:
        cfg = self.cfg
        # the context sees the query, or a row depends on others
        plain = cfg.has_plain_scores and cfg.norm_location == "before" and not cfg.parallel_attn_mlp
        if cfg.keys == "full" or cfg.momentum or self._recurrent or cfg.rotates_by_length or not plain:
            return self._query_streams_one_by_one(prompts, queries, points)
        if cfg.keys == "context" and len(points) > 1:  # points see later ones, so each prefix is a separate context
            prefixes = [
                self._query_streams_by_sharing(prompts.prefix(t), queries[:, t : t + 1], range(t, t + 1))
                for t in points
            ]
            return (torch.cat(streams, dim=1) for streams in zip(*prefixes, strict=True))
        n_tokens = cfg.format.n_tokens
        positions = range(n_tokens(points[0]) - 1, n_tokens(points[-1]), n_tokens(1) - n_tokens(0))
        tokens = rearrange(self._query_tokens(queries), "prompt point query d -> (prompt query) point d")
        embedded = self.embed_tokens(tokens, positions)
        embedded = embedded.unflatten(0, (len(prompts), queries.shape[2])).transpose(1, 2)
        return query_streams(self.blocks, self.layer_streams(prompts, at="positions"), embedded, positions)

    # ---- hooks ----

    @checked
    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Turn `attn.hook_result` (each head's output) on or off."""
        self._request_hooks(use_attn_result=use_attn_result)

    @checked
    def set_use_attn_state(self, use_attn_state: bool) -> None:
        """Turn `attn.hook_state` of recurrent layers (the state after each position) on or off."""
        self._request_hooks(use_attn_state=use_attn_state)

    @checked
    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Turn `hook_attn_in` (each head's input, before the norm) on or off, in the block and in its attention."""
        self._request_hooks(use_attn_in=use_attn_in)

    @checked
    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Turn `hook_q_input`, `hook_k_input`, `hook_v_input` (the inputs of each head's queries ...) on or off.

        Each exists twice, one after the other: in the block, as in TransformerLens 3, and in its attention, as in 4.
        """
        self._request_hooks(use_split_qkv_input=use_split_qkv_input)

    @checked
    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Turn `hook_mlp_in` (the MLP's input, before the norm) on or off.

        Blocks without an MLP get it too, and `hook_mlp_out`: an MLP without neurons, which adds 0. TransformerLens'
        `attribution_patch` needs them in every block.
        """
        self._request_hooks(use_hook_mlp_in=use_hook_mlp_in)

    @checked
    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Turn on or off that `hook_k` and `hook_v` have the keys and values of each head, not of each group of heads.

        So that those of one head can be changed. Without groups nothing changes.
        """
        self._request_hooks(ungroup_grouped_query_attention=ungroup_grouped_query_attention)

    @property
    def _recurrent(self) -> bool:
        return any(kind in RECURRENT for kind in self.cfg.attention.split(","))

    def _request_hooks(self, **flags: bool) -> None:
        self._replace_cfg(**flags)
        for part in self.modules():
            if isinstance(part, Block):
                part.add_requested_hooks()
        self.setup()

    # ---- weights and config ----

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Load weights as torch does, also with the names of TransformerLens and of earlier versions.

        Blocks of a looped model stay one block, also with `assign=True`.

        Raises:
            StateDictError: a RuntimeError, as torch's, and a ValueError: names or shapes are not the model's.
        """
        if not isinstance(state_dict, Mapping):
            raise ArgumentError(f"state_dict must be a dictionary of tensors, got {described(state_dict)}")
        try:
            result = super().load_state_dict(current_names(self.cfg, state_dict), *args, **kwargs)
        except RuntimeError as error:
            raise StateDictError(str(error)) from error
        self._tie_blocks()
        return result

    def _tie_blocks(self) -> None:
        """Give every block the shared parameters of the first one, which torch sometimes separates."""
        cfg = self.cfg
        for block in list(self.blocks)[1:] if cfg.recurrent or cfg.share_mlp else ():
            tied, source = (block, self.blocks[0]) if cfg.recurrent else (block.mlp, self.blocks[0].mlp)
            firsts = dict(source.named_modules())
            for name, module in tied.named_modules():
                if name in firsts and type(module) is type(firsts[name]):  # not a user's replacement
                    module._parameters.update(firsts[name]._parameters)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._tie_blocks()
        return result

    def _replace_cfg(self, **changes: Any) -> None:
        super()._replace_cfg(**changes)
        for part in self.modules():
            if isinstance(part, Embed | PosEmbed | Unembed):
                part.cfg = self.cfg
            elif isinstance(part, Block | Attention):
                part.cfg = self.cfg.for_layer(part.layer)

    def _set_initial_weights(self, initial_weights: Tensor) -> None:
        if self.cfg.prompt_format != "paired":
            raise ValueError("initial_weights need the paired format: an x token has no place for -x W_0")
        if self.cfg.attention_weights == "gradient_descent":
            raise ValueError("attention_weights='gradient_descent' starts from W_0 = 0: no initial_weights")
        if initial_weights.shape != self.initial_weights.shape:
            expected = tuple(self.initial_weights.shape)
            raise ValueError(f"initial_weights must be [x y] = {expected}, got {tuple(initial_weights.shape)}")
        self.initial_weights.copy_(initial_weights)


# From Python 3.12 on, isinstance does not find a protocol's members among a module's submodules, such as `blocks`.
TransformerLensModelWithWeights.register(HookedTransformer)  # type: ignore[attr-defined]
