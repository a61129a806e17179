"""The report on models of token sequences: when induction heads form, and the circuit that they are part of."""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mechicl import viz
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
from mechicl.models import HookedTransformer
from mechicl.prompts import TokenSequences
from mechicl.reports.comparison import Comparison, Measured, Section
from mechicl.reports.kind import Kind, Part, plural
from mechicl.reports.rows import Row
from mechicl.reports.verdict import Verdict, beside_published
from mechicl.statistics import Interval, interval
from mechicl.tasks import RepeatedTokens
from mechicl.viz.verdict import score_bars

SCORES = ("previous_token", "induction")
N_SCORED, N_PATCHED = 64, 32
ALIKE = "it is for sequences that repeat, where one earlier occurrence decides the next token"
KIND = 0.3  # of its attention that a head gives to what its kind attends to, at least
WORDS = {
    "learning": """
        Black: each seed's cross entropy of the next token on held-out sequences, over the tokens that can be
        predicted. Coloured: the highest score of any head, mean over the seeds: attention to the token before, and from
        a token to what followed its earlier occurrences, on random sequences that are repeated once.""",
    "learner": """
        Kullback-Leibler divergence of each reference learner's next-token probabilities from the network's, after so
        many tokens.""",
    "regret": """
        Cross entropy of the next token above that of the best known learner of the task, on the same sequences.""",
    "heads": """
        Scores of every head of the opened seed: shares of attention (0 to 1), and eigenvalue scores of the weights
        (-1 to 1): copying, of W_E W_V W_O W_U, and prefix matching, of the circuit by which the head's keys see what an
        earlier head wrote (0 in layer 0).""",
    "composition": """
        How much of what a head writes the keys of a later head read: the Frobenius norm of the product of their weights
        over the norms of both, less what random matrices of these shapes have.""",
    "patching": """
        Every earlier occurrence of the last token is replaced by another token, and one head's output at one position
        is put back as it was before: the share of the loss of the following token that this recovers. The segments of
        these sequences are as long as training had them. An induction head acts at the last position; a previous-token
        head just after the earlier occurrence.""",
    "circuit": """
        The heads and connections that the loss needs, found by cutting all others, in groups, as long as the loss moves
        by less than a twentieth of what cutting everything does: a connection that is cut brings the mean over
        sequences at the same position. Numbers are what the loss gains, in nats, when a connection is cut too; those of
        less than a twentieth of the largest are left out.""",
}


def _learning(kind: "Tokens") -> Measured:
    """Losses, and the highest scores of heads at the snapshots."""
    models = kind.study.models
    losses, right = zip(*(_losses(model, kind.held_out) for model in models), strict=True)
    over = "seeds" if len(models) > 1 else ""
    rows = [
        Row("cross entropy of tokens that can be predicted (nats)", None, _over_seeds(torch.stack(losses)), over),
        Row("share of tokens that can be predicted that are", None, _over_seeds(torch.stack(right)), over),
    ]
    if kind.formed is None:
        return rows, [], {}
    drawn = viz.heads_during_training(kind.study.record.get("curve", {}), kind.formed, "Loss and scores")
    data = {"steps": kind.formed.steps, **{name: values.tolist() for name, values in kind.formed.scores.items()}}
    return rows, [Section("When heads form", WORDS["learning"], drawn)], {"formation": data}


def _heads(kind: "Tokens") -> Measured:
    """Scores of every head."""
    scores = [score_heads(model, n_prompts=N_SCORED, seed=kind.seed) for model in kind.study.models]
    first, rows = scores[0], []
    for name in [name for name in (*SCORES, "copying", "prefix_matching") if name in first.scores]:
        best = torch.stack([each.mean(name).max() for each in scores])
        note = f"{first.chance[name]:.3f} if attention were uniform" if first.is_of_attention(name) else ""
        rows.append(Row(f"highest {name.replace('_', ' ')} score of a head", None, _over_seeds(best),
                        "seeds" if len(scores) > 1 else "", note))  # fmt: skip
    data = {"heads": [each.to_dataframe().to_dict("records") for each in scores], "best_heads": _best_heads(first)}
    return rows, [Section("What the heads do", WORDS["heads"], viz.head_table(first, "Scores of heads"))], data


def _best_heads(scores: HeadScores) -> dict[str, list[float]]:
    """Of each score the best head, its score, and that of uniform attention."""
    return {
        name: [*scores.best(name), scores.interval(name, *scores.best(name)).mean, scores.chance[name]]
        for name in SCORES
    }


def _composition(kind: "Tokens") -> Measured:
    drawn = viz.composition_figure(composition_scores(kind.study.model, "K", baseline=True), "K")
    return [], [Section("Which heads read what others wrote", WORDS["composition"], drawn)], {}


