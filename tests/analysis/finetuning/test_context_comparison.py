"""Every field of a comparison against loops over queries, layers, heads and pairs of tokens."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from mechicl.analysis.finetuning import FineTuning, FineTuningComparison, compare_with_finetuning, fine_tune
from tests.analysis.finetuning.oracles import KINDS, added, cached, compared, expanded, model_on_tokens, token_shots

TUNINGS = {
    "plain": FineTuning(0.1, epochs=2),
    "linearized": FineTuning(0.05, method="linearized", epochs=2),
    "per_layer": FineTuning(0.1, method="per_layer"),
    "all": FineTuning(0.05, parameters="all"),
}


def assert_fields(comparison, expected, atol=1e-6):
    assert {field.name for field in dataclasses.fields(comparison)} == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(comparison, name).numpy(), value, atol=atol, rtol=1e-6, err_msg=name)


def numbers(comparison):
    return {name: value.numpy() for name, value in comparison.samples().items()}


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [*((kind, "plain") for kind in KINDS), ("softmax", "linearized"), ("linear", "linearized"), ("gpt2", "linearized"),
     ("llama", "linearized"), ("softmax", "per_layer"), ("softmax", "all")],
)  # fmt: skip
def test_every_field(kind, tuning):
    model, shots = model_on_tokens(kind), token_shots()
    tuned = fine_tune(model, shots, TUNINGS[tuning])
    comparison = compare_with_finetuning(model, shots, TUNINGS[tuning] if kind == "softmax" else tuned, seed=3)
    after = expanded(model, tuned.changes) if tuning == "linearized" else cached(added(model, tuned.changes))
    assert_fields(comparison, compared(model.cfg.n_layers, shots, cached(model), after, seed=3))


@pytest.mark.parametrize("kind", ["softmax", "gpt2"])
def test_memory_makes_no_difference(kind):
    model, shots = model_on_tokens(kind), token_shots(queries=(1, 3, 2, 3, 2, 2, 1))
    tuned = fine_tune(model, shots, TUNINGS["plain"])
    expected = numbers(compare_with_finetuning(model, shots, tuned))
    for memory in (1.3e5, 3e5):  # one query, or a few, at a time
        assert_fields(compare_with_finetuning(model, shots, tuned, memory=memory), expected)


def test_tokens_that_examples_share_tie_whatever_the_batches():
    """Demonstrations with a common start, each read alone, have the same query vectors there, up to rounding."""
    model = model_on_tokens("softmax", n_ctx=80)
    shots = token_shots((6, 8, 7, 9, 6, 8), (2, 3), prefix=4)
    tuned = fine_tune(model, shots, TUNINGS["plain"])
    one, several = (compare_with_finetuning(model, shots, tuned, memory=memory) for memory in (1e6, 2**30))
    expected = compared(2, shots, cached(model), cached(added(model, tuned.changes)), seed=0)
    for name in ("rank_correlation", "head_rank_correlation"):
        for comparison in (one, several):
            np.testing.assert_allclose(getattr(comparison, name), expected[name], atol=1e-9, err_msg=name)


def test_undefined_measures_are_nan():
    model, shots = model_on_tokens("softmax"), token_shots(queries=(1, 1, 2))
    still = compare_with_finetuning(model, shots, FineTuning(learning_rate=0.0))
    for name, value in still.samples().items():
        undefined = name in ("update_similarity", "head_update_similarity")
        if name.startswith("map_similarity"):  # one score has no direction but a sign
            assert value[..., :2].isnan().all()
            assert value[..., 2].isfinite().all()
        else:
            assert value.isnan().all() if undefined else value.isfinite().all(), name
    torch.testing.assert_close(still.zero_shot_loss, still.finetuned_loss)
    torch.testing.assert_close(still.map_similarity_before[..., 2], still.map_similarity_after[..., 2])
    torch.testing.assert_close(still.rank_correlation, still.rank_correlation_before)
    assert np.isnan(still.recall().mean)
    with torch.no_grad():  # flat attention: no scores
        for block in model.blocks:
            block.attn.W_Q.zero_()
            block.attn.b_Q.zero_()
    flat = compare_with_finetuning(model, shots, TUNINGS["plain"])
    for name in ("rank_correlation", "head_rank_correlation", "random_rank_correlation", "map_similarity_before"):
        assert getattr(flat, name).isnan().all()
    assert flat.update_similarity.isfinite().all()
    one_token = compare_with_finetuning(model_on_tokens("softmax"), token_shots((1,), (1, 2)), FineTuning(0.1))
    assert one_token.rank_correlation.isnan().all()
    assert one_token.update_similarity.isfinite().all()


def test_comparisons_are_joined_and_tabled():
    model = model_on_tokens("softmax")
    # seeds with queries that fine-tuning improves, of which the recall is a share
    parts = [compare_with_finetuning(model, token_shots(seed=seed), FineTuning(0.3)) for seed in (3, 5)]
    both = FineTuningComparison.concatenate(parts)
    for name, value in both.samples().items():
        assert_close(value, torch.cat([getattr(part, name) for part in parts], -1), equal_nan=True)
    table = both.to_dataframe()
    assert len(table) == 10
    assert table["head_rank_correlation[0,1]"].tolist() == both.head_rank_correlation[0, 1].tolist()
    better = [i for i in range(10) if both.finetuned_score[i] > both.zero_shot_score[i]]
    too = [i for i in better if both.in_context_score[i] > both.zero_shot_score[i]]
    assert better
    assert both.recall().mean == pytest.approx(len(too) / len(better))


def test_other_types_of_ids():
    model, shots = model_on_tokens("softmax"), token_shots()
    narrow = {
        field.name: tuple(ids.int() for ids in value) if isinstance(value, tuple) else value.int()
        for field in dataclasses.fields(shots)
        if field.name not in ("query_lengths", "example_spans") and (value := getattr(shots, field.name)) is not None
    }
    expected = numbers(compare_with_finetuning(model, shots, TUNINGS["plain"]))
    assert_fields(compare_with_finetuning(model, dataclasses.replace(shots, **narrow), TUNINGS["plain"]), expected)


def test_models_without_positions_read_prompts_of_any_length():
    free = model_on_tokens("softmax", positional_embedding_type="none")
    shots = token_shots((3, 3, 3, 3), (2,))
    assert compare_with_finetuning(free, shots, TUNINGS["plain"]).update_similarity.isfinite().all()


def test_intervals_stay_in_the_range_of_scores_and_cosines():
    comparison = compare_with_finetuning(model_on_tokens("softmax"), token_shots(), TUNINGS["plain"])
    n = len(comparison.in_context_score)
    scores = torch.tensor([0.0] + [1.0] * (n - 1)).double()
    cosines = scores.expand(2, -1)
    made = dataclasses.replace(comparison, in_context_score=scores, update_similarity=cosines, zero_shot_score=-scores)
    intervals = made.intervals()
    assert intervals["in_context_score"].high == intervals["update_similarity"].high == 1
    assert intervals["in_context_score"].mean == 0.8
    assert intervals["zero_shot_score"].low < -1  # squared errors of a regression have no bound
