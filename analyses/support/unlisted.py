"""Learners that are on no list of algorithms: an open world to test `identify` in.

Each is a function of inputs `x` `[prompt point d]`, targets `y` `[prompt point]` and the query `q` `[prompt d]` in
float64, which returns predictions `[prompt]`. Half of them calibrate confidence, the other half test it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softmax

from mechicl.learners import AlgorithmLearner
from mechicl.prompts import Prompts

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]


def unlisted() -> dict[str, AlgorithmLearner]:
    """All learners, by name; they predict the first target dimension."""
    return {name: AlgorithmLearner(_predictor(name, rule)) for name, rule in RULES.items()}


def halves() -> tuple[list[str], list[str]]:
    """Names to calibrate on, and names to test on: every second one of each kind."""
    names = list(RULES)
    return names[::2], names[1::2]


def _predictor(name: str, rule: Rule) -> Callable[[Prompts], Tensor]:
    def predict(prompts: Prompts) -> Tensor:
        xs, ys = prompts.xs.double(), prompts.ys.double()
        return rule(xs[:, :-1], ys[:, :-1, 0], xs[:, -1])[:, None]

    predict.__name__ = name
    return predict


# ---- parts ----


def solve(a: Tensor, b: Tensor) -> Tensor:
    """Least squares by the pseudo-inverse, for singular matrices too."""
    return (torch.linalg.pinv(a, hermitian=True) @ b[..., None])[..., 0]


def moments(x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return XᵀX and Xᵀy, of points with weights."""
    w = torch.ones_like(y) if weights is None else weights
    return torch.einsum("pn,pni,pnj->pij", w, x, x), torch.einsum("pn,pni,pn->pi", w, x, y)


def ols(x: Tensor, y: Tensor, weights: Tensor | None = None, penalty: float = 0.0) -> Tensor:
    """Weights of least squares or ridge regression, `[prompt d]`."""
    s, b = moments(x, y, weights)
    return solve(s + penalty * torch.eye(x.shape[2], dtype=x.dtype), b)


