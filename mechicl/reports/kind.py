"""Kinds of reports: a table of parts that are measured, and a verdict made from them."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl import algorithms, viz
from mechicl.algorithms import references
from mechicl.algorithms.card import count
from mechicl.analysis import score_heads_over_training
from mechicl.analysis.dynamics import OverTraining
from mechicl.base.progress import progress_bar
from mechicl.base.shipped import predicts_classes
from mechicl.checkpoints import Study
from mechicl.checkpoints.study import Models
from mechicl.learners import AlgorithmLearner, squared_errors
from mechicl.models import HookedTransformer, PromptedModel, TableTransformer
from mechicl.prompts import Prompts
from mechicl.reports.algorithm import AlgorithmQuestion
from mechicl.reports.causes import causes, no_causes, slow_causes
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.finetuning import finetuning, no_finetuning, slow_finetuning
from mechicl.reports.heads import model_parts, no_model_parts
from mechicl.reports.history import history, no_history, strategies
from mechicl.reports.verdict import NOT_TESTED, Fact, Verdict, explained_terms, has_learned, learner_phrase
from mechicl.tasks import LinearRegression
from mechicl.viz.page import table

NOT_COMPARED = "", "", ("", "")  # of a loss without baselines
N_TRACED = 64  # prompts that heads are scored on at each snapshot


@dataclass(frozen=True)
class Part:
    """A part of a report."""

    name: str  # name of the part, for `sections=` and `--sections`
    measure: Callable[[Any], Measured]  # function of the report that returns rows, sections and numbers
    # function that returns the reason why this model has no such part; empty if it has.
    missing: Callable[[Any], str] = lambda kind: ""
    # function that returns the reason why the part is measured only on request; empty if it is quick.
    slow: Callable[[Any], str] = lambda kind: ""


class Kind:
    """A report on one kind of model; subclasses list their parts.

    `study` may be a checkpoint, which is opened at its first seed; `n_prompts` and `seed` (held out) are the kind's.
    """

    parts: ClassVar[tuple[Part, ...]] = ()
    heading: ClassVar[str] = "{name}"
    remark: ClassVar[str] = ""
    """Sentences at the end of the lead."""
    dtype: ClassVar[torch.dtype | None] = None
    """Precision of the held-out prompts; None for the task's default."""
    n_held_out: ClassVar[int] = 10_000
    prompt_seed: ClassVar[int] = 1_000_003
    opens: ClassVar[str] = "algorithm"
    """Name of the part that the verdict is made from."""
    no_weights: ClassVar[str] = ""
    """The reason why the verdict has nothing on the weights, unless `weights_as_text` is overridden."""

    def __init__(self, study: Models, *, n_prompts: int | None = None, seed: int | None = None):
        self.study = study if isinstance(study, Study) else Study(study, seed=study.seeds[0])
        self.n_prompts = self.n_held_out if n_prompts is None else n_prompts
        self.sections: Sequence[str] | None = None  # those that were requested
        self.seed = self.prompt_seed if seed is None else seed

    @property
    def title(self) -> str:
        """Title of the page."""
        return self.heading.format(name=self.study.name)

    @property
    def lead(self) -> str:
        """Description of the models, the task and the prompts."""
        study = self.study
        seeds = f"{count(len(study.models), 'seed')} of " if len(study.models) > 1 else ""
        described = seeds + _model_as_text(study.model)
        learner = _best_known(study.task)
        sentences = (
            f"Model: {study.name}{f', {described}' if described else ''}.", f"Task: {task_as_text(study.task)}.",
            f"Its best known learner is {learner}." if learner else "",
            f"Measured on {self.n_prompts:,} held-out prompts.", self.remark, study.chosen,
        )  # fmt: skip
        return " ".join(filter(None, sentences))

    @property
    def data(self) -> dict[str, Any]:
        """The models and the held-out prompts."""
        study = self.study
        return {"checkpoint": study.name, "command": study.record.get("command"), "seeds": tuple(study.seeds),
                "n_prompts": self.n_prompts, "prompt_seed": self.seed, "seed": self.seed}  # fmt: skip

    @cached_property
    def models(self) -> list[Any]:
        """The models of all seeds, the opened one first."""
        return self.study.models

    @cached_property
    def held_out(self) -> Any:
        """The held-out prompts, or sequences."""
        options = {} if self.dtype is None else {"dtype": self.dtype}
        return self.study.task.sample(self.n_prompts, seed=self.seed, **options)

    @cached_property
    def opened_errors(self) -> Float[Tensor, "prompt"]:
        """Squared errors of the opened model on the held-out prompts."""
        return squared_errors(self.models[0], self.held_out)[:, 0]

    @cached_property
    def squared_errors(self) -> Float[Tensor, "seed prompt"]:
        """Squared errors of the models on the held-out prompts."""
        others = (squared_errors(model, self.held_out)[:, 0] for model in self.models[1:])
        return torch.stack([self.opened_errors, *others])

    @property
    def learned(self) -> tuple[str, str, Fact]:
        """The loss of the opened model compared with baselines; see `has_learned`."""
        prompts = self.held_out
        if not isinstance(prompts, Prompts):
            return NOT_COMPARED
        zero, averaging = prompts.query.ys.square().mean(-1), AlgorithmLearner(algorithms.averaging)
        baselines = {"predicting 0": zero, "averaging": squared_errors(averaging, prompts)[:, 0]}
        return has_learned(self.opened_errors, baselines)

    @cached_property
    def question(self) -> AlgorithmQuestion:
        """The algorithm that the opened model behaves like."""
        return AlgorithmQuestion(self.study)

    @property
    def loss(self) -> str:
        """Name of the loss of the training."""
        return "cross entropy (nats)" if predicts_classes(self.study.model.cfg.to_dict()) else "squared error (MSE)"

    @property
    def plateau(self) -> float | None:
        """The loss from which training falls, that of predicting 0; None for its first loss."""
        return self.held_out.query.ys.double().square().mean().item()

    @property
    def traced(self) -> dict[str, Any]:
        """Results over the snapshots of the training, by the title of their panel in the section on the training."""
        found: dict[str, Any] = {**strategies(self.study, self.held_out[:N_TRACED])}
        question, asked = self.question, "algorithm" in (part.name for part in self.chosen(self.sections))
        if asked and question.answer.nearness != "none" and question.over_training:
            steps, distances = question.over_training
            shares = {f"unexplained by {learner_phrase(question.answer.match.name)}": 100 * distances.clamp(max=1)}
            found["unexplained by the algorithm (%, cut at 100)"] = OverTraining(steps, shares)
        if getattr(self.study.model.cfg, "prompt_format", "") == "interleaved":
            prompts = self.study.task.sample(N_TRACED, seed=self.seed)
            names = ("previous_token", "target_to_input" if self.study.model.cfg.one_pass else "input_to_target")
            opened = self.study.opened()  # all seeds take as long as the rest of some reports
            found["highest score of a head, opened seed"] = score_heads_over_training(opened, names, prompts=prompts)
        return found

    @cached_property
    def _missing(self) -> dict[str, str]:
        return {part.name: why for part in self.parts if (why := part.missing(self))}

    @cached_property
    def _slow(self) -> dict[str, str]:
        return {part.name: why for part in self.parts if part.name not in self._missing and (why := part.slow(self))}

    def weights_as_text(self) -> str:
        """Return a sentence on what the weights show."""
        return self.no_weights

    def verdict(self, comparison: Comparison) -> Verdict:
        """Make the sentences that the page opens with from everything that was measured."""
        return self.question.verdict(comparison, self.weights_as_text())

    def chosen(self, sections: Sequence[str] | None) -> list[Part]:
        """Return the parts to measure, in the order of the page."""
        parts = {part.name: part for part in self.parts if part.name not in self._missing}
        if sections is None:
            return [part for name, part in parts.items() if name not in self._slow]
        if not sections:
            raise ValueError(f"name one section or more, or leave sections out; this report has {', '.join(parts)}")
        if unknown := [name for name in sections if name not in parts]:
            reasons = "".join(f"; {n} is left out here: {self._missing[n]}" for n in unknown if n in self._missing)
            raise ValueError(
                f"this report has no section {', '.join(map(repr, unknown))}; it has {', '.join(parts)}{reasons}"
            )
        return [part for name, part in parts.items() if name in sections]

    def measure(self, sections: Sequence[str] | None = None) -> Comparison:
        """Measure the chosen parts."""
        self.sections = sections
        comparison = Comparison(self.title, self.lead, [], [], self.data)
        parts = self.chosen(sections)
        for part in progress_bar(parts, unit="section", desc=self.study.name):
            comparison = comparison.with_more(*part.measure(self))
        return comparison

    def write(self, out: Path, name: str, sections: Sequence[str] | None = None) -> Path:
        """Write NAME.html and NAME.json to a folder and return the path of the page."""
        comparison = self.measure(sections)
        measured = {part.name for part in self.chosen(sections)}
        verdict = Verdict("", {})
        if self.opens in measured | self._missing.keys():
            verdict = self.verdict(comparison)
        headline, learned, fact = self.learned
        headline = ". ".join(filter(None, (headline, verdict.headline))) or learned.partition(":")[0] or self.title
        sentences = {**({"Has it learned the task?": learned} if learned else {}), **verdict.sentences}
        facts = [*verdict.facts, *([fact] if learned else [])]
        verdict = replace(verdict, headline=headline, sentences=sentences, facts=facts)
        left_out = self._missing | {
            part.name: "not among the requested sections" if sections is not None else self._slow[part.name]
            for part in self.parts
            if part.name not in measured | self._missing.keys()
        }
        more = []
        if left_out:
            gaps = f"Sections left out: {', '.join(left_out)} (reasons at the end)."
            verdict.sentences[NOT_TESTED] = f"{verdict.sentences.get(NOT_TESTED, '')} {gaps}".strip()
            more = [Section("What this report leaves out", "", table(("section", "why"), list(left_out.items())))]
        opened = {"seed": self.study.seeds[0], "chosen": self.study.chosen}
        said = {"headline": verdict.headline, "sentences": verdict.sentences, **verdict.numbers, **opened}
        comparison = comparison.with_more(sections=more, data={"verdict": said})
        words = [comparison.lead, *verdict.sentences.values(), *(row.quantity + row.note for row in comparison.rows)]
        words += [f"{section.title} {section.words}" for section in comparison.sections]
        terms = replace(comparison, sections=[*comparison.sections, explained_terms(" ".join(words))])
        return terms.write(out, name, opening=verdict.named(self.study.name).section())

    def learning(self, words: str, references: dict[str, float], *, log_x: bool = False) -> list[Section]:
        """Draw the learning curve of the record, with losses of reference learners; none if there is no curve."""
        curve = self.study.record.get("curve")
        if curve is None or self.study.is_own:
            return []
        losses = {"each seed": curve["eval_loss"]}
        drawn = viz.losses_over_training(curve["eval_step"], losses, references=references, log_x=log_x)
        return [Section("Learning", words, drawn)]


