"""The report on models of token sequences: when induction heads form, and the circuit that they are part of."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mechicl import viz
from mechicl.analysis import (
    Circuit,
    InterventionSweep,
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
from mechicl.checkpoints import Checkpoint
from mechicl.models import HookedTransformer
from mechicl.prompts import TokenSequences
from mechicl.reports.comparison import Comparison, Part, Section
from mechicl.reports.engine import Kind
from mechicl.reports.rows import Row
from mechicl.reports.study import Study
from mechicl.reports.verdict import Verdict, beside_published
from mechicl.statistics import Interval, interval
from mechicl.tasks import RepeatedTokens
from mechicl.viz.verdict import score_bars

SCORES = ("previous_token", "induction")
N_SCORED, N_PATCHED = 64, 32
N_HELD_OUT, PROMPT_SEED = 1024, 2_000_003
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


def compare_tokens(checkpoint: Checkpoint, *, n_prompts: int = 1024, progress: bool = True) -> Comparison:
    """Loss, head scores during and after training, patching and the circuit of a token model.

    Args:
        checkpoint: of models that read token ids, with their task in the record.
        n_prompts: held-out sequences.
        progress: show progress bars.

    Source: Elhage et al. 2021; Olsson et al. 2022.
    """
    comparison = Comparison(_title(checkpoint), _lead(checkpoint, n_prompts), [], [], _data(n_prompts))
    for measure in _parts(checkpoint, n_prompts, progress).values():
        comparison = comparison.with_more(*measure())
    return comparison


def tokens_kind(study: Study, *, n_prompts: int | None = None, progress: bool = True) -> Kind:
    """The parts of `compare_tokens`, and what they come to."""
    n = n_prompts or N_HELD_OUT
    parts, lead = _parts(study, n, progress), f"{_lead(study, n)} {study.chosen}"
    of_repeats = () if isinstance(study.task, RepeatedTokens) else ("composition", "patching", "circuit")
    missing: dict[str, str] = dict.fromkeys(of_repeats, ALIKE)
    return Kind(_title(study), lead, parts, partial(_verdict, study), _data(n), missing=missing)


def _title(checkpoint: Checkpoint) -> str:
    return f"Heads and circuits ({checkpoint.name})"


def _data(n_prompts: int) -> dict[str, Any]:
    return {"seed": PROMPT_SEED, "n_prompts": n_prompts}


def _lead(checkpoint: Checkpoint, n_prompts: int) -> str:
    n, cfg = len(checkpoint.models), checkpoint.models[0].cfg
    return (
        f"{checkpoint.name}: {n} seed{'s' if n > 1 else ''} of {cfg.n_layers} layers with {cfg.n_heads} heads, on "
        f"sequences of {cfg.n_ctx} tokens out of {cfg.d_vocab}; {n_prompts:,} held-out sequences (seed {PROMPT_SEED})."
    )


def _parts(checkpoint: Checkpoint, n_prompts: int, progress: bool) -> dict[str, Callable[[], Part]]:
    """What is measured, by name."""
    task, models = cast(RepeatedTokens, checkpoint.task), checkpoint.models
    held_out = cast(TokenSequences, task.sample(n_prompts, seed=PROMPT_SEED))
    over = "seeds" if len(models) > 1 else ""

    def learning() -> Part:
        losses, right = zip(*(_losses(model, held_out) for model in models), strict=True)
        rows = [
            Row("cross entropy of tokens that can be predicted (nats)", None, _over_seeds(torch.stack(losses)), over),
            Row("share of tokens that can be predicted that are", None, _over_seeds(torch.stack(right)), over),
        ]
        formed = _formed(checkpoint)
        if formed is None:
            return rows, [], {}
        drawn = viz.heads_during_training(checkpoint.record.get("curve", {}), formed, "Loss and scores")
        data = {"steps": formed.steps, **{name: values.tolist() for name, values in formed.scores.items()}}
        return rows, [Section("When heads form", WORDS["learning"], drawn)], {"formation": data}

    def heads() -> Part:
        scores = [score_heads(model, n_prompts=N_SCORED, seed=PROMPT_SEED) for model in models]
        rows = []
        for name in [name for name in (*SCORES, "copying", "prefix_matching") if name in scores[0].scores]:
            best = torch.stack([each.mean(name).max() for each in scores])
            note = f"{scores[0].chance[name]:.3f} if attention were uniform" if scores[0].is_of_attention(name) else ""
            rows.append(Row(f"highest {name.replace('_', ' ')} score of a head", None, _over_seeds(best), over, note))
        best_heads = {
            name: [*scores[0].best(name), scores[0].interval(name, *scores[0].best(name)).mean, scores[0].chance[name]]
            for name in SCORES
        }
        data = {"heads": [each.to_dataframe().to_dict("records") for each in scores], "best_heads": best_heads}
        drawn = viz.head_table(scores[0], "Scores of heads")
        return rows, [Section("What the heads do", WORDS["heads"], drawn)], data

    def composition() -> Part:
        composed = viz.composition_figure(composition_scores(models[0], "K", baseline=True), "K")
        return [], [Section("Which heads read what others wrote", WORDS["composition"], composed)], {}

    def patching() -> Part:
        drawn = viz.patching_grid(_patched(models[0], task), title="Each head's output put back")
        return [], [Section("Where the earlier occurrence is seen", WORDS["patching"], drawn)], {}

    def circuit() -> Part:
        found = _circuit(models[0], held_out, progress)
        scores = score_heads(models[0], n_prompts=N_SCORED, seed=PROMPT_SEED)
        data = {"circuit": found.to_dataframe().to_dict("records")}
        return _circuit_rows(found, scores), [Section("The circuit", WORDS["circuit"], viz.circuit_graph(found))], data

    def learner() -> Part:
        model, chains = models[0], cast(Any, checkpoint.task)
        identified = identify_on_tokens(model, chains, n_prompts=n_prompts, seed=PROMPT_SEED, progress=False)
        measured = regret(model, chains, n_prompts=n_prompts, seed=PROMPT_SEED, progress=False)
        rows = [
            Row(_divergence(name), None, identified.divergence(name), "prompts", "the opened seed")
            for name in identified.divergences
        ]
        note = "cross entropy above that of the best known learner"
        rows.append(Row(f"regret against {measured.reference} (nats a token)", None, measured.mean(), "prompts", note))
        drawn = [Section("Which learner it is", WORDS["learner"], viz.plot(identified)),
                 Section("How far from the best learner", WORDS["regret"], viz.plot(measured))]  # fmt: skip
        return rows, drawn, {"nearest_learner": identified.best}

    parts: dict[str, Callable[[], Part]] = {"learning": learning, "heads": heads}
    if not isinstance(checkpoint.task, RepeatedTokens):
        return parts | {"learner": learner}
    if models[0].cfg.n_layers > 1:
        parts["composition"] = composition
    return parts | {"patching": patching, "circuit": circuit}


def _circuit_rows(circuit: Circuit, scores: HeadScores) -> list[Row]:
    """The circuit, what kinds of heads are in it, and how faithful it is."""
    everything = ", all heads that there are" if len(circuit.nodes) == circuit.n_nodes else ""
    kinds = [name.replace("_", "-") for name in SCORES
             if any(scores.mean(name)[layer, head] > KIND for layer, head in circuit.heads)]  # fmt: skip
    rows = [
        Row("heads of the circuit", None, ", ".join(map(str, circuit.nodes)), "",
            f"{len(circuit.edges)} edges{everything}; the opened seed"),
        Row("kinds of heads in the circuit", "previous-token + induction", " + ".join(kinds) or "neither", "",
            f"a score above {KIND:g} on random sequences that are repeated", "is previous-token + induction",
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


def _formed(checkpoint: Checkpoint) -> HeadsOverTraining | None:
    """The highest scores of heads at the snapshots, if there are any."""
    if checkpoint.snapshots is None or "curve" not in checkpoint.record:
        return None
    if isinstance(checkpoint, Study) and checkpoint.is_own:
        return None
    return score_heads_over_training(checkpoint, SCORES, n_prompts=N_SCORED, seed=PROMPT_SEED)


def _verdict(study: Study, comparison: Comparison) -> Verdict:
    """Whether it does induction, since when, and whether its circuit is the published one."""
    rows, data = {row.quantity: row for row in comparison.rows}, comparison.data
    best = data.get("best_heads")
    if best is None:
        scores = score_heads(study.model, n_prompts=N_SCORED, seed=PROMPT_SEED)
        best = {name: [*scores.best(name), scores.interval(name, *scores.best(name)).mean, scores.chance[name]]
                for name in SCORES}  # fmt: skip
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
    sentences = {"What does it do?": words, "Since when?": _since(study, data, has_induction)}
    faithful, loss = rows.get("faithfulness of the circuit"), rows.get("loss of the circuit alone (nats)")
    causes = "The circuit was not looked for (--sections)."
    if faithful is not None and loss is not None:
        causes = (
            f"With all but the circuit ablated ({rows['heads of the circuit']}), {100 * faithful.ends[1]:.0f}% of what "
            f"the heads gain is kept, on sequences that it was not looked for: ablation "
            f"{'agrees with' if faithful.ends[0] > 0.5 else 'does not confirm'} the scores."
        )
    sentences["Do causes and papers agree?"] = f"{causes} {beside_published(comparison.rows)}"
    formed = _formed(study)
    picture = None if formed is None else viz.heads_during_training(study.record["curve"], formed, "When heads form")
    numbers = {"induction": has_induction, "best_heads": best, "seed": study.seeds[0], "chosen": study.chosen}
    headline = f"It does induction, with head {layer}.{head}" if has_induction else "It does no induction"
    return Verdict(headline, sentences, picture or _scores_bar(best), numbers)


def _since(study: Study, data: dict[str, Any], has_induction: bool) -> str:
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


def _scores_bar(best: dict[str, list[float]]) -> Any:
    """The highest scores beside those of uniform attention, where no training was recorded."""
    names = [name.replace("_", " ") for name in best]
    lines = {"highest of any head": [values[2] for values in best.values()],
             "if attention were uniform": [values[3] for values in best.values()]}  # fmt: skip
    return score_bars("Scores of heads", "share of attention", names, lines)


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


def _patched(model: HookedTransformer, task: RepeatedTokens) -> InterventionSweep:
    """Head outputs put back where the last token's earlier occurrences were replaced, all at the same positions."""
    sequences = task.replace(min_period=task.max_period).sample(N_PATCHED, seed=PROMPT_SEED)
    corrupted = corrupt_tokens(sequences.read, d_vocab=task.d_vocab)
    return patch(model, sequences, corrupted, "z", ("layer", "pos", "head"), progress=False)


def _circuit(model: HookedTransformer, sequences: TokenSequences, progress: bool) -> Circuit:
    """Looked for on some sequences, measured on others."""
    looked_at, others = sequences[:N_PATCHED], sequences[N_PATCHED : 4 * N_PATCHED]
    circuit = find_circuit(model, looked_at, method="mean", tolerance=0.05, at="positions", progress=progress)
    return measure_circuit(model, circuit, others if len(others) > 1 else looked_at, at="positions", progress=progress)
