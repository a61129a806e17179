"""TransformerLens' cache of activations, without the sums that would be wrong."""

from typing import Any

from transformer_lens import ActivationCache


class SummingCache(ActivationCache):
    """An `ActivationCache` that refuses to split a stream into parts that do not add up to it.

    TransformerLens takes what heads, neurons and biases write before the norm that follows them in Gemma 2 and OLMo 2,
    and does not know clipped tokens and an MLP on the input.
    """

    def decompose_resid(self, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens; a ValueError for clipped tokens and for an MLP on the input."""
        self._refuse("decompose_resid", clips=True)
        return super().decompose_resid(*args, **kwargs)

    def stack_head_results(self, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens; a ValueError if a norm follows the heads."""
        self._refuse("stack_head_results", norms=True)
        return super().stack_head_results(*args, **kwargs)

    def stack_neuron_results(self, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens; a ValueError if a norm follows the neurons."""
        self._refuse("stack_neuron_results", norms=True)
        return super().stack_neuron_results(*args, **kwargs)

    def get_full_resid_decomposition(self, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens; a ValueError where one of the other methods has one."""
        self._refuse("get_full_resid_decomposition", norms=True, clips=True)
        return super().get_full_resid_decomposition(*args, **kwargs)

    def _refuse(self, method: str, *, norms: bool = False, clips: bool = False) -> None:
        plain = {"norm_location": "before"} if norms else {}
        plain |= {"mlp_location": "blocks", "token_clip": None} if clips else {}
        for name, value in plain.items():
            if (own := getattr(self.model.cfg, name, value)) != value:
                raise ValueError(
                    f"{method}: with {name}={own!r} these parts do not add up to the stream; accumulated_resid and "
                    f"mechicl.analysis.layers.direct_logit_attribution are right"
                )
