"""`TableTransformer`: a network that reads a table as a prompt, a token for each cell, with hooks in every layer.

A cell of the rows to predict attends to rows with labels only, so these rows do not see each other. After Hollmann et
al. 2025 (TabPFN v2), without their random marks of columns: the order of columns, too, changes no prediction.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechicl.base.annotations import described
from mechicl.base.arguments import ArgumentError, Count, Natural, checked
from mechicl.base.threads import holds_models
from mechicl.models.config_checks import OwnConfig
from mechicl.models.prompted import PromptedModel
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.layers import MLP
from mechicl.models.transformer.norms import BlockPart, LayerNorm
from mechicl.prompts import At, Paired, Prompts, Tables


@dataclass(frozen=True, kw_only=True)
class TableConfig(OwnConfig):
    """Every choice that makes a `TableTransformer`.

    Attributes:
        x_dim: most columns in training, without the label's; tables of any number fit.
        n_context: most rows with labels in training; tables of any number fit.
        y_dim: number of values of a label, or of classes.
        predicts: "values", or "classes": their probabilities, for labels with a column for each class.
        n_layers: number of blocks, each with attention between columns, attention between rows, and an MLP.
        n_heads: heads of each attention.
        d_model: width of the stream of a cell; a multiple of `n_heads`.
        d_mlp: width of the MLPs' hidden layer; by default twice d_model.
        dtype: "float32", "float64", "bfloat16" or "float16".
        device: device of a new model; the model keeps it up to date.

    Example:
        >>> TableConfig(x_dim=4, n_context=50, n_layers=2, n_heads=4, d_model=32).d_head
        8
    """

    x_dim: Count
    n_context: Natural
    y_dim: Count = 1
    predicts: Literal["values", "classes"] = "values"
    n_layers: Count = 4
    n_heads: Count = 4
    d_model: Count = 64
    d_mlp: Count | None = None
    dtype: str = "float32"
    device: str = "cpu"

    architecture = "table"
    prompt_format = "table"
    keys = "context"
    one_pass = False
    recurrent = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads must divide d_model, got n_heads={self.n_heads} and d_model={self.d_model}")
        if self.predicts == "classes" and self.y_dim < 2:
            raise ValueError(f"predicts='classes' needs y_dim (the number of classes) above 1, got {self.y_dim}")
        if self.d_mlp is None:
            object.__setattr__(self, "d_mlp", 2 * self.d_model)

    @property
    def format(self) -> Paired:
        """The layout by rows: each has a point, and the last one is the query."""
        return Paired(self.x_dim, self.y_dim)

    @property
    def d_token(self) -> int:
        """Numbers of a cell's token: its value (or the values of a label), and 1 if it is missing (or unknown)."""
        return self.y_dim + 1

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_heads

    @property
    def of_parts(self) -> TransformerConfig:
        """The config of the norms and MLPs, which are those of `HookedTransformer`."""
        sizes: dict[str, Any] = {"n_heads": self.n_heads, "d_model": self.d_model, "d_mlp": self.d_mlp}
        return TransformerConfig(
            x_dim=1, n_context=1, **sizes, act_fn="gelu", normalization_type="LN", read_in="linear", read_out="linear"
        )


