"""`WrappedModel`: any module as a learner with hooks, made by `wrap`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name

from mechicl.base.annotations import described
from mechicl.base.arguments import ArgumentError, check_fields, checked
from mechicl.base.threads import holding, holds_models, share_lock
from mechicl.models.layered import LayeredModel
from mechicl.models.temporary_hooks import without_user_hooks
from mechicl.models.wrapping.module_hooks import KEYWORDS, NO_HOOKS, HookedParts, HookPlace
from mechicl.models.wrapping.trials import (
    bytes_of_run,
    change_futures,
    differ,
    in_eval_mode,
    refuse_training_mode,
    sees_no_future,
)
from mechicl.prompts import At, Prompts, prompt_format
from mechicl.prompts.formats import PromptFormat, PromptFormatName

Encode = Callable[[Prompts], Tensor]
Decode = Callable[[Any], Tensor]
CallModule = Callable[[nn.Module, Tensor], Any]


@dataclass(frozen=True, eq=False)
class Reading:
    """How a module reads prompts, for `wrap(module, encode=...)` where a format or a function is not enough.

    Attributes:
        encode: the module's input: "interleaved", "paired", or a function of `Prompts` (see `wrap`).
        points: the positions at which points are predicted, in order, the query's last: in the stream, and without
            `decode` in the output. By default every x token of interleaved prompts, and the last position otherwise.
            `slice(0, None, 2)` declares that a function as `encode` makes two tokens per point, x first. Whether a
            position sees later points is tried out when the module first reads prompts.
        call: function of the module and the result of `encode` that runs the module; by default `module(tokens)`.
        batch_first: False for a module that takes and returns `[pos prompt ...]`, as torch's recurrent layers by
            default. In `encode`, `decode` and hooks prompts come first all the same.

    Example:
        >>> gru = torch.nn.GRU(4, 8)
        >>> model = wrap(gru, encode=Reading("paired", batch_first=False), decode=lambda output: output[0][:, -1, :1])
        >>> model.predict(LinearRegression(x_dim=3, n_context=4).sample(8, seed=0)).shape
        torch.Size([8, 1])
    """

    encode: Encode | PromptFormatName
    points: slice | None = None
    call: CallModule | None = None
    batch_first: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class WrappedConfig:
    """The facts known about a wrapped module; those that a trial shows are None or False before it has read prompts."""

    n_layers: int  # as declared
    n_heads: int  # as declared, else 1
    d_model: int | None  # width of the stream, from a trial
    prompt_format: str  # "own" for a function
    one_pass: bool  # one pass predicts every point from those before it, from a trial
    causal: bool  # the stream at each point's position depends on no later point, from a trial
    device: str
    torch_dtype: torch.dtype
    format: PromptFormat | None


class ModuleError(ValueError, RuntimeError):
    """A wrapped module failed on its input."""


class WrappedModel(LayeredModel):
    """A module with hook points at its sub-modules, made by `wrap`.

    Attributes:
        module: the module. Its weights, `state_dict` and outputs are unchanged; `train`, `eval` and `to` act on it.
        blocks: the hook points, by TransformerLens' names.
        points: positions at which points are predicted; the last one is the query's.
        name: name in tables and pictures.
    """

    @checked
    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[tuple[str, HookPlace]],
        reading: Reading,
        decode: Decode | None,
        n_layers: int,
        n_heads: int,
        unembed: Sequence[str],
        name: str,
    ):
        super().__init__()
        share_lock(self, module)
        self.module = module
        self.blocks = nn.ModuleList(nn.Module() for _ in range(n_layers))
        default = slice(0, None, 2) if reading.encode == "interleaved" else slice(-1, None)
        self.points, self._points_given = (default, False) if reading.points is None else (reading.points, True)
        self.name = name
        self._encode: Encode | PromptFormatName = reading.encode
        self._decode, self._reading = decode, reading
        self._n_heads, self._unembed = n_heads, tuple(unembed)
        self._format: PromptFormat | None = None
        self._d_model: int | None = None
        self._one_pass = self._causal = False
        self._tried: object = None  # the version of the weights that was tried
        self._bytes: dict[tuple[Any, ...], float] = {}
        self._parts = HookedParts(module, parts, self.blocks)
        self.setup()

    def setup(self) -> None:
        """Name the hook points; the module's own sub-modules are left alone."""
        named = self.blocks.named_modules(prefix="blocks")
        self.hook_dict = {name: point for name, point in named if isinstance(point, HookPoint)}
        self.mod_dict = dict(self.hook_dict)
        for name, point in self.hook_dict.items():
            point.name = name
        self.blocks.eval()  # they have nothing to train, and only the module's own mode counts

    @property
    def cfg(self) -> WrappedConfig:  # type: ignore[override]
        """The facts known about the module."""
        weight = next((t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()), torch.empty(0))
        is_current = (self._one_pass or self._causal) and self._tried == self._version()
        return WrappedConfig(
            n_layers=len(self.blocks),
            n_heads=self._n_heads,
            d_model=self._d_model,
            prompt_format=self._encode if isinstance(self._encode, str) else "own",
            one_pass=self._one_pass and is_current,
            causal=self._causal and is_current,
            device=str(weight.device),
            torch_dtype=weight.dtype,
            format=self._format,
        )

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return self.module.training if "module" in self.__dict__.get("_modules", {}) else False

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignored: the module has the mode."""

    @checked
    def train(self, mode: bool = True) -> "WrappedModel":
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    # ---- prompts in, predictions out ----

    @holds_models
    def forward(self, tokens: Tensor | Prompts, *, at: At = "positions") -> Any:
        """Run the module on tokens or prompts.

        Args:
            tokens: the module's input, or prompts.
            at: "positions" for the module's output unchanged; "query" for the prediction of the query `[prompt 1 y]`;
                "points" for predictions `[prompt point y]` of all points, each from those before, if it makes them.
        """
        self._positions(at, 1)  # refuses other values
        if not isinstance(tokens, Tensor | Prompts):
            raise ArgumentError(f"tokens must be a tensor or Prompts, got {described(tokens)}")
        tokens = self.encode(tokens) if isinstance(tokens, Prompts) else tokens
        calls: Counter[str] = Counter()
        with self._parts.attached(calls) if self._parts.has_hooks() else self._naming_errors(tokens):
            outputs = self._run(tokens)
        self._parts.check(calls)
        if at == "positions":
            return outputs
        if at == "points" and not self.cfg.one_pass:
            raise ValueError(f"{self.name} does not predict all points from earlier ones in one pass: take at='query'")
        predictions = self.decode(outputs)
        return predictions[:, -1:] if at == "query" else predictions

    @checked
    def encode(self, prompts: Prompts) -> Tensor:
        """Return the module's input for prompts, on its device and in its dtype.

        Raises:
            ValueError: the module sees the query's target, or predictions change with the other prompts of a batch.
        """
        tokens = self._read(prompts)
        if len(prompts) and prompts.n_context:
            with holding(self), torch.no_grad():
                if self._tried != self._version():
                    self._try(prompts)
        return tokens

    @checked(undefined=True)
    def decode(self, outputs: Any) -> Float[Tensor, "prompt point y"]:
        """Extract the predictions from the module's output: of all points, or of one, the query."""
        predictions = outputs if self._decode is None else self._decode(outputs)
        source = "the module returned" if self._decode is None else "decode returned"
        expected = "predictions [prompt y] or [prompt point y]: give decode=, a function of the module's output"
        if not isinstance(predictions, Tensor):
            raise TypeError(f"{source} {type(predictions).__name__}, not {expected}")
        if predictions.ndim not in (2, 3):
            raise ValueError(f"{source} the shape {tuple(predictions.shape)}, not {expected}")
        if predictions.ndim == 2:
            return predictions[:, None]
        return predictions if self._decode is not None else predictions[:, self.points]

    @checked
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Predict the query of each prompt, in bounded memory.

        Gradients reach the prompts, if these require them, and not the weights: to train, differentiate the module.
        """
        return self._in_parts(self._predictions, prompts)[:, -1]

    @checked
    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """Predict each point from the points before it; the last one is the query.

        This takes one pass if the module predicts all points and none depends on later ones, which is tried on changed
        prompts whenever the weights have changed; otherwise one pass for each point.

        Raises:
            ValueError: the module cannot read shorter prompts.
        """
        predictions = self._in_parts(self._predictions, prompts)
        if self.cfg.one_pass:
            return predictions
        parts = []
        for t in range(prompts.n_context):
            try:
                parts.append(self.predict(prompts.prefix(t)))
            except (RuntimeError, IndexError) as error:
                problem = f"{self.name} reads no prompts of {t} context points"
                raise ValueError(f"{problem}: use predict(), or an encode= that pads shorter prompts") from error
        return torch.stack([*parts, predictions[:, -1]], dim=1)

    @checked
    def bytes_per_prompt(self, prompts: Prompts) -> float:
        """Return an upper estimate of the bytes of everything that a pass over one prompt computes."""
        return self._bytes_per_row(self._read(prompts[:1])) if len(prompts) else 0.0

    def _bytes_per_row(self, tokens: Tensor) -> float:
        shape = (*tokens.shape[1:], tokens.dtype)
        if shape not in self._bytes:
            # an attention that is opened has scores and a pattern, which torch's fused one never holds
            hooks = [(lambda name: True, lambda activation, hook: None)] if self._parts.opens_attention else []
            with self.hooks(fwd_hooks=hooks):
                self._bytes[shape] = 2 * bytes_of_run(self.module, lambda: self.forward(tokens[:1]))
        return self._bytes[shape]

    # ---- the stream, layer by layer ----

    @checked
    def layer_streams(self, prompts: Prompts, at: At = "points") -> Iterator[Float[Tensor, "prompt row d_model"]]:
        """Yield the residual stream before the first layer and then after each, like `PromptedModel.layer_streams`."""
        if not len(self.blocks):
            raise ValueError(f"{self.name} {NO_HOOKS}")
        refuse_training_mode(self.module)
        tokens, streams = self.encode(prompts), {}
        names = [get_act_name("resid_pre", 0), *(get_act_name("resid_post", i) for i in range(len(self.blocks)))]
        hooks = [(name, lambda activation, hook: streams.update({hook.name: activation})) for name in names]
        with self.hooks(fwd_hooks=hooks):
            self.forward(tokens)
        widths = [streams[name].shape[-1] for name in names]
        if len(set(widths)) > 1:
            raise ValueError(f"the layers of {self.name} have the widths {widths}, not one: leave some out of layers=")
        for name in names:
            yield streams[name][:, self._positions(at, streams[name].shape[1])]

    @checked(undefined=True)
    def query_streams(
        self, prompts: Prompts, queries: Float[Tensor, "prompt point query x"], at: At = "points"
    ) -> Iterator[Float[Tensor, "prompt point query d_model"]]:
        """Yield the residual stream of other queries, each in a separate prompt, like `PromptedModel.query_streams`."""
        return self._query_streams_one_by_one(*self._checked_queries(prompts, queries, at))

    @property
    def tokens_per_point(self) -> int | None:
        """Number of positions (tokens) of a context point; None for a function as `encode` without `points`."""
        if isinstance(self._encode, str):
            return 2 if self._encode == "interleaved" else 1
        begins = self._points_given and self.points.start in (None, 0) and self.points.stop is None
        return (self.points.step or 1) if begins else None

    @property
    def reads_out(self) -> bool:
        """True if `unembed` was declared."""
        return bool(self._unembed)

    @checked(undefined=True)
    def read_out(self, residual: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row d_out"]:
        """Map the final stream to outputs, by the declared `unembed`."""
        if not self._unembed:
            raise ValueError(f"{self.name} has no unembed=, the names of the sub-modules from its stream to its output")
        residual = residual.clone()  # as in `_run`
        for name in self._unembed:
            residual = self.module.get_submodule(name)(residual)
        return residual

    @checked
    def how_to_declare(self, hook_name: str) -> str:
        """For error messages: the argument of `wrap` that declares a hook."""
        keyword = KEYWORDS.get(hook_name.rpartition(".")[2])
        return f": declare it with wrap(..., {keyword})" if keyword else ": a wrapped module does not have it"

    # ---- details ----

    def _is_hooked(self) -> bool:
        return super()._is_hooked() or self._parts.has_hooks()

    def _points(self, n_pos: int) -> slice:
        return self.points

    def _positions(self, at: At | slice, n_pos: int) -> slice:
        if at != "query":
            return super()._positions(at, n_pos)
        last = range(n_pos)[self.points][-1]
        return slice(last, last + 1)

    def _read(self, prompts: Prompts) -> Tensor:
        cfg = self.cfg
        prompts = prompts.to(cfg.device, cfg.torch_dtype)
        if not callable(self._encode):
            self._format = prompt_format(self._encode, x_dim=prompts.x_dim, y_dim=prompts.y_dim)
            return self._format.encode(prompts)
        tokens = self._encode(Prompts(prompts.xs.clone(), prompts.ys.clone()))  # which it may write into
        if not isinstance(tokens, Tensor):
            kind = type(tokens).__name__
            raise TypeError(f"encode returned {kind}, not a tensor [prompt ...]: return one, split by Reading(call=)")
        if tokens.ndim == 0 or len(tokens) != len(prompts):
            raise ValueError(f"encode returned the shape {tuple(tokens.shape)} for {len(prompts)} prompts")
        return tokens

    @contextmanager
    def _naming_errors(self, tokens: Tensor) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # out of memory, or named already
                raise
            shape = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            raise ModuleError(f"{self.name} cannot read these prompts, as tokens of {shape}: {error}") from error

    def _run(self, tokens: Tensor) -> Any:
        call, batch_first = self._reading.call, self._reading.batch_first
        tokens = (tokens if batch_first else tokens.transpose(0, 1)).clone()  # the module may write into them
        outputs = self.module(tokens) if call is None else call(self.module, tokens)
        if batch_first:
            return outputs
        if isinstance(outputs, tuple) and not hasattr(outputs, "_fields") and outputs:
            return (_prompts_first(outputs[0]), *outputs[1:])
        return _prompts_first(outputs)

    def _predictions(self, prompts: Prompts) -> Tensor:
        refuse_training_mode(self.module)
        predictions = self.decode(self.forward(self.encode(prompts)))
        n, n_points, width = predictions.shape
        if n != len(prompts) or width != prompts.y_dim or n_points not in (1, prompts.n_context + 1):
            shape = tuple(predictions.shape)
            raise ValueError(
                f"predictions of the shape {shape} for {prompts}: give decode= or Reading(points=) for [prompt point y]"
            )
        return predictions

    def _version(self) -> tuple[tuple[int, int, int], ...]:
        """A value that changes when a weight is written to, or replaced by another tensor."""
        return tuple((id(t), t.data_ptr(), t._version) for t in (*self.parameters(), *self.buffers()))

    def _try(self, prompts: Prompts) -> None:
        """Find out whether predictions and streams depend on later points, once for each version of the weights."""
        both, cuts = change_futures(prompts)
        streams: list[Tensor] = []
        last = get_act_name("resid_post", len(self.blocks) - 1)
        hooks = [(last, lambda activation, hook: streams.append(activation))] if len(self.blocks) else []
        with in_eval_mode(self.module), without_user_hooks(self):
            with self.hooks(fwd_hooks=hooks):
                tokens = self._read(both)
                with self._naming_errors(tokens):
                    predicted = self.decode(self.forward(tokens))
            alone = self.decode(self.forward(self._read(both[-1:])))
        if streams:
            self._d_model = streams[0].shape[-1]
        if alone.shape != predicted[-1:].shape or differ(alone, predicted[-1:]):
            problem = f"the prediction of {self.name} for a prompt changes with the other prompts of its batch"
            fix = "give Reading(..., batch_first=False) if it reads [pos prompt ...], load quantized weights in float32"
            raise ValueError(f"{problem}: {fix}, or change encode=")
        if differ(*(part[-1:, -1] for part in predicted.chunk(2))):
            raise ValueError(f"{self.name} sees the query's target: encode= must leave out prompts.ys[:, -1]")
        if not differ(*(part[:1, -1] for part in predicted.chunk(2))):
            return  # it predicts the same for every input, which shows nothing
        at_points = [stream[:, self.points] for stream in streams]
        self._causal = bool(streams) and all(sees_no_future(each, cuts, prompts.n_context) for each in at_points)
        self._one_pass = sees_no_future(predicted, cuts, prompts.n_context) and (self._causal or not streams)
        if self._unembed and streams:
            read = self.read_out(streams[0][:, self._positions("query", streams[0].shape[1])])
            if read.shape != predicted[:, -1:].shape or differ(read[:, -1], predicted[:, -1]):
                raise ValueError(f"unembed={list(self._unembed)} does not predict as {self.name} does: name norms too")
        self._tried = self._version()


def refuse_wrapped(models: Any, what: str) -> None:
    """Refuse (TypeError) a wrapped module, or a list with one, for an analysis of `HookedTransformer` weights."""
    for model in models if isinstance(models, list | tuple) else [models]:
        if isinstance(model, WrappedModel):
            raise TypeError(f"{what} of a HookedTransformer; {model.name} is a wrapped module: see patch")


def _prompts_first(output: Any) -> Any:
    return output.transpose(0, 1) if isinstance(output, Tensor) and output.ndim > 2 else output
