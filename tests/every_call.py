"""A small call of every public function that computes something, and the reasons why others have none."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import functools
import importlib
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pandas as pd
import torch
from sklearn.linear_model import Ridge
from torch import nn
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM

from mechicl import algorithms, analysis, checkpoints, constructions, interop, tasks, text, training
from mechicl.algorithms import stepwise
from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent
from mechicl.analysis import causes, dynamics, finetuning, language
from mechicl.analysis import layers as layer_analysis
from mechicl.checkpoints import load_checkpoint
from mechicl.learners import AlgorithmLearner, TokenAlgorithmLearner
from mechicl.models import HookedLSTM, LSTMConfig, TableConfig, TransformerConfig, build, wrap
from mechicl.prompts import Prompts
from mechicl.statistics import interval
from mechicl.tasks import LinearRegression, MarkovChains, RepeatedTokens, TaskPool, TopicClassification
from mechicl.training import TrainingConfig
from tests import families
from tests.analysis.language.conftest import make_tokenizer
from tests.models.modules import NanoGPT

QUIET: dict[str, Any] = {"progress": False}
FEW_SETTINGS: dict[str, Any] = {"learning_rates": (0.01,), "epochs": (1,)}
SIZES: dict[str, Any] = {"x_dim": 2, "n_context": 4}
SOFTMAX: dict[str, Any] = SIZES | {
    "prompt_format": "interleaved", "attention": "softmax", "read_in": "linear", "read_out": "linear", "n_layers": 2,
    "n_heads": 2, "d_model": 6, "d_mlp": 4, "attn_only": False, "initializer_range": 0.3,
}  # fmt: skip
RECURRENT = ("gated_linear", "delta", "mamba2", "mesa")


@functools.cache
def world() -> SimpleNamespace:
    """Make the models, prompts and tasks of the calls."""
    w = SimpleNamespace(task=LinearRegression(**SIZES))
    w.prompts, w.few, w.others = (w.task.sample(n, seed=seed) for n, seed in ((12, 0), (2, 1), (12, 2)))
    w.exact, w.near = (constructions.gradient_descent(**SIZES, step_size=size, steps=2) for size in (0.1, 0.2))
    w.model, w.other = (build(TransformerConfig(**SOFTMAX), seed=seed) for seed in (0, 1))
    w.table_model = build(TableConfig(**SIZES, n_layers=2, n_heads=2, d_model=6))
    w.ridge, w.table_task = interop.from_sklearn(Ridge()), tasks.TableRegression(x_dim=2, n_context=8)
    w.lstm = HookedLSTM(LSTMConfig(**SIZES, d_model=5))
    torch.manual_seed(0)
    w.module = NanoGPT(d_in=3).eval()
    w.wrapped = wrap(
        w.module, encode="paired", layers="blocks.{}", attention={"out": "blocks.{}.attn"}, mlp="blocks.{}.mlp"
    )
    w.learner, w.mean = AlgorithmLearner(algorithms.ridge, {"penalty": 0.1}), AlgorithmLearner(algorithms.averaging)
    w.descent = AlgorithmLearner(algorithms.gradient_descent, {"steps": [0, 1, 2], "step_size": 0.1})
    w.hypothesis = Hypothesis(ResidualDescent(2, step_size=0.1))
    w.sources = analysis.sample_sources(w.task, w.prompts, seed=1)
    w.chains = MarkovChains(d_vocab=3, n_ctx=8)
    w.repeated = RepeatedTokens(d_vocab=5, n_ctx=8, min_period=2, max_period=4)
    w.pooled_chains = MarkovChains(d_vocab=3, n_ctx=8, n_chains=3)
    w.sequences, w.chain_sequences = w.repeated.sample(6, seed=0), w.pooled_chains.sample(6, seed=0)
    w.tokens = constructions.induction(d_vocab=5, n_ctx=8, n_heads=2, previous_token_head=0, induction_head=1, seed=0)
    w.token_learner = TokenAlgorithmLearner(algorithms.bigram_bayes, {"d_vocab": 3})
    w.checkpoint, w.induction = load_checkpoint("lsa-1l"), load_checkpoint("induction-2l")
    w.lsa = w.checkpoint.best
    w.lsa_prompts = w.checkpoint.task.sample(6, seed=0)
    w.config = TrainingConfig(
        task=w.task, model=TransformerConfig(**SOFTMAX), steps=3, batch_size=4, eval_prompts=8, seeds=(0, 1), cpu=True
    )
    w.pool = TaskPool(**SIZES, n_tasks=3)
    w.pool_prompts = w.pool.sample(12, seed=0)
    w.frame = pd.DataFrame(
        {"seed": [0, 0, 0, 0], "x": [1.0, 2.0, 1.0, 2.0], "y": [1, 1, 2, 2], "value": [0.1, 0.9, 0.3, 0.8]}
    )
    w.samples = torch.tensor([1.0, 2.0, 4.0, 3.0])
    w.tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(w.tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    config._attn_implementation = "eager"
    bridge = build_bridge_from_module(LlamaForCausalLM(config).eval(), "LlamaForCausalLM", hf_config=config)
    w.language = interop.LanguageModel("tiny", bridge.eval(), w.tokenizer)
    w.mamba, _ = families.open_family("Mamba-2")
    draw: dict[str, Any] = {"n_shots": 2, "n_prompts": 4}
    w.words = text.word_prompts(w.tokenizer, "antonyms", **draw)
    w.shuffled_words = text.word_prompts(w.tokenizer, "antonyms", labels="shuffled", **draw)
    with torch.no_grad():
        w.logits = w.language.model(w.words.ids)[:, -1]
    w.causal = language.CausalModel({"first": lambda ids: int(ids[0])}, lambda values: values["first"])
    w.ids = torch.randint(5, (40, 8), generator=torch.Generator().manual_seed(0))
    w.topics = TopicClassification()
    w.reader = build(TransformerConfig(
        prompt_format="token_ids", d_vocab=len(text.topic_tokenizer()), n_ctx=64, n_layers=1, n_heads=2, d_model=8,
        attention="softmax", normalization_type="LN", initializer_range=0.3,
    ))  # fmt: skip
    w.texts = finetuning.draw_texts(text.TEXT_TASKS["farm"], n_demonstrations=3, n_held_out=3, n_queries=3)
    w.plain = build(TransformerConfig(
        prompt_format="token_ids", d_vocab=5, n_ctx=8, n_layers=1, n_heads=2, d_model=8, attention="softmax",
    ))  # fmt: skip
    w.shots = finetuning.prompt_shots(w.model, w.prompts[:1])
    w.tuning = analysis.FineTuning(learning_rate=0.01)
    w.eigenvalues = torch.tensor([1.0, 2.0])
    w.folder = Path(tempfile.mkdtemp(prefix="every-call-"))
    w.circuit = analysis.find_circuit(w.model, w.few, **QUIET)
    w.scores = analysis.score_edges(w.model, w.few, **QUIET)
    w.sweep = analysis.patch(w.model, w.few, w.others[:2], "z", ("layer", "head"), **QUIET)
    w.scored_heads = analysis.score_heads_over_training(w.induction, n_prompts=4, **QUIET)
    kinds: list[dict[str, Any]] = [{**SOFTMAX, "attention": kind} for kind in RECURRENT]
    w.recurrent = {each["attention"]: build(TransformerConfig(**each)) for each in kinds}
    w.matched = analysis.match(w.model, w.learner, w.prompts, **QUIET)
    w.eye = torch.tensor([[1.0, 0.2], [0.2, 1.0]])
    w.shares = torch.linspace(0.1, 0.9, 12).reshape(3, 4, 1)
    return w


Call = Callable[[SimpleNamespace], Any]
ALGORITHMS: dict[str, dict[str, Any]] = {
    "averaging": {}, "bayes": {"noise_std": 0.1}, "chebyshev": {"steps": [1, 3]},
    "conjugate_gradient": {"steps": [1, 2]},
    "discounted_averaging": {"discount": 0.9}, "discounted_gradient_descent": {"step_size": 0.1, "discount": 0.9},
    "gd_plus_plus": {"steps": [2], "step_size": 0.1, "gamma": 0.05},
    "gradient_descent": {"steps": [1, 9], "step_size": 0.1},
    "kernel_smoothing": {"bandwidth": 0.5}, "lasso": {"penalty": 0.1}, "gradient_flow": {"time": 0.3},
    "kernel_ridge": {"bandwidth": 1.0, "penalty": 0.1}, "huber": {"threshold": 0.5}, "on_unit_inputs": {},
    "mixture_bayes": {"noise_stds": [0.1, 1.0]},
    "nearest_neighbours": {"n_neighbours": 2}, "network_descent": {"n_hidden": 4, "steps": 2}, "newton": {"steps": [2]},
    "ols": {}, "online_gradient_descent": {"step_size": 0.1},
    "recursive_least_squares": {"penalty": 0.1}, "ridge": {"penalty": 0.1}, "ridge_path": {"steps": [1, 3]},
    "sparse_bayes": {"sparsity": 1}, "steepest_descent": {"steps": [2]}, "tuned_step_size": {},
    "stable_step_size": {}, "greedy_tree": {},
}  # fmt: skip
"""Algorithms of real targets, which take the same prompts."""


def _of_algorithms() -> Iterator[tuple[str, Call]]:
    def call(name: str, w: SimpleNamespace) -> Any:
        return getattr(algorithms, name)(w.prompts, **ALGORITHMS[name])

    for name in ALGORITHMS:
        yield f"algorithms.{name}", functools.partial(call, name)


def _of_steps() -> Iterator[tuple[str, Call]]:
    """The algorithms in step form."""
    step = {"step_size": 0.1}
    options: dict[str, dict[str, Any]] = {
        "DiscountedDescent": {"steps": 2, **step}, "NewtonSteps": {"iterations": 2}, "OnlineDescent": {"n_context": 4},
        "QueryDescent": {"steps": 2, **step}, "RecursiveSteps": {"n_context": 4, "penalty": 0.1},
        "ResidualDescent": {"steps": 2, **step}, "ResidualRidge": {"steps": 2, "penalty": 0.1},
        "RidgePath": {"penalties": [0.1, 1.0]},
    }  # fmt: skip
    for name, some in options.items():
        yield f"stepwise.{name}", lambda w, name=name, some=some: getattr(stepwise, name)(**some).predict(w.prompts)


def _of_tasks() -> Iterator[tuple[str, Call]]:
    """The samples of every kind of task."""
    cells = torch.arange(24.0).view(12, 2)
    more: dict[str, dict[str, Any]] = {
        "FixedTasks": {"task": LinearRegression(**SIZES), "n_tasks": 3},
        "OwnTable": {"cells": cells, "labels": cells[:, :1], "n_context": 6},
    }
    for name in tasks.__all__:
        kind = getattr(tasks, name)
        if isinstance(kind, type) and hasattr(kind, "sample") and not inspect.isabstract(kind) and name != "Task":
            yield f"tasks.{name}", lambda w, kind=kind, name=name: kind(**more.get(name, {})).sample(3, seed=0)


def _of_constructions() -> Iterator[tuple[str, Call]]:
    step = {"step_size": 0.1}
    options: dict[str, dict[str, Any]] = {
        "copy_targets": {}, "copy_then_gradient_descent": step, "discounted_averaging": {"discount": 0.9},
        "discounted_gradient_descent": step, "gd_plus_plus": {**step, "gamma": 0.1}, "gradient_descent": step,
        "newton": {"steps": 2, "alpha": 0.1}, "online_gradient_descent": step, "relu_optimum": {},
        "recursive_least_squares": {"penalty": 0.1}, "softmax_gradient_descent": {**step, "score_scale": 0.1},
    }  # fmt: skip
    for name, some in options.items():
        yield f"constructions.{name}", lambda w, name=name, some=some: getattr(constructions, name)(**SIZES, **some)


def _of_models() -> Iterator[tuple[str, Call]]:
    """Predictions, runs, recordings and gradients of every kind of model."""
    for name in ("exact", "model", "lstm", "wrapped"):
        if name != "wrapped":  # the user's module, which follows torch's global state
            yield f"models.{name}.run_with_cache", lambda w, name=name: getattr(w, name).run_with_cache(w.prompts)
        yield f"models.{name}.predict", lambda w, name=name: getattr(w, name).predict(w.prompts)
        yield f"models.{name}.predict_prefixes", lambda w, name=name: getattr(w, name).predict_prefixes(w.prompts)
        yield f"models.{name}.encode", lambda w, name=name: getattr(w, name).encode(w.prompts)
    for kind in RECURRENT:
        yield f"models.{kind}.build", lambda w, kind=kind: build(w.recurrent[kind].cfg, 1)
        yield f"models.{kind}.predict", lambda w, kind=kind: w.recurrent[kind].predict(w.prompts)
    yield "models.token_ids", lambda w: (w.tokens(w.ids), w.tokens.run_with_cache(w.ids))


def _function(name: str) -> Any:
    package, _, path = name.partition(".")
    return attrgetter(path)(importlib.import_module(f"mechicl.{package}"))


OF_FUNCTIONS: dict[str, Callable[[Any, SimpleNamespace], Any]] = {
    # ---- algorithms ----
    "algorithms.bigram_bayes": lambda f, w: f(w.chain_sequences, d_vocab=3),
    "algorithms.unigram_bayes": lambda f, w: f(w.chain_sequences, d_vocab=3),
    "algorithms.uniform_tokens": lambda f, w: f(w.chain_sequences, d_vocab=3),
    "algorithms.ngram_bayes": lambda f, w: f(w.chain_sequences, d_vocab=3, order=2),
    "algorithms.pool_bayes": lambda f, w: f(w.chain_sequences, pool=w.pooled_chains.transitions(3, seed=0)),
    "algorithms.conjunction_bayes": lambda f, w: f(tasks.Conjunctions(x_dim=3).sample(4, seed=0)),
    "algorithms.elimination": lambda f, w: f(tasks.Conjunctions(x_dim=3).sample(4, seed=0)),
    "algorithms.parity_bayes": lambda f, w: f(tasks.Parities(x_dim=3, degree=2).sample(4, seed=0), degree=2),
    "algorithms.gf2_elimination": lambda f, w: f(tasks.Parities(x_dim=3).sample(4, seed=0)),
    "algorithms.logistic": lambda f, w: f(tasks.LogisticRegression(**SIZES).sample(4, seed=0)),
    "algorithms.dmmse": lambda f, w: f(w.pool_prompts, pool=w.eye[..., None], noise_std=0.1),
    "algorithms.preconditioned_gd": lambda f, w: f(w.prompts, steps=[2], preconditioner=w.eye),
    "algorithms.on_features": lambda f, w: f(
        w.prompts, features=lambda xs: xs**2, algorithm=algorithms.ridge, hyperparameters={"penalty": 0.1}
    ),
    "algorithms.references": lambda f, w: [each.predict_prefixes(w.prompts) for each in f(w.task).values()],
    "algorithms.in_context_classifier": lambda f, w: f(
        tasks.GaussianClusters().sample(3, seed=0), within_class_noise=0.1
    ),
    # ---- constructions, learners ----
    "constructions.linear_optimum": lambda f, w: f(covariance=w.eye, n_context=4),
    "constructions.preconditioned_gd": lambda f, w: f(**SIZES, preconditioner=w.eye),
    "constructions.kernel_gradient_descent": lambda f, w: f(weights=w.eye, n_context=4, step_size=0.1),
    "constructions.induction": lambda f, w: f(d_vocab=5, n_ctx=8, seed=3),
    "constructions.compress": lambda f, w: f(w.exact, w.prompts, d_model=3),
    "constructions.hide": lambda f, w: f(w.exact, seed=1),
    "constructions.weights_circuit": lambda f, w: f(w.tokens),
    "constructions.known_models": lambda f, w: f(seed=1)[:3],
    "learners.squared_errors": lambda f, w: f(w.model, w.prompts),
    "learners.token_log_probabilities": lambda f, w: f(w.token_learner, w.chain_sequences),
    "learners.token_losses": lambda f, w: f(w.token_learner, w.chain_sequences),
    "learners.prompt_batches": lambda f, w: list(f(w.model, w.prompts)),
    # ---- behaviour ----
    "analysis.align": lambda f, w: f(w.model, w.learner, w.prompts, **QUIET),
    "analysis.match": lambda f, w: f(w.model, w.learner, w.prompts, **QUIET),
    "analysis.align_over_training": lambda f, w: f([w.model, w.other], w.learner, w.prompts, **QUIET),
    "analysis.fingerprint": lambda f, w: f(w.learner, w.task, n_prompts=8, **QUIET).violations,
    "analysis.identify": lambda f, w: f(w.exact, w.task, n_prompts=24, with_limits=False, steps=1, **QUIET),
    "analysis.identify_on_tokens": lambda f, w: f(w.token_learner, w.chains, n_prompts=8, **QUIET),
    "analysis.fingerprint_on_tables": lambda f, w: f(w.ridge, w.table_task, n_tables=3, **QUIET).influence,
    "analysis.identify_on_tables": lambda f, w: (
        f(w.ridge, w.table_task, n_tables=3, families=["nearest neighbours"], **QUIET).matches[0].squared_distances
    ),
    "analysis.regret": lambda f, w: f(w.model, w.task, n_prompts=8, **QUIET),
    "analysis.measure_shifted_losses": lambda f, w: f({"ridge": w.learner}, w.task, n_prompts=8, **QUIET),
    "analysis.behaviour.induced_weights": lambda f, w: f(w.learner, w.prompts),
    "analysis.behaviour.sensitivities": lambda f, w: f(w.model, w.prompts),
    "analysis.behaviour.regressed_weights": lambda f, w: f(w.model, w.prompts, w.others.xs[:, -1]),
    "analysis.behaviour.tuned_descent": lambda f, w: f(w.prompts, 2),
    "analysis.behaviour.tuned_clipped_descent": lambda f, w: f(w.prompts, 2, 1.0),
    # ---- layers ----
    "analysis.Lens": lambda f, w: f(w.model).errors(w.prompts),
    "analysis.fit_readouts": lambda f, w: _read_out(f(w.model, w.prompts, **QUIET), w.others),
    "analysis.probe": lambda f, w: f(w.model, {"ols": layer_analysis.ols_weights}, w.prompts, w.others, **QUIET),
    "analysis.layers.LayerErrors.of": lambda f, w: f(w.descent.trajectory(w.prompts), w.prompts),
    "analysis.layers.algorithm_weights": lambda f, w: f(algorithms.ols)(w.prompts),
    "analysis.layers.direct_logit_attribution": lambda f, w: f(w.language.model, w.words.ids, w.words.targets, **QUIET),
    "analysis.layers.logit_lens": lambda f, w: f(w.language.model, w.words.ids, **QUIET),
    "analysis.layers.cross_moments": lambda f, w: f(w.prompts),
    "analysis.layers.ols_weights": lambda f, w: f(w.prompts),
    "analysis.layers.second_moments": lambda f, w: f(w.prompts),
    # ---- weights ----
    "analysis.read_weight_products": lambda f, w: f(w.exact),
    "analysis.weights.replace_products": lambda f, w: f(w.lsa, analysis.read_weight_products(w.lsa)),
    "analysis.weights.linear_attention_optimum": lambda f, w: f(w.eigenvalues, 4),
    "analysis.weights.one_step_optimum": lambda f, w: f(w.task),
    "analysis.connect_modes": lambda f, w: f(w.exact, w.near, w.task, n_prompts=8, bending_steps=3, **QUIET),
    "analysis.interpolate": lambda f, w: f(w.exact, w.near, w.prompts, n_alphas=3),
    "analysis.fit_construction": lambda f, w: f([w.lsa], "gd", w.checkpoint.task, n_prompts=16),
    # ---- heads ----
    "analysis.composition_scores": lambda f, w: f(w.model),
    "analysis.score_heads": lambda f, w: f(w.tokens, n_prompts=4, **QUIET),
    "analysis.score_heads_over_training": lambda f, w: f([w.tokens], n_prompts=4, **QUIET),
    "analysis.measure_target_copying": lambda f, w: f(w.model, w.prompts, **QUIET),
    "analysis.read_dual_form": lambda f, w: f(w.exact, w.prompts, **QUIET),
    # ---- interventions and circuits ----
    "analysis.patch": lambda f, w: f(w.model, w.prompts, w.others, "z", ("layer", "head"), **QUIET),
    "analysis.ablate": lambda f, w: f(w.model, w.prompts, "z", ("layer", "head"), **QUIET),
    "analysis.attribute": lambda f, w: f(w.model, w.prompts, w.others, "z", ("layer", "head"), **QUIET),
    "analysis.patch_paths": lambda f, w: f(w.model, w.prompts, w.others, **QUIET),
    "analysis.corrupt": lambda f, w: [f(w.prompts, kind, seed=1) for kind in ("task", "labels", "query", "noise")],
    "analysis.corrupt_tokens": lambda f, w: f(w.sequences.ids, d_vocab=5, seed=1),
    "analysis.next_token_loss": lambda f, w: f(w.words.targets)(w.logits),
    "analysis.interventions.squared_error": lambda f, w: f(w.prompts)(w.model.predict(w.prompts)),
    "analysis.interventions.logit_difference": lambda f, w: f(w.words.targets, w.words.targets.flip(0))(w.logits),
    "analysis.interventions.target_probability": lambda f, w: f(w.words.targets)(w.logits),
    "analysis.interventions.correlate_effects": lambda f, w: f(w.sweep, w.sweep),
    "analysis.find_circuit": lambda f, w: f(w.model, w.few, **QUIET),
    "analysis.score_edges": lambda f, w: [f(w.model, w.few, scoring=kind, **QUIET) for kind in ("eap-ig", "mask-ig")],
    "analysis.measure_circuit": lambda f, w: f(w.model, w.circuit, w.prompts, n_subsets=3, **QUIET),
    "analysis.compare_circuits": lambda f, w: f(w.circuit, w.circuit),
    "analysis.circuits.circuit_curve": lambda f, w: f(w.model, w.scores, w.few, **QUIET),
    # ---- causes ----
    "analysis.interchange": lambda f, w: f(w.exact, w.hypothesis, w.prompts, w.sources, **QUIET),
    "analysis.sample_sources": lambda f, w: f(w.task, w.prompts, seed=1),
    "analysis.test_hypotheses": lambda f, w: f(
        w.exact, w.task, [w.hypothesis], n_prompts=16, with_likeness=False, **QUIET
    ),
    "analysis.fit_subspace": lambda f, w: f(
        w.exact, w.hypothesis, "residual", w.task, layers=1, dims=1, fit=causes.SubspaceFit(8, 8, 2, 0), **QUIET
    ),
    "analysis.causes.exchange_patterns": lambda f, w: f(w.exact, w.prompts, w.sources),
    "analysis.causes.fit_hypotheses": lambda f, w: f(w.exact, w.task, {"gd": w.hypothesis.algorithm}, **QUIET),
    # ---- fine-tuning ----
    "analysis.fine_tune": lambda f, w: f(w.model, w.shots, w.tuning, **QUIET),
    "analysis.compare_with_finetuning": lambda f, w: f(w.model, w.shots, w.tuning, **QUIET),
    "analysis.compare_on_prompts": lambda f, w: f(w.model, w.few, w.tuning, **QUIET),
    "analysis.finetuning.search_tuning": lambda f, w: f(w.model, w.shots, **FEW_SETTINGS, **QUIET),
    "analysis.finetuning.search_on_prompts": lambda f, w: f(w.model, w.few, **FEW_SETTINGS, **QUIET),
    "analysis.finetuning.prompt_shots": lambda f, w: f(w.model, w.prompts[:1]),
    "analysis.finetuning.draw_texts": lambda f, w: f(
        text.TEXT_TASKS["farm"], n_demonstrations=3, n_held_out=3, n_queries=3
    ),
    "analysis.finetuning.measure_accuracy": lambda f, w: f(w.reader, text.topic_tokenizer(), w.texts, (0, 2)),
    "analysis.finetuning.study_task": lambda f, w: f(
        w.reader, text.topic_tokenizer(), w.texts, methods=("plain",), search=FEW_SETTINGS, **QUIET
    ),
    # ---- dynamics ----
    "analysis.find_transitions": lambda f, w: f([1, 2, 3, 4], [[1.0, 1.0], [1.0, 0.9], [0.1, 0.8], [0.1, 0.2]]),
    "analysis.measure_over_training": lambda f, w: f(
        [w.model, w.other], lambda m: {"e": m.predict(w.prompts)[:, 0]}, **QUIET
    ),
    "analysis.dynamics.learning_coefficient": lambda f, w: _quietly(
        f, w.exact, w.prompts, sampler=dynamics.Sampler(2, 6, 2, step_size=1e-4), **QUIET
    ),
    "analysis.dynamics.track_strategies": lambda f, w: f(
        [w.model, w.other], {"ridge": w.learner, "mean": w.mean}, w.prompts, n_resamples=3, **QUIET
    ),
    "analysis.dynamics.fit_strategy_odds": lambda f, w: f(
        w.shares, [2, 4, 8], [10, 20, 30, 40], [0.3, 0.4, 0.5], held_out=(8,)
    ),
    # ---- language ----
    "analysis.language.icl_score": lambda f, w: f(
        w.language, ["antonyms", "plural"], shots=(0, 2), n_prompts=3, **QUIET
    ),
    "analysis.language.function_vectors": lambda f, w: f(
        w.language, "antonyms", n_heads=2, n_shots=2, n_prompts=3, n_clean=3, **QUIET
    ),
    "analysis.language.task_vectors": lambda f, w: f(w.language, "antonyms", n_shots=2, n_prompts=3, **QUIET),
    "analysis.language.loss_by_position": lambda f, w: f(w.language, w.words.ids),
    "analysis.language.ablate_matched": lambda f, w: f(
        w.language.model, w.words, [(0, 1)], reference=w.shuffled_words, n_random=2, **QUIET
    ),
    "analysis.language.stability": lambda f, w: f(lambda i: ["a", "b", "c"][i : i + 2], [0, 1], **QUIET),
    "analysis.language.align_variables": lambda f, w: f(
        w.tokens, w.causal, "first", w.ids, layers=[0], fit=language.AlignmentFit(2, 20, 1), **QUIET
    ),
    "analysis.language.TextLearner": lambda f, w: f(w.language).write(w.few),
    # ---- texts, models of others, saved models ----
    "text.word_prompts": lambda f, w: f(w.tokenizer, "antonyms", n_prompts=3, n_shots=2, labels="shuffled"),
    "text.text_shots": lambda f, w: f(text.topic_tokenizer(), w.texts.demonstrations, w.texts.queries),
    "text.load_texts": lambda f, w: f("farm", "train", n_texts=5),
    "interop.from_sklearn": lambda f, w: f(Ridge()).predict(w.prompts),
    "interop.open_states": lambda f, w: f(w.mamba),
    "interop.to_transformer_lens": lambda f, w: f(w.plain),
    "interop.from_transformer_lens": lambda f, w: f(*interop.to_transformer_lens(w.plain)),
    "checkpoints.load": lambda f, w: f("lsa-1l"),
    "checkpoints.load_checkpoint": lambda f, w: f("lsa-1l").models,
    "checkpoints.save": lambda f, w: checkpoints.load_checkpoint(f(w.folder / "saved", w.model)).models,
    "checkpoints.Study": lambda f, w: f.load("lsa-1l").prompts.xs,
    "checkpoints.untrained": lambda f, w: f(w.checkpoint).models,
    "models.build": lambda f, w: f(w.model.cfg, seed=3),
    "models.HookedTransformer": lambda f, w: f(w.model.cfg, seed=3),
    "models.HookedLSTM": lambda f, w: f(w.lstm.cfg, seed=3),
    "prompts.Tables.from_arrays": lambda f, w: f(w.few.xs[0], w.few.ys[0], w.few.xs[1]).prompts(),
    "models.process_weights": lambda f, w: f(w.tokens),
    "models.wrap": lambda f, w: f(w.module, encode="paired", layers="blocks.{}").predict(w.prompts),
    "prompts.Prompts.concatenate": lambda f, w: f([w.prompts, w.others]),
    "prompts.TokenSequences.concatenate": lambda f, w: f([w.sequences, w.sequences]),
    # ---- training and statistics ----
    "training.train": lambda f, w: f(w.config, w.folder / "trained", restart=True, **QUIET).models,
    "training.train_interchange": lambda f, w: (
        f(w.config, Hypothesis(ResidualDescent(2, step_size=0.1)), **QUIET).models
    ),
    "sweeps.find_threshold": lambda f, w: f(w.frame[:2], "x", "value"),
    "statistics.interval": lambda f, w: f(w.samples),
    "statistics.median_interval": lambda f, w: f(w.samples, seed=1, n_resamples=20),
    "statistics.crossed_interval": lambda f, w: f(w.prompts.ys[..., 0], n_resamples=20),
    "statistics.difference_interval": lambda f, w: f(w.samples, w.samples.flip(0)),
    "statistics.ratio_interval": lambda f, w: f(w.samples, w.samples.flip(0)),
    "statistics.mean_of_intervals": lambda f, w: f([interval(w.samples), interval(w.samples**2)]),
    # ---- figures ----
    "viz.plot": lambda f, w: [f(each) for each in (w.sweep, w.circuit)],
    "viz.patching_grid": lambda f, w: f(w.sweep),
    "viz.circuit_graph": lambda f, w: f(w.circuit),
    "viz.prompt_attention": lambda f, w: f(w.model, w.prompts[0:1]),
    "viz.lines": lambda f, w: f(w.frame, "x", "value", by="y"),
    "viz.phase_diagram": lambda f, w: f(w.frame, "x", "y", "value"),
}
"""Calls of the functions of these names, which are the first argument."""
CALLS: dict[str, Call] = {
    **dict(_of_algorithms()),
    **dict(_of_steps()),
    **dict(_of_tasks()),
    **dict(_of_constructions()),
    **dict(_of_models()),
    **{name: functools.partial(call, _function(name)) for name, call in OF_FUNCTIONS.items()},
    "algorithms.stepwise.Runs": lambda w: (
        stepwise.Runs(w.hypothesis.algorithm, *map(w.hypothesis.algorithm.states, (w.prompts, w.sources))).base
    ),
    "learners.AlgorithmLearner": lambda w: (
        w.learner.predict(w.prompts),
        w.descent.trajectory(w.prompts, with_weights=True),
    ),
    "analysis.PatchingSession": lambda w: _session(w),
    "analysis.language.steering": lambda w: _steered(w),
    "models.TableTransformer": lambda w: w.table_model.predict(w.prompts),
    "training.SOAP": lambda w: _soap_step(),
}


def _steered(w: SimpleNamespace) -> Any:
    with language.steering(w.language.model, torch.ones(16, device="cpu", dtype=torch.float32), 0), torch.no_grad():
        return w.language.model(w.words.ids)


def _quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


def _session(w: SimpleNamespace) -> Any:
    session = analysis.PatchingSession(w.model, w.few, w.others[:2])
    session.toggle(analysis.Site("z", 0, pos=1, head=0))
    return session.result()


def _read_out(readouts: Any, prompts: Prompts) -> Any:
    return readouts.errors(prompts), readouts.trajectory(prompts, with_weights=True)


def _soap_step() -> Any:
    with torch.inference_mode(False):
        rows = nn.Parameter(torch.linspace(-1, 1, 24, device="cpu", dtype=torch.float32).reshape(2, 12))
    optimizer = training.SOAP(rows, [torch.Size([3, 4])], lr=0.1)
    for _ in range(3):
        rows.grad = rows.detach() - 1
        optimizer.step()
    return rows


def call_names(call: Any) -> set[str]:
    """The attributes that the code of a call reads."""
    codes, names = [getattr(call, "func", call).__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return names


# ---- functions that are not called, by reason ----
REASONS = {
    "a value: settings, a table of names, a result that other calls return, an error": (
        "Algorithm FitProblem FittedAlgorithm AfterCopying Hypothesis Induction KernelReading "
        "FineTuning Site Edge GraphFile Node WeightProducts CausalModel EMBEDDING INTERVENTIONS METHODS "
        "METHOD_NAMES MEASURES SWEEPS PRESETS TEXT_TASKS WORD_TASKS Method Metric At Clamp Curriculum Ramp "
        "TrainingConfig TrainingResult Sweep LSTMConfig TableConfig TransformerConfig HookedTransformerConfig "
        "Interleaved Fingerprint TableFingerprint Ranked Sampler Paired Prompts Shots Tables TokenSequences "
        "Trajectory Circuit "
        "Identification AlignmentFit InterventionSweep Match Reading Readouts Replacement SubspaceFit "
        "SubspaceSearch Alignment Regret SpectralLearner AlignmentOverTraining HeadsOverTraining "
        "LearningCoefficient OverTraining StrategyOdds StrategyTracking Transitions FineTuningComparison "
        "TaskTexts HeadScores TargetCopying LossPath LayerErrors EdgeScores HypothesisTest "
        "Interchange PatternExchange FewShotScores FunctionVector MatchedAblation Stability TaskVectors "
        "VariableAlignment Interval Result Comparison Row Section Checkpoint Snapshots AlgorithmFamily Head Layer "
        "Stream LanguageModel LabelledTexts TextTask WordPrompts WordTask ConditioningWarning DivergenceWarning "
        "SamplingWarning CheckpointError FineTuningDivergedError SweepError TrainingDivergedError "
    ),
    "an interface that others implement": (
        "AnyTask "
        "StepwiseAlgorithm IterativeLearner Learner Learners PrefixLearner TokenLearner TokenAlgorithmLearner "
        "PromptedModel WrappedModel CompiledTransformer Task PromptDistribution TokenDistribution"
    ),
    "a package": "behaviour causes circuits dynamics finetuning heads interventions language layers weights stepwise",
    "reads, writes or looks up, and computes nothing": (
        "RandomTensors prompt_format "
        "available cards references published register random_weights join push load_result "
        "load_table status storable read_graph write_graph read_word_task topic_tokenizer rank_families query_of "
        "task_from_dict task_to_dict load_garg from_garg from_tracr load_language_model install"
    ),
    "draws a result: `viz.plot` draws some in these tests": (
        "PatchingExplorer alignments_over_training attention_figure causal_graph composition_figure connectivity_paths "
        "counterfactual_scatter head_similarity_figure head_table init_notebook interval_lines "
        "learning_coefficients losses_over_training map_similarity_figure settings_figure shifted_losses "
        "training_history update_similarity_figure weight_products_figure save"
    ),
    "a part of calls above takes its steps": "assemble in_weights_classifier",
    "a constant": "UNBOUNDED",
    "takes a minute": "report",
}
NOT_CALLED = {name for names in REASONS.values() for name in names.split()}
_FOLDS = "fitted on folds of the prompts"
ORDERED = {
    "analysis.sample_sources": "draws one prompt after the other",
    "analysis.dynamics.track_strategies": "resamples prompts", "analysis.finetuning.prompt_shots": "takes one prompt",
    "prompts.Prompts.concatenate": "has more prompts",
    "analysis.corrupt": "draws one prompt's numbers after the other's",
    "analysis.fit_readouts": _FOLDS, "analysis.probe": _FOLDS, "analysis.measure_target_copying": _FOLDS,
}  # fmt: skip
"""Calls whose results depend on the order of the prompts, as they document."""
FITTED = {
    "analysis.behaviour.regressed_weights": "has one query for each prompt",
    "analysis.ablate": "replaces by the mean of the prompts",
}
"""Calls whose results for a prompt depend on the others."""
