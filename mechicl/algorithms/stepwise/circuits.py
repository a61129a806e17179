"""Two-step circuits: what points hand to each other before an algorithm can begin."""

from jaxtyping import Float
from torch import Tensor

from mechicl.algorithms.stepwise.base import State, StepwiseAlgorithm
from mechicl.algorithms.stepwise.descent import without_query_target
from mechicl.prompts import Prompts


class AfterCopying(StepwiseAlgorithm):
    """An algorithm whose first step moves every target from a token of its own to the token of its input.

    For prompts whose inputs and targets are tokens of their own. Before that step a point's target is at its target
    token ("target"), after it at its input token, and the target's token is read no more.

    Args:
        algorithm: what runs on the points that the copying has put together.

    Source: von Oswald et al. 2023, Proposition 3 and section 4.

    Example:
        >>> AfterCopying(ResidualDescent(2, step_size=0.05)).n_steps
        3
    """

    def __init__(self, algorithm: StepwiseAlgorithm):
        self.algorithm = algorithm
        self.n_steps, self.causal = algorithm.n_steps + 1, algorithm.causal
        self.variables = (*algorithm.variables, "target")
        self._receivers = [name for name in ("y", "residual") if name in algorithm.variables]  # what starts as a target
        self.name = f"copying, then {algorithm.name}"

    def start(self, prompts: Prompts) -> State:
        """The algorithm's state on prompts without targets, and the targets beside it."""
        state = self.algorithm.start(prompts)
        return state | {name: 0 * state[name] for name in self._receivers} | {"target": without_query_target(prompts)}

    def step(self, k: int, readers: State, context: State, sees: Tensor | None = None) -> State:
        """The copy of each point's own target, or a step of the algorithm."""
        if k == 0:
            return readers | dict.fromkeys(self._receivers, readers["target"])
        inner = self.algorithm.step(k - 1, readers, context, sees)
        return inner | {"target": readers["target"]}

    def read(self, query: State) -> Float[Tensor, "prompt y"]:
        """The algorithm's prediction."""
        return self.algorithm.read(query)
