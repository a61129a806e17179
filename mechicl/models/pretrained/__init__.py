"""Language models of other projects as `HookedTransformer`s: families of `transformers`, and TransformerLens' own."""
