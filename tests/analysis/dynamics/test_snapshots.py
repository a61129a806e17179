"""Analyses at snapshots against the same analyses of each model by itself."""

import itertools

import pytest
import torch

from mechicl import algorithms, constructions
from mechicl.analysis import align, align_over_training, score_heads, score_heads_over_training
from mechicl.checkpoints import Checkpoint, CheckpointError, Snapshots
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.statistics import load_result
from tests.training.runs import EXACT, MODEL, READER, TASK

STEP = AlgorithmLearner(algorithms.gradient_descent, {"steps": 1, "step_size": 0.4})


def checkpoint(*snapshots: list[HookedTransformer]) -> Checkpoint:
    """A training whose models, one a seed, were these at steps 0, 4, 8, ..."""
    names = snapshots[0][0].state_dict()
    weights = {
        name: torch.stack([torch.stack([model.state_dict()[name] for model in models]) for models in snapshots])
        for name in names
    }
    return Checkpoint("made", list(snapshots[-1]), {}, Snapshots(tuple(4 * i for i in range(len(snapshots))), weights))


def random_checkpoint(cfg: TransformerConfig, n_snapshots: int, n_seeds: int) -> Checkpoint:
    return checkpoint(*[[HookedTransformer(cfg, seed=10 * i + j) for j in range(n_seeds)] for i in range(n_snapshots)])


POINTS = random_checkpoint(MODEL, 3, 2)
TOKENS = random_checkpoint(READER, 3, 2)
BARE = Checkpoint("bare", POINTS.models, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_entry_is_the_alignment_of_that_model_at_that_snapshot(dtype):
    prompts = TASK.sample(7, seed=1, dtype=dtype)
    result = align_over_training(POINTS, STEP, prompts)
    assert result.steps == (0, 4, 8)
    assert result.mse.shape == (3, 2)
    for i in range(3):
        for j, model in enumerate(POINTS.models_at(i)):
            alone = align(model.double(), STEP, prompts)
            for name in ("prediction_distance", "sensitivity_cosine", "sensitivity_distance"):
                values = getattr(result, name)
                assert values.dtype == torch.float64
                assert values[i, j].item() == pytest.approx(getattr(alone, name).mean().item(), rel=1e-6)
            squares = [
                (predicted - y) ** 2
                for predicted, y in zip(
                    model.predict(prompts)[:, 0].tolist(), prompts.ys[:, -1, 0].tolist(), strict=True
                )
            ]
            assert result.mse[i, j].item() == pytest.approx(sum(squares) / len(squares), rel=1e-6)
    assert len(set(result.mse.flatten().tolist())) == 6
    assert all(model.cfg.dtype == torch.float32 for model in POINTS.models)


def test_prompts_without_a_cosine_are_left_out_of_its_mean():
    prompts = TASK.sample(6, seed=1, dtype=torch.float64)
    silent = prompts.ys.clone()
    silent[:2] = 0  # gradient descent stays at 0 on these
    prompts = type(prompts)(prompts.xs, silent)
    result, rest = (align_over_training(POINTS, STEP, part) for part in (prompts, prompts[2:]))
    assert result.sensitivity_cosine.isfinite().all()
    torch.testing.assert_close(result.sensitivity_cosine, rest.sensitivity_cosine)


def test_a_construction_is_aligned_as_its_step_size_says():
    models = [constructions.gradient_descent(x_dim=3, n_context=4, step_size=a) for a in (0.2, -0.2)]
    crossed = checkpoint(models, models[::-1])
    result = align_over_training(crossed, models[0], TASK.sample(5, seed=0, dtype=torch.float64))
    torch.testing.assert_close(result.sensitivity_cosine, torch.tensor([[1, -1], [-1, 1]]).double())
    torch.testing.assert_close(result.prediction_distance[0, 0], torch.tensor(0.0).double())
    assert result.prediction_distance[0, 1] == result.prediction_distance[1, 0] > 0


def test_every_score_is_that_of_the_best_head_of_that_model_at_that_snapshot():
    names = ("previous_token", "induction", "copying")
    result = score_heads_over_training(TOKENS, names, n_prompts=5, seed=2)
    assert result.steps == (0, 4, 8)
    assert list(result.scores) == list(names)
    for i in range(3):
        for j, model in enumerate(TOKENS.models_at(i)):
            alone = score_heads(model, n_prompts=5, seed=2)
            for name in names:
                places = itertools.product(range(model.cfg.n_layers), range(model.cfg.n_heads))
                means = [alone[name][place].mean().item() for place in places]
                assert result.scores[name].shape == (3, 2)
                assert result.scores[name][i, j].item() == pytest.approx(max(means), rel=1e-6)
    assert len(set(result.scores["induction"].flatten().tolist())) == 6  # every snapshot and seed has its own


def test_models_on_points_are_scored_on_prompts():
    cfg = EXACT.replace(prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, attention="softmax")
    made, prompts = random_checkpoint(cfg, 2, 1), TASK.sample(6, seed=0, dtype=torch.float64)
    result = score_heads_over_training(made, ["target_to_input"], prompts=prompts)
    expected = score_heads(made.models_at(-1)[0], prompts=prompts).mean("target_to_input").max()
    assert result.scores["target_to_input"][-1].item() == pytest.approx(expected.item())
    with pytest.raises(ValueError, match="scored on prompts"):
        score_heads_over_training(made)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    aligned = align_over_training(POINTS, STEP, TASK.sample(3, seed=0))
    for result in (aligned, score_heads_over_training(TOKENS, n_prompts=2)):
        table = load_result(result.save(tmp_path / type(result).__name__)).to_dataframe()
        assert table.equals(result.to_dataframe())
        assert table["step"].tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: align_over_training(BARE, STEP, TASK.sample(2, seed=0)), CheckpointError, "bare was saved without sn"),
        (lambda: score_heads_over_training(BARE), CheckpointError, "bare was saved without snapshots"),
        (lambda: score_heads_over_training([]), ValueError, "checkpoint must be .* got an empty list"),
        (lambda: score_heads_over_training(TOKENS, ["inducton"]), ValueError, "no score 'inducton'"),
        (lambda: score_heads_over_training(POINTS), ValueError, "paired|scored on prompts"),
    ],
)
def test_errors_name_the_cause(call, error, named):
    with pytest.raises(error, match=named):
        call()


def test_a_list_of_models_is_a_training_of_one_seed():
    prompts, models = TASK.sample(5, seed=0), [POINTS.models_at(i)[0] for i in range(3)]
    listed, whole = (align_over_training(each, STEP, prompts) for each in (models, POINTS))
    assert listed.steps == (0, 1, 2)
    torch.testing.assert_close(listed.mse, whole.mse[:, :1])
    assert models[0].cfg.dtype == torch.float32  # the user's models are not converted
    tokens = [TOKENS.models_at(i)[1] for i in range(3)]
    scores, expected = (score_heads_over_training(each, n_prompts=3).scores["induction"] for each in (tokens, TOKENS))
    torch.testing.assert_close(scores, expected[:, 1:])
