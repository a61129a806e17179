"""The RASP programs: their outputs, and their circuits by the labels of tracr's blocks."""

import copy
from dataclasses import replace

import pytest
import torch
from tracr.rasp import causal_eval

from mechicl.models.opening.sites import list_edges
from tests.interop.compiling import circuit_by_labels
from tests.scripts import import_script

programs, library = import_script("rasp_programs"), import_script("rasp_library")
SUBSET = (
    "histogram", "count_distinct", "sort", "reverse", "balanced", "open_share", "induction", "induction_share",
    "seven_hops", "share_above", "shift_by_position", "window", "asked_twice", "mean_of_nothing", "two_flags",
)  # fmt: skip
"""Compiled in every test run, in seconds, and one that averages words, which the interpreter of RASP refuses to do.

`python analyses/rasp_programs.py` compiles and verifies all.
"""


@pytest.mark.parametrize("name", SUBSET)
def test_a_compiled_program_computes_what_plain_python_does(name):
    assert programs.wrong_values(name, n=5) == []


@pytest.mark.parametrize("name", sorted(set(library.PROGRAMS) - set(SUBSET)))
def test_the_others_compute_it_by_tracrs_interpreter(name):
    program = library.PROGRAMS[name]
    evaluate = causal_eval.evaluate if program.causal else library.rasp.evaluate
    expression = program.build()
    for text in programs.random_texts(program, n=3, seed=1):
        for value, right in zip(evaluate(expression, text), program.compute(text), strict=True):
            assert right is None or value == pytest.approx(right)


@pytest.mark.parametrize("name", SUBSET)
def test_the_circuit_is_that_of_the_blocks(name):
    program, model = library.PROGRAMS[name], programs.compile_program(name)
    nodes, edges = circuit_by_labels(program.build(), set(program.words), program.length)
    assert set(model.true_circuit.nodes) == nodes
    assert set(model.true_circuit.edges) == edges


@pytest.mark.parametrize("name", ["one_answer", "sum_of_tokens"])
def test_parts_without_effect_are_left_out_of_the_circuit(name):
    """An MLP that makes the same of all counts, and a sum in which one count has the factor 0."""
    program, model = library.PROGRAMS[name], programs.compile_program(name)
    _, edges = circuit_by_labels(program.build(), set(program.words), program.length)
    left_out = edges - set(model.true_circuit.edges)
    heads = {edge.receiver for edge in left_out if edge.by and edge.receiver}
    assert set(model.true_circuit.edges) < edges
    assert len(heads) == 1
    ids, changed = model.sample_ids(4, seed=0), copy.deepcopy(model)
    for head in heads:
        with torch.no_grad():
            changed.blocks[head.layer].attn.W_O[head.head] *= -3
    torch.testing.assert_close(changed(ids), model(ids), rtol=0, atol=1e-9)


def test_there_are_programs_of_every_kind_and_size():
    assert len(library.PROGRAMS) >= 60
    assert all(program.text.endswith(".") for program in library.PROGRAMS.values())
    models = [programs.compile_program(name) for name in SUBSET]
    assert {model.cfg.n_layers for model in models} >= {1, 2, 3, 4, 5, 7}
    assert {model.values is None for model in models} == {True, False}
    sizes = [len(list_edges(model)) for model in models]
    assert min(sizes) < 10
    assert max(sizes) > 600
    assert sum(program.causal for program in library.PROGRAMS.values()) >= 8


def test_a_wrong_program_is_noticed(monkeypatch):
    wrong = replace(library.PROGRAMS["histogram"], compute=lambda w: [len(w) for _ in w])
    monkeypatch.setitem(library.PROGRAMS, "histogram", wrong)
    assert len(programs.wrong_values("histogram", n=5)) > 5
