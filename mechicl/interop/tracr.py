"""Programs compiled to transformers by tracr (Lindner et al. 2023), with their vocabularies and circuits."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from mechicl.base.arguments import Count, checked
from mechicl.constructions.supports import WeightsCircuit, weights_circuit
from mechicl.models import HookedTransformer, TransformerConfig

PARTS = {"query": "Q", "key": "K", "value": "V", "linear": "O"}
ATTRIBUTES = ("params", "model_config", "residual_labels", "input_encoder", "output_encoder", "get_compiled_model")
Word = str | int | float | bool


class CompiledTransformer(HookedTransformer):
    """A compiled program: a `HookedTransformer` of token ids with its vocabulary and its circuit.

    Attributes:
        words: the word of each token id, including the beginning and a filler, which no input contains.
        beginning: the word that every input begins with.
        filler: the word for padding, which the model never reads.
        values: the value of each output dimension; None if the output is one number.
    """

    words: tuple[Word, ...] = ()
    beginning: Word = ""
    filler: Word | None = None
    values: tuple[Any, ...] | None = None

    @property
    def vocabulary(self) -> tuple[Word, ...]:
        """The words of inputs, without the beginning and the filler."""
        return tuple(word for word in self.words if word not in (self.beginning, self.filler))

    @property
    def max_length(self) -> int:
        """Largest number of words of an input, not counting the beginning."""
        return self.cfg.n_ctx - 1

    @cached_property
    def true_circuit(self) -> WeightsCircuit:
        """The nodes and edges of the program, read off the weights at first use; see `weights_circuit`."""
        return weights_circuit(self)

    def _ids(self) -> dict[Word, int]:
        if not self.words:
            raise ValueError(f"this {type(self).__name__} has no words: only from_tracr makes such models")
        return {word: i for i, word in enumerate(self.words)}

    @checked
    def encode_words(self, words: Sequence[Any]) -> Int[Tensor, "prompt pos"]:
        """Convert the words of one input, or of several of the same length, to token ids that start with `beginning`.

        Args:
            words: the words of an input, or a list of inputs.
        """
        ids = self._ids()
        several = all(isinstance(text, Sequence) and not isinstance(text, str) for text in words)
        texts = [list(text) for text in words] if several else [list(words)]
        lengths = sorted({len(text) for text in texts})
        if not texts or lengths[0] < 1 or len(lengths) > 1 or lengths[-1] > self.max_length:
            raise ValueError(
                f"words must be inputs of one length, 1 to {self.max_length}, without {self.beginning!r}; got lengths "
                f"{lengths}"
            )
        unknown = sorted({repr(word) for text in texts for word in text if word not in self.vocabulary})
        if unknown:
            raise ValueError(f"words must be in {list(self.vocabulary)}, got {', '.join(unknown)}")
        return torch.tensor([[ids[self.beginning], *(ids[word] for word in text)] for text in texts])

    @checked
    def decode_outputs(self, outputs: Tensor) -> list[list[Any]]:
        """Convert outputs `[prompt pos d_out]` to lists of the program's values (or numbers), one for each word."""
        if outputs.ndim != 3 or outputs.shape[-1] != self.cfg.d_out:
            raise ValueError(f"outputs must be [prompt pos {self.cfg.d_out}], got {tuple(outputs.shape)}")
        if self.values is None:
            return outputs[:, 1:, 0].tolist()
        return [[self.values[i] for i in row] for row in outputs[:, 1:].argmax(-1).tolist()]

    @checked
    def sample_ids(self, n: Count, *, seed: int) -> Int[Tensor, "prompt pos"]:
        """Draw token ids of `n` inputs of `max_length` uniform words, after `beginning`."""
        ids = self._ids()
        readable = torch.tensor([ids[word] for word in self.vocabulary])
        drawn = torch.randint(len(readable), (n, self.max_length), generator=torch.Generator().manual_seed(seed))
        return torch.cat([torch.full((n, 1), ids[self.beginning]), readable[drawn]], dim=1)


