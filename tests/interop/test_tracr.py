"""Compiled programs against tracr's own runs of them, and against the programs themselves."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mechicl.constructions import hide, weights_circuit
from mechicl.interop import CompiledTransformer, from_tracr
from tests.interop.compiling import AB, circuit_by_labels, compile_program, programs


@pytest.fixture(scope="module", params=list(programs()))
def compiled(request):
    return request.param, compile_program(request.param)


@pytest.fixture(scope="module")
def model(compiled) -> CompiledTransformer:
    return from_tracr(compiled[1])


def streams(model, ids):
    """The stream after the embedding and after each half of each layer, and the outputs."""
    outputs, cache = model.run_with_cache(ids)
    layers = range(model.cfg.n_layers)
    names = [f"blocks.{layer}.hook_resid_{half}" for layer in layers for half in ("mid", "post")]
    return [cache["blocks.0.hook_resid_pre"], *(cache[name] for name in names)], outputs


def test_streams_and_outputs_are_tracrs(compiled, model):
    words = list(np.random.default_rng(0).choice(AB, model.max_length))
    theirs = compiled[1].apply([model.beginning, *words])
    ours, outputs = streams(model, model.encode_words(words))
    expected = [theirs.input_embeddings, *theirs.residuals]
    for stream, residual in zip(ours, expected, strict=True):
        assert np.abs(stream.numpy() - np.array(residual)).max() <= 1e-6
    decoded = model.decode_outputs(outputs)[0]
    if model.values is None:
        np.testing.assert_allclose(decoded, theirs.decoded[1:], rtol=1e-6)
    else:
        assert decoded == theirs.decoded[1:]
    precise = from_tracr(compiled[1], dtype=torch.float64)  # without rounding errors
    for stream, residual in zip(streams(precise, model.encode_words(words))[0], expected, strict=True):
        assert stream.dtype == torch.float64
        assert np.abs(stream.numpy() - np.array(residual)).max() <= 1e-4


def test_the_model_computes_the_program(compiled, model):
    program, _, _, causal = programs()[compiled[0]]
    for length in (1, 3, model.max_length):
        ids = model.sample_ids(4, seed=length)[:, : length + 1]
        for row, values in zip(ids, model.decode_outputs(model(ids)), strict=True):
            words = [model.words[i] for i in row[1:].tolist()]
            expected = program(words)
            if causal:  # each output depends only on the words up to it
                expected = [program(words[: i + 1])[-1] for i in range(length)]
            for value, right in zip(values, expected, strict=True):
                assert right is None or value == (right if model.values else pytest.approx(right, abs=1e-4))


def test_the_circuit_is_that_of_the_compiled_blocks(compiled, model):
    program, words, length, _ = programs()[compiled[0]]
    nodes, edges = circuit_by_labels(program, set(words), length)
    assert set(model.true_circuit.nodes) == nodes
    assert set(model.true_circuit.edges) == edges
    assert len(model.true_circuit.edges) == len(edges)


def test_a_hidden_program_has_the_circuit_of_the_original(compiled):
    model = from_tracr(compiled[1], dtype=torch.float64)
    ids = model.sample_ids(8, seed=0)
    options: dict[str, Any]
    for seed, options in enumerate(({}, {"distractors": 2}, {"junk_prompts": ids})):
        hidden = hide(model, seed=seed, **options).model
        torch.testing.assert_close(hidden(ids), model(ids), rtol=0, atol=1e-8)
        assert weights_circuit(hidden) == model.true_circuit


def test_words_are_encoded_and_drawn_as_the_program_reads_them(compiled, model):
    assert model.vocabulary == AB
    ids = model.encode_words([["a", "b"], ["c", "c"]])
    assert [[model.words[i] for i in row] for row in ids.tolist()] == [["compiler_bos", *"ab"], ["compiler_bos", *"cc"]]
    assert ids.tolist() == [compiled[1].input_encoder.encode(["compiler_bos", *text]) for text in ("ab", "cc")]
    drawn = model.sample_ids(50, seed=3)
    assert drawn.shape == (50, model.max_length + 1)
    assert (drawn[:, 0] == ids[0, 0]).all()
    assert {model.words[i] for i in drawn[:, 1:].unique().tolist()} == set(AB)
    assert torch.equal(drawn, model.sample_ids(50, seed=3))
    assert not torch.equal(drawn, model.sample_ids(50, seed=4))


@pytest.fixture(scope="module")
def histogram():
    return compile_program("histogram")


def test_unknown_words_are_refused(histogram):
    model = from_tracr(histogram)
    for words, message in (
        (["a", "z"], "words must be in .'a', 'b', 'c'., got 'z'"),
        (["compiler_bos", "a"], "got 'compiler_bos'"),
        ([], "1 to 5"),
        (["a"] * 6, r"lengths \[6\]"),
        ([["a"], ["a", "b"]], r"lengths \[1, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model.encode_words(words)
    with pytest.raises(ValueError, match="n must be"):
        model.sample_ids(0, seed=0)
    with pytest.raises(ValueError, match=r"outputs must be \[prompt pos 6\]"):
        model.decode_outputs(torch.zeros(2, 3))


def test_other_objects_are_refused(histogram):
    with pytest.raises(TypeError, match="SimpleNamespace has no params, model_config"):
        from_tracr(SimpleNamespace())
    fields = {name: getattr(histogram, name) for name in vars(histogram)}
    sizes = vars(histogram.model_config)
    for changes, message in (
        ({"model_config": SimpleNamespace(**{**sizes, "layer_norm": True})}, "layer_norm=True"),
        ({"model_config": SimpleNamespace(**{**sizes, "activation_function": np.tanh})}, "tanh"),
        ({"model_config": SimpleNamespace(**{**sizes, "key_size": 3})}, "attn/query/w must be"),
        ({"model_config": SimpleNamespace(**{**sizes, "num_layers": 2})}, "layer_1/attn/query/w .* missing"),
        ({"params": {**histogram.params, "extra": {"w": np.ones(2)}}}, "unknown weights: .'extra/w'"),
        ({"get_compiled_model": lambda: None}, "does not contain its output space"),
        ({"input_encoder": SimpleNamespace(encoding_map={"a": 0})}, "compile it by"),
        ({"input_encoder": SimpleNamespace(encoding_map={"a": 1}, bos_token="a", pad_token=None)}, "must be 0 to 0"),
    ):
        with pytest.raises(ValueError, match=message):
            from_tracr(SimpleNamespace(**{**fields, **changes}))
    spoiled = {**histogram.params, "token_embed": {"embeddings": np.full((5, 18), np.nan)}}
    with pytest.raises(ValueError, match="finite"):
        from_tracr(SimpleNamespace(**{**fields, "params": spoiled}))


def test_biases_of_attention_are_kept_where_there_are_any(histogram):
    params = {
        name: {key: np.array(value) for key, value in weights.items()} for name, weights in histogram.params.items()
    }
    assert not from_tracr(histogram).cfg.attn_bias
    params["transformer/layer_0/attn/linear"]["b"] += np.arange(18)
    params["transformer/layer_0/attn/query"]["b"] += 0.1 * np.arange(5)
    params["transformer/layer_0/mlp/linear_1"]["b"] += 0.5
    changed = SimpleNamespace(**{**vars(histogram), "params": params})
    model = from_tracr(changed)
    ids = model.encode_words(["a", "b", "a"])
    theirs = histogram.forward(params, ids.numpy()).transformer_output.residuals
    for stream, residual in zip(streams(model, ids)[0][1:], theirs, strict=True):
        np.testing.assert_allclose(stream.numpy(), np.array(residual), atol=1e-5)
