"""The report on models of token sequences: when induction heads form, and the circuit that they are part of."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mechicl import viz
from mechicl.algorithms import references
from mechicl.analysis import (
    Circuit,
    composition_scores,
    corrupt_tokens,
    find_circuit,
    identify_on_tokens,
    measure_circuit,
    patch,
    regret,
    score_heads,
    score_heads_over_training,
)
from mechicl.analysis.dynamics import HeadsOverTraining
from mechicl.analysis.heads import HeadScores
from mechicl.base.precision import at_least_float32
from mechicl.learners.token_learners import named_token_learners, token_losses
from mechicl.models import HookedTransformer
from mechicl.prompts import TokenSequences
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.history import TITLE, strategies
from mechicl.reports.kind import HISTORY, N_TRACED, Kind, Part
from mechicl.reports.rows import Row
from mechicl.reports.verdict import NOT_TESTED, Fact, Verdict, agreement_with_papers, has_learned
from mechicl.statistics import Interval, interval
from mechicl.tasks import RepeatedTokens
from mechicl.viz.behaviour import score_bars

SCORES = ("previous_token", "induction")
N_SCORED, N_PATCHED = 64, 32
KIND = 0.3  # least share of its attention by which a head is of a kind
RIGHT = "share of predictable tokens that are predicted"
NODES, FAITHFUL = "heads of the circuit", "faithfulness of the circuit"
_WORDS = {
    "learner": """Kullback-Leibler divergence of each reference learner's next-token probabilities from the network's,
        by the number of tokens read.""",
    "regret": """Cross entropy of the next token above that of the best known learner of the task, on the same
        sequences.""",
    "heads": """Scores of every head of the opened seed: shares of attention (0 to 1), and eigenvalue scores of the
        weights (-1 to 1). Copying is of W_E W_V W_O W_U. Prefix matching is of the circuit by which the head's keys
        read what an earlier head wrote (0 in layer 0).""",
    "composition": """How much of what a head writes the keys of a later head read: the Frobenius norm of the product of
        their weights over the norms of both, minus the value for random matrices of these shapes.""",
    "patching": """Every earlier occurrence of the last token is replaced by another token, and one head's output at one
        position is restored to its original value. Cells are the share of the loss of the following token that this
        recovers. All sequences repeat with the longest period of training. An induction head acts at the last position;
        a previous-token head just after the earlier occurrence.""",
    "circuit": """The heads and connections that the loss needs. All others were cut, in groups, as long as the loss
        changed by less than a twentieth of the change from cutting everything. A connection that is cut carries the
        mean over sequences at the same position. Numbers are the increase of the loss, in nats, when a connection is
        cut as well; those below a twentieth of the largest are left out.""",
}


def _learning(kind: "Tokens") -> Measured:
    losses, right = zip(*(_losses(model, kind.held_out) for model in kind.study.models), strict=True)
    over = "seeds" if len(losses) > 1 else ""
    rows = [
        Row("cross entropy of predictable tokens (nats)", None, _over_seeds(torch.stack(losses)), over),
        Row(RIGHT, None, _over_seeds(torch.stack(right)), over, share=True),
    ]
    return [replace(row, section=TITLE) for row in rows], [], {}


def _heads(kind: "Tokens") -> Measured:
    scores = [score_heads(model, n_prompts=N_SCORED, seed=kind.seed) for model in kind.study.models]
    first, rows = scores[0], []
    for name in [name for name in (*SCORES, "copying", "prefix_matching") if name in first.scores]:
        highest = torch.tensor([each.best(name)[2].mean for each in scores])
        note = f"{first.chance[name]:.3f} if attention were uniform" if first.is_of_attention(name) else ""
        rows.append(Row(f"highest {name.replace('_', ' ')} score of a head", None, _over_seeds(highest),
                        "seeds" if len(scores) > 1 else "", note))  # fmt: skip
    best = {name: first.best(name) for name in SCORES}
    found = {name: [layer, head, score.mean, first.chance[name]] for name, (layer, head, score) in best.items()}
    data = {"heads": [each.to_dataframe().to_dict("records") for each in scores], "best_heads": found}
    return rows, [Section("What the heads do", _WORDS["heads"], viz.head_table(first, "Scores of heads"))], data


def _composition(kind: "Tokens") -> Measured:
    drawn = viz.composition_figure(composition_scores(kind.study.model, "K", baseline=True), "K")
    return [], [Section("Which heads read what others wrote", _WORDS["composition"], drawn)], {}


def _patching(kind: "Tokens") -> Measured:
    task = kind.study.task
    sequences = task.replace(min_period=task.max_period).sample(N_PATCHED, seed=kind.seed)
    corrupted = corrupt_tokens(sequences.read, d_vocab=task.d_vocab)
    sweep = patch(kind.study.model, sequences, corrupted, "z", ("layer", "pos", "head"), progress=False)
    drawn = viz.patching_grid(sweep, title="Each head's output restored")
    return [], [Section("Where the earlier occurrence is seen", _WORDS["patching"], drawn)], {}


def _circuit(kind: "Tokens") -> Measured:
    model, searched, others = kind.study.model, kind.held_out[:N_PATCHED], kind.held_out[N_PATCHED : 4 * N_PATCHED]
    circuit = find_circuit(model, searched, method="mean", tolerance=0.05, at="positions")
    circuit = measure_circuit(model, circuit, others if len(others) > 1 else searched, at="positions")
    rows = _circuit_rows(circuit, score_heads(model, n_prompts=N_SCORED, seed=kind.seed))
    data = {"circuit": circuit.to_dataframe().to_dict("records")}
    return rows, [Section("The circuit", _WORDS["circuit"], viz.circuit_graph(circuit))], data


def _circuit_rows(circuit: Circuit, scores: HeadScores) -> list[Row]:
    everything = ", all heads of the model" if len(circuit.nodes) == circuit.n_nodes else ""
    kinds = [name.replace("_", "-") for name in SCORES
             if any(scores.mean(name)[layer, head] > KIND for layer, head in circuit.heads)]  # fmt: skip
    rows = [
        Row(NODES, None, ", ".join(map(str, circuit.nodes)), "",
            f"{len(circuit.edges)} edges{everything}; the opened seed"),
        Row("kinds of heads in the circuit", "previous-token + induction", " + ".join(kinds) or "neither", "",
            f"a score above {KIND:g} on random sequences that are repeated", kinds == ["previous-token", "induction"],
            "elhage2021"),
        Row("loss of the circuit alone (nats)", None, interval(circuit.edges_alone), "prompts",
            f"all else cut; {circuit.full.mean():.3g} whole, {circuit.ablated.mean():.3g} with everything cut"),
        Row(FAITHFUL, None, circuit.faithfulness(), "prompts",
            "share of the improvement by all heads that it keeps, on other sequences", share=True),
    ]  # fmt: skip
    if not everything:
        words = "share of the improvement by all heads that is lost without its heads"
        rows.append(Row("completeness of the circuit", None, circuit.completeness(), "prompts", words, share=True))
    return rows


def _learner(kind: "Tokens") -> Measured:
    options: dict[str, Any] = {"n_prompts": kind.n_prompts, "seed": kind.seed, "progress": False}
    identified = identify_on_tokens(kind.study.model, kind.study.task, **options)
    measured = regret(kind.study.model, kind.study.task, **options)
    rows = [
        Row(_divergence(name), None, identified.divergence(name), "prompts", "the opened seed")
        for name in identified.divergences
    ]
    note = "cross entropy above that of the best known learner"
    rows.append(Row(f"regret against {measured.reference} (nats a token)", None, measured.mean(), "prompts", note))
    drawn = [Section("Which learner it is", _WORDS["learner"], viz.plot(identified)),
             Section("How far from the best learner", _WORDS["regret"], viz.plot(measured))]  # fmt: skip
    return rows, drawn, {"nearest_learner": identified.best}


def _divergence(name: str) -> str:
    return f"divergence from {name} (nats a token)"


def _no_repeats(kind: "Tokens") -> str:
    needed = "it is for sequences that repeat, where one earlier occurrence decides the next token"
    return "" if isinstance(kind.study.task, RepeatedTokens) else needed


def _no_composition(kind: "Tokens") -> str:
    return _no_repeats(kind) or ("" if kind.study.model.cfg.n_layers > 1 else "it is between layers, and there is one")


def _no_chains(kind: "Tokens") -> str:
    return "" if _no_repeats(kind) else "no reference learners are known for sequences that repeat"


def _over_seeds(values: Tensor) -> Interval | float:
    return interval(values) if len(values) > 1 else values.item()


def _losses(model: HookedTransformer, sequences: TokenSequences) -> tuple[Tensor, Tensor]:
    targets = sequences.targets()
    with torch.no_grad():
        logits = at_least_float32(torch.cat([model(part) for part in sequences.read.split(256)]))
    scored = targets >= 0
    return F.cross_entropy(logits[scored], targets[scored]), (logits.argmax(-1) == targets)[scored].double().mean()


class Tokens(Kind):
    """Loss, heads, patching and circuit of a model of token ids (Elhage et al. 2021; Olsson et al. 2022)."""

    parts = (
        Part("learning", _learning), Part("heads", _heads), Part("learner", _learner, _no_chains),
        Part("composition", _composition, _no_composition), Part("patching", _patching, _no_repeats),
        Part("circuit", _circuit, _no_repeats), HISTORY,
    )  # fmt: skip
    heading = "Heads and circuits ({name})"
    n_held_out, prompt_seed = 1024, 2_000_003
    opens = "heads"

    @cached_property
    def formed(self) -> HeadsOverTraining | None:
        """The highest scores of heads at the snapshots, if there are any."""
        study = self.study
        if study.snapshots is None or "curve" not in study.record or study.is_own:
            return None
        return score_heads_over_training(study, SCORES, n_prompts=N_SCORED, seed=self.seed)

    @property
    def learned(self) -> tuple[str, str, Fact]:
        """The cross entropy of the opened model compared with that of guessing or of the weaker reference learners."""
        sequences, task = self.held_out, self.study.task
        (learner,) = named_token_learners([self.study.model]).values()
        losses = token_losses(learner, sequences)
        if isinstance(task, RepeatedTokens):
            seen = F.one_hot(sequences.read.cpu(), task.d_vocab).cumsum(1).clamp(max=1).sum(-1).double()
            baselines = {"uniform guessing": torch.full_like(losses, task.d_vocab), "guessing among tokens read": seen}
            baselines = {name: n.log().masked_fill(losses.isnan(), torch.nan) for name, n in baselines.items()}
        else:
            weaker = list(references(task).items())[:0:-1]
            baselines = {f"the {name} learner": token_losses(learner, sequences) for name, learner in weaker}
        means = {name: each.nanmean(1) for name, each in baselines.items()}
        return has_learned(losses.nanmean(1), means, "cross entropy")

    @property
    def plateau(self) -> None:
        """None, so that the first loss counts: tasks of tokens have no common loss of guessing."""

    @property
    def traced(self) -> dict[str, Any]:
        """The strategies of tasks with reference learners, and the highest scores of heads."""
        found = strategies(self.study, self.held_out[:N_TRACED])
        return found if self.formed is None else {**found, "highest score of a head": self.formed}

    def verdict(self, comparison: Comparison) -> Verdict:
        """Report whether it does induction, since when, and whether its circuit is the published one."""
        rows, data, study = {row.quantity: row for row in comparison.rows}, comparison.data, self.study
        best = data["best_heads"]
        layer, head, induction, chance = best["induction"]
        has_induction, name = induction > KIND, f"head {head} of layer {layer}"
        gives = f"gives {induction:.0%} of its attention to the token after an earlier occurrence of the current one"
        if has_induction:
            words = [f"It does induction: {name} {gives}."]
            earlier, at, share, _ = best["previous_token"]
            words.append(f"Head {at} of layer {earlier} gives {share:.0%} to the previous token." if share > KIND else
                         f"No head gives more than {share:.0%} to the previous token.")  # fmt: skip
        else:
            words = [f"No head does induction: the best, {name}, {gives}."]
        words.append(f"Uniform attention would give {chance:.0%}.")
        if RIGHT in rows and isinstance(study.task, RepeatedTokens):
            words.append(f"It predicts {rows[RIGHT].ends[1]:.0%} of the repeated tokens.")
        if nearest := data.get("nearest_learner"):
            words.append(f"The reference learner with the most similar predictions is {nearest}, "
                         f"{rows[_divergence(nearest)].ends[1]:.2g} nats a token apart.")  # fmt: skip
        sentences, gaps = {"What does it do?": " ".join(words)}, []
        if has_induction and self.formed is not None:
            sentences["Since when?"] = _since(self.formed)
        elif has_induction:
            gaps.append("Since which step it does induction: no snapshots were saved.")
        evidence = []
        if FAITHFUL in rows:
            faithful = rows[FAITHFUL].ends
            evidence = [
                f"With everything but {rows[NODES]} ablated, the model keeps {faithful[1]:.0%} of the improvement by "
                f"all heads, on sequences that the search did not use. Ablation "
                f"{'agrees with' if faithful[0] > 0.5 else 'does not confirm'} the scores."
            ]
        if agreement := " ".join(filter(None, (*evidence, agreement_with_papers(comparison.rows)))):
            sentences["Do causal tests and papers agree?"] = agreement
        sentences |= {NOT_TESTED: " ".join(gaps)} if gaps else {}
        lines = {"highest of any head": [values[2] for values in best.values()],
                 "if attention were uniform": [values[3] for values in best.values()]}  # fmt: skip
        names = [f"{_task_of_head(score)}: head\u00a0{at[0]}.{at[1]}" for score, at in best.items()]
        picture = score_bars("What the heads attend to", "share of attention", names, lines)
        facts = [(f"{induction:.0%}", f"of {name}'s attention goes to the token after an earlier occurrence of the "
                  f"current one; {chance:.0%} if attention were uniform")]  # fmt: skip
        if FAITHFUL in rows:
            verb = "confirms" if rows[FAITHFUL].ends[0] > 0.5 else "does not confirm"
            kept = f"of the loss's improvement by all heads remains with only {rows[NODES]}: ablation {verb} the scores"
            facts.append((str(rows[FAITHFUL]), kept))
        elif nearest:
            facts.append((f"{rows[_divergence(nearest)].ends[1]:.2g} nats", f"a token from the predictions of the "
                          f"{nearest} learner, the nearest of {len(references(study.task))}"))  # fmt: skip
        numbers = {"induction": has_induction, "best_heads": best}
        headline = f"It does induction, with {name}" if has_induction else "It does no induction"
        if nearest:
            does = name if has_induction else "no head"
            headline = f"It predicts most like the {nearest} learner; {does} does induction"
        return Verdict(headline, sentences, picture, numbers, facts)


def _task_of_head(score: str) -> str:
    return {"previous_token": "the token before", "duplicate_token": "an earlier occurrence",
            "induction": "the token after an earlier occurrence"}.get(score, score.replace("_", " "))  # fmt: skip


def _since(formed: HeadsOverTraining) -> str:
    scores, steps = formed.scores["induction"][:, 0].tolist(), formed.steps
    below = [i for i, score in enumerate(scores) if score < scores[-1] / 2]
    first = steps[below[-1] + 1] if below else steps[0]
    return (
        f"Since step {first:,} of {steps[-1]:,}. From this snapshot on, the highest induction score of the opened seed "
        f"is more than half of its last value, {scores[-1]:.2f}. At the first of {len(steps)} snapshots it was "
        f"{scores[0]:.2f}."
    )
