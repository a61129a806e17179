"""Run code that was written for TransformerLens 3 with mechicl's `HookedTransformer`."""

from mechicl.compat.transformer_lens import register_classes

__all__ = ["install"]


def install() -> None:
    """Put what TransformerLens 4 removed back into `transformer_lens`, as mechicl's own.

    For code that cannot be edited. Afterwards `from transformer_lens import HookedTransformer, HookedTransformerConfig,
    utils, loading, train`, `import transformer_lens.utils` and `from transformer_lens.HookedTransformer import ...`
    work in this process, in all modules that are imported later. The modules that TransformerLens 4 has (`patching`,
    `utilities` ...) stay the same, but `hook_points` gets `HookedRootModule` back. Calling it again changes nothing.

    Example:
        >>> install()  # doctest: +SKIP
        >>> from transformer_lens import HookedTransformer  # doctest: +SKIP
    """
    register_classes("transformer_lens")