class CellAttention(BlockPart):
    """Attention between the cells of a row ("columns"), or from the cells of a column to its labelled rows ("rows").

    Weights are those of `Attention`: W_Q, W_K, W_V `[head d_model d_head]`, W_O `[head d_head d_model]`. Hooks:
    `hook_q`, `hook_k`, `hook_v`, `hook_z` `[table row column head d_head]`; `hook_attn_scores` and `hook_pattern`
    `[table row head query_column key_column]`, or `[table column head query_row key_row]`. Between rows, keys and
    values exist for rows with labels only.
    """

    def __init__(self, cfg: TableConfig, over: Literal["columns", "rows"]):
        super().__init__()
        self.over, self.scale = over, cfg.d_head**-0.5
        h, m, d = cfg.n_heads, cfg.d_model, cfg.d_head
        self.add_weights(W_Q=(h, m, d), W_K=(h, m, d), W_V=(h, m, d), W_O=(h, d, m))
        self.add_hooks("q", "k", "v", "attn_scores", "pattern", "z")

    def forward(
        self, stream: Float[Tensor, "table row column d_model"], n_context: int, *, fused: bool = False
    ) -> Float[Tensor, "table row column d_model"]:
        """Compute what the heads write; `fused` takes torch's kernel, without scores and patterns."""
        keys = stream if self.over == "columns" else stream[:, :n_context]
        q, k, v = (
            hook((read @ weight.movedim(0, 1).flatten(1)).unflatten(-1, weight.shape[::2]))
            for hook, read, weight in (
                (self.hook_q, stream, self.W_Q), (self.hook_k, keys, self.W_K), (self.hook_v, keys, self.W_V)
            )
        )  # fmt: skip
        if fused and keys.shape[1]:
            cells = "t a b h d -> (t a) h b d" if self.over == "columns" else "t b a h d -> (t a) h b d"
            mixed = F.scaled_dot_product_attention(*(rearrange(part, cells) for part in (q, k, v)), scale=self.scale)
            z = rearrange(mixed, " -> ".join(reversed(cells.split(" -> "))), t=len(stream))
        else:
            cells, summed = (
                ("t r i h, t r j h", "t r h i j") if self.over == "columns" else ("t i c h, t j c h", "t c h i j")
            )
            a, b = (f"{part} d" for part in cells.split(", "))
            pattern = self.hook_attn_scores(self.scale * einsum(q, k, f"{a}, {b} -> {summed}")).softmax(-1)
            z = einsum(self.hook_pattern(pattern), v, f"{summed}, {b} -> {a}")
        return self.hook_z(z).flatten(-2) @ self.W_O.flatten(0, 1)


class TableBlock(BlockPart):
    """Attention between columns, attention between rows, and an MLP, each with its norm and its residual update."""

    def __init__(self, cfg: TableConfig):
        super().__init__()
        parts = cfg.of_parts
        self.ln_col, self.col_attn = LayerNorm(parts), CellAttention(cfg, "columns")
        self.ln_row, self.row_attn = LayerNorm(parts), CellAttention(cfg, "rows")
        self.ln2, self.mlp = LayerNorm(parts), MLP(parts)
        self.add_hooks("resid_pre", "col_attn_out", "resid_col", "row_attn_out", "resid_mid", "mlp_out", "resid_post")

    def forward(
        self, stream: Float[Tensor, "table row column d_model"], n_context: int, *, fused: bool = False
    ) -> Float[Tensor, "table row column d_model"]:
        """Compute the stream after this block."""

        def normed(norm: LayerNorm, stream: Tensor) -> Tensor:
            return F.layer_norm(stream, norm.w.shape, norm.w, norm.b, norm.eps) if fused else norm(stream)

        stream = self.hook_resid_pre(stream)
        stream = stream + self.hook_col_attn_out(self.col_attn(normed(self.ln_col, stream), n_context, fused=fused))
        stream = self.hook_resid_col(stream)
        stream = stream + self.hook_row_attn_out(self.row_attn(normed(self.ln_row, stream), n_context, fused=fused))
        stream = self.hook_resid_mid(stream)
        return self.hook_resid_post(stream + self.hook_mlp_out(self.mlp(normed(self.ln2, stream))))


