"""Arguments that are refused by name, for all algorithms, step forms and hypotheses."""

import math
from functools import partial

import pytest
import torch

from mechicl import algorithms
from mechicl.algorithms.gradient_descent import gd_plus_plus_filters
from mechicl.algorithms.stepwise import (
    Hypothesis,
    KernelReading,
    NewtonSteps,
    OnlineDescent,
    QueryDescent,
    ResidualDescent,
    RidgePath,
    Runs,
)
from mechicl.algorithms.stepwise.copying import best_match
from mechicl.algorithms.stepwise.descent import nearest
from mechicl.algorithms.stepwise.inverses import MomentsThenRidge, RidgeByDirections
from mechicl.algorithms.stepwise.plans import select_interventions
from mechicl.prompts import Prompts, TokenSequences
from mechicl.tasks import GaussianClusters, Parities, RepeatedTokens
from tests.algorithms.reference import make_prompts

PROMPTS = make_prompts()
SIGNS, LABELS = Parities(x_dim=12, n_context=2).sample(1, seed=0), GaussianClusters().sample(1, seed=0)
TOKENS = TokenSequences(torch.tensor([[0, 1, 2]]), torch.tensor([[False, True, True]]))
BLANK_XS, BLANK_YS = make_prompts(), make_prompts()
BLANK_XS.xs[:], BLANK_YS.ys[:] = 0, 0
HALVES = Prompts(SIGNS.xs / 2, SIGNS.ys)
ONES = Prompts(torch.ones(1, 3, 3), torch.ones(1, 3, 1))
EYE, DESCENT = torch.eye(4), ResidualDescent(3, step_size=0.1)
OVERLAPPING = {"x": EYE[:, :2], "residual": EYE[:, 1:2]}
nan, inf = math.nan, math.inf