def linear(weights: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """A learner that predicts with weights `[prompt d]`."""
    return lambda x, y, q: (weights(x, y) * q).sum(-1)


def reweighted(x: Tensor, y: Tensor, weight: Callable[[Tensor], Tensor], n: int = 30) -> Tensor:
    """Iteratively reweighted least squares; `weight` is of residuals relative to their median size."""
    w = ols(x, y)
    for _ in range(n):
        r = y - (x @ w[..., None])[..., 0]
        scale = r.abs().median(1, keepdim=True).values.clamp(min=1e-9)
        w = ols(x, y, weight(r / scale), 1e-9)
    return w


def descent(x: Tensor, y: Tensor, n: int, step: Callable[[Tensor, int, dict[str, Tensor]], Tensor]) -> Tensor:
    """`n` steps on the mean loss from zero; `step` returns the change from the gradient."""
    w, memory = torch.zeros_like(x[:, 0]), {}
    for k in range(n):
        gradient = -torch.einsum("pni,pn->pi", x, y - (x @ w[..., None])[..., 0]) / x.shape[1]
        w = w + step(gradient, k, memory)
    return w


def adam(g: Tensor, k: int, memory: dict[str, Tensor], *, rate: float = 0.1) -> Tensor:
    m = memory["m"] = 0.9 * memory.get("m", torch.zeros_like(g)) + 0.1 * g
    v = memory["v"] = 0.99 * memory.get("v", torch.zeros_like(g)) + 0.01 * g * g
    return -rate * (m / (1 - 0.9 ** (k + 1))) / ((v / (1 - 0.99 ** (k + 1))).sqrt() + 1e-8)


def adagrad(g: Tensor, k: int, memory: dict[str, Tensor], *, rate: float = 0.3) -> Tensor:
    memory["v"] = memory.get("v", torch.zeros_like(g)) + g * g
    return -rate * g / (memory["v"].sqrt() + 1e-8)


def rmsprop(g: Tensor, k: int, memory: dict[str, Tensor], *, rate: float = 0.05) -> Tensor:
    memory["v"] = 0.9 * memory.get("v", torch.zeros_like(g)) + 0.1 * g * g
    return -rate * g / (memory["v"].sqrt() + 1e-6)


def soft_threshold(w: Tensor, by: float | Tensor) -> Tensor:
    return w.sign() * (w.abs() - by).clamp(min=0)


def proximal(x: Tensor, y: Tensor, prox: Callable[[Tensor, Tensor], Tensor], n: int = 150) -> Tensor:
    """Proximal gradient descent; `prox` gets the weights and the step size `[prompt 1]`."""
    s, b = moments(x, y)
    size = 1 / torch.linalg.eigvalsh(s)[:, -1:]
    w = torch.zeros_like(b)
    for _ in range(n):
        w = prox(w - size * ((s @ w[..., None])[..., 0] - b), size)
    return w


def pursuit(x: Tensor, y: Tensor, k: int, *, refit: bool) -> Tensor:
    """(Orthogonal) matching pursuit with `k` atoms."""
    w, chosen = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    norms = x.square().sum(1).clamp(min=1e-12)
    for _ in range(k):
        r = y - (x @ w[..., None])[..., 0]
        c = torch.einsum("pni,pn->pi", x, r)
        best = torch.nn.functional.one_hot((c.square() / norms).argmax(1), x.shape[2]).to(x.dtype)
        chosen = torch.maximum(chosen, best)
        w = ols(x * chosen[:, None], y) * chosen if refit else w + best * c / norms
    return w


def gram(a: Tensor, b: Tensor, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    return kernel(torch.cdist(a, b) / a.shape[2] ** 0.5)


def kernel_ridge(
    x: Tensor, y: Tensor, q: Tensor, kernel: Callable[[Tensor, Tensor], Tensor], penalty: float = 0.3
) -> Tensor:
    k = kernel(x, x) + penalty * torch.eye(x.shape[1], dtype=x.dtype)
    return (kernel(q[:, None], x)[:, 0] * torch.linalg.solve(k, y)).sum(-1)


def smoother(x: Tensor, y: Tensor, q: Tensor, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    w = gram(q[:, None], x, kernel)[:, 0]
    return (w * y).sum(-1) / w.sum(-1).clamp(min=1e-12)


def local_linear(x: Tensor, y: Tensor, q: Tensor) -> Tensor:
    w = torch.exp(-(((x - q[:, None]).square().sum(-1)) / x.shape[2]) / 2)
    one = torch.cat([torch.ones_like(x[..., :1]), x], -1)
    return (ols(one, y, w, 1e-3) * torch.cat([torch.ones_like(q[:, :1]), q], -1)).sum(-1)


def neighbours(x: Tensor, y: Tensor, q: Tensor, k: int, *, median: bool = False, weighted: bool = False) -> Tensor:
    d, i = torch.cdist(q[:, None], x)[:, 0].topk(k, largest=False)
    values = y.gather(1, i)
    if median:
        return values.median(1).values
    w = 1 / d.clamp(min=1e-9) if weighted else torch.ones_like(d)
    return (w * values).sum(1) / w.sum(1)


def spectral(f: Callable[[Tensor], Tensor]) -> Rule:
    """A learner `q f(S) Xᵀy`; f of the eigenvalues `[prompt d]`, ascending."""

    def rule(x: Tensor, y: Tensor, q: Tensor) -> Tensor:
        s, b = moments(x, y)
        values, vectors = torch.linalg.eigh(s)
        values = values.clamp(min=0)
        return ((q[:, None] @ vectors)[:, 0] * f(values) * (b[:, None] @ vectors)[:, 0]).sum(-1)

    return rule


def principal(k: int) -> Rule:
    return spectral(lambda v: torch.cat([torch.zeros_like(v[:, :-k]), 1 / v[:, -k:].clamp(min=1e-9)], 1))


def sweeps(x: Tensor, y: Tensor, n: int) -> Tensor:
    """Gauss-Seidel: coordinate descent over the inputs, `n` times."""
    s, b = moments(x, y)
    w = torch.zeros_like(b)
    for _ in range(n):
        for i in range(x.shape[2]):
            rest = b[:, i] - (s[:, i] * w).sum(-1) + s[:, i, i] * w[:, i]
            w = w.clone()
            w[:, i] = rest / s[:, i, i].clamp(min=1e-9)
    return w


def jacobi(x: Tensor, y: Tensor, n: int, damping: float) -> Tensor:
    s, b = moments(x, y)
    diagonal = s.diagonal(dim1=1, dim2=2).clamp(min=1e-9)
    w = torch.zeros_like(b)
    for _ in range(n):
        w = w + damping * (b - (s @ w[..., None])[..., 0]) / diagonal
    return w


def barzilai_borwein(x: Tensor, y: Tensor, n: int) -> Tensor:
    s, b = moments(x, y)
    w, size = torch.zeros_like(b), 1 / s.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True)
    for _ in range(n):
        g = (s @ w[..., None])[..., 0] - b
        w = w - size * g
        size = g.square().sum(-1, keepdim=True) / torch.einsum("pi,pij,pj->p", g, s, g)[:, None].clamp(min=1e-30)
    return w


def averaged_sgd(x: Tensor, y: Tensor, rate: float) -> Tensor:
    w = total = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        w = w + rate * (y[:, t] - (w * x[:, t]).sum(-1))[:, None] * x[:, t]
        total = total + w
    return total / x.shape[1]


def exponentiated(x: Tensor, y: Tensor, n: int, rate: float) -> Tensor:
    """Exponentiated gradient with positive and negative weights of total 2."""
    log = torch.zeros(len(x), 2 * x.shape[2], dtype=x.dtype)
    for _ in range(n):
        p = 2 * softmax(log, -1)
        w = p[:, : x.shape[2]] - p[:, x.shape[2] :]
        g = torch.einsum("pni,pn->pi", x, y - (x @ w[..., None])[..., 0]) / x.shape[1]
        log = log + rate * torch.cat([g, -g], -1)
    p = 2 * softmax(log, -1)
    return p[:, : x.shape[2]] - p[:, x.shape[2] :]


def with_intercept(x: Tensor, y: Tensor, q: Tensor) -> Tensor:
    mean, level = x.mean(1, keepdim=True), y.mean(1, keepdim=True)
    return level[:, 0] + (ols(x - mean, y - level) * (q - mean[:, 0])).sum(-1)


def standardized(x: Tensor, y: Tensor, q: Tensor, penalty: float) -> Tensor:
    scale = x.square().mean(1, keepdim=True).sqrt().clamp(min=1e-9)
    return (ols(x / scale, y, None, penalty) * (q / scale[:, 0])).sum(-1)


def total_least_squares(x: Tensor, y: Tensor) -> Tensor:
    vectors = torch.linalg.svd(torch.cat([x, y[..., None]], -1)).Vh[:, -1]
    last = vectors[:, -1:]
    return -vectors[:, :-1] / torch.where(last.abs() < 1e-6, torch.full_like(last, 1e-6), last)


def random_features(x: Tensor, y: Tensor, q: Tensor, width: int = 40) -> Tensor:
    a = torch.randn(x.shape[2], width, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
    return (ols((x @ a).relu(), y, None, 1.0) * (q @ a).relu()).sum(-1)


def pooled(x: Tensor, y: Tensor, n: int, noise: float) -> Tensor:
    """The posterior mean over a pool of `n` fixed weight vectors."""
    pool = torch.randn(n, x.shape[2], generator=torch.Generator().manual_seed(9), dtype=x.dtype)
    errors = (y[:, None] - torch.einsum("pni,ki->pkn", x, pool)).square().sum(-1)
    return softmax(-errors / (2 * noise**2), -1) @ pool


def towards(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Ridge regression towards fixed weights that are not zero."""
    center = torch.ones(x.shape[2], dtype=x.dtype) / x.shape[2] ** 0.5
    s, b = moments(x, y)
    return solve(s + penalty * torch.eye(x.shape[2], dtype=x.dtype), b + penalty * center)


def james_stein(x: Tensor, y: Tensor) -> Tensor:
    w = ols(x, y)
    r = (y - (x @ w[..., None])[..., 0]).square().mean(1, keepdim=True)
    return w * (1 - (x.shape[2] - 2) * r / w.square().sum(-1, keepdim=True).clamp(min=1e-9) / x.shape[1]).clamp(min=0)


def trimmed(x: Tensor, y: Tensor, share: float) -> Tensor:
    w = ols(x, y)
    for _ in range(10):
        r = (y - (x @ w[..., None])[..., 0]).abs()
        limit = r.quantile(1 - share, dim=1, keepdim=True)
        w = ols(x, y, (r <= limit).to(x.dtype), 1e-9)
    return w


def hard_threshold(x: Tensor, y: Tensor, k: int) -> Tensor:
    w = ols(x, y)
    return w * (w.abs() >= w.abs().topk(k, -1).values[:, -1:])


def elastic_net(x: Tensor, y: Tensor) -> Tensor:
    return proximal(x, y, lambda w, size: soft_threshold(w, 2 * size) / (1 + 2 * size))


def kaczmarz(x: Tensor, y: Tensor, n: int) -> Tensor:
    """Cyclic projections with a relaxation of 0.5, `n` times through the points, backwards."""
    w = torch.zeros_like(x[:, 0])
    for _ in range(n):
        for t in reversed(range(x.shape[1])):
            r = y[:, t] - (w * x[:, t]).sum(-1)
            w = w + 0.5 * (r / x[:, t].square().sum(-1).clamp(min=1e-9))[:, None] * x[:, t]
    return w


def average_of_ridges(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([ols(x, y, None, p) for p in (0.01, 1.0, 30.0)]).mean(0)


def mixed(a: Rule, b: Rule, share: float = 0.5) -> Rule:
    return lambda x, y, q: (1 - share) * a(x, y, q) + share * b(x, y, q)


def averaging(x: Tensor, y: Tensor) -> Tensor:
    return moments(x, y)[1] / x.shape[1]


def some_points(which: slice, then: Rule) -> Rule:
    return lambda x, y, q: then(x[:, which], y[:, which], q)


OLS, MEAN = linear(ols), linear(averaging)
RULES: dict[str, Rule] = {
    # shrunk, clipped, mixed
    "0.7 times least squares": lambda x, y, q: 0.7 * OLS(x, y, q),
    "averaging of normalized inputs": lambda x, y, q: MEAN(x / x.norm(dim=-1, keepdim=True), y, q) * x.shape[2] ** 0.5,
    "James-Stein": linear(james_stein),
    "saturated least squares": lambda x, y, q: torch.tanh(OLS(x, y, q)),
    "half least squares, half averaging": mixed(OLS, MEAN),
    "half ridge, half nearest neighbour": mixed(linear(partial(ols, penalty=1.0)), partial(neighbours, k=1)),
    "rounded least squares": lambda x, y, q: (2 * OLS(x, y, q)).round() / 2,
    "least squares on signs of targets": lambda x, y, q: OLS(x, y.sign() * y.abs().mean(1, keepdim=True), q),
    "least squares on clipped targets": lambda x, y, q: OLS(x, y.clamp(-1, 1), q),
    "average of three ridges": linear(average_of_ridges),
    "half of the nearest mean, half of least squares": mixed(OLS, partial(neighbours, k=5)),
    "least squares with intercept": with_intercept,
    # robust
    "least absolute deviations": linear(partial(reweighted, weight=lambda r: 1 / r.abs().clamp(min=1e-3))),
    "Tukey's biweight": linear(
        partial(reweighted, weight=lambda r: (1 - (r / 4.7).square()).clamp(min=0).square() + 1e-6)
    ),
    "trimmed least squares": linear(partial(trimmed, share=0.2)),
    "Cauchy regression": linear(partial(reweighted, weight=lambda r: 1 / (1 + (r / 2.4).square()))),
    # sparse, greedy
    "orthogonal matching pursuit, 2": linear(partial(pursuit, k=2, refit=True)),
    "orthogonal matching pursuit, 3": linear(partial(pursuit, k=3, refit=True)),
    "matching pursuit, 6": linear(partial(pursuit, k=6, refit=False)),
    "hard thresholds": linear(partial(hard_threshold, k=3)),
    "elastic net": linear(elastic_net),
    "non-negative least squares": linear(partial(proximal, prox=lambda w, size: w.clamp(min=0))),
    "weights in a box": linear(partial(proximal, prox=lambda w, size: w.clamp(-0.8, 0.8))),
    "weights in a ball": linear(partial(proximal, prox=lambda w, size: w / w.norm(dim=-1, keepdim=True).clamp(min=1))),
    # kernels, local
    "Laplace kernel ridge": partial(kernel_ridge, kernel=partial(gram, kernel=lambda d: torch.exp(-d))),
    "quadratic kernel ridge": partial(kernel_ridge, kernel=lambda a, b: (1 + a @ b.mT / a.shape[2]).square()),
    "Gaussian smoother": partial(smoother, kernel=lambda d: torch.exp(-2 * d * d)),
    "Cauchy smoother": partial(smoother, kernel=lambda d: 1 / (1 + 4 * d * d)),
    "local linear regression": local_linear,
    "median of five neighbours": partial(neighbours, k=5, median=True),
    "weighted neighbours": partial(neighbours, k=4, weighted=True),
    "random features": random_features,
    # adaptive descent
    "Adam, 20 steps": linear(partial(descent, n=20, step=adam)),
    "AdaGrad, 10 steps": linear(partial(descent, n=10, step=adagrad)),
    "RMSprop, 20 steps": linear(partial(descent, n=20, step=rmsprop)),
    "sign descent, 12 steps": linear(partial(descent, n=12, step=lambda g, k, _: -0.15 * g.sign() / (1 + 0.2 * k))),
    "normalized descent, 8 steps": linear(
        partial(descent, n=8, step=lambda g, k, _: -0.3 * g / g.norm(dim=-1, keepdim=True).clamp(min=1e-9))
    ),
    "clipped descent, 6 steps": linear(
        partial(descent, n=6, step=lambda g, k, _: -0.6 * g / g.norm(dim=-1, keepdim=True).clamp(min=1))
    ),
    "Barzilai-Borwein, 4 steps": linear(partial(barzilai_borwein, n=4)),
    "descent with decay, 8 steps": linear(partial(descent, n=8, step=lambda g, k, _: -0.8 / (1 + k) * g)),
    "exponentiated gradient, 10 steps": linear(partial(exponentiated, n=10, rate=1.0)),
    "averaged online descent": linear(partial(averaged_sgd, rate=0.1)),
    # preconditioned by the prompt
    "Jacobi, 3 steps": linear(partial(jacobi, n=3, damping=0.5)),
    "Gauss-Seidel, 1 sweep": linear(partial(sweeps, n=1)),
    "Gauss-Seidel, 2 sweeps": linear(partial(sweeps, n=2)),
    "diagonal least squares": linear(partial(jacobi, n=1, damping=1.0)),
    "ridge on standardized inputs": partial(standardized, penalty=5.0),
    "Kaczmarz, 2 rounds backwards": linear(partial(kaczmarz, n=2)),
    # filters of S
    "2 principal components": principal(2),
    "3 principal components": principal(3),
    "square root of least squares": spectral(lambda v: v.clamp(min=1e-9).rsqrt() / v.mean(1, keepdim=True).sqrt()),
    "iterated Tikhonov, 2": spectral(lambda v: (1 - (3 / (v + 3)).square()) / v.clamp(min=1e-9)),
    "heavy damping of small directions": spectral(lambda v: v / (v.square() + 9)),
    "normalized by the trace": spectral(lambda v: 3 / v.sum(1, keepdim=True).expand_as(v)),
    # windows, pools
    "least squares on the last half": lambda x, y, q: OLS(x[:, x.shape[1] // 2 :], y[:, x.shape[1] // 2 :], q),
    "ridge on every second point": some_points(slice(None, None, 2), linear(partial(ols, penalty=0.5))),
    "median of three regressions": lambda x, y, q: (
        torch.stack([OLS(x[:, i::3], y[:, i::3], q) for i in range(3)]).median(0).values
    ),
    "pool of 8 tasks": linear(partial(pooled, n=8, noise=1.0)),
    "pool of 64 tasks": linear(partial(pooled, n=64, noise=0.7)),
    "ridge towards ones": linear(partial(towards, penalty=3.0)),
    "total least squares": linear(total_least_squares),
    "points weighted by size": lambda x, y, q: (ols(x, y, x.square().sum(-1)) * q).sum(-1),
    "points weighted by nearness to the query": lambda x, y, q: (
        ols(x, y, torch.exp(-(x - q[:, None]).square().mean(-1)), 1e-6) * q
    ).sum(-1),
    "product of ridge and its confidence": lambda x, y, q: (
        OLS(x, y, q)
        * torch.sigmoid(2 - torch.einsum("pi,pij,pj->p", q, torch.linalg.pinv(moments(x, y)[0], hermitian=True), q))
    ),
}
"""The rules by name, in groups of a kind."""
