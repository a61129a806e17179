"""Tasks: distributions over prompts.

A task is a small frozen dataclass: `sample(n, seed=...)` gives prompts, `replace(...)` a varied task, and
`task_to_dict` the data that checkpoints keep. Tasks of points give `Prompts`, those of tokens (`RepeatedTokens`,
`MarkovChains`, `TopicClassification`) give `TokenSequences`. One's own is a frozen dataclass on the base
`PromptDistribution`, or any class that has what `Task` says; `register` names it for records.
`algorithms.references(task)` are the best known learners of a task.
"""

from mechicl.tasks.boolean_functions import Conjunctions, Parities
from mechicl.tasks.fixed_tasks import FixedTasks
from mechicl.tasks.function_classes import (
    DecisionTrees,
    LogisticRegression,
    QuadraticRegression,
    ReluNetworks,
    SparseLinearRegression,
)
from mechicl.tasks.gaussian_clusters import GaussianClusters
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.markov_chains import MarkovChains
from mechicl.tasks.mixed_regression import MixedRegression
from mechicl.tasks.protocol import Task
from mechicl.tasks.registry import AnyTask, register, task_from_dict, task_to_dict
from mechicl.tasks.repeated_tokens import RepeatedTokens
from mechicl.tasks.sampling import PromptDistribution, RandomTensors, TokenDistribution
from mechicl.tasks.sine_regression import SineRegression
from mechicl.tasks.task_pool import TaskPool
from mechicl.tasks.topics import TopicClassification

__all__ = [
    "AnyTask",
    "Conjunctions",
    "DecisionTrees",
    "FixedTasks",
    "GaussianClusters",
    "LinearRegression",
    "LogisticRegression",
    "MarkovChains",
    "MixedRegression",
    "Parities",
    "PromptDistribution",
    "QuadraticRegression",
    "RandomTensors",
    "ReluNetworks",
    "RepeatedTokens",
    "SineRegression",
    "SparseLinearRegression",
    "Task",
    "TaskPool",
    "TokenDistribution",
    "TopicClassification",
    "register",
    "task_from_dict",
    "task_to_dict",
]
