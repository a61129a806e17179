"""The report on models of token sequences: when induction heads form, and the circuit that they are part of."""

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mechicl import viz
from mechicl.analysis import (
    Circuit,
    Sweep,
    composition_scores,
    corrupt_tokens,
    find_circuit,
    measure_circuit,
    patch,
    score_heads,
    score_heads_over_training,
)
from mechicl.checkpoints import Checkpoint
from mechicl.models import HookedTransformer
from mechicl.reports.comparison import Comparison, Row, Section
from mechicl.statistics import Interval, interval
from mechicl.tasks import RepeatedTokens
from mechicl.tokens import TokenSequences

SCORES = ("previous_token", "induction")
N_SCORED, N_PATCHED = 64, 32
PROMPT_SEED = 2_000_003
WORDS = {
    "learning": """
        Black: each seed's cross entropy of the next token on held-out sequences, over the tokens that can be
        predicted. Coloured: the highest score of any head, mean over the seeds: attention to the token before, and from
        a token to what followed its earlier occurrences, on random sequences that are repeated once.""",
    "heads": """
        Scores of every head of the first seed: shares of attention (0 to 1), and eigenvalue scores of the weights
        (-1 to 1): copying, of W_E W_V W_O W_U, and prefix matching, of the circuit by which the head's keys see what an
        earlier head wrote (0 in layer 0).""",
    "composition": """
        How much of what a head writes the keys of a later head read: the Frobenius norm of the product of their weights
        over the norms of both, less what random matrices of these shapes have. First seed.""",
    "patching": """
        Every earlier occurrence of the last token is replaced by another token, and one head's output at one position
        is put back as it was before: the share of the loss of the following token that this recovers. The segments of
        these sequences are as long as training had them. An induction head acts at the last position; a previous-token
        head just after the earlier occurrence. First seed.""",
    "circuit": """
        The heads and connections that the loss needs, found by ablating the others (by their mean over sequences at the
        same position) one after the other. Numbers are what the loss gains, in nats, when a connection is cut too;
        those of less than a twentieth of the largest are left out. First seed.""",
}


def compare_tokens(checkpoint: Checkpoint, *, n_prompts: int = 1024, progress: bool = True) -> Comparison:
    """Loss, head scores during and after training, patching and the circuit of a token model.

    Args:
        checkpoint: of models that read token ids, with their task in the record.
        n_prompts: held-out sequences.
        progress: show progress bars.

    Source: Elhage et al. 2021; Olsson et al. 2022.
    """
    task, models, cfg = checkpoint.task, checkpoint.models, checkpoint.models[0].cfg
    held_out = cast(TokenSequences, task.sample(n_prompts, seed=PROMPT_SEED))
    losses, right = zip(*(_losses(model, held_out) for model in models), strict=True)
    scores = [score_heads(model, n_prompts=N_SCORED, seed=PROMPT_SEED) for model in models]
    over = "seeds" if len(models) > 1 else ""
    rows = [
        Row("cross entropy of tokens that can be predicted (nats)", None, _over_seeds(torch.stack(losses)), over),
        Row("share of them predicted", None, _over_seeds(torch.stack(right)), over),
    ]
    for name in [name for name in (*SCORES, "copying", "prefix_matching") if name in scores[0].scores]:
        best = torch.stack([each.mean(name).max() for each in scores])
        note = f"{scores[0].chance[name]:.3f} if attention were uniform" if scores[0].is_of_attention(name) else ""
        rows.append(Row(f"highest {name.replace('_', ' ')} score of a head", None, _over_seeds(best), over, note))
    patched, circuit = _patched(models[0], cast(RepeatedTokens, task)), _circuit(models[0], held_out, progress)
    everything = ", all heads that there are" if len(circuit.nodes) == circuit.n_nodes else ""
    rows += [
        Row("circuit", "previous-token and induction head", ", ".join(map(str, circuit.nodes)), "",
            f"{len(circuit.edges)} edges{everything}; first seed"),
        Row("its loss alone (nats)", None, interval(circuit.edges_alone), "prompts",
            f"all else ablated; {circuit.full.mean():.3g} whole, {circuit.ablated.mean():.3g} without any head"),
        Row("its faithfulness", None, circuit.faithfulness(), "prompts",
            "share of what the heads gain that it keeps, on sequences that it was not looked for"),
    ]  # fmt: skip
    if not everything:
        words = "share of it that is lost without its heads"
        rows.append(Row("its completeness", None, circuit.completeness(), "prompts", words))
    sections = _learning(checkpoint)
    sections.append(Section("What the heads do", WORDS["heads"], viz.head_table(scores[0], "Scores of heads")))
    if cfg.n_layers > 1:
        composed = viz.composition_figure(composition_scores(models[0], "K", baseline=True), "K")
        sections.append(Section("Which heads read what others wrote", WORDS["composition"], composed))
    sections += [
        Section("Where the earlier occurrence is seen", WORDS["patching"],
               viz.patching_grid(patched, title="Each head's output put back")),
        Section("The circuit", WORDS["circuit"], viz.circuit_graph(circuit)),
    ]  # fmt: skip
    data: dict[str, Any] = {
        "heads": [each.to_dataframe().to_dict("records") for each in scores],
        "circuit": circuit.to_dataframe().to_dict("records"),
        "seed": PROMPT_SEED,
        "n_prompts": n_prompts,
    }
    seeds = f"{len(models)} seed{'s' if len(models) > 1 else ''}"
    lead = (
        f"{checkpoint.name}: {seeds} of {cfg.n_layers} layers with {cfg.n_heads} heads, on sequences of {cfg.n_ctx} "
        f"tokens out of {cfg.d_vocab}; {n_prompts:,} held-out sequences (seed {PROMPT_SEED})."
    )
    return Comparison(f"Heads and circuits ({checkpoint.name})", lead, rows, sections, data)


