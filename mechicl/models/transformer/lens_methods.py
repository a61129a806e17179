"""Methods that TransformerLens' users call on a model: embedding, processed weights, text, generation."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.utilities import USE_DEFAULT_VALUE

from mechicl.models.holding import holds_models
from mechicl.models.prompted import with_batch_axis
from mechicl.models.transformer import weight_processing
from mechicl.models.transformer.config import TransformerConfig
from mechicl.models.transformer.generation import Generating
from mechicl.models.transformer.weight_processing import State
from mechicl.prompts import Prompts


class LensMethods(Generating):
    """The embedding and processed weights by TransformerLens' names."""

    cfg: TransformerConfig
    setup: Callable[[], None]
    has_hooks: Callable[[], bool]
    embed_tokens: Callable[..., Tensor]
    _parameters: dict[str, nn.Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, nn.Module | None]

    def input_to_embed(
        self, input: str | list[str] | Tensor, prepend_bos: bool | None = USE_DEFAULT_VALUE, **_: Any
    ) -> tuple[Float[Tensor, "batch pos d_model"], Tensor, None, None]:
        """The stream before the first block, the tokens, and two Nones (TransformerLens' shortformer and mask)."""
        tokens = with_batch_axis(self.to_tokens(input, prepend_bos))
        return self.embed_tokens(tokens), tokens, None, None

    def run_with_cache(self, input: Tensor | Prompts | str | list[str], *args: Any, **kwargs: Any) -> Any:
        """Outputs and an `ActivationCache` of every hook: see `LayeredModel.run_with_cache`.

        Token ids without a batch axis, and texts with `prepend_bos`, are taken as `forward` takes them.
        """
        read = with_batch_axis(self.to_tokens(input, kwargs.get("prepend_bos")))
        return cast(Any, super()).run_with_cache(read, *args, **kwargs)

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

        Parameters are new ones: an optimizer made before knows the old ones. `models.process_weights(model)` gives
        another model instead, and leaves this one as it is. `verbose` is ignored.

        Raises:
            ValueError: hooks are attached, which would get lost; or a step that is asked for would change the outputs.
        """
        if self.has_hooks():
            raise ValueError("the hooks that are attached would get lost: call reset_hooks(including_permanent=True)")
        processed = weight_processing.process_weights(
            self,
            fold_ln=fold_ln,
            center_writing_weights=center_writing_weights,
            center_unembed=center_unembed,
            fold_value_biases=fold_value_biases,
            refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )
        for name in ("_parameters", "_buffers", "_modules", "cfg"):
            setattr(self, name, getattr(processed, name))
        self.setup()

    process_weights = process_weights_  # TransformerLens 4's name for it

    def fold_layer_norm(self, state_dict: State) -> State:
        """A state dict of this model with its norms folded: see `process_weights`."""
        return self._processed(weight_processing.fold_layer_norm, state_dict)

    def center_writing_weights(self, state_dict: State) -> State:
        """A state dict of this model whose writing weights have mean 0: see `process_weights`."""
        return self._processed(weight_processing.center_writing_weights, state_dict)

    def center_unembed(self, state_dict: State) -> State:
        """A state dict of this model whose read-out has mean 0 over the vocabulary: see `process_weights`."""
        return self._processed(weight_processing.center_unembed, state_dict)

    def fold_value_biases(self, state_dict: State) -> State:
        """A state dict of this model with its value biases in the output biases: see `process_weights`."""
        return self._processed(weight_processing.fold_value_biases, state_dict)

    def refactor_factored_attn_matrices(self, state_dict: State) -> State:
        """A state dict of this model with orthogonal factors of its heads' products: see `process_weights`."""
        return self._processed(weight_processing.refactor_factored_attn_matrices, state_dict)

    def load_and_process_state_dict(self, state_dict: Mapping[str, Tensor], **steps: Any) -> None:
        """Load weights and process them: `load_state_dict`, then `process_weights_(**steps)`."""
        self.load_state_dict(state_dict)  # type: ignore[attr-defined]
        self.process_weights_(**steps)

    def _processed(self, step: Callable[[State, TransformerConfig], State], state_dict: State) -> State:
        try:
            return step(state_dict, self.cfg)
        except (KeyError, IndexError, RuntimeError) as error:  # a name that is not there, or another shape
            raise ValueError(f"state_dict is not one of this model, which {step.__name__} takes: {error}") from error