def _model_as_text(model: Any) -> str:
    if isinstance(model, HookedTransformer):
        heads = count(model.cfg.n_heads, f"{model.cfg.attention.replace(',', ', then ')} head")
        repeated = " (one layer, repeated)" if model.cfg.recurrent else ""
        mlps = f" and MLPs of width {model.cfg.d_mlp}" if model.cfg.d_mlp else ""
        layers = f"{count(model.cfg.n_layers, 'layer')}{repeated}"
        return f"a transformer with {layers}, each with {heads}{mlps}, and width {model.cfg.d_model}"
    if isinstance(model, TableTransformer):
        layers, heads = count(model.cfg.n_layers, "layer"), count(model.cfg.n_heads, "head")
        return f"a transformer of tables with {layers}, each with {heads}, and width {model.cfg.d_model}"
    if isinstance(model, PromptedModel):
        return f"an LSTM with {count(model.cfg.n_layers, 'layer')} and width {model.cfg.d_model}"
    return ""


def _best_known(task: Any) -> str:
    try:
        name = next(iter(references(task)))
    except TypeError:  # no reference learner is known
        return ""
    return learner_phrase(name)


# ---- parts of several kinds ----


ALGORITHM = Part("algorithm", lambda kind: kind.question.part())
CAUSES = Part("causes", causes, no_causes, slow_causes)
HEADS = Part("heads", lambda kind: model_parts(kind.study),
             lambda kind: no_model_parts(kind.study))  # fmt: skip
