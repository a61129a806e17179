"""Every field of a comparison against loops over queries, layers, heads and pairs of tokens."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.finetuning import (
    FineTuning,
    FineTuningComparison,
    compare_with_finetuning,
    fine_tune,
)
from mechicl.statistics import interval
from tests.analysis.finetuning.oracles import KINDS, added, cached, compared, expanded, model_on_tokens, token_shots
from tests.analysis.interventions.oracles import bridge, lstm, model_of

TUNINGS = {
    "plain": FineTuning(0.1, epochs=2),
    "linearized": FineTuning(0.05, method="linearized", epochs=2),
    "per_layer": FineTuning(0.1, method="per_layer"),
    "all": FineTuning(0.05, parameters="all"),
}


def assert_fields(found, expected, atol=1e-6):
    assert {field.name for field in dataclasses.fields(found)} == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name).numpy(), value, atol=atol, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field(kind):
    model, shots = model_on_tokens(kind), token_shots()
    tuned = fine_tune(model, shots, TUNINGS["plain"])
    found = compare_with_finetuning(model, shots, tuned, seed=3)
    after = cached(added(model, tuned.changes))
    assert_fields(found, compared(model.cfg.n_layers, shots, cached(model), after, seed=3))


@pytest.mark.parametrize(
    ("kind", "method"),
    [("softmax", "linearized"), ("linear", "linearized"), ("gpt2", "linearized"), ("llama", "linearized"),
     ("softmax", "per_layer"), ("gpt2", "per_layer"), ("softmax", "all"), ("gpt2", "all")],
)  # fmt: skip
def test_every_field_however_it_was_tuned(kind, method):
    model, shots = model_on_tokens(kind), token_shots()
    tuned = fine_tune(model, shots, TUNINGS[method])
    found = compare_with_finetuning(model, shots, TUNINGS[method])
    after = expanded(model, tuned.changes) if method == "linearized" else cached(added(model, tuned.changes))
    assert_fields(found, compared(model.cfg.n_layers, shots, cached(model), after, seed=0))


@pytest.mark.parametrize("kind", ["softmax", "gpt2"])
def test_batches_make_no_difference(kind):
    model, shots = model_on_tokens(kind), token_shots(queries=(1, 3, 2, 3, 2, 2, 1))
    tuned = fine_tune(model, shots, TUNINGS["plain"])
    one = compare_with_finetuning(model, shots, tuned, memory=1.3e5)
    for memory in (3e5, 2**30):
        assert_fields(
            compare_with_finetuning(model, shots, tuned, memory=memory),
            {name: of.numpy() for name, of in one.samples().items()},
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tokens_that_examples_share_tie_whatever_the_batches(dtype):
    """Read alone, demonstrations that begin alike have the same queries there, but for rounding."""
    model = model_on_tokens("softmax", n_ctx=80, dtype=dtype)
    shots = token_shots((6, 8, 7, 9, 6, 8), (2, 3), prefix=4)
    tuned = fine_tune(model, shots, TUNINGS["plain"])
    one, many = (compare_with_finetuning(model, shots, tuned, memory=memory) for memory in (1e6, 2**30))
    expected = compared(2, shots, cached(model), cached(added(model, tuned.changes)), seed=0)
    for name in ("rank_correlation", "head_rank_correlation"):
        assert_close(getattr(one, name), getattr(many, name), atol=1e-9, rtol=0, msg=name)
        if dtype == "float64":
            np.testing.assert_allclose(getattr(one, name), expected[name], atol=1e-9, err_msg=name)


def test_the_same_seed_gives_the_same_baselines():
    model, shots = model_on_tokens("softmax"), token_shots()
    a, b, c = (compare_with_finetuning(model, shots, TUNINGS["plain"], seed=seed) for seed in (0, 0, 1))
    for name, of in a.samples().items():
        assert torch.equal(of.nan_to_num(7), getattr(b, name).nan_to_num(7))
        assert torch.equal(of.nan_to_num(7), getattr(c, name).nan_to_num(7)) != name.startswith("random")


def test_what_is_not_defined_is_nan_and_nothing_else():
    model, shots = model_on_tokens("softmax"), token_shots(queries=(1, 1, 2))
    still = compare_with_finetuning(model, shots, FineTuning(learning_rate=0.0))
    for name, of in still.samples().items():
        undefined = name in ("update_similarity", "head_update_similarity")
        if name.startswith("map_similarity"):  # one score has no direction but a sign
            assert of[..., :2].isnan().all()
            assert of[..., 2].isfinite().all()
        else:
            assert of.isnan().all() if undefined else of.isfinite().all(), name
    assert torch.equal(still.zero_shot_loss, still.finetuned_loss)
    assert torch.equal(still.map_similarity_before[..., 2], still.map_similarity_after[..., 2])
    assert torch.equal(still.rank_correlation, still.rank_correlation_before)
    assert np.isnan(still.recall().mean)
    with torch.no_grad():  # flat attention: no scores
        for block in model.blocks:
            block.attn.W_Q.zero_()
            block.attn.b_Q.zero_()
    flat = compare_with_finetuning(model, shots, TUNINGS["plain"])
    assert flat.rank_correlation.isnan().all()
    assert flat.head_rank_correlation.isnan().all()
    assert flat.random_rank_correlation.isnan().all()
    assert flat.map_similarity_before.isnan().all()
    assert flat.update_similarity.isfinite().all()


def test_one_token_of_demonstrations_has_no_ranks():
    found = compare_with_finetuning(model_on_tokens("softmax"), token_shots((1,), (1, 2)), FineTuning(0.1))
    assert found.rank_correlation.isnan().all()
    assert found.update_similarity.isfinite().all()


def test_intervals_of_layers_and_heads():
    found = compare_with_finetuning(model_on_tokens("softmax"), token_shots(), TUNINGS["plain"])
    layers, heads = found.by_layer("map_similarity_after"), found.by_head("map_similarity_after")
    for layer, of in enumerate(found.map_similarity_after.numpy()):
        assert layers[layer].mean == pytest.approx(np.mean(of), nan_ok=True)
        assert [head.mean for head in heads[layer]] == pytest.approx(list(np.mean(of, axis=-1)), nan_ok=True)
        assert layers[layer].n == of.shape[-1]
    assert found.by_layer("update_similarity")[1] == interval(found.update_similarity[1])
    with pytest.raises(ValueError, match="'update_similarity' is not one of \\['head_update_similarity'"):
        found.by_head("update_similarity")
    with pytest.raises(ValueError, match="'zero_shot_loss' is not one of"):
        found.by_layer("zero_shot_loss")


def test_comparisons_are_put_together_and_tabled():
    model = model_on_tokens("softmax")
    parts = [compare_with_finetuning(model, token_shots(seed=seed), TUNINGS["plain"]) for seed in range(2)]
    both = FineTuningComparison.concatenate(parts)
    for name, of in both.samples().items():
        assert_close(of, torch.cat([getattr(part, name) for part in parts], -1), equal_nan=True)
    table = both.to_dataframe()
    assert len(table) == 10
    assert table["update_similarity[1]"].tolist() == both.update_similarity[1].tolist()
    assert table["head_rank_correlation[0,1]"].tolist() == both.head_rank_correlation[0, 1].tolist()
    assert both.intervals()["in_context_loss"].mean == pytest.approx(table["in_context_loss"].mean())
    better = [i for i in range(10) if both.finetuned_score[i] > both.zero_shot_score[i]]
    too = [i for i in better if both.in_context_score[i] > both.zero_shot_score[i]]
    assert both.recall().mean == pytest.approx(len(too) / len(better))
    with pytest.raises(ValueError, match="no comparisons"):
        FineTuningComparison.concatenate([])


@pytest.mark.parametrize(("kind", "method"), [("softmax", "plain"), ("softmax", "linearized"), ("gpt2", "plain")])
def test_other_types_of_ids(kind, method):
    model, shots = model_on_tokens(kind), token_shots()
    expected = compare_with_finetuning(model, shots, TUNINGS[method])
    narrow = {
        field.name: tuple(of.int() for of in value) if isinstance(value, tuple) else value.int()
        for field in dataclasses.fields(shots)
        if field.name not in ("query_lengths", "example_spans") and (value := getattr(shots, field.name)) is not None
    }
    found = compare_with_finetuning(model, dataclasses.replace(shots, **narrow), TUNINGS[method])
    assert_fields(found, {name: of.numpy() for name, of in expected.samples().items()})


# ---- what is refused ----


def test_a_prompt_that_is_too_long():
    shots = token_shots((3, 3, 3, 3), (2,))
    for kind in ("softmax", "gpt2", "llama"):
        with pytest.raises(ValueError, match=r"prompt of 23 tokens is longer than the model's context of n_ctx=16"):
            compare_with_finetuning(model_on_tokens(kind), shots, TUNINGS["plain"])
    free = model_on_tokens("softmax", positional_embedding_type="none")
    assert compare_with_finetuning(free, shots, TUNINGS["plain"]).update_similarity.isfinite().all()


def test_models_that_cannot_be_compared():
    shots = token_shots()
    with pytest.raises(TypeError, match="Linear has no hooks"):
        compare_with_finetuning(torch.nn.Linear(2, 2), shots, TUNINGS["plain"])
    with pytest.raises(ValueError, match=r"the model has no hook 'blocks.0.hook_attn_out'"):
        compare_with_finetuning(lstm(), shots, TUNINGS["plain"])
    for kind in ("softmax", "gpt2"):
        model = model_on_tokens(kind).train()
        with pytest.raises(ValueError, match=r"training mode .*: call model.eval\(\) first"):
            compare_with_finetuning(model, shots, TUNINGS["plain"])


def test_what_another_model_was_tuned_to():
    shots = token_shots()
    for method in ("plain", "linearized"):
        tuned = fine_tune(model_on_tokens("deep"), shots, TUNINGS[method])
        with pytest.raises(ValueError, match=r"the model has no parameters \['blocks.2"):
            compare_with_finetuning(model_on_tokens("softmax"), shots, tuned)
        wide = model_of("ids", d_vocab=20, n_ctx=16, n_layers=4, d_head=5)
        with pytest.raises(ValueError, match=r"a change of \(2, 8, 4\) for the parameter 'blocks.0.attn.W_K'"):
            compare_with_finetuning(wide, shots, tuned)


def test_a_bridge_in_float32():
    model, shots = bridge(), token_shots()
    found = compare_with_finetuning(model, shots, TUNINGS["plain"])
    expected = compare_with_finetuning(model_on_tokens("gpt2"), shots, TUNINGS["plain"])
    for name in ("finetuned_loss", "update_similarity", "map_similarity_after", "random_update_similarity"):
        assert_close(getattr(found, name), getattr(expected, name), atol=1e-3, rtol=1e-3, equal_nan=True)