def write_tokens_report(checkpoint: Checkpoint, out: Path, *, n_prompts: int, progress: bool) -> Path:
    """`compare_tokens` as `report.html` and `report.json`."""
    return compare_tokens(checkpoint, n_prompts=n_prompts, progress=progress).write(out, "report")


def _over_seeds(values: Tensor) -> Interval | float:
    return interval(values) if len(values) > 1 else values.item()


def _losses(model: HookedTransformer, sequences: TokenSequences) -> tuple[Tensor, Tensor]:
    """Cross entropy and share of right predictions, over the tokens that can be predicted."""
    targets = sequences.targets()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in sequences.read.split(256)])
    scored = targets >= 0
    return F.cross_entropy(logits[scored], targets[scored]), (logits.argmax(-1) == targets)[scored].double().mean()


def _learning(checkpoint: Checkpoint) -> list[Section]:
    if "curve" not in checkpoint.record or checkpoint.snapshots is None:
        return []
    formed = score_heads_over_training(checkpoint, SCORES, n_prompts=N_SCORED, seed=PROMPT_SEED)
    drawn = viz.heads_during_training(checkpoint.record["curve"], formed, "Loss and scores")
    return [Section("When heads form", WORDS["learning"], drawn)]


def _patched(model: HookedTransformer, task: RepeatedTokens) -> Sweep:
    """Head outputs put back where the last token's earlier occurrences were replaced, all at the same positions."""
    sequences = task.replace(min_period=task.max_period).sample(N_PATCHED, seed=PROMPT_SEED)
    corrupted = corrupt_tokens(sequences.read, d_vocab=task.d_vocab)
    return patch(model, sequences, corrupted, "z", ("layer", "pos", "head"), progress=False)


def _circuit(model: HookedTransformer, sequences: TokenSequences, progress: bool) -> Circuit:
    """Looked for on some sequences, measured on others."""
    looked_at, others = sequences[:N_PATCHED], sequences[N_PATCHED : 4 * N_PATCHED]
    circuit = find_circuit(model, looked_at, at="positions", progress=progress)
    return measure_circuit(model, circuit, others if len(others) > 1 else looked_at, at="positions", progress=progress)
