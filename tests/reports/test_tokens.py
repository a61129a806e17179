"""The report on token models, on small untrained ones: its numbers, its pictures, and what it does without a curve."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mechicl.analysis import corrupt_tokens, find_circuit, measure_circuit, next_token_loss, score_heads
from mechicl.checkpoints import Snapshots, load_checkpoint, save, stack_models
from mechicl.constructions import induction
from mechicl.models import HookedTransformer
from mechicl.reports import Comparison, report
from mechicl.reports.tokens import FAITHFUL, NODES, RIGHT, Tokens
from mechicl.statistics import interval
from mechicl.tasks import MarkovChains
from tests.pictures import drawn
from tests.reports import by_quantity, made
from tests.training.runs import READER, WORDS

N = 48
PROMPT_SEED = 2_000_003
LOSS = "cross entropy of predictable tokens (nats)"


def networks(first: int = 0) -> list[HookedTransformer]:
    return [HookedTransformer(READER, seed=first + seed).eval() for seed in range(2)]


@cache
def compared() -> Comparison:
    """The report's numbers on one seed."""
    return Tokens(made(WORDS, networks()[0]), n_prompts=N).measure()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds with a curve and two snapshots."""
    models = networks()
    stacks = [stack_models(group) for group in (networks(10), models)]
    snapshots = Snapshots((0, 20), {name: torch.stack([stack[name] for stack in stacks]) for name in stacks[0]})
    curve = {"eval_step": [0, 10, 20], "eval_loss": [[2.0, 1.9], [1.0, 1.2], [0.5, 0.4]]}
    record = made(WORDS, seeds=[0, 1], curve=curve).record
    return save(tmp_path_factory.mktemp("checkpoints") / "reader", models, record, snapshots)


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(folder, None, tmp_path_factory.mktemp("out"), n_prompts=N, progress=False)


def by_loops(model: HookedTransformer) -> tuple[float, float]:
    """Mean cross entropy and share predicted, token by token."""
    sequences = WORDS.sample(N, seed=PROMPT_SEED)
    losses, right = [], []
    for ids, predictable in zip(sequences.ids.tolist(), sequences.predictable.tolist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]]))[0].double().tolist()
        for pos in range(1, len(ids)):
            if predictable[pos]:
                scores = logits[pos - 1]
                losses.append(math.log(sum(map(math.exp, scores))) - scores[ids[pos]])
                right.append(scores.index(max(scores)) == ids[pos])
    return sum(losses) / len(losses), sum(right) / len(right)


def by_halves(scores: torch.Tensor) -> float:
    """The mean score on every second prompt of the head that is best on the others; weights have one score."""
    if scores.ndim == 2:
        return scores.max().item()
    heads = scores.double().flatten(0, 1).tolist()
    means = [sum(row[::2]) / len(row[::2]) for row in heads]
    row = heads[means.index(max(means))][1::2]
    return sum(row) / len(row)


def test_losses_and_scores_are_those_of_plain_loops(folder, written):
    data = json.loads(written.with_suffix(".json").read_text(), parse_constant=pytest.fail)
    rows, models = {row["quantity"]: row for row in data["table"]}, load_checkpoint(folder).models
    losses, right = zip(*map(by_loops, models), strict=True)
    for quantity, values in ((LOSS, losses), (RIGHT, right)):
        expected = interval(torch.tensor(values, dtype=torch.float64))
        measured = rows[quantity]["measured"]
        assert (rows[quantity]["over"], measured["n"]) == ("seeds", 2)
        assert (measured["mean"], measured["low"]) == pytest.approx((expected.mean, expected.low), rel=1e-4)
    for name in ("previous_token", "induction", "copying", "prefix_matching"):
        best = [by_halves(score_heads(model, n_prompts=64, seed=PROMPT_SEED)[name]) for model in models]
        measured = rows[f"highest {name.replace('_', ' ')} score of a head"]["measured"]
        assert measured["mean"] == pytest.approx(sum(best) / 2)
    alone = by_quantity(compared().rows)  # of one seed there are no intervals
    assert (alone[LOSS].measured, alone[RIGHT].measured) == pytest.approx(by_loops(networks()[0]), rel=1e-5)
    assert alone[RIGHT].over == ""
    assert "nan" not in str(compared())


def test_the_page_has_every_picture_and_no_errors(written, browser):
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    page.goto(written.as_uri())
    titles = page.locator("h2").all_inner_texts()
    sentence = page.locator("h1").all_inner_texts()
    assert sentence == ["Not learned: worse than uniform guessing. reader does no induction"]
    assert titles == [
        "Published and measured", "What the heads do",
        "Which heads read what others wrote", "Where the earlier occurrence is seen", "The circuit",
        "How it came about", "What this report leaves out", "Terms on this page",
    ]  # fmt: skip
    assert drawn(page) > 0
    assert page.locator("section:has(.js-plotly-plot .main-svg) h2").all_inner_texts() == titles[1:-2]
    left_out = page.locator("section", has=page.locator("h2", has_text=titles[-2])).locator("td").all_inner_texts()
    assert left_out == ["learner", "no reference learners are known for sequences that repeat"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    lead = page.locator("#opening > details").last.text_content() or ""
    assert "reader, 2 seeds of a transformer with 2 layers, each with 2 softmax heads" in lead
    assert "RepeatedTokens(d_vocab=7" in lead
    assert "48 held-out" in lead
    page.close()
    assert not problems


@pytest.mark.parametrize(("factor", "headline"), [
    (0.0, "Not learned: not measurably better than uniform guessing"),
    (-1.0, "Not learned: worse than uniform guessing"),
    (1.0, "Barely learned: worse than guessing among tokens read"),  # it is not confident enough
    (10.0, ""),
])  # fmt: skip
def test_the_loss_is_compared_with_that_of_guessing(factor, headline):
    task = WORDS.replace(d_vocab=8, min_period=4)
    model = induction(d_vocab=8, n_ctx=12, seed=0)
    with torch.no_grad():
        model.unembed.W_U.mul_(factor)
    kind = Tokens(made(task, model), n_prompts=N)
    found, words, _ = kind.learned
    assert found == headline
    assert words.startswith(f"{headline}. Its cross entropy is " if headline else "It has learned the task: its cross ")
    if factor == 0:
        assert "is 100% of that of uniform guessing and 1" in words  # and more than of guessing among those read


def patching_grid(result: Comparison) -> torch.Tensor:
    """Shares of the loss that head outputs recover, `[head layer pos]`."""
    grid: Any = next(section.content for section in result.sections if section.title.startswith("Where"))
    return torch.tensor([[list(row) for row in heat.z] for heat in grid.data])


def test_a_planted_circuit_is_found_where_it_is():
    task = WORDS.replace(d_vocab=8, min_period=4)
    model = induction(d_vocab=8, n_ctx=12, n_heads=2, induction_head=1, seed=0)
    kind = Tokens(made(task, model), n_prompts=N)
    result = kind.measure()
    rows = by_quantity(result.rows)
    assert rows[NODES].measured == "head 0.0, head 1.1"
    assert "all heads" not in rows[NODES].note
    assert rows["highest induction score of a head"].ends[1] > 0.5
    of_heads = patching_grid(result)
    assert of_heads[1, 1, -1] > 0.9  # the induction head at the last position
    assert of_heads[0, 1].abs().max() < 1e-6  # distractors
    assert of_heads[1, 0].abs().max() < 1e-6
    assert of_heads[0, 0, 1:-1].max() > 0.1  # and its helper, after the earlier occurrences
    verdict = kind.verdict(result)
    assert verdict.headline == "It does induction, with head 1 of layer 1"
    assert "no snapshots were saved" in verdict.sentences["What was not tested?"]
    assert "Ablation agrees with the scores." in verdict.sentences["Do causal tests and papers agree?"]


@torch.no_grad()
def test_the_circuit_is_measured_on_other_sequences_than_those_of_the_search():
    model, rows = networks()[0], by_quantity(compared().rows)
    sequences = WORDS.sample(N, seed=PROMPT_SEED)
    searched, others = sequences[:32], sequences[32:]
    circuit = find_circuit(
        model, searched.read, next_token_loss(searched.targets()), method="mean", tolerance=0.05, at="positions"
    )
    again = measure_circuit(model, circuit, others.read, next_token_loss(others.targets()), at="positions")
    assert rows[NODES].measured == ", ".join(map(str, circuit.nodes))
    alone = rows["loss of the circuit alone (nats)"]
    assert alone.measured == interval(again.edges_alone)
    assert alone.note.endswith(f"{again.full.mean():.3g} whole, {again.ablated.mean():.3g} with everything cut")
    assert rows[FAITHFUL].measured == again.faithfulness()
    whole = len(circuit.nodes) == circuit.n_nodes
    assert ("all heads of the model" in rows[NODES].note) == whole
    assert ("completeness of the circuit" in rows) == (not whole)
    if not whole:
        assert rows["completeness of the circuit"].measured == again.completeness()


@torch.no_grad()
def test_head_outputs_are_restored_where_periods_are_the_same():
    model, drawn_shares = networks()[0], patching_grid(compared())
    clean = WORDS.replace(min_period=WORDS.max_period).sample(32, seed=PROMPT_SEED)
    back = WORDS.n_ctx - 1 - WORDS.max_period
    assert torch.equal(clean.ids[:, back], clean.ids[:, WORDS.n_ctx - 1])  # the occurrence that is replaced
    corrupted = corrupt_tokens(clean.read, d_vocab=WORDS.d_vocab)
    loss = next_token_loss(clean.ids[:, -1])
    right, wrong = (model.run_with_cache(ids)[1]["blocks.1.attn.hook_z"] for ids in (clean.read, corrupted))
    before, whole = (loss(model(ids)[:, -1]).mean() for ids in (corrupted, clean.read))
    for head, pos in [(0, back + 1), (1, WORDS.n_ctx - 1)]:
        mixed = wrong.clone()
        mixed[:, pos, head] = right[:, pos, head]
        logits = model.run_with_hooks(corrupted, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook, m=mixed: m)])
        expected = (loss(logits[:, -1]).mean() - before) / (whole - before)
        assert drawn_shares[head, 1, pos].item() == pytest.approx(expected.item(), rel=2e-3, abs=2e-3)


def test_one_layer_composes_with_nothing():
    model = HookedTransformer(READER.replace(n_layers=1), seed=0).eval()
    result = Tokens(made(WORDS, model), n_prompts=N).measure()
    titles = [section.title for section in result.sections]
    assert titles == ["What the heads do", "Where the earlier occurrence is seen", "The circuit"]


def test_markov_chains_have_their_learners_in_place_of_a_circuit(tmp_path):
    folder = save(tmp_path / "chains", networks()[0], made(MarkovChains(d_vocab=7, n_ctx=12), seeds=[0]).record)
    path = report(folder, None, tmp_path, n_prompts=N, progress=False)
    saved = json.loads(path.with_suffix(".json").read_text())
    quantities = [row["quantity"] for row in saved["table"]]
    assert "divergence from bigram (nats a token)" in quantities
    assert "regret against bigram (nats a token)" in quantities
    assert not any("circuit" in quantity for quantity in quantities)
    assert "nats a token apart" in saved["verdict"]["sentences"]["What does it do?"]