class TableTransformer(PromptedModel):
    """A transformer on tables with the interface of `HookedTransformer`; positions are rows, each with its cells.

    Columns are centred at the median of the rows with labels, divided by the mean distance from it, and squashed by
    asinh. Labels are read unchanged: they should be of size 1, as those of `TableRegression`. The stream is
    `[table row column d_model]` with the label's column last, in which the unknown labels are marked. Predictions are
    read off that column.

    Prompts have one query, the last row; `predict_tables` takes `Tables` with many, and missing cells. Hooks are
    `hook_embed` and in each block `hook_resid_pre`, `col_attn.hook_pattern` (and the other hooks of `CellAttention`),
    `hook_col_attn_out`, `hook_resid_col`, `row_attn.hook_pattern`, `hook_row_attn_out`, `hook_resid_mid`,
    `mlp.hook_pre`, `mlp.hook_post`, `hook_mlp_out` and `hook_resid_post`.

    Args:
        cfg: the configuration.

    Example:
        >>> model = TableTransformer(TableConfig(x_dim=4, n_context=50, n_layers=2, d_model=32))
        >>> tables = TableRegression(missing=0.1, n_queries=20).sample_tables(3, seed=0)
        >>> model.predict_tables(tables).shape
        torch.Size([3, 20, 1])
    """

    cfg: TableConfig
    vectorizes: ClassVar[bool] = False

    @checked
    def __init__(self, cfg: TableConfig, *, seed: int = 0):
        super().__init__()
        self.cfg = cfg
        with torch.device(cfg.device):
            self.W_cell = nn.Parameter(torch.zeros(2, cfg.d_model))  # of the value and the mark of a missing one
            self.b_cell = nn.Parameter(torch.zeros(cfg.d_model))
            self.W_label = nn.Parameter(torch.zeros(cfg.d_token, cfg.d_model))
            self.b_label = nn.Parameter(torch.zeros(cfg.d_model))
            self.hook_embed = HookPoint()
            self.blocks = nn.ModuleList(TableBlock(cfg) for _ in range(cfg.n_layers))
            self.ln_final = LayerNorm(cfg.of_parts)
            self.W_U = nn.Parameter(torch.zeros(cfg.d_model, cfg.d_out))
            self.b_U = nn.Parameter(torch.zeros(cfg.d_out))
        self.setup()
        self.to(device=cfg.device, dtype=cfg.torch_dtype)
        self.reset_parameters(seed)

    @checked
    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw new weights, the same for the same seed: normal with variance 1 / fan-in, smaller where parts write."""
        generator, smaller = torch.Generator().manual_seed(seed), (3 * self.cfg.n_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.is_meta:
                continue
            leaf = name.rsplit(".", 1)[-1]
            if leaf.startswith("W_"):
                fan_in = {"W_cell": 1, "W_label": 1, "W_O": self.cfg.d_model}.get(leaf, weight.shape[-2])
                fresh = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
                weight.copy_(fresh / math.sqrt(fan_in) * (smaller if leaf in ("W_O", "W_out") else 1))
            elif leaf == "w":
                weight.fill_(1)
            else:
                weight.zero_()

    # ---- tables in, predictions out ----

    @checked
    def encode(self, prompts: Prompts | Tables) -> Float[Tensor, "prompt row column d_token"]:
        """Encode prompts or tables as tokens, one for each cell, the label's column last; of any size.

        A cell's token is its scaled value and 0, or 0 and 1 if it is missing; a label's is the label and 0, or 0 and 1
        in the rows to predict.
        """
        n = prompts.n_context
        if (y_dim := prompts.ys.shape[2]) != self.cfg.y_dim:
            raise ValueError(f"the model takes y_dim={self.cfg.y_dim}, the prompts have {y_dim}")
        xs, ys = prompts.xs.to(self.cfg.device, torch.float64), prompts.ys.to(self.cfg.device, self.cfg.torch_dtype)
        known = ~xs.isnan()
        if n:
            centre = xs[:, :n].nanmedian(1, keepdim=True).values.nan_to_num(0.0)
            scale = (xs[:, :n] - centre).abs().nanmean(1, keepdim=True).nan_to_num(1.0)
            rounding = 4 * torch.finfo(xs.dtype).eps * centre.abs()
            xs = (xs - centre) / torch.where(scale > rounding, scale, 1.0)
        xs = torch.where(known, xs, 0.0).asinh().to(ys)  # in float64 until here: a cast may merge the column's values
        if not (xs.isfinite().all() and ys.isfinite().all()):
            raise ArgumentError(f"labels must fit {self.cfg.dtype}, and the differences of a column's cells float64")
        cells = torch.stack([xs, (~known).to(xs)], dim=-1)
        unknown = (torch.arange(xs.shape[1], device=xs.device) >= n).to(xs)[:, None]
        labels = torch.cat([ys * (1 - unknown), unknown.expand(len(ys), -1, -1)], dim=-1)
        # between a cell's value and its mark, where labels have several values
        padded = torch.cat([cells[..., :1], cells.new_zeros(*xs.shape, self.cfg.y_dim - 1), cells[..., 1:]], dim=-1)
        return torch.cat([padded, labels[:, :, None]], dim=2)

    @holds_models
    def embed_tokens(self, tokens: Tensor) -> Float[Tensor, "table row column d_model"]:
        """Compute the stream before the first layer."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 4 or tokens.shape[-1] != self.cfg.d_token:
            raise ArgumentError(f"tokens must be [table row column {self.cfg.d_token}], got {described(tokens)}")
        cells = tokens[:, :, :-1, [0, -1]] @ self.W_cell + self.b_cell
        labels = tokens[:, :, -1:] @ self.W_label + self.b_label
        return self.hook_embed(torch.cat([cells, labels], dim=2))

    def read_out(self, residual: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row d_out"]:
        """Compute outputs from the stream of the label's column: values, or logits of classes."""
        self._check_width(residual)
        return self.ln_final(residual) @ self.W_U + self.b_U

    @holds_models
    def forward(
        self,
        input: Float[Tensor, "table row column d"] | Prompts | Tables,
        return_type: Literal["logits"] | None = "logits",
        start_at_layer: int | None = None,
        *,
        stop_at_layer: int | None = None,
        at: At | slice = "positions",
    ) -> Any:
        """Compute the outputs for tokens.

        Args:
            input: tokens (see `encode`), prompts or tables; with `start_at_layer`, the stream before that layer, of
                prompts with one query.
            return_type: "logits" for the outputs, or None for a run for hooks only.
            start_at_layer: begin before this block; negative numbers count from the end.
            stop_at_layer: end before this block and return the stream there; negative numbers count from the end.
            at: rows of the outputs: all "positions", the rows to predict ("query" or "points"), or a slice.

        Returns:
            Outputs `[table row d_out]` (values, or logits of classes), or with `stop_at_layer` the stream
            `[table row column d_model]`.
        """
        if return_type not in ("logits", None):
            raise ValueError(f"return_type={return_type!r} is not one of ('logits', None) for a model of tables")
        start = self._layer("start_at_layer", start_at_layer, default=0)
        stop = self._layer("stop_at_layer", stop_at_layer, default=self.cfg.n_layers)
        tokens = self.encode(input) if isinstance(input, Prompts | Tables) else input
        if start_at_layer is None:
            stream, n_context = self.embed_tokens(tokens), int((tokens[0, :, -1, -1] == 0).sum()) if len(tokens) else 0
        else:
            if tokens.ndim != 4 or tokens.shape[-1] != self.cfg.d_model:
                expected = f"a stream [table row column {self.cfg.d_model}]"
                raise ValueError(f"with start_at_layer the input is {expected}, got {tuple(tokens.shape)}")
            stream, n_context = tokens.clone(), tokens.shape[1] - 1  # the first hook may change it in place
        rows = at if isinstance(at, slice) else slice(0 if at == "positions" else n_context, None)
        self._positions(at, stream.shape[1])  # refuses an unknown one
        fused = not self._is_hooked()
        for block in self.blocks[start:stop]:
            stream = block(stream, n_context, fused=fused)
        if return_type is None:
            return None
        return stream[:, rows] if stop_at_layer is not None else self.read_out(stream[:, rows, -1])

    @checked(undefined=True)
    def decode(self, outputs: Float[Tensor, "prompt row d_out"]) -> Float[Tensor, "prompt row y"]:
        """Return predictions of outputs: values, or probabilities of classes."""
        return outputs.softmax(-1) if self.cfg.predicts == "classes" else outputs

    @checked
    def predict(self, prompts: Prompts) -> Float[Tensor, "prompt y"]:
        """Predict the query of each prompt, in bounded memory: values, or probabilities of classes."""
        return self._in_parts(lambda part: self.decode(self.forward(part, at="query"))[:, -1], prompts)

    @checked
    @torch.no_grad()
    def predict_tables(self, tables: Tables) -> Float[Tensor, "table query y"]:
        """Predict the labels of all rows to predict, from one pass: values, or probabilities of classes."""
        return self.decode(self.forward(tables, at="query"))

    @checked
    def bytes_per_prompt(self, prompts: Prompts) -> float:
        """Return an upper estimate of the bytes of memory that a pass without gradients takes for each prompt."""
        n_rows, n_columns = prompts.n_context + 1, prompts.x_dim + 1
        of_scores = self.cfg.n_heads * max(n_rows, n_columns)
        return max(self.cfg.torch_dtype.itemsize, 4) * n_rows * n_columns * (self._numbers_per_position(1) + of_scores)

    def _numbers_per_position(self, n_pos: int) -> int:
        return 8 * self.cfg.d_model + 2 * (self.cfg.d_mlp or 0)

    # ---- the stream of the label's column ----

    def _at_positions(self, stream: Tensor, positions: slice) -> Float[Tensor, "prompt row d_model"]:
        return stream[:, positions, -1]

    def _query_streams_by_sharing(self, prompts: Prompts, queries: Tensor, points: range) -> Iterator[Tensor]:
        return self._query_streams_one_by_one(prompts, queries, points)