def _patching(kind: "Tokens") -> Measured:
    """Head outputs restored where the last token's earlier occurrences were replaced, all at the same positions."""
    task = kind.study.task
    sequences = task.replace(min_period=task.max_period).sample(N_PATCHED, seed=kind.seed)
    corrupted = corrupt_tokens(sequences.read, d_vocab=task.d_vocab)
    sweep = patch(kind.study.model, sequences, corrupted, "z", ("layer", "pos", "head"), progress=False)
    drawn = viz.patching_grid(sweep, title="Each head's output put back")
    return [], [Section("Where the earlier occurrence is seen", WORDS["patching"], drawn)], {}


def _circuit(kind: "Tokens") -> Measured:
    """Found on some sequences, measured on others."""
    model, looked_at, others = kind.study.model, kind.held_out[:N_PATCHED], kind.held_out[N_PATCHED : 4 * N_PATCHED]
    options: dict[str, Any] = {"at": "positions", "progress": kind.progress}
    circuit = find_circuit(model, looked_at, method="mean", tolerance=0.05, **options)
    circuit = measure_circuit(model, circuit, others if len(others) > 1 else looked_at, **options)
    rows = _circuit_rows(circuit, score_heads(model, n_prompts=N_SCORED, seed=kind.seed))
    data = {"circuit": circuit.to_dataframe().to_dict("records")}
    return rows, [Section("The circuit", WORDS["circuit"], viz.circuit_graph(circuit))], data


def _learner(kind: "Tokens") -> Measured:
    """The nearest reference learner, and the regret."""
    options: dict[str, Any] = {"n_prompts": kind.n_prompts, "seed": kind.seed, "progress": False}
    identified = identify_on_tokens(kind.study.model, kind.study.task, **options)
    measured = regret(kind.study.model, kind.study.task, **options)
    rows = [
        Row(_divergence(name), None, identified.divergence(name), "prompts", "the opened seed")
        for name in identified.divergences
    ]
    note = "cross entropy above that of the best known learner"
    rows.append(Row(f"regret against {measured.reference} (nats a token)", None, measured.mean(), "prompts", note))
    drawn = [Section("Which learner it is", WORDS["learner"], viz.plot(identified)),
             Section("How far from the best learner", WORDS["regret"], viz.plot(measured))]  # fmt: skip
    return rows, drawn, {"nearest_learner": identified.best}


def _no_repeats(kind: "Tokens") -> str:
    return "" if isinstance(kind.study.task, RepeatedTokens) else ALIKE


def _no_composition(kind: "Tokens") -> str:
    return _no_repeats(kind) or ("" if kind.study.model.cfg.n_layers > 1 else "it is between layers, and there is one")


def _no_chains(kind: "Tokens") -> str:
    return "no reference learners are known for sequences that repeat" if not _no_repeats(kind) else ""


def _circuit_rows(circuit: Circuit, scores: HeadScores) -> list[Row]:
    """The circuit, what kinds of heads are in it, and how faithful it is."""
    everything = ", all heads that there are" if len(circuit.nodes) == circuit.n_nodes else ""
    kinds = [name.replace("_", "-") for name in SCORES
             if any(scores.mean(name)[layer, head] > KIND for layer, head in circuit.heads)]  # fmt: skip
    rows = [
        Row("heads of the circuit", None, ", ".join(map(str, circuit.nodes)), "",
            f"{len(circuit.edges)} edges{everything}; the opened seed"),
        Row("kinds of heads in the circuit", "previous-token + induction", " + ".join(kinds) or "neither", "",
            f"a score above {KIND:g} on random sequences that are repeated", kinds == ["previous-token", "induction"],
            "elhage2021"),
        Row("loss of the circuit alone (nats)", None, interval(circuit.edges_alone), "prompts",
            f"all else cut; {circuit.full.mean():.3g} whole, {circuit.ablated.mean():.3g} with everything cut"),
        Row("faithfulness of the circuit", None, circuit.faithfulness(), "prompts",
            "share of what the heads gain that it keeps, on sequences that it was not looked for"),
    ]  # fmt: skip
    if not everything:
        words = "share of what the heads gain that is lost without its heads"
        rows.append(Row("completeness of the circuit", None, circuit.completeness(), "prompts", words))
    return rows


