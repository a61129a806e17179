"""Models on points with random weights, biases too."""

from mechicl.models import HookedTransformer, TransformerConfig


def random_model(**config) -> HookedTransformer:
    """Two linear layers of two heads in float64, but for what is named."""
    sizes = {"x_dim": 3, "n_context": 8, "n_layers": 2, "d_model": 8, "n_heads": 2, "initializer_range": 0.3}
    cfg = TransformerConfig(**{**sizes, "read_in": "linear", "read_out": "linear", "dtype": "float64", **config})
    model = HookedTransformer(cfg, seed=0)
    for name, weight in model.named_parameters():
        if ".b_" in name:
            weight.data.normal_()
    return model.eval()