@checked
def from_tracr(compiled: Any, *, dtype: torch.dtype = torch.float32) -> CompiledTransformer:
    """Convert a program that tracr compiled to a `HookedTransformer` with the same residual stream.

    Its algorithm is known, so it is ground truth for analyses. tracr itself is not needed for the conversion. Every
    layer has attention and an MLP; parts that the program does not need have zero weights. Source: Lindner et al. 2023,
    section 3.

    Args:
        compiled: the result of `tracr.compiler.compiling.compile_rasp_to_model`.
        dtype: dtype of the weights. In float32, as in tracr, rounding errors are of order 1e-5, since MLPs take
            differences of numbers as large as 100. In float64 they are negligible.

    Returns:
        A `CompiledTransformer` in eval mode: `encode_words` turns words into token ids, `decode_outputs` outputs into
        the program's values, `true_circuit` has the program's nodes and edges, and `stream_labels` are tracr's names of
        the residual stream's dimensions. Outputs have one column per value of a categorical program, a single column
        for a numerical one.

    Raises:
        TypeError: compiled is not a compiled model.
        ValueError: the model has norms or an activation other than ReLU, or inconsistent or non-finite weights.

    Example:
        >>> from tracr.compiler.compiling import compile_rasp_to_model
        >>> from tracr.rasp import rasp
        >>> same = rasp.Select(rasp.tokens, rasp.tokens, rasp.Comparison.EQ)
        >>> model = from_tracr(compile_rasp_to_model(rasp.SelectorWidth(same), {"a", "b"}, max_seq_len=4))
        >>> model.decode_outputs(model(model.encode_words(["a", "b", "a"])))
        [[2, 1, 2]]
        >>> print(model.true_circuit.edges[-1])
        MLP 0 → output
    """
    missing = [name for name in ATTRIBUTES if not hasattr(compiled, name)]
    if missing:
        raise TypeError(
            f"compiled must be the result of tracr's compile_rasp_to_model; {type(compiled).__name__} has no "
            f"{', '.join(missing)}"
        )
    _check_kind(compiled)
    weights = {
        f"{module}/{name}": torch.from_numpy(np.array(weight, dtype=np.float64))
        for module, named in compiled.params.items() for name, weight in named.items()
    }  # fmt: skip
    sizes, attention_biases = compiled.model_config, [weights[n] for n in weights if "/attn/" in n and n.endswith("/b")]
    words, values = _listed(compiled.input_encoder), _listed(compiled.output_encoder)
    read_out = _read_out(compiled)
    width, n_ctx = len(compiled.residual_labels), len(weights.get("pos_embed/embeddings", ()))
    cfg = TransformerConfig(
        prompt_format="token_ids", d_vocab=len(words or ()), d_vocab_out=read_out.shape[1], n_ctx=n_ctx,
        n_layers=sizes.num_layers, n_heads=sizes.num_heads, d_model=width, d_head=sizes.key_size,
        d_mlp=sizes.mlp_hidden_size, act_fn="relu", attention="softmax", normalization_type=None,
        keys="causal" if sizes.causal else "full", attn_bias=any(bool(bias.any()) for bias in attention_biases),
        read_bias=False, initializer_range=0.0, dtype=dtype,
    )  # fmt: skip
    model, names = CompiledTransformer(cfg), _our_names(cfg)
    state = {ours: _reshaped(weights, theirs, cfg) for theirs, ours in names.items()}
    if unknown := sorted(weights.keys() - names.keys()):
        raise ValueError(f"the compiled model has unknown weights: {unknown[:5]}")
    if not cfg.attn_bias:
        state = {name: weight for name, weight in state.items() if ".attn.b_" not in name}
    model.load_state_dict(state | {"unembed.W_U": read_out})
    model.words, model.values = words or (), values
    model.beginning, model.filler = compiled.input_encoder.bos_token, compiled.input_encoder.pad_token
    model.stream_labels = tuple(compiled.residual_labels)
    return model.eval()


def _our_names(cfg: TransformerConfig) -> dict[str, str]:
    """The names of all weights, by tracr's, which are haiku's."""
    names = {"token_embed/embeddings": "embed.W_E", "pos_embed/embeddings": "pos_embed.W_pos"}
    for layer in range(cfg.n_layers):
        theirs, ours = f"transformer/layer_{layer}", f"blocks.{layer}"
        for kind, letter in (("w", "W"), ("b", "b")):
            names |= {f"{theirs}/attn/{part}/{kind}": f"{ours}.attn.{letter}_{PARTS[part]}" for part in PARTS}
            names[f"{theirs}/mlp/linear_1/{kind}"] = f"{ours}.mlp.{letter}_in"
            names[f"{theirs}/mlp/linear_2/{kind}"] = f"{ours}.mlp.{letter}_out"
    return names


def _reshaped(weights: Mapping[str, Tensor], name: str, cfg: TransformerConfig) -> Tensor:
    weight = weights.get(name)
    if weight is None or not weight.isfinite().all():
        raise ValueError(f"{name} must be finite numbers; it is {'missing' if weight is None else 'not finite'}")
    *_, part, kind = name.split("/")
    if part not in PARTS or (part == "linear" and kind == "b"):
        return weight
    axis = -1 if part != "linear" else 0
    if weight.shape[axis] != cfg.n_heads * cfg.d_head:
        raise ValueError(f"{name} must be of {cfg.n_heads} heads of width {cfg.d_head}, got {list(weight.shape)}")
    heads = weight.unflatten(axis, (cfg.n_heads, cfg.d_head))
    return heads.movedim(1, 0) if part != "linear" and kind == "w" else heads


def _check_kind(compiled: Any) -> None:
    activation = compiled.model_config.activation_function
    tried = [float(number) for number in activation(np.array([-1.0, 0.0, 0.5, 2.0]))]
    if compiled.model_config.layer_norm or tried != [0.0, 0.0, 0.5, 2.0]:
        raise ValueError(
            f"compiled must have no norms, and ReLU in its MLPs, got layer_norm={compiled.model_config.layer_norm} and "
            f"{getattr(activation, '__name__', activation)}"
        )
    if getattr(compiled.input_encoder, "bos_token", None) is None:
        raise ValueError("the compiled model has no bos_token: compile it by compile_rasp_to_model")


def _listed(encoder: Any) -> tuple[Any, ...] | None:
    """Return the words of an encoder in the order of their ids; None if it has no ids, as for numbers."""
    ids = getattr(encoder, "encoding_map", None)
    if ids is None:
        return None
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"the ids of {len(ids)} words must be 0 to {len(ids) - 1}, got {sorted(ids.values())}")
    return tuple(sorted(ids, key=ids.__getitem__))


def _read_out(compiled: Any) -> Tensor:
    # No attribute of a compiled model contains its output dimensions, but the closure that makes its embeddings
    # contains the two spaces.
    spaces = inspect.getclosurevars(compiled.get_compiled_model).nonlocals
    if not {"residual_space", "output_space"} <= set(spaces):
        raise ValueError("the compiled model does not contain its output space: is it of another version of tracr?")
    rows = {direction: i for i, direction in enumerate(spaces["residual_space"].basis)}
    read_out = torch.zeros(len(rows), len(spaces["output_space"].basis), dtype=torch.float64)
    for column, direction in enumerate(spaces["output_space"].basis):
        read_out[rows[direction], column] = 1
    return read_out
