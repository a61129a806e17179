"""How well searches find the circuits of compiled programs, and how fast."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from rasp_library import Program, combine, fetch, indices, tokens
from rasp_programs import NAMES, compile_by_tracr, compile_program
from torch import Tensor

import mechicl
from benchmarks.interventions import bridge, peak_bytes
from benchmarks.rows import Row, Settings, row, timed
from mechicl import constructions
from mechicl.analysis import Replacement
from mechicl.analysis.circuits import Circuit, compare_circuits, find_circuit, score_edges
from mechicl.analysis.circuits.problem import make_problem
from mechicl.constructions import hide, weights_circuit
from mechicl.constructions.supports import WeightsCircuit
from mechicl.interop import from_tracr
from mechicl.models.opening.sites import list_edges, list_nodes
from mechicl.tasks import LinearRegression

N_PROMPTS = 24
METHODS = ("any", "zero", "mean", "resample")
SEARCHES = ("exact", "acdc", "eap-ig")


def tally(name: str, pairs: Sequence[tuple[Circuit, WeightsCircuit]], bars: bool = False) -> list[Row]:
    """Shares of true nodes and edges that were found, and of programs whose circuit is right to the edge."""
    rows = []
    for kind, bar in (("nodes", ">= 1"), ("edges", ">= 0.99")):
        sets = [(set(getattr(circuit, kind)), set(getattr(truth, kind))) for circuit, truth in pairs]
        right, true = sum(len(here & there) for here, there in sets), sum(len(there) for _, there in sets)
        false = sum(len(here - there) for here, there in sets)
        detail = f"{right} of {true} true {kind}; {false} false ones"
        rows.append(row(f"{name}: {kind} found", [right / true], bar if bars else "shown", detail))
    exact, n = sum(compare_circuits(*pair).is_exact for pair in pairs), len(pairs)
    quantity, bar = f"{name}: circuits right to the edge", ">= 0.95" if bars else "shown"
    return [*rows, row(quantity, [exact / n], bar, f"{exact} of {n} programs")]


def search(model: Any, prompts: Any, *at: Any, **options: Any) -> Circuit:
    return find_circuit(model, prompts, *at, effects=False, progress=False, **options)


def program_rows(names: tuple[str, ...]) -> list[Row]:
    """Everything by default, the time with compilation and truth, and the gradients alone."""
    areas, started = [], time.perf_counter()
    models = [compile_program(name) for name in names]
    found = [(search(model, model.sample_ids(N_PROMPTS, seed=0)), model.true_circuit) for model in models]
    n_edges = [len(list_edges(model)) for model in models]
    seconds = time.perf_counter() - started
    for model in models:
        if len(model.true_circuit.edges) < len(list_edges(model)):
            scores = score_edges(model, model.sample_ids(N_PROMPTS, seed=0), progress=False)
            areas.append(scores.auroc(model.true_circuit))
    return [
        *tally(f"{len(names)} compiled programs", found, bars=True),
        row("the same, seconds", [seconds], "<= 180", f"compiled, searched; {min(n_edges)} to {max(n_edges)} edges"),
        row("AUROC of the gradients alone, mean over programs", [sum(areas) / len(areas)], "shown",
            f"{sum(area == 1 for area in areas)} of {len(areas)} are 1; the worst {min(areas):.3f}"),
    ]  # fmt: skip


def largest_row(names: tuple[str, ...] = ("sum_of_tokens", "window", "sum_of_positions", "never_negative")) -> Row:
    """CPU seconds of the slowest search among the programs with the most edges."""
    seconds = {}
    for name in names:
        model = compile_program(name)
        started = time.process_time()
        find_circuit(model, model.sample_ids(N_PROMPTS, seed=0), progress=False)
        seconds[name] = time.process_time() - started, len(list_edges(model))
    slowest, (most, n_edges) = max(seconds.items(), key=lambda each: each[1])
    largest = max(n for _, n in seconds.values())
    words = f"{slowest}, {n_edges} edges; the largest of {len(names)} has {largest}"
    return row("circuit of a large compiled program, with effects: seconds", [most], "<= 20", words)


def hidden_rows(names: tuple[str, ...]) -> list[Row]:
    """The same programs in a rotated stream, each head in a random gauge, with a distractor in every layer."""
    found = []
    for number, name in enumerate(names):
        model = compile_program(name)
        ids = model.sample_ids(N_PROMPTS, seed=0)
        hidden = hide(model, seed=number, distractors=1, junk_prompts=ids).model
        found.append((search(hidden, ids), model.true_circuit))
    return tally(f"{len(names)} of them, rotated and with distractors", found, bars=True)


def construction_rows() -> list[Row]:
    """Models on points whose weights were written by hand."""
    prompts = LinearRegression(x_dim=3, n_context=6).sample(N_PROMPTS, seed=0, dtype=torch.float64)
    sizes: dict[str, Any] = {"x_dim": 3, "n_context": 6}
    models = [
        constructions.gradient_descent(**sizes, step_size=0.1, steps=3),
        constructions.gd_plus_plus(**sizes, step_size=0.1, gamma=0.05, steps=3),
        constructions.newton(**sizes, steps=2, alpha=0.05),
        constructions.copy_then_gradient_descent(**sizes, step_size=0.1),
        constructions.relu_optimum(**sizes),
        constructions.softmax_gradient_descent(**sizes, step_size=0.1, score_scale=1e-3),
    ]
    found = [(search(model.double(), prompts, "outputs"), weights_circuit(model)) for model in models]
    return tally(f"{len(models)} constructions on points", found)


def choice_rows(names: tuple[str, ...]) -> list[Row]:
    """Compare methods of ablating and searching edges by how well they find the true circuit."""
    rows = []
    choices: list[tuple[str, dict[str, Any]]] = [
        (f"cut edges carry {method!r}, tolerance {tolerance}", {"method": method, "tolerance": tolerance})
        for method in METHODS
        for tolerance in (0.001, 0.05)
    ]
    choices += [(f"search={search!r}", {"search": search}) for search in SEARCHES[1:]]
    choices += [("search='eap-ig', cut edges carry 'zero'", {"search": "eap-ig", "method": "zero"})]
    for words, options in choices:
        found: list[Any] = []
        for model in map(compile_program, names):
            try:
                circuit = search(model, model.sample_ids(N_PROMPTS, seed=0), **options)
            except ValueError:  # with means, what depends on positions alone does not change: there is nothing to find
                circuit = WeightsCircuit((), ())
            found.append((circuit, model.true_circuit))
        rows += tally(words, found)[1:2]
    return rows


def wide_program(n_heads: int = 5, n_layers: int = 5) -> Program:
    """Chains of heads side by side, each of which fetches from a fixed distance, compared pairwise in the end."""

    def build() -> Any:
        ends = []
        for head in range(n_heads):
            chain = tokens
            for _ in range(n_layers):
                chain = fetch(indices, indices, lambda key, query, by=head: key == (query - by) % 8, chain)
            ends.append(chain)
        while len(ends) > 1:
            pairs = [ends[i : i + 2] for i in range(0, len(ends), 2)]
            ends = [combine(lambda a, b: "a" if a == b else "b", *pair) if len(pair) > 1 else pair[0] for pair in pairs]
        return ends[0]

    return Program("wide", "ab", 8, "Chains of heads side by side.", compute=list, build=build)


def large_rows(rounds: int, n_timed: int = 40) -> list[Row]:
    """Compare a search of 2,000 edges with one run per edge."""
    model = from_tracr(compile_by_tracr(wide_program()))
    ids = model.sample_ids(N_PROMPTS, seed=0)
    seconds, ratios, circuit = [], [], None
    for _ in range(rounds):
        of_search, circuit = timed(lambda: search(model, ids))
        seconds.append(of_search)
        problem = make_problem(model, ids, None, method="zero", at=None)
        everything = torch.ones(len(problem.graph.edges), dtype=torch.bool)
        started = time.perf_counter()
        for number in range(0, len(everything), len(everything) // n_timed):
            kept = everything.clone()
            kept[number] = False
            problem.objective.measure(problem.graph.run(kept))
        n_run = len(range(0, len(everything), len(everything) // n_timed))
        ratios.append((time.perf_counter() - started) * len(everything) / n_run / seconds[-1])
    assert circuit is not None
    exact = compare_circuits(circuit, model.true_circuit).is_exact
    detail = f"{len(list_edges(model))} edges, {len(model.true_circuit.edges)} of them true; "
    return [
        row("a compiled model of 2,000 edges, seconds", seconds, "<= 30", detail + ("exact" if exact else "not exact")),
        row("one run an edge over ours", ratios, ">= 12", f"{n_timed} of the runs timed, with zeros on the cut edge"),
    ]


def bridge_rows() -> list[Row]:
    """All edges of a model of GPT-2's shape, with the memory that it takes."""
    model, memory = bridge(), 2**31
    generator = torch.Generator().manual_seed(0)
    clean, corrupted = torch.randint(50257, (2, 8, 16), generator=generator)

    def difference(logits: Tensor) -> Tensor:
        return logits[:, 11] - logits[:, 22]

    def score() -> Any:
        with mechicl.settings(memory=memory):
            return score_edges(
                model, clean, difference, scoring="eap-ig", steps=1, method=Replacement("resample", corrupted),
                progress=False,
            )  # fmt: skip

    seconds, (scores, _) = zip(*(timed(score) for _ in range(2)), strict=True)
    peak = peak_bytes(score)  # type: ignore[arg-type]
    return [
        row("all edges of GPT-2's shape scored by one gradient, seconds", seconds, "<= 60",
            f"{len(scores.edges)} edges between {len(list_nodes(model))} nodes, 8 prompts of 16 tokens, a bridge"),
        row("the same, peak of memory over the bound", [peak / memory], "<= 1.1", f"bound {memory / 2**30:.0f} GiB"),
    ]  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    names = NAMES[:: settings.every]
    return [
        *program_rows(names),
        *hidden_rows(names[:: 1 if settings.full else 2]),
        *construction_rows(),
        *large_rows(min(settings.rounds, 3)),
        *bridge_rows(),
        *choice_rows(names[:: 2 if settings.full else 4]),
    ]
