"""`PromptedModel`: the shared code of our networks on prompts, from tokens to predictions, streams and losses."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import TransformerLensKeyValueCache
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import lm_cross_entropy_loss

from mechicl.base.annotations import described
from mechicl.base.arguments import ArgumentError, checked
from mechicl.base.precision import at_least_float32
from mechicl.base.threads import holds_models
from mechicl.models.config_checks import DTYPES, dtype_name
from mechicl.models.layered import LayeredModel, has_torch_hooks
from mechicl.prompts import At, Prompts

ReturnType = Literal["logits", "loss", "both"]


class Output(NamedTuple):
    """The outputs and the loss, for `return_type="both"` (TransformerLens' name)."""

    logits: Float[Tensor, "batch pos d_out"]
    loss: Float[Tensor, ""] | Float[Tensor, "batch row"]


def with_batch_axis(tokens: Tensor) -> Tensor:
    """Return token ids `[pos]` as a batch of one `[1 pos]`, other tokens unchanged."""
    return tokens[None] if tokens.ndim == 1 and not tokens.is_floating_point() else tokens


def on_right(attention_mask: Tensor) -> bool:
    """Return True if a mask hides positions at the end only."""
    return bool((attention_mask.int().diff(dim=-1) <= 0).all())


class PromptedModel(LayeredModel):
    """A stack of blocks that reads prompts as tokens: the interface of `HookedTransformer` and `HookedLSTM`.

    A subclass defines its config and blocks, `reset_parameters`, `embed_tokens` (the stream before the first block),
    `read_out`, `_run_blocks` (the stream after some layers, or its outputs), `_numbers_per_position` (an upper estimate
    of the numbers that a layer holds at once for each position of a prompt), and `_query_streams_by_sharing`
    (`query_streams` without hooks, with the context computed once).

    Attributes:
        cfg: the model's config; `device` and `dtype` follow the weights.
        blocks: the layers, each from stream to stream `[batch pos d_model]`.
        vectorizes: whether `torch.func.vmap` can run several of these at once.
    """

    vectorizes: ClassVar[bool] = True

    def setup(self) -> None:
        """Name and index the hook points; call it again after adding or removing some."""
        super().setup()
        self._watched = tuple(self.modules())
        self._children = [(part, dict(part._modules)) for part in self._watched if part._modules]
        kinds = {name: type(part) for name, part in self.named_modules() if type(part) is not HookPoint}
        self._kinds = self.__dict__.get("_kinds", kinds)  # those that the model was made with
        self._is_spliced = kinds != self._kinds

    # ---- tokens in, outputs out ----

    @holds_models
    def forward(
        self,
        input: Float[Tensor, "batch pos d"] | Int[Tensor, "batch pos"] | Int[Tensor, "pos"] | Prompts | str | list[str],
        return_type: ReturnType | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: Literal["left", "right"] | None = None,
        start_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | Prompts | None = None,
        *,
        attention_mask: Int[Tensor, "batch key_pos"] | Bool[Tensor, "batch key_pos"] | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: TransformerLensKeyValueCache | None = None,
        at: At | slice = "positions",
    ) -> Any:
        """Compute the outputs for tokens, or their loss.

        Args:
            input: `[batch pos d_token]` (see `encode`), token ids `[batch pos]` or `[pos]`, prompts, or texts for a
                model with a tokenizer. With `start_at_layer`, the residual stream `[batch pos d_model]` before that
                layer.
            return_type: "logits" for the outputs, "loss" (see `loss_fn`), "both", or None for a run for hooks only.
            loss_per_token: return the loss of each prediction, not their mean.
            prepend_bos: for texts, whether to put the tokenizer's beginning-of-sequence token first; by default the
                config's `default_prepend_bos`.
            padding_side: side on which shorter texts are padded; by default the tokenizer's.
            start_at_layer: begin before this block; negative numbers count from the end.
            tokens: token ids or prompts with the targets of the loss, if the input is a residual stream.
            attention_mask: for token ids, 0 at padding, which is not attended to, not counted in positions and has no
                loss, and 1 elsewhere. A run from a residual stream needs the mask of the run that computed the stream,
                also if that run found its padding in ids or texts.
            stop_at_layer: end before this block and return the residual stream there; negative as above.
            past_kv_cache: keys and values of earlier positions of the texts, which the run continues and adds its own
                to (`HookedTransformerKeyValueCache`).
            at: positions of the returned outputs: all "positions", the predicted "points", the "query", or a slice.

        Returns:
            Outputs `[batch row d_out]`, one row per position (predictions before `decode`, or logits), or with
            `stop_at_layer` the residual stream `[batch row d_model]`. A loss is a mean over predictions, or
            `[batch pos - 1]` for token ids and `[batch point]` for prompts with `loss_per_token`. For "both" an
            `Output` with `logits` and `loss`.

        Raises:
            ValueError: tokens of another width, more positions than the model has, a layer that does not exist, an
                unknown `at` or return_type, or a loss of inputs that have no targets.
            IndexError: a token id outside the vocabulary.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type={return_type!r} is not one of ('logits', 'loss', 'both', None)")
        start = self._layer("start_at_layer", start_at_layer, default=0)
        stop = self._layer("stop_at_layer", stop_at_layer, default=self.cfg.n_layers)
        if isinstance(input, Prompts):
            read = self.encode(input)
        else:
            read, padding = self._read_texts(input, prepend_bos, padding_side, past_kv_cache)
            attention_mask = padding if attention_mask is None else attention_mask
        run = self._plan_run(read, attention_mask, past_kv_cache)
        if start_at_layer is None:
            residual = self.embed_tokens(read) if run is None else self.embed_tokens(read, run.new_positions(read))
        else:
            if read.ndim != 3 or read.shape[2] != self.cfg.d_model:
                expected = f"a residual stream [batch pos {self.cfg.d_model}]"
                raise ValueError(f"with start_at_layer the input is {expected}, got {tuple(read.shape)}")
            residual = read.clone()  # the first hook may change it in place
        positions = self._positions(at, residual.shape[1])
        to_outputs, known = stop_at_layer is None, {} if run is None else {"run": run}
        outputs = self._run_blocks(residual, range(start, stop), positions, to_outputs=to_outputs, **known)
        if return_type == "logits" or stop_at_layer is not None:
            return outputs
        if return_type is None:
            return None
        if (start_at_layer is not None and tokens is None) or at != "positions":
            raise ValueError(
                f"return_type={return_type!r} needs at='positions', and tokens= with start_at_layer, got at={at!r}"
            )
        if tokens is None:
            tokens = input if isinstance(input, Prompts) else read
        loss = self.loss_fn(outputs, tokens, attention_mask, loss_per_token)
        return loss if return_type == "loss" else Output(outputs, loss)

    def _read_texts(
        self, input: Any, prepend_bos: bool | None, padding_side: Any, cache: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the ids of texts, or tokens unchanged, and a mask of the padding that models of texts find in them."""
        return with_batch_axis(self.to_tokens(input, prepend_bos=prepend_bos)), None

    def _plan_run(
        self, tokens: Tensor, attention_mask: Tensor | None, cache: TransformerLensKeyValueCache | None
    ) -> Any:
        """Return what a run knows besides its stream, if anything: padding that would be seen, earlier positions."""
        if cache is not None or not (attention_mask is None or on_right(attention_mask)):
            raise ValueError(f"{type(self).__name__} takes no past_kv_cache, and no padding but on the right")

    @checked(undefined=True)
    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_out"],
        tokens: Int[Tensor, "batch pos"] | Float[Tensor, "batch pos d_token"] | Prompts,
        attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, ""] | Float[Tensor, "batch row"]:
        """Compute the loss of the outputs at all positions.

        For token ids this is the cross entropy of each next token, in nats; for prompts the squared error of each
        prediction, averaged over the target's dimensions.

        Args:
            logits: the model's outputs at all positions.
            tokens: the model's input, token ids or prompts, which contains the targets.
            attention_mask: 0 for token ids that are padding, which have no loss.
            per_token: return the loss of each prediction, `[batch pos - 1]` or `[prompt point]`, not their mean.
        """
        if isinstance(tokens, Prompts):
            predictions = self.decode(at_least_float32(logits))
            targets = tokens.ys[:, -predictions.shape[1] :].to(predictions)
            if predictions.shape != targets.shape:
                raise ValueError(f"targets are {list(targets.shape)} for predictions {list(predictions.shape)}")
            errors = (predictions - targets).square().mean(-1)
            return errors if per_token else errors.mean()
        if tokens.is_floating_point():
            raise ValueError("continuous tokens have no target of the query: take the loss of the Prompts")
        try:
            return lm_cross_entropy_loss(at_least_float32(logits), tokens.to(logits.device), attention_mask, per_token)
        except (IndexError, RuntimeError) as error:
            if not tokens.numel() or 0 <= int(tokens.min()) <= int(tokens.max()) < logits.shape[-1]:
                raise
            ids = f"{int(tokens.min())} to {int(tokens.max())}"
            raise IndexError(f"tokens have ids from {ids}, the logits are of 0 to {logits.shape[-1] - 1}") from error

    # ---- prompts in, predictions out ----

    @checked
    def encode(self, prompts: Prompts) -> Float[Tensor, "prompt pos d_token"]:
        """Encode prompts as the model's input tokens, on its device and in its dtype."""
        cfg, form = self.cfg, self.cfg.format
        if (prompts.x_dim, prompts.y_dim) != (cfg.x_dim, cfg.y_dim):
            prompts_dims = f"the prompts have x_dim={prompts.x_dim}, y_dim={prompts.y_dim}"
            raise ValueError(f"the model takes x_dim={cfg.x_dim}, y_dim={cfg.y_dim}; {prompts_dims}")
        # only models on paired prompts have initial weights
        return form.encode(prompts.to(cfg.device, cfg.torch_dtype), getattr(self, "initial_weights", None))

    @checked(undefined=True)
    def decode(self, outputs: Float[Tensor, "prompt pos d_out"]) -> Float[Tensor, "prompt point y"]:
        """Extract predictions from outputs at all positions: of every point if interleaved, of the query if paired."""
        return outputs[:, self._points(outputs.shape[1])]

    @checked
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Predict the query of each prompt, in bounded memory.

        Gradients reach the prompts, if these require them, and not the weights: to train, differentiate `forward`.
        """
        return self._in_parts(lambda part: self.forward(part, at="query")[:, -1], prompts)

    @checked
    def bytes_per_prompt(self, prompts: Prompts) -> float:
        """Return an upper estimate of the bytes of memory that a pass without gradients takes for each prompt."""
        n_pos = self.cfg.format.n_tokens(prompts.n_context)
        # half precision takes its sums in float32
        return max(self.cfg.torch_dtype.itemsize, 4) * n_pos * self._numbers_per_position(n_pos)

    @checked
    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Predict each point from the points before it; the last one is the query.

        This takes one pass if no output sees later points (interleaved and causal), otherwise one pass for each point.
        Memory and gradients are as for `predict`.
        """
        if self.cfg.one_pass:
            return self._in_parts(lambda part: self.forward(part, at="points"), prompts)
        return torch.stack([self.predict(prompts.prefix(t)) for t in range(prompts.n_context + 1)], dim=1)

    # ---- the stream, layer by layer ----

    @property
    def tokens_per_point(self) -> int | None:
        """Number of positions (tokens) of a context point; None for a model of token ids."""
        return {"paired": 1, "interleaved": 2}.get(self.cfg.prompt_format)

    @checked
    def layer_streams(self, prompts: Prompts, at: At = "points") -> Iterator[Float[Tensor, "prompt row d_model"]]:
        """Yield the residual stream before the first layer and then after each: n_layers + 1 tensors, from one pass.

        Args:
            at: rows of the tensors: the predicted "points", the "query" alone, or all "positions".
        """
        stream = self.forward(prompts, stop_at_layer=0)
        positions = self._positions(at, stream.shape[1])
        yield self._at_positions(stream, positions)
        for layer in range(self.cfg.n_layers):
            stream = self.forward(stream, start_at_layer=layer, stop_at_layer=layer + 1)
            yield self._at_positions(stream, positions)

    def _at_positions(self, stream: Tensor, positions: slice) -> Float[Tensor, "prompt row d_model"]:
        return stream[:, positions]

    @holds_models
    @checked(undefined=True)
    def query_streams(
        self, prompts: Prompts, queries: Float[Tensor, "prompt point query x"], at: At = "points"
    ) -> Iterator[Float[Tensor, "prompt point query d_model"]]:
        """Yield the stream of other queries, each as if it replaced point t, before the first layer and after each.

        Queries do not see each other. They share the context's activations (see `queries.py`), unless hooks are
        attached.

        Args:
            prompts: the contexts; their own queries are ignored.
            queries: `[prompt point query x]`, for each of the n_context + 1 points, or for the last point only.
            at: "points" for queries at every point, "query" for queries at the last one: `[prompt 1 query x]`.
        """
        prompts, queries, points = self._checked_queries(prompts, queries, at)
        if self._is_hooked():
            return self._query_streams_one_by_one(prompts, queries, points)
        return self._query_streams_by_sharing(prompts, queries, points)

    def _query_tokens(self, queries: Tensor) -> Float[Tensor, "prompt point query d_token"]:
        xs = queries.flatten(0, 2)[:, None]
        tokens = self.encode(Prompts(xs, xs.new_zeros(len(xs), 1, self.cfg.y_dim)))
        return tokens.view(*queries.shape[:3], self.cfg.d_token)

    # ---- hooks ----

    def _is_hooked(self) -> bool:
        # other libraries put modules in the place of ours, or replace a module's `forward`
        return (
            self._is_spliced
            or any(part._modules != children for part, children in self._children)
            or any(has_torch_hooks(part) or "forward" in part.__dict__ for part in self._watched)
        )

    # ---- device and dtype, arguments ----

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        weight = next((t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()), None)
        if weight is not None:
            device, name = str(weight.device), dtype_name(weight.dtype)
            name = name if name in DTYPES else dtype_name(self.cfg.dtype)
            if (device, name) != (self.cfg.device, dtype_name(self.cfg.dtype)):
                self._replace_cfg(device=device, dtype=name)
        return result

    def _replace_cfg(self, **changes: Any) -> None:
        self.cfg = self.cfg.replace(**changes)

    def _layer(self, name: str, layer: int | None, *, default: int) -> int:
        if layer is None:
            return default
        n = self.cfg.n_layers
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise TypeError(f"{name} must be an int or None, got {type(layer).__name__}")
        if not -n <= layer <= n:
            raise ValueError(f"{name}={layer}, but the model has {n} layers")
        return layer + n if layer < 0 else layer

    def _check_tokens(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor) or tokens.ndim != 3 or tokens.shape[2] != self.cfg.d_token:
            raise ArgumentError(f"tokens must be [batch pos {self.cfg.d_token}], got {described(tokens)}")

    def _checked_dtype(self, tokens: Tensor) -> Tensor:
        dtype = self.cfg.torch_dtype
        unlike = tokens.is_floating_point() and tokens.dtype != dtype
        if unlike and not torch.is_autocast_enabled(tokens.device.type):
            raise ValueError(f"input must be of the model's dtype, {dtype}, got a tensor of {tokens.dtype}")
        return tokens

    def _check_width(self, residual: Tensor) -> None:
        if not isinstance(residual, Tensor) or residual.shape[-1:] != (self.cfg.d_model,):
            raise ArgumentError(f"residual must be [batch row {self.cfg.d_model}], got {described(residual)}")
