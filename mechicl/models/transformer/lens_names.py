"""A transformer's weights and methods under the names that TransformerLens' users and tools know."""

import itertools
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import FactoredMatrix
from transformer_lens.utilities import USE_DEFAULT_VALUE

from mechicl.base.annotations import described
from mechicl.base.arguments import checked
from mechicl.base.threads import holds_models
from mechicl.models.prompted import with_batch_axis
from mechicl.models.transformer import weight_processing
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.layers import Block, TiedUnembed, Unembed
from mechicl.models.transformer.lens_config import current_names
from mechicl.models.transformer.texts import TextModel
from mechicl.models.transformer.weight_processing import NamedWeights
from mechicl.prompts import Prompts


class HeadLabels(list[str]):
    """Names of heads: a list, which TransformerLens 3 calls."""

    def __call__(self) -> list[str]:
        """Return the names."""
        return list(self)


def _stacked(part: str, name: str, doc: str) -> property:
    def stack(model: "LensNames") -> Tensor:
        if name in ("b_Q", "b_K", "b_V", "b_O") and not model.cfg.attn_bias:
            weights = model.W_Q[:, 0, :, 0] if name == "b_O" else model.W_Q[:, :, 0]
            return torch.zeros_like(weights)
        return torch.stack([getattr(getattr(block, part), name) for block in model.blocks])

    return property(stack, doc=doc)