STEPS = [
    (name, options | {"steps": steps}, "steps")
    for name, options in (
        ("gradient_descent", {"step_size": 0.1}),
        ("conjugate_gradient", {}),
        ("newton", {}),
        ("preconditioned_gd", {"preconditioner": EYE}),
    )
    for steps in ([], [-1], -2, [1, True], True)
]
OPTIONS = [
    *STEPS,
    ("gradient_descent", {"step_size": nan}, "step_size"),
    ("gradient_descent", {"step_size": inf}, "step_size"),
    *(
        ("gradient_descent", {"step_size": 0.1, "initial_weights": torch.zeros(shape)}, "initial_weights")
        for shape in ((4, 2), (1, 2), (2, 4), (1, 1))  # some would be broadcast
    ),
    ("gd_plus_plus", {"step_size": -inf, "gamma": 0.0}, "step_size"),
    ("gd_plus_plus", {"step_size": 0.1, "steps": 2, "gamma": [0.0, inf]}, "gamma"),
    *(("gd_plus_plus", {"step_size": 0.1, "steps": [1, 3], "gamma": [0.1] * n}, "gamma") for n in (0, 2, 4)),
    *(("newton", {"alpha": alpha}, "alpha") for alpha in (0.0, -1.0, inf, nan)),
    *(("preconditioned_gd", {"steps": 2, "preconditioner": m}, "preconditioner") for m in (EYE[:3], [EYE])),
    ("online_gradient_descent", {"step_size": nan}, "step_size"),
    ("online_gradient_descent", {"step_size": inf}, "step_size"),
    *(("ridge", {"penalty": penalty}, "penalty") for penalty in (0, -1.0, inf)),
    *(("lasso", {"penalty": penalty}, "penalty") for penalty in (0, -1.0, inf)),
    *(("ridge_path", {"steps": 2, **option}, next(iter(option))) for option in ({"shrink": 1.0}, {"shrink": 0.0})),
    ("ridge_path", {"penalty": 0.0}, "penalty"),
    *(("bayes", {"noise_std": std}, "noise_std") for std in (-0.1, nan, inf)),
    *(("bayes", {"noise_std": 0.1, "weight_std": std}, "weight_std") for std in (0.0, -1.0, inf)),
    *(("bayes", {"weight_covariance": m}, "weight_covariance") for m in (EYE[:3, :3], EYE.cumsum(0), -EYE)),
    *(
        ("dmmse", {"pool": pool, "noise_std": 0.5}, "pool")
        for pool in (torch.zeros(3, 5), torch.zeros(0, 4), torch.zeros(3, 4, 2), torch.full((3, 4), nan))
    ),
    *(("dmmse", {"pool": torch.zeros(3, 4), "noise_std": std}, "noise_std") for std in (-1.0, inf)),
    ("mixture_bayes", {"noise_stds": ()}, "noise_stds"),
    ("mixture_bayes", {"noise_stds": (0.1, 0.2), "weight_stds": (1.0, 1.0, 1.0)}, "weight_stds"),
    ("mixture_bayes", {"noise_stds": (0.1, 0.0)}, "noise_stds"),
    *(("sparse_bayes", {"sparsity": sparsity}, "sparsity") for sparsity in (0, 5)),
    ("sparse_bayes", {"sparsity": 1, "noise_std": nan}, "noise_std"),
    ("sparse_bayes", {"sparsity": 1, "weight_std": 0.0}, "weight_std"),
    ("greedy_tree", {"depth": 0}, "depth"),
    ("nearest_neighbours", {"n_neighbours": 0}, "n_neighbours"),
    *(("kernel_smoothing", {"bandwidth": h}, "bandwidth") for h in (0.0, -1.0, inf, nan, [], [1.0, 0.0])),
    ("kernel_smoothing", {"bandwidth": 1.0, "kernel": lambda x, other: x @ other.mT + nan}, "kernel"),
    ("kernel_smoothing", {"bandwidth": 1.0, "kernel": lambda x, other: x @ other.mT + inf}, "kernel"),
    ("kernel_smoothing", {"bandwidth": 1.0, "kernel": lambda x, other: (x @ other.mT)[:, :1]}, "kernel"),
    ("network_descent", {"n_hidden": 0}, "n_hidden"),
    ("network_descent", {"steps": -1}, "steps"),
    ("network_descent", {"learning_rate": 0.0}, "learning_rate"),
    ("on_features", {"features": lambda xs: xs.sum(-1)}, "features"),
    ("logistic", {}, "labels of the context must be -1 or 1"),
    ("logistic", {"weight_std": inf}, "weight_std"),
    ("logistic", {"posterior": "mean"}, "posterior must be 'mode' or 'laplace'"),
    ("tuned_step_size", {"steps": 0}, "steps"),
]
CALLS = [
    *((partial(getattr(algorithms, name), PROMPTS, **options), named) for name, options, named in OPTIONS),
    *((partial(algorithms.tuned_step_size, prompts), "tuning needs") for prompts in (PROMPTS[:0], PROMPTS.prefix(0))),
    *((partial(algorithms.tuned_step_size, p, k), "nothing to tune") for p in (BLANK_XS, BLANK_YS) for k in (1, 4)),
    (partial(algorithms.stable_step_size, PROMPTS.prefix(0)), "a context point other than 0"),
    *((partial(algorithms.tuned_bandwidth, prompts), "tuning needs") for prompts in (PROMPTS[:0], PROMPTS.prefix(0))),
    (partial(algorithms.tuned_bandwidth, PROMPTS.prefix(1)), "nothing to tune"),
    (partial(algorithms.conjunction_bayes, SIGNS), "too many to enumerate.*take elimination"),
    (partial(algorithms.conjunction_bayes, SIGNS, literal_probability=-1.0), "literal_probability"),
    (partial(algorithms.parity_bayes, SIGNS, degree=13), "degree"),
    (partial(algorithms.parity_bayes, Parities(x_dim=25, n_context=1).sample(1, seed=0)), "take gf2_elimination"),
    *((partial(each, HALVES), "inputs") for each in (algorithms.elimination, algorithms.gf2_elimination)),
    (partial(algorithms.elimination, Prompts(SIGNS.xs, SIGNS.ys.expand(-1, -1, 2))), "one target"),
    (partial(algorithms.in_context_classifier, LABELS, within_class_noise=0.1, burstiness=3), "burstiness must divide"),
    (partial(algorithms.in_context_classifier, LABELS, within_class_noise=0.0), "within_class_noise"),
    (
        partial(
            algorithms.in_context_classifier,
            GaussianClusters(n_context=20).sample(1, seed=0),
            within_class_noise=0.1,
            burstiness=2,
        ),
        "more than 20000 ways",
    ),
    (
        partial(
            algorithms.in_weights_classifier,
            LABELS,
            means=torch.zeros(3, 2),
            labels=torch.eye(3),
            frequencies=torch.ones(3) / 3,
            within_class_noise=0.1,
        ),
        "means",
    ),
    *((partial(each, TOKENS, d_vocab=2), "d_vocab=2") for each in (algorithms.bigram_bayes, algorithms.uniform_tokens)),
    (partial(algorithms.unigram_bayes, TOKENS, d_vocab=3, concentration=0.0), "concentration"),
    (partial(algorithms.references, RepeatedTokens()), "register_references"),
    (partial(algorithms.register_references, lambda task: {}), "annotation"),
    (partial(gd_plus_plus_filters, EYE[0], [0.1, 0.4], [0.05]), "shorter"),
    (lambda: ResidualDescent(0, step_size=0.1), "steps"),
    (lambda: ResidualDescent(2, step_size=[0.1]), "step_size"),
    (lambda: ResidualDescent(2, step_size=nan), "step_size"),
    (lambda: ResidualDescent(2, step_size=0.1, clip=0.0), "clip"),
    (lambda: ResidualDescent(2, step_size=0.1, preconditioner=[EYE]), "preconditioner"),
    (lambda: QueryDescent(2, step_size=0.1).trajectory(PROMPTS, with_weights=True), "no weights"),
    (lambda: NewtonSteps(3, alpha=-1.0), "alpha"),
    (lambda: NewtonSteps(3, answer="never"), "answer"),  # type: ignore[arg-type]
    (lambda: KernelReading(nearest, 0), "steps"),
    (lambda: RidgePath(()), "penalties"),
    (lambda: RidgePath((1.0, -1.0)), "penalties"),
    (lambda: MomentsThenRidge(penalty=-0.1), "penalty"),
    (lambda: RidgeByDirections(2, penalty=inf), "penalty"),
    (lambda: RidgeByDirections(2).predict(ONES), "3 dimensions"),
    (lambda: OnlineDescent(1).predict(ONES), "have 2"),
    (lambda: best_match(EYE[None].double(), EYE[None]), "readers are torch.float64 and points torch.float32"),
    *((partial(best_match, EYE[None], EYE[None], sharpness), "sharpness") for sharpness in (-1.0, 1e300)),
    *(
        (partial(Hypothesis, DESCENT, schedule=schedule), "schedule")
        for schedule in (((1, 0), (3, 3)), ((0, 0), (3, 2)), ((0, 0), (2, 2), (2, 3)), ((0, 0), (1, 2), (2, 1), (3, 3)))
    ),
    (lambda: Hypothesis(DESCENT, subspaces={"x": torch.ones(4, 2)}), "orthonormal"),
    (lambda: Hypothesis(DESCENT, subspaces={"momentum": EYE[:, :1]}), "has the variables"),
    (lambda: Hypothesis(DESCENT, subspaces=OVERLAPPING).rest, "all subspaces together"),
    (lambda: Runs(DESCENT, *[DESCENT.states(PROMPTS)] * 2).exchange(1, "query", ["y"]), "variables"),
    (lambda: Runs(DESCENT, *[DESCENT.states(PROMPTS)] * 2).freeze((), "query"), "stops"),
    (lambda: Runs(DESCENT, *[DESCENT.states(PROMPTS)] * 2).exchange(4, "query"), "steps must be 0 to 3"),
    (lambda: select_interventions([], ["dance"]), "interventions"),
]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("call", "named"), CALLS)
def test_what_is_wrong_is_named(call, named):
    with pytest.raises((ValueError, TypeError), match=named):
        call()
