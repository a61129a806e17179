"""`Study`: what it opens, and that analyses of a study are those of its model and task."""

import types

import pytest
import torch

import mechicl
from mechicl import algorithms
from mechicl.analysis import align_over_training, identify, measure_over_training, regret
from mechicl.analysis.causes import fit_hypotheses
from mechicl.analysis.weights import fit_construction
from mechicl.checkpoints import Checkpoint, CheckpointError, Study, load_checkpoint
from mechicl.checkpoints.study import takes_study
from mechicl.learners import AlgorithmLearner
from mechicl.models import TransformerConfig, build
from mechicl.tasks import LinearRegression, MarkovChains

TASK = LinearRegression(x_dim=3, n_context=6)
OLS = AlgorithmLearner(algorithms.ols)


def distances(result) -> torch.Tensor:
    return torch.stack([match.squared_distances for match in result.matches])


def test_an_analysis_of_a_study_is_that_of_its_model_and_task():
    study, checkpoint = Study.load("lsa-1l"), load_checkpoint("lsa-1l")
    ours = identify(study, n_prompts=64, progress=False)
    plain = identify(checkpoint.best, checkpoint.task, n_prompts=64, progress=False)
    assert torch.equal(distances(ours), distances(plain))
    mean = regret(study, n_prompts=32, progress=False).mean()
    assert mean == regret(checkpoint.best, checkpoint.task, n_prompts=32, progress=False).mean()
    every = fit_construction(study, "gd", n_prompts=64).best.parameters
    alone = fit_construction(study.models, "gd", study.task, n_prompts=64).best.parameters
    assert all(torch.equal(every[name], alone[name]) for name in alone)
    aligned = align_over_training(study, OLS, progress=False)  # on the prompts of the study
    assert aligned.mse[-1, 0] == pytest.approx((study.model.predict(study.prompts) - study.prompts.query.ys)
                                               .square().mean().item(), rel=1e-4)  # fmt: skip
    steps = measure_over_training(study, lambda model: {"n": torch.ones(1)}, progress=False).steps
    assert checkpoint.snapshots is not None
    assert steps == checkpoint.snapshots.steps


def test_the_opened_seed_has_the_least_loss_or_the_sentence_says_that_none_was_compared():
    chains = MarkovChains(d_vocab=3, n_ctx=9)
    cfg = TransformerConfig(prompt_format="token_ids", d_vocab=3, n_ctx=9, n_layers=1, n_heads=1, d_model=8)
    models = [build(cfg, seed).eval() for seed in range(3)]
    with torch.no_grad():
        next(models[0].parameters()).fill_(torch.nan)
    ids = chains.sample(2000, seed=0).ids
    losses = [torch.nn.functional.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) for m in models]
    best = min((1, 2), key=losses.__getitem__)
    assert f"seed {best}, which has the least held-out loss of 3 seeds" in Study(models, chains).chosen
    words = "The opened model is seed 0, the first of 2: their losses could not be compared."
    assert Study([models[0], models[0]], chains).chosen == words
    assert Study([OLS, OLS], types.SimpleNamespace(sample=lambda *_, **__: "a text")).chosen == words


def test_learners_to_compare_with_do_not_replace_others_of_their_name():
    one, two, three = (AlgorithmLearner(algorithms.ridge, {"penalty": each}) for each in (0.1, 1.0, 10.0))
    study = Study(one, LinearRegression(), compare={one.name: two, "averaging": three, "third": two})
    assert study.with_compared({one.name: one, "averaging": one}) == {
        one.name: one, "averaging": one, f"{one.name}, compared": two, "averaging, compared": three, "third": two,
    }  # fmt: skip


def test_what_the_call_names_is_used_instead_of_the_studys():
    study = Study(OLS, TASK, compare={"mine": OLS})
    other = LinearRegression(x_dim=2, n_context=4)
    result = identify(study, task=other, n_prompts=32, progress=False)
    assert "mine" in {match.name for match in result.matches}
    plain = identify(OLS, other, also={"mine": OLS}, n_prompts=32, progress=False)
    assert torch.equal(distances(result), distances(plain))

    @takes_study
    def arguments(model, task, first, prompts, second=2, *, also=()):
        return model, task, first, prompts, second, also

    assert arguments(study, 1, 3) == (OLS, TASK, 1, study.prompts, 3, study.compare)
    assert arguments(study, other, 1, None) == (OLS, other, 1, None, 2, study.compare)
    assert arguments(study, prompts=1, first=3, also=4) == (OLS, TASK, 3, 1, 2, 4)
    assert arguments(OLS, other, 1, None) == (OLS, other, 1, None, 2, ())
    with pytest.raises(TypeError, match="takes a study and task, first, prompts, second: got 6"):
        arguments(study, 1, 2, 3, 4, 5)


def test_the_prompts_are_drawn_once():
    study = Study(OLS, TASK, n_prompts=5)
    assert study.prompts is study.prompts
    assert len(study.prompts) == 5


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="give the task"):
        Study(OLS)
    with pytest.raises(CheckpointError, match="task=5 draws no prompts"):
        Study.load("lsa-1l", task=5)
    with pytest.raises(CheckpointError, match="is empty"):
        Study([], TASK)
    with pytest.raises(CheckpointError, match="task_index=1"):
        Study(OLS, TASK, task_index=1)
    with pytest.raises(CheckpointError, match="no snapshots of its training"):
        measure_over_training(Study(OLS, TASK), lambda model: {})
    with pytest.raises(CheckpointError, match="no-such-checkpoint"):
        Study.load("no-such-checkpoint")
    with pytest.raises(ValueError, match="has its own task, seed"):
        mechicl.report(Study(OLS, TASK), TASK, tmp_path, seed=0)
    with pytest.raises(TypeError, match="not a learner"):
        Study([OLS, torch.nn.Linear(2, 2)], TASK)


def test_the_opened_model_is_first_and_can_be_studied_alone():
    whole = load_checkpoint("lsa-1l")
    study = Study(whole, seed=whole.seeds[2])
    one = study.opened()
    assert study.model is one.model is whole.models[2]
    assert one.seeds == whole.seeds[2:3]
    assert sorted(study.seeds) == sorted(whole.seeds)
    assert study.checkpoint is not None
    assert one.checkpoint is not None
    assert one.checkpoint.record["seeds"] == one.seeds
    assert study.record["seeds"] == study.seeds
    hypotheses = fit_hypotheses(Study(whole, LinearRegression(n_context=5)), {}, progress=False)
    assert hypotheses == []
    assert Study(Checkpoint("alone", whole.models[:1]), TASK).seeds == [0]