class LensNames(TextModel):
    """The stacked weights of all layers, and the rest of the protocol `TransformerLensModelWithWeights`."""

    cfg: TransformerConfig

    W_Q = _stacked("attn", "W_Q", "Query weights of all layers `[layer head d_model d_head]`.")
    W_K = _stacked("attn", "W_K", "Key weights of all layers `[layer head d_model d_head]`.")
    W_V = _stacked("attn", "W_V", "Value weights of all layers `[layer head d_model d_head]`.")
    W_O = _stacked("attn", "W_O", "Output weights of all layers `[layer head d_head d_model]`.")
    b_Q = _stacked("attn", "b_Q", "Query biases of all layers `[layer head d_head]`, 0 where they have none.")
    b_K = _stacked("attn", "b_K", "Key biases of all layers `[layer head d_head]`, 0 where they have none.")
    b_V = _stacked("attn", "b_V", "Value biases of all layers `[layer head d_head]`, 0 where they have none.")
    b_O = _stacked("attn", "b_O", "Output biases of all layers' attention `[layer d_model]`, 0 where they have none.")
    W_in = _stacked("mlp", "W_in", "First MLP weights of all layers `[layer d_model d_mlp]`.")
    b_in = _stacked("mlp", "b_in", "First MLP biases of all layers `[layer d_mlp]`.")
    W_out = _stacked("mlp", "W_out", "Second MLP weights of all layers `[layer d_mlp d_model]`.")
    b_out = _stacked("mlp", "b_out", "Second MLP biases of all layers `[layer d_model]`.")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"] | None:
        """Gate weights of all layers' gated MLPs; None without gates."""
        return torch.stack([block.mlp.W_gate for block in self.blocks]) if self.cfg.gated_mlp else None

    @property
    def QK(self) -> FactoredMatrix:
        """`W_Q W_Kᵀ` `[layer head d_model d_model]`, the bilinear form of the scores."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """`W_V W_O` `[layer head d_model d_model]`, the map from a head's input to its output."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def W_E(self) -> Float[Tensor, "token d_model"]:
        """The read-in as a matrix."""
        if self.cfg.read_in == "linear":
            return self.embed.W_E
        return torch.eye(self.cfg.d_token, self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.torch_dtype)

    @property
    def W_pos(self) -> Float[Tensor, "pos d_model"]:
        """The update of the stream by each position.

        Raises:
            AttributeError: positions are not added to the stream.
        """
        return self.pos_embed.rows(range(self.cfg.n_ctx)).to(self.W_E)

    @property
    def W_E_pos(self) -> Float[Tensor, "token_and_pos d_model"]:
        """`W_E` and `W_pos`, one below the other."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def b_U(self) -> Float[Tensor, "d_out"]:
        """The bias of the read-out, 0 where it has none."""
        return self.unembed.b_U if hasattr(self.unembed, "b_U") else self.W_U.new_zeros(self.cfg.d_out)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_out"]:
        """The read-out as a matrix (without the final norm)."""
        if self.cfg.read_out == "linear":
            return self.unembed.W_U
        eye = torch.eye(self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.torch_dtype)
        return -eye[:, self.cfg.y_slot]

    @checked
    def blocks_with(self, part: str) -> list[tuple[int, Block]]:
        """Return the blocks with a part ("attn", "mlp") and their numbers, as TransformerLens 4 does."""
        return [(layer, block) for layer, block in enumerate(self.blocks) if hasattr(block, part)]

    @property
    def all_head_labels(self) -> HeadLabels:
        """Names of all heads: "L0H0", "L0H1" ..."""
        return HeadLabels(f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads))

    @property
    def n_params_total(self) -> int:
        """Number of all parameters; `cfg.n_params` counts the matrices of the blocks."""
        return sum(weight.numel() for weight in self.parameters())

    @checked
    def all_composition_scores(
        self, mode: Literal["Q", "K", "V"]
    ) -> Float[Tensor, "layer head layer_after head_after"]:
        """Measure how much of each head's output is read by queries ("Q"), keys ("K") or values ("V") of later heads.

        `|W_OV W| / (|W_OV| |W|)` in Frobenius norms for the later head's W: `W_QK` (mode "Q"), `W_QKᵀ` ("K") or `W_OV`
        ("V"); 0 for heads that are not in a later layer. Source: Elhage et al. 2021, "A mathematical framework for
        transformer circuits".
        """
        reads = {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode]
        # |A M B| from the Gram matrices of A and B: pairs of heads need no decomposition
        A, O, R, B = (part.detach().double() for part in (self.OV.A, self.OV.B, reads.A, reads.B))
        of_A, of_B = A.mT @ A, B @ B.mT

        def norms(left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
            return ((left @ middle) * (middle @ right)).sum((-2, -1)).clamp(min=0).sqrt()

        eye = torch.eye(A.shape[-1]).to(A)
        outputs, inputs = norms(of_A, eye, O @ O.mT), norms(R.mT @ R, eye, of_B)
        scores = torch.zeros(*outputs.shape, *inputs.shape).to(self.W_O)
        for layer, after in itertools.combinations(range(self.cfg.n_layers), 2):
            both = norms(of_A[layer][:, None], O[layer][:, None] @ R[after], of_B[after])
            scores[layer, :, after] = (both / outputs[layer][:, None] / inputs[after]).to(scores)
        return scores

    @checked
    def tokens_to_residual_directions(
        self, tokens: str | int | Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch_out d_model"]:
        """Return the direction of the scaled stream that raises each output (a token's logit, or a dimension of y).

        A column of `W_U`, times the final norm's weights if these are not folded: the products with the parts of a
        stream, as in `ActivationCache.logit_attrs`, then sum to the logit less its bias (`output_biases`) whether
        `process_weights` was called or not. TransformerLens returns the column of `W_U`, which is the same with folded
        weights. One token, or a tensor of one, gives one direction `[d_model]`.
        """
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        directions = self.W_U if not hasattr(self.ln_final, "w") else self.ln_final.w[:, None] * self.W_U
        if isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = int(tokens)
        try:
            return directions.T[tokens]
        except IndexError as error:
            raise IndexError(f"tokens must be below {self.W_U.shape[1]}, got {described(tokens)}") from error

    @property
    def output_biases(self) -> Float[Tensor, "d_out"]:
        """The outputs of a zero stream: `b_U`, and the read-out of the final norm's bias if it is not folded."""
        return self.b_U + self.ln_final.b @ self.W_U if hasattr(self.ln_final, "b") else self.b_U

    @checked
    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d_model"]:
        """Sum the output biases of the blocks before `layer` (and of its attention, with `mlp_input`).

        Raises:
            ValueError: norms follow the biases, so that they are not what is written.
        """
        if self.cfg.norm_location != "before":
            raise ValueError(
                f"with norm_location={self.cfg.norm_location!r} norms change the biases before they are written"
            )
        bias = torch.zeros(self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.torch_dtype)
        for index in range(min(layer + mlp_input, self.cfg.n_layers)):
            block = self.blocks[index]
            if self.cfg.attn_bias:
                bias = bias + self.cfg.damping * block.attn.b_O
            if self.cfg.block_mlp and include_mlp_biases and index < layer:
                bias = bias + self.cfg.damping * block.mlp.b_out
        return bias

    @checked(undefined=True)
    def input_to_embed(
        self, input: str | list[str] | Tensor, prepend_bos: bool | None = USE_DEFAULT_VALUE, **_: Any
    ) -> tuple[Float[Tensor, "batch pos d_model"], Tensor, None, None]:
        """Return the stream before the first block, the tokens, and None for TransformerLens' shortformer and mask."""
        tokens = with_batch_axis(self.to_tokens(input, prepend_bos))
        return self.embed_tokens(tokens), tokens, None, None

    def run_with_cache(self, input: Tensor | Prompts | str | list[str], *args: Any, **kwargs: Any) -> Any:
        """Return outputs and an `ActivationCache` of every hook: see `LayeredModel.run_with_cache`.

        Token ids without a batch axis, and texts with `prepend_bos`, are accepted as by `forward`.
        """
        if isinstance(input, Prompts):
            read = self.encode(input)
        else:
            known = (kwargs.get(name) for name in ("prepend_bos", "padding_side", "past_kv_cache"))
            read, mask = self._read_texts(input, *known)
            if kwargs.get("attention_mask") is None:
                kwargs["attention_mask"] = mask
        return super().run_with_cache(read, *args, **kwargs)

    def to(self, *args: Any, print_details: bool = False, **kwargs: Any) -> Any:
        """Move the model to a device or dtype, as torch does; `print_details` is ignored."""
        return super().to(*args, **kwargs)

    # ---- processed weights ----

    @holds_models
    def process_weights_(
        self,
        fold_ln: bool | None = None,
        center_writing_weights: bool | None = None,
        center_unembed: bool | None = None,
        refactor_factored_attn_matrices: bool = False,
        *,
        fold_value_biases: bool | None = None,
        verbose: bool = False,
    ) -> None:
        """Process this model's weights in place, as TransformerLens 3 and 4 do; see `process_weights` for the steps.

        The parameters are new: an optimizer made before has the old ones. Hooks stay attached.
        `models.process_weights(model)` makes another model instead. `verbose` is ignored.

        Raises:
            ValueError: a step set to True would change the outputs.
        """
        processed = weight_processing.process_weights(
            self, fold_ln=fold_ln, center_writing_weights=center_writing_weights, center_unembed=center_unembed,
            fold_value_biases=fold_value_biases, refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )  # fmt: skip
        if isinstance(self.unembed, TiedUnembed) and not processed.cfg.tie_word_embeddings:
            cast(Any, self.unembed).__class__ = self._kinds["unembed"] = Unembed
        for name, part in processed.named_modules():
            mine = self.get_submodule(name)
            mine._parameters, mine._buffers = part._parameters, part._buffers
            vars(mine).update({key: value for key, value in vars(part).items() if key in ("cfg", "has_weights")})
        self.setup()

    process_weights = process_weights_  # TransformerLens 4's name for it

    def load_and_process_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        fold_ln: bool | None = None,
        center_writing_weights: bool | None = None,
        center_unembed: bool | None = None,
        fold_value_biases: bool | None = None,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Load weights, then process them in place; see `process_weights_`. Weights that are missing stay unchanged.

        Raises:
            ValueError: names or shapes are not the model's (also a RuntimeError), or as for `process_weights_`.
        """
        self.load_state_dict(self.state_dict() | current_names(self.cfg, state_dict))
        steps = (fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices)
        self.process_weights_(*steps, fold_value_biases=fold_value_biases)

    @checked(undefined=True)
    def fold_layer_norm(
        self, state_dict: NamedWeights, fold_biases: bool = True, center_weights: bool = True
    ) -> NamedWeights:
        """Return a state dict in which the norms' weights and biases are in the weights that read them.

        Those are centred over d_model after a layer norm, and not after a root-mean-square norm, which has no biases
        either. A norm of a part's outputs has no reader and stays. The methods for single steps change neither the
        model nor their argument, and do not ask whether the outputs stay the same: `process_weights` does.

        Args:
            state_dict: weights in TransformerLens' names, as `model.state_dict()`.
            fold_biases: fold the biases too.
            center_weights: centre the weights that read a layer norm.
        """
        return weight_processing.fold_layer_norm(state_dict, self.cfg, fold_biases, center_weights)

    @checked(undefined=True)
    def center_writing_weights(self, state_dict: NamedWeights) -> NamedWeights:
        """Return a state dict without the mean over d_model of all weights that write to the stream."""
        return weight_processing.center_writing_weights(state_dict, self.cfg)

    @checked(undefined=True)
    def center_unembed(self, state_dict: NamedWeights) -> NamedWeights:
        """Return a state dict without the mean over the vocabulary of `W_U` and `b_U`."""
        return weight_processing.center_unembed(state_dict, self.cfg)

    @checked(undefined=True)
    def fold_value_biases(self, state_dict: NamedWeights) -> NamedWeights:
        """Return a state dict with the value biases moved into the output biases of attention."""
        return weight_processing.fold_value_biases(state_dict, self.cfg)

    @checked(undefined=True)
    def refactor_factored_attn_matrices(self, state_dict: NamedWeights) -> NamedWeights:
        """Return a state dict with orthogonal factors of `W_Q W_Kᵀ` and `W_V W_O` (not with rotary positions)."""
        return weight_processing.refactor_factored_attn_matrices(state_dict, self.cfg)

    def init_weights(self) -> None:
        """Draw new weights by the config's seed, or else by a seed from torch's global generator."""
        seed = self.cfg.seed
        self.reset_parameters(int(torch.randint(2**31, ())) if seed is None else seed)
