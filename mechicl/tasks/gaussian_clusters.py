"""Few-shot classification of Gaussian clusters: learned from the context, or from the weights?"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.base.arguments import Count, Fraction, Natural, NonNegative, at_least, check_fields
from mechicl.prompts import Prompts
from mechicl.tasks.sampling import PromptDistribution, RandomTensors


@dataclass(frozen=True, repr=False)
class GaussianClusters(PromptDistribution):
    """Few-shot classification of Gaussian clusters: does a model learn in context, or remember classes in its weights?

    There are `n_classes` classes with fixed means and labels (several classes share a label). An input of a class is
    `(mean + ε η) / sqrt(1 + ε²)`, with means and η from N(0, I / x_dim). In a bursty prompt the context has
    `n_context / burstiness` different classes, each `burstiness` times, in random order, and the query is of one of
    them: its label can be copied from the context, or remembered from training. Which of the two a model does shows on
    prompts that do not occur in training (`classes=`).

    `sample(n, seed=...)` draws `Prompts` whose targets are one-hot labels: the best prediction by squared error is the
    probability of each label. (The papers train by cross entropy; the minimum is the same distribution.)
    `regret(loss="errors")` and `loss="log loss"` read predictions as classes and as probabilities. Source: Reddy 2024,
    "The mechanistic basis of data dependence and abrupt learning in an in-context classification task"; burstiness and
    Zipf's law of classes after Chan et al. 2022.

    Attributes:
        x_dim: dimension of the inputs.
        n_context: number of labelled context points, without the query.
        n_classes: number of classes in training, K.
        n_labels: number of labels, L; class k has label k mod L.
        burstiness: points of each class in a bursty context, B.
        bursty_share: share of the prompts with known classes that are bursty; in the others all points and the query
            are drawn independently.
        within_class_noise: ε, the size of the noise relative to the means.
        zipf_exponent: α; class k (from 1) is drawn in proportion to k^-α, and 0 gives equal chances.
        classes: "known" classes as in training; "new" ones for each prompt, with random means and labels, which only
            the context gives (in-context learning); "absent": known classes, and the query's is not in the context, so
            that only the weights can give its label (in-weights learning); "swapped": known classes, but every label
            of a prompt is replaced by another one, so that context and weights disagree; the target is the context's.
        class_seed: seed of the fixed means.

    Example:
        >>> task = GaussianClusters(n_classes=64)
        >>> task.sample(3, seed=0)
        Prompts(n_prompts=3, n_context=8, x_dim=16, y_dim=4, dtype=torch.float32, device='cpu')
        >>> task.replace(classes="new").sample(3, seed=0).ys.sum(-1).unique()
        tensor([1.])
    """

    x_dim: Count = 16
    n_context: Count = 8
    n_classes: Annotated[int, at_least(2)] = 128
    n_labels: Annotated[int, at_least(2)] = 4
    burstiness: Count = 2
    bursty_share: Fraction = 1.0
    within_class_noise: NonNegative = 0.1
    zipf_exponent: NonNegative = 0.0
    classes: Literal["known", "new", "absent", "swapped"] = "known"
    class_seed: Natural = 0

    def __post_init__(self):
        check_fields(self)
        if self.n_context % self.burstiness:
            raise ValueError(f"burstiness must divide n_context={self.n_context}, got {self.burstiness}")
        if self.n_classes < max(self.n_labels, self.n_groups + 1):
            raise ValueError(
                f"n_classes must be at least n_labels={self.n_labels} and one more than the {self.n_groups} classes of "
                f"a context, got {self.n_classes}"
            )

    @property
    def y_dim(self) -> int:
        """Dimension of the targets: the number of labels."""
        return self.n_labels

    @property
    def n_groups(self) -> int:
        """Number of different classes in a bursty context."""
        return self.n_context // self.burstiness

    @cached_property
    def means(self) -> Float[Tensor, "class x"]:
        """Means of the fixed classes, float64."""
        generator = torch.Generator().manual_seed(self.class_seed)
        normal = torch.randn(self.n_classes, self.x_dim, generator=generator, dtype=torch.float64)
        return normal / self.x_dim**0.5

    @cached_property
    def labels(self) -> Int[Tensor, "class"]:
        """Label of each fixed class."""
        return torch.arange(self.n_classes) % self.n_labels

    @cached_property
    def frequencies(self) -> Float[Tensor, "class"]:
        """Probability of each fixed class, float64."""
        powers = torch.arange(1, self.n_classes + 1).double() ** -self.zipf_exponent
        return powers / powers.sum()

    def _sample(self, n_prompts: int, random: RandomTensors) -> Prompts:
        n, groups = self.n_context, self.n_groups
        # keys whose order draws classes without replacement in proportion to their frequencies (Gumbel's trick)
        keys = self.frequencies.log().to(random.device) - random.exponential(n_prompts, self.n_classes).double().log()
        classes = keys.topk(groups + 1).indices  # [prompt place], the last for the query of "absent"
        place = (torch.arange(n, device=random.device) // self.burstiness).expand(n_prompts, -1)
        place = place.gather(1, random.uniform(n_prompts, n).argsort(-1))  # in random order
        query = random.integers(0, groups, n_prompts, 1)
        if self.classes == "absent":
            query = torch.full_like(query, groups)
        places = torch.cat([place, query], dim=1)
        of_points = classes.gather(1, places)
        if self.bursty_share < 1 and self.classes == "known":
            chances = self.frequencies.to(random.device).expand(max(n_prompts, 1), -1)
            drawn = torch.multinomial(chances, n + 1, replacement=True, generator=random.generator)[:n_prompts]
            of_points = torch.where(random.uniform(n_prompts, 1) < self.bursty_share, of_points, drawn)
        labels = self.labels.to(random.device)[of_points]
        means = self.means.to(random.device, random.dtype)[of_points]
        if self.classes == "new":  # by their places: each prompt has its own means and labels there
            fresh = random.normal(n_prompts, groups, self.x_dim) / self.x_dim**0.5
            means = fresh.gather(1, places[..., None].expand(-1, -1, self.x_dim))
            labels = random.integers(0, self.n_labels, n_prompts, groups).gather(1, places)
        elif self.classes == "swapped":  # every label becomes another one
            shift = random.integers(1, self.n_labels, n_prompts, 1)
            labels = (labels + shift) % self.n_labels
        epsilon = self.within_class_noise
        noise = random.normal(n_prompts, n + 1, self.x_dim) / self.x_dim**0.5
        xs = (means + epsilon * noise) / (1 + epsilon**2) ** 0.5
        return Prompts(xs, torch.nn.functional.one_hot(labels, self.n_labels).to(xs))
