"""Alignment search on compiled programs: their stated variables, and what the search finds."""

import pytest
import torch

from mechicl import constructions
from mechicl.analysis.language import AlignmentFit, CausalModel, align_variables, variables
from tests.scripts import import_script

script = import_script("align_programs")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in script.KNOWN]
QUICK = ("add_the_first", "two_steps_of_an_automaton")


def stated(name):
    model, known = script.compile_program(name), script.KNOWN[name]
    causal = script.causal_model(model, known)
    ids, rank = script.draw_prompts(model, known, causal)
    return model, known, causal, ids, rank


def by_labels(model, known, causal, ids):
    """Find dimensions that determine the variable and it them: the first such group of the compiler's labels.

    Groups whose labels continue the first one's contain the same variable, such as the number of a one-hot code.
    """
    hook, groups, found = f"blocks.{known.layer}.hook_{known.component}", {}, {}
    stream = model.run_with_cache(ids)[1][hook][:, known.pos]
    values = [causal.variables[known.variable](row) for row in ids]
    for i, label in enumerate(model.stream_labels):
        groups.setdefault(label.rpartition(":")[0] or label, []).append(i)
    for group, dims in groups.items():
        coded = {
            (value, tuple(row)) for value, row in zip(values, stream[:, dims].round(decimals=3).tolist(), strict=True)
        }
        if len(coded) == len(set(values)) == len({code for _, code in coded}):
            found[group] = dims
    first = next(iter(found))
    return hook, stream, [dim for group, dims in found.items() if group.startswith(first) for dim in dims]


@pytest.mark.parametrize("name", [*QUICK, *(each for each in SLOW if each.values[0] not in QUICK)])
def test_exchanging_the_labelled_dimensions_is_exchanging_the_variable(name):
    """The stated causal model is right: by the compiler's labels, without any fit."""
    model, known, causal, ids, rank = stated(name)
    outputs = model(ids)[:, known.read].argmax(-1)
    assert outputs.tolist() == [causal.output(causal.values(row)) for row in ids]
    hook, stream, dims = by_labels(model, known, causal, ids)
    assert rank == (1 if known.is_number else int(torch.linalg.matrix_rank(stream[:, dims] - stream[:, dims].mean(0))))
    sources = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))

    def exchange(act, hook):
        act[:, known.pos, dims] = stream[sources][:, dims]
        return act

    exchanged = model.run_with_hooks(ids, fwd_hooks=[(hook, exchange)])[:, known.read].argmax(-1)
    expected = [
        causal.interchange(base, source, known.variable) for base, source in zip(ids, ids[sources], strict=True)
    ]
    assert exchanged.tolist() == expected
    assert expected != outputs.tolist()


def test_the_search_finds_a_variable():
    found = script.align_program("two_steps_of_an_automaton", n_pairs=256, epochs=15)
    assert found.accuracy.mean() >= 0.99
    assert abs(found.controls["random targets"].mean() - 1 / found.n_outputs) < 0.15
    assert found.controls["untrained"].mean() < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("name", script.KNOWN)
def test_the_search_finds_all_variables(name):
    found = script.align_program(name)
    assert found.accuracy.mean() >= 0.99
    assert abs(found.controls["random targets"].mean() - 1 / found.n_outputs) < 0.1
    assert found.controls["untrained"].mean() < 0.85


def small_model():
    return constructions.induction(d_vocab=8, n_ctx=8, n_heads=2, previous_token_head=0, induction_head=1, seed=0)


def test_halves_share_values_but_no_prompts(monkeypatch):
    halves, draw = [], variables._pairs
    monkeypatch.setattr(variables, "_pairs", lambda *args: halves.append(args[2]) or draw(*args))
    ids = torch.tensor([[value, other, 7] for value in range(5) for other in range(1, 5 - value + (value == 4))])
    causal = CausalModel({"value": lambda row: int(row[0])}, lambda values: values["value"])
    fit = AlignmentFit(n_pairs=8, epochs=1)
    align_variables(small_model(), causal, "value", ids.repeat(3, 1), layers=[0], fit=fit, progress=False)
    fitting, held_out = ({tuple(row) for row in half.tolist()} for half in halves)
    assert not fitting & held_out
    assert len(halves[0]) + len(halves[1]) == len(fitting | held_out) == len(ids)
    assert {row[0] for row in fitting} >= {0, 1, 2}
    assert {row[0] for row in held_out} >= {0, 1, 2}


def test_the_intact_output_is_a_choice_too():
    """Exchanges can only lead to 0 here, since both variables are always equal; this alone must not give accuracy 1."""
    both = {"left": lambda row: int(row[0]), "right": lambda row: int(row[1])}
    causal = CausalModel(both, lambda values: values["left"] * values["right"])
    ids = torch.tensor([[bit, bit, other] for bit in (0, 1) for other in range(8)])
    fit = AlignmentFit(n_pairs=64, epochs=1)
    found = align_variables(small_model(), causal, "left", ids, layers=[0], fit=fit, progress=False)
    assert found.n_outputs == 2
    assert found.controls["random targets"].mean() < 0.9
