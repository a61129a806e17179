"""Any module as a learner with hooks, as `wrap` makes it: prompts in, predictions out, the stream layer by layer."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_act_name

from mechicl.base.arguments import checked
from mechicl.models.holding import holding, in_a_pass, share_lock
from mechicl.models.layered import LayeredModel
from mechicl.models.wrapping.module_hooks import KEYWORDS, NO_HOOKS, HookedParts, Place
from mechicl.models.wrapping.trials import bytes_of_run, change_futures, differ, in_eval_mode, sees_no_future
from mechicl.prompts import At, PromptFormat, PromptFormatName, Prompts, prompt_format

Encode = Callable[[Prompts], Tensor]
Decode = Callable[[Any], Tensor]
Call = Callable[[nn.Module, Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class WrappedConfig:
    """What is known of a wrapped module at the moment."""

    n_layers: int  # as declared
    n_heads: int  # as declared, else 1
    d_model: int | None  # width of the stream; None until the module has read prompts
    prompt_format: str  # "own" for a function
    one_pass: bool  # whether one pass predicts every point from those before it; False until a run has shown it
    device: str
    torch_dtype: torch.dtype
    format: PromptFormat | None


class ModuleError(ValueError, RuntimeError):
    """A wrapped module failed on what it was given to read."""


class WrappedModel(LayeredModel):
    """A module with hook points at its sub-modules, made by `wrap`.

    Attributes:
        module: what is wrapped. Its weights, its `state_dict` and what it computes stay as they are; `train`, `eval`
            and `to` act on it.
        blocks: the hook points, by TransformerLens' names.
        points: where the predictions of the points stand among the positions; the last is the query's.
        name: for tables and pictures.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[tuple[str, Place]],
        encode: Encode | str,
        decode: Decode | None,
        points: slice,
        n_layers: int,
        n_heads: int,
        unembed: Sequence[str],
        name: str,
        call: Call | None = None,
        batch_first: bool = True,
    ):
        super().__init__()
        share_lock(self, module)
        self.module = module
        self.blocks = nn.ModuleList(nn.Module() for _ in range(n_layers))
        self.points = points
        self.name = name
        self._encode, self._decode, self._call, self._batch_first = encode, decode, call, batch_first
        self._n_heads, self._unembed = n_heads, tuple(unembed)
        self._format: PromptFormat | None = None
        self._d_model: int | None = None
        self._one_pass, self._looked_at = False, None
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
        """What is known of the module."""
        weight = next((t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()), torch.empty(0))
        return WrappedConfig(
            n_layers=len(self.blocks),
            n_heads=self._n_heads,
            d_model=self._d_model,
            prompt_format=self._encode if isinstance(self._encode, str) else "own",
            one_pass=self._one_pass and self._looked_at == self._version(),
            device=str(weight.device),
            torch_dtype=weight.dtype,
            format=self._format,
        )

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training if "module" in self.__dict__.get("_modules", {}) else False

    @training.setter
    def training(self, mode: bool) -> None:
        """Nothing: the module knows it."""

    def train(self, mode: bool = True) -> "WrappedModel":
        """Put the module into training mode, or out of it."""
        self.module.train(mode)
        return self

    # ---- prompts in, predictions out ----

    @in_a_pass
    def forward(self, tokens: Tensor | Prompts, *, at: At = "positions") -> Any:
        """The module's output for tokens or prompts (at="positions"), or predictions `[prompt point y]`.

        `at="query"` gives the query's only, "points" those of all points, from a module that predicts each from those
        before it.
        """
        if at not in get_args(At):
            raise ValueError(f"at={at!r} is not one of {get_args(At)}")
        if isinstance(tokens, Prompts):
            tokens = self.encode(tokens)
        if self._parts.listens():
            outputs = self._run_hooked(tokens)
        else:
            with self._reading(tokens):
                outputs = self._run(tokens)
        if at == "positions":
            return outputs
        if at == "points" and not self.cfg.one_pass:
            raise ValueError(
                f"{self.name} does not give every point's prediction, made from the points before it, in one pass: "
                f"take at='query' (for all points, decode must return [prompt point y] and points= be their positions)"
            )
        predictions = self.decode(outputs)
        return predictions[:, -1:] if at == "query" else predictions

    @checked
    def encode(self, prompts: Prompts) -> Tensor:
        """Prompts as what the module reads, on its device and in its dtype.

        Raises:
            ValueError: the module sees the query's target, or predictions change with the other prompts of a batch.
        """
        tokens = self._read(prompts)
        self._look(prompts)
        return tokens

    def decode(self, outputs: Any) -> Float[Tensor, "prompt point y"]:
        """The predictions in the module's output: of all points, or of one, the query."""
        if self._decode is not None:
            predictions, source = self._decode(outputs), "decode returned"
        else:
            predictions, source = outputs, "the module returned"
        if not isinstance(predictions, Tensor):
            raise TypeError(
                f"{source} {type(predictions).__name__}, not predictions [prompt y] or [prompt point y]: give "
                f"decode=, a function of what the module returns"
            )
        if predictions.ndim not in (2, 3):
            raise ValueError(
                f"{source} the shape {tuple(predictions.shape)}, not [prompt y] or [prompt point y]: give decode="
            )
        if predictions.ndim == 2:
            return predictions[:, None]
        return predictions if self._decode is not None else predictions[:, self._positions_of(predictions, "points")]

    @checked
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """The query's prediction, in bounded memory; a graph only leads to the prompts (see `LayeredModel`)."""
        return self._in_parts(self._predictions, prompts)[:, -1]

    @checked
    def predict_prefixes(self, prompts: Prompts) -> Float[Tensor, "prompt point y"]:
        """The prediction of each point t from the points before it; the last one is the query's.

        One pass where the module gives all points and none depends on later ones, which is tried out on changed
        prompts whenever the weights have changed; else one pass a prefix.

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
                raise ValueError(
                    f"{self.name} reads no prompts of {t} context points, and predicts the query alone: use predict(), "
                    f"or an encode= that pads shorter prompts"
                ) from error
        return torch.stack([*parts, predictions[:, -1]], dim=1)

    def bytes_per_prompt(self, prompts: Prompts) -> float:
        """Bytes of everything that a pass over one prompt computes: an upper estimate of what it holds at once."""
        return self._bytes_per_row(self._read(prompts[:1])) if len(prompts) else 0.0

    def _bytes_per_row(self, tokens: Tensor) -> float:
        shape = (*tokens.shape[1:], tokens.dtype)
        if shape not in self._bytes:
            with holding(self):
                self._bytes[shape] = 2 * bytes_of_run(self.module, lambda: self._run(tokens[:1]))
        return self._bytes[shape]

    # ---- the stream, layer by layer ----

    def layer_streams(self, prompts: Prompts, at: At = "points") -> Iterator[Float[Tensor, "prompt row d_model"]]:
        """The stream before the first layer and then after each: n_layers + 1 tensors, from one pass.

        Raises:
            ValueError: no layers were declared, or they have different widths.
        """
        if not len(self.blocks):
            raise ValueError(f"{self.name} {NO_HOOKS}")
        tokens, streams = self.encode(prompts), {}

        def keep(activation: Tensor, hook: HookPoint) -> None:
            streams[hook.name] = activation

        names = [get_act_name("resid_pre", 0), *(get_act_name("resid_post", i) for i in range(len(self.blocks)))]
        with self.hooks(fwd_hooks=[(name, keep) for name in names]):
            self.forward(tokens)
        widths = [streams[name].shape[-1] for name in names]
        if len(set(widths)) > 1:
            raise ValueError(
                f"the stream of {self.name} has the widths {widths} before the first layer and after each: what reads "
                f"every layer alike needs one width (leave out of layers= what changes it)"
            )
        for name in names:
            yield streams[name][:, self._positions_of(streams[name], at)]

    def query_streams(
        self, prompts: Prompts, queries: Float[Tensor, "prompt point query x"], at: At = "points"
    ) -> Iterator[Float[Tensor, "prompt point query d_model"]]:
        """The stream of other queries, each in a prompt of its own; as `PromptedModel.query_streams`."""
        return self._query_streams_one_by_one(*self._checked_queries(prompts, queries, at))

    @property
    def reads_out(self) -> bool:
        """Whether `unembed` was declared."""
        return bool(self._unembed)

    def read_out(self, residual: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row d_out"]:
        """The final stream as outputs, by the declared `unembed`."""
        if not self._unembed:
            raise ValueError(
                f"{self.name} has no declared way from its stream to its output: wrap it with unembed=, the names of "
                f"the sub-modules that make it (for instance ['ln_f', 'head'])"
            )
        for name in self._unembed:
            residual = self.module.get_submodule(name)(residual)
        return residual

    def how_to_declare(self, hook_name: str) -> str:
        """For messages: which argument of `wrap` makes a hook."""
        keyword = KEYWORDS.get(hook_name.rpartition(".")[2])
        return f": declare it with wrap(..., {keyword})" if keyword else ": a wrapped module does not have it"

    # ---- details ----

    def _read(self, prompts: Prompts) -> Tensor:
        cfg = self.cfg
        prompts = prompts.to(cfg.device, cfg.torch_dtype)
        if isinstance(self._encode, str):
            self._format = prompt_format(cast(PromptFormatName, self._encode), x_dim=prompts.x_dim, y_dim=prompts.y_dim)
            return self._format.encode(prompts)
        tokens = self._encode(prompts)
        if not isinstance(tokens, Tensor):
            raise TypeError(
                f"encode returned {type(tokens).__name__}, not one tensor [prompt ...]: return all that the module "
                f"reads in one, and take it apart in call=, say lambda module, tokens: module(x=tokens[..., :-1])"
            )
        if tokens.ndim == 0 or len(tokens) != len(prompts):
            raise ValueError(f"encode returned the shape {tuple(tokens.shape)} for {len(prompts)} prompts")
        return tokens

    def _run_hooked(self, tokens: Tensor) -> Any:
        calls: Counter[str] = Counter()
        with self._parts.attached(calls):
            outputs = self._run(tokens)
        self._parts.check(calls)
        return outputs

    @contextmanager
    def _reading(self, tokens: Tensor) -> Iterator[None]:
        """Turn torch's errors into one that names the module and what it was given."""
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # out of memory, or said already
                raise
            raise ModuleError(
                f"{self.name} cannot read these prompts, as tokens of {str(tokens.dtype).removeprefix('torch.')} "
                f"{list(tokens.shape)}: {error}"
            ) from error

    def _run(self, tokens: Tensor) -> Any:
        """What the module returns, prompts first."""
        if not self._batch_first:
            tokens = tokens.transpose(0, 1)
        outputs = self.module(tokens) if self._call is None else self._call(self.module, tokens)
        if self._batch_first:
            return outputs
        if isinstance(outputs, tuple) and not hasattr(outputs, "_fields") and outputs:
            return (_prompts_first(outputs[0]), *outputs[1:])
        return _prompts_first(outputs)

    def _predictions(self, prompts: Prompts) -> Tensor:
        predictions = self.decode(self.forward(self.encode(prompts)))
        n, n_points, width = predictions.shape
        if n != len(prompts) or width != prompts.y_dim or n_points not in (1, prompts.n_context + 1):
            raise ValueError(
                f"predictions of the shape {tuple(predictions.shape)} for {prompts}: decode= must return [prompt y] "
                f"or [prompt point y]" + ("" if self._decode else f"; without it, the output is read at {self.points}")
            )
        return predictions

    def _positions_of(self, activation: Tensor, at: At) -> slice:
        places = range(activation.shape[1])[self.points]
        if at == "positions":
            return slice(None)
        if at == "query":
            return slice(places[-1], places[-1] + 1)
        if at == "points":
            return self.points
        raise ValueError(f"at={at!r} is not one of {get_args(At)}")

    def _version(self) -> tuple[tuple[int, int, int], ...]:
        """A value that changes when a weight is written to, or replaced by another tensor."""
        return tuple((id(t), t.data_ptr(), t._version) for t in (*self.parameters(), *self.buffers()))

    def _look(self, prompts: Prompts) -> None:
        """Find out by trying whether predictions depend on what comes after them, once for the weights as they are."""
        if not len(prompts) or not prompts.n_context:
            return
        with holding(self), torch.no_grad():
            if self._looked_at != self._version():
                self._try_futures(prompts)

    def _try_futures(self, prompts: Prompts) -> None:
        both, cuts = change_futures(prompts)
        streams: list[Tensor] = []
        hooks: list[Any] = []
        if len(self.blocks):
            name = get_act_name("resid_post", len(self.blocks) - 1)
            hooks.append((name, lambda activation, hook: streams.append(activation)))
        with in_eval_mode(self.module), self.hooks(fwd_hooks=hooks):
            tokens = self._read(both)
            with self._reading(tokens):
                predicted = self.decode(self.forward(tokens))
        if streams:
            self._d_model = streams[0].shape[-1]
        with in_eval_mode(self.module):
            alone = self.decode(self.forward(self._read(both[-1:])))
        if alone.shape != predicted[-1:].shape or differ(alone, predicted[-1:]):
            raise ValueError(
                f"what {self.name} predicts for a prompt changes with the other prompts of its batch: if it reads "
                f"[pos prompt ...], wrap it with batch_first=False; if encode= mixes prompts, change that"
            )
        if differ(*(part[-1:, -1] for part in predicted.chunk(2))):
            raise ValueError(
                f"{self.name} sees the query's target: its prediction changes with it, so encode= must leave out "
                f"prompts.ys[:, -1]"
            )
        if not differ(*(part[:1, -1] for part in predicted.chunk(2))):
            return  # it predicts the same whatever it reads: nothing can be told
        self._one_pass = all(
            sees_no_future(read, cuts, prompts.n_context)
            for read in (predicted, *(stream[:, self.points] for stream in streams))
        )
        if self._unembed and streams:
            read = self.read_out(streams[0][:, self._positions_of(streams[0], "query")])
            if read.shape != predicted[:, -1:].shape or differ(read[:, -1], predicted[:, -1]):
                raise ValueError(
                    f"unembed={list(self._unembed)} does not make the predictions of {self.name} from the stream after "
                    f"its last layer: name all sub-modules in between, norms too"
                )
        self._looked_at = self._version()


def refuse_wrapped(models: Any, what: str) -> None:
    """Refuse (TypeError) a wrapped module, or a list with one, where the package's own parts are needed."""
    for model in models if isinstance(models, list | tuple) else [models]:
        if isinstance(model, WrappedModel):
            raise TypeError(
                f"{what} of a HookedTransformer of this package, and {model.name} is a wrapped module: its parts are "
                f"read by hooks (run_with_cache) and intervened on (patch, ablate)"
            )


def _prompts_first(output: Any) -> Any:
    return output.transpose(0, 1) if isinstance(output, Tensor) and output.ndim > 2 else output
