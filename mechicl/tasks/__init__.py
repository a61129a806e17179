"""Tasks: distributions over prompts.

A task is a small frozen dataclass: `sample(n, seed=...)` returns prompts, `replace(...)` a changed task, and
`task_to_dict` the data that checkpoints store. Tasks of points return `Prompts`, those of tokens (`RepeatedTokens`,
`MarkovChains`, `BallsAndUrns`, `GraphTracing`, `TopicClassification`) return `TokenSequences`. For your own task write
a frozen dataclass on the base `PromptDistribution`, or any class that implements `Task`; `register` names it in
records.
`algorithms.references(task)` are the best known learners of a task.
"""

from mechicl.tasks.boolean_functions import Conjunctions, Parities
from mechicl.tasks.function_classes import (
    AssociativeRecall,
    DecisionTrees,
    DriftingRegression,
    LogisticRegression,
    MixedRegression,
    QuadraticRegression,
    ReluNetworks,
    SineRegression,
    SparseLinearRegression,
)
from mechicl.tasks.gaussian_clusters import GaussianClusters
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.own_tables import OwnTable
from mechicl.tasks.pools import FixedTasks, TaskPool
from mechicl.tasks.registry import AnyTask, register, task_from_dict, task_to_dict
from mechicl.tasks.sampling import PromptDistribution, RandomTensors, Task, TokenDistribution
from mechicl.tasks.tables import TableClassification, TableRegression
from mechicl.tasks.token_sequences import BallsAndUrns, GraphTracing, MarkovChains, RepeatedTokens
from mechicl.tasks.topics import TopicClassification

__all__ = [
    "AnyTask", "AssociativeRecall", "BallsAndUrns", "Conjunctions", "DecisionTrees", "DriftingRegression",
    "FixedTasks", "GaussianClusters", "GraphTracing", "LinearRegression", "LogisticRegression", "MarkovChains",
    "MixedRegression", "OwnTable", "Parities", "PromptDistribution", "QuadraticRegression", "RandomTensors",
    "ReluNetworks", "RepeatedTokens", "SineRegression", "SparseLinearRegression", "TableClassification",
    "TableRegression", "Task", "TaskPool", "TokenDistribution", "TopicClassification", "register", "task_from_dict",
    "task_to_dict",
]  # fmt: skip
