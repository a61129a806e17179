"""Scores of predictions: answers to few-shot prompts, and targets of a regression."""

import math
from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from mechicl.base.arguments import checked
from mechicl.prompts import Shots
from mechicl.statistics import Interval, Result, interval
from mechicl.statistics.results import SHARE


@dataclass(frozen=True, eq=False)
class FewShotScores(Result):
    """Accuracy and log-probability of the right answer, by task, labels and demonstrations.

    Results of `icl_score` (words) and `measure_accuracy` (texts).

    Attributes:
        tasks: names of the tasks.
        labels: kinds of labels in the demonstrations.
        shots: numbers of demonstrations.
        accuracy: 1 where the right answer's token is the most probable one, else 0. For words this is the first token
            that differs between answers, compared with all tokens; for texts the label's, compared with all labels.
        log_probability: log-probability of that token, in nats.
    """

    tasks: tuple[str, ...]
    labels: tuple[str, ...]
    shots: tuple[int, ...]
    accuracy: Float[Tensor, "task label shot prompt"] = field(metadata=SHARE)
    log_probability: Float[Tensor, "task label shot prompt"]

    @checked
    def gain(self, task: str, label: str = "shuffled", shots: int | None = None, level: float = 0.95) -> Interval:
        """Return the accuracy with true labels minus that with other labels, paired by query, with its interval.

        Args:
            task: name of the task.
            label: kind of the other labels.
            shots: number of demonstrations; by default the last of those measured.
        """
        shots = self.shots[-1] if shots is None else shots
        for value, known in ((task, self.tasks), (label, self.labels), ("true", self.labels), (shots, self.shots)):
            if value not in known:
                raise ValueError(f"{value!r} was not measured, only {list(known)}")
        cell = self.accuracy[self.tasks.index(task), :, self.shots.index(shots)]
        return interval(cell[self.labels.index("true")] - cell[self.labels.index(label)], level, within=(-1, 1))


def score_answers(
    logits: Float[Tensor, "prompt vocab"], targets: Int[Tensor, "prompt"], choices: Int[Tensor, "choice"] | None = None
) -> tuple[Float[Tensor, "prompt"], Float[Tensor, "prompt"]]:
    """Return 1 for each target with the highest logit and 0 for others, and the targets' log-probabilities in nats.

    With `choices`, only these tokens are compared, and probabilities are among them. Both are NaN where a logit is.
    """
    targets = targets.to(logits.device)
    if choices is not None:
        choices = choices.to(logits.device)
        logits, targets = logits[:, choices], (targets[:, None] == choices).int().argmax(-1)
    right = (logits.argmax(-1) == targets).to(logits.dtype).masked_fill(logits.isnan().any(-1), math.nan)
    return right, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def scores_and_losses(
    outputs: Float[Tensor, "query d_out"], shots: Shots
) -> tuple[Float[Tensor, "query"], Float[Tensor, "query"]]:
    """Score (the higher the better) the predictions of the queries, and compute their losses; float64 on the CPU.

    Among choices: 1 where the right one has the highest logit and 0 elsewhere; cross entropy over the choices, in nats.
    In a regression: squared error summed over the target's dimensions, and minus it as the score.
    """
    outputs, targets = outputs.detach().cpu().double(), shots.targets.cpu()
    if shots.choices is None:
        loss = (outputs - targets.double()).square().sum(-1)
        return -loss, loss
    right, log_probability = score_answers(outputs, targets, shots.choices)
    return right, -log_probability


class Scored:
    """Part of results with scores of answers: right (1) or wrong (0), or minus the squared error in a regression."""

    def _interval(self, name: str, samples: Tensor, level: float = 0.95) -> Interval:
        if name.endswith("score") and (samples >= 0).all():
            return interval(samples, level, within=(0, 1))
        return super()._interval(name, samples, level)  # type: ignore[misc]