def _verdict(kind: "Tokens", comparison: Comparison) -> Verdict:
    """Whether it does induction, since when, and whether its circuit is the published one."""
    rows, data, study = {row.quantity: row for row in comparison.rows}, comparison.data, kind.study
    best = data.get("best_heads") or _best_heads(score_heads(study.model, n_prompts=N_SCORED, seed=kind.seed))
    layer, head, induction, chance = best["induction"]
    before = best["previous_token"]
    right = rows.get("share of tokens that can be predicted that are")
    has_induction = induction > KIND
    if has_induction:
        words = (
            f"It does induction: head {layer}.{head} attends from a token to what followed its earlier occurrence with "
            f"{induction:.0%} of its attention ({chance:.0%} if it were uniform)"
        )
        words += (
            f", and head {before[0]}.{before[1]} attends to the token before with {before[2]:.0%}."
            if before[2] > KIND else f"; no head attends to the token before with more than {before[2]:.0%}."
        )  # fmt: skip
    else:
        words = (
            f"No head does induction: the highest score, of head {layer}.{head}, is {induction:.0%} of its attention "
            f"({chance:.0%} if it were uniform)."
        )
    if right is not None and isinstance(study.task, RepeatedTokens):
        words += f" Of the tokens that repeat what was seen, {right.ends[1]:.0%} are predicted."
    nearest = data.get("nearest_learner")
    if nearest is not None:
        apart = rows[_divergence(nearest)].ends[1]
        words += f" Of the reference learners {nearest} predicts most like it: {apart:.2g} nats a token apart."
    sentences = {"What does it do?": words, "Since when?": _since(data, has_induction)}
    faithful, loss = rows.get("faithfulness of the circuit"), rows.get("loss of the circuit alone (nats)")
    causes = "The circuit was not looked for (--sections)."
    if faithful is not None and loss is not None:
        causes = (
            f"With all but the circuit ablated ({rows['heads of the circuit']}), {100 * faithful.ends[1]:.0f}% of what "
            f"the heads gain is kept, on sequences that it was not looked for: ablation "
            f"{'agrees with' if faithful.ends[0] > 0.5 else 'does not confirm'} the scores."
        )
    sentences["Do causes and papers agree?"] = f"{causes} {beside_published(comparison.rows)}"
    if kind.formed is not None:
        picture = viz.heads_during_training(study.record["curve"], kind.formed, "When heads form")
    else:
        lines = {"highest of any head": [values[2] for values in best.values()],
                 "if attention were uniform": [values[3] for values in best.values()]}  # fmt: skip
        picture = score_bars("Scores of heads", "share of attention", [n.replace("_", " ") for n in best], lines)
    numbers = {"induction": has_induction, "best_heads": best, "seed": study.seeds[0], "chosen": study.chosen}
    headline = f"It does induction, with head {layer}.{head}" if has_induction else "It does no induction"
    return Verdict(headline, sentences, picture, numbers)


def _since(data: dict[str, Any], has_induction: bool) -> str:
    formed = data.get("formation")
    if not has_induction:
        return "There is no induction that could have come at some step."
    if formed is None:
        return "No snapshots were saved during training, so that this page cannot say since which step."
    scores, steps = [seeds[0] for seeds in formed["induction"]], formed["steps"]
    half = scores[-1] / 2
    below = [i for i, score in enumerate(scores) if score < half]
    first = steps[below[-1] + 1] if below else steps[0]
    return (
        f"Since step {first:,} of {steps[-1]:,}: from this snapshot on the highest induction score of the opened seed "
        f"is more than half of its last value, {scores[-1]:.2f} (at step {steps[0]:,} it was {scores[0]:.2f}; "
        f"{len(steps)} snapshots)."
    )


def _divergence(name: str) -> str:
    return f"divergence from {name} (nats a token)"


def _over_seeds(values: Tensor) -> Interval | float:
    return interval(values) if len(values) > 1 else values.item()


def _losses(model: HookedTransformer, sequences: TokenSequences) -> tuple[Tensor, Tensor]:
    """Cross entropy and share of right predictions, over the tokens that can be predicted."""
    targets = sequences.targets()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in sequences.read.split(256)])
    scored = targets >= 0
    return F.cross_entropy(logits[scored], targets[scored]), (logits.argmax(-1) == targets)[scored].double().mean()


class Tokens(Kind):
    """Loss, head scores during and after training, patching and the circuit of a model that reads token ids.

    Source: Elhage et al. 2021; Olsson et al. 2022.
    """

    parts = (
        Part("learning", _learning), Part("heads", _heads), Part("learner", _learner, _no_chains),
        Part("composition", _composition, _no_composition), Part("patching", _patching, _no_repeats),
        Part("circuit", _circuit, _no_repeats),
    )  # fmt: skip
    n_held_out, prompt_seed = 1024, 2_000_003

    @cached_property
    def formed(self) -> HeadsOverTraining | None:
        """The highest scores of heads at the snapshots, if there are any."""
        study = self.study
        if study.snapshots is None or "curve" not in study.record or study.is_own:
            return None
        return score_heads_over_training(study, SCORES, n_prompts=N_SCORED, seed=self.seed)

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Heads and circuits ({self.study.name})"

    @property
    def lead(self) -> str:
        """What was measured, on what."""
        cfg = self.study.model.cfg
        return (
            f"{self.study.name}: {plural(len(self.study.models), 'seed')} of {cfg.n_layers} layers with {cfg.n_heads} "
            f"heads, on sequences of {cfg.n_ctx} tokens out of {cfg.d_vocab}; {self.n_prompts:,} held-out sequences "
            f"(seed {self.seed}). {self.study.chosen}"
        ).rstrip()

    @property
    def data(self) -> dict[str, Any]:
        """The sequences."""
        return {"seed": self.seed, "n_prompts": self.n_prompts}

    def verdict(self, comparison: Comparison) -> Verdict:
        """Whether it does induction, since when, and whether its circuit is the published one."""
        return _verdict(self, comparison)