HISTORY = Part("history", lambda kind: history(kind.study, kind.traced, loss=kind.loss, plateau=kind.plateau),
               lambda kind: no_history(kind.study))  # fmt: skip
FINETUNING = Part("fine-tuning", lambda kind: finetuning(kind.study),
                  lambda kind: no_finetuning(kind.study), lambda kind: slow_finetuning(kind.study))  # fmt: skip


def task_as_text(task: Any) -> str:
    """Describe linear regression by sizes, distributions, noise and all other settings, another task by its `repr`."""
    if not isinstance(task, LinearRegression):
        return repr(task) if dataclasses.is_dataclass(task) else type(task).__name__
    changed = {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if getattr(task, f.name) != f.default}
    inputs = {"uniform": "uniform on [-1/2, 1/2]", "gaussian": "standard normal"}.get(str(task.inputs), task.inputs)
    described = [f"inputs {inputs}", "standard normal weights",
                 f"noise of standard deviation {task.noise_std:g}" if task.noise_std else "no noise"]  # fmt: skip
    known = ("x_dim", "n_context", "inputs", "noise_std")
    described += [f"{name.replace('_', ' ')} {value}" for name, value in changed.items() if name not in known]
    size = f"{task.n_context} context points, {task.x_dim} dimensions"
    return f"linear regression ({size}; {', '.join(described)})"
