"""Search ten compiled programs for a variable that each is known to compute, with controls.

python analyses/align_programs.py                      # all ten, in about two minutes
python analyses/align_programs.py majority spread      # two of them
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pandas as pd
import torch
import tyro
from rasp_library import never_below
from rasp_programs import compile_program
from scipy.stats import binomtest
from torch import Tensor

from mechicl.analysis.language import AlignmentFit, CausalModel, VariableAlignment, align_variables
from mechicl.interop import CompiledTransformer

Words = Sequence[Any]
EPOCHS = 60  # after 30, one search has not ended on some processors


@dataclass(frozen=True)
class Known:
    """A variable of a program, and where the compiled model computes it."""

    variable: str  # its name
    value: Callable[[Words], Any]  # its value, from the words of an input
    # the program's output at the position `read`, from the variable's value and the words
    output: Callable[[Any, Words], Any]
    layer: int  # after which the stream contains it
    component: str = "resid_post"  # "resid_mid" if the MLP of the same layer reads it
    is_number: bool = False  # whether it takes one dimension; a category takes one less than its number of values
    pos: int = -1  # position of the variable; the first word is at 1
    read: int = -1  # position of the output


def count(word: Any) -> Callable[[Words], int]:
    return lambda words: list(words).count(word)


KNOWN = {
    "parity_of_a": Known("count of a", count("a"), lambda n, w: n % 2 == 1, 0),
    "at_least_two": Known("count of a", count("a"), lambda n, w: n >= 2, 0, is_number=True),
    "majority": Known("count of a", count("a"), lambda n, w: "ab"[w.count("b") > n], 0),
    "counts_of_each": Known("count of b", count("b"), lambda n, w: 100 * w.count("a") + 10 * n + w.count("c"), 0),
    "depth": Known("count of (", count("("), lambda n, w: n - w.count(")"), 0),
    "balanced": Known("depth", lambda w: w.count("(") - w.count(")"), lambda n, w: n == 0 and never_below(w), 3),
    "spread": Known("largest", max, lambda n, w: n - min(w), 1, "resid_mid"),
    "add_the_first": Known("first", lambda w: w[0], lambda n, w: (n + w[-1]) % 3, 0, "resid_mid"),
    "pointer_three_times": Known("place", lambda w: w[w[-1]], lambda n, w: w[w[n]], 0),
    "two_steps_of_an_automaton": Known("cell", lambda w: w[0] ^ w[2], lambda n, w: n ^ w[2] ^ w[4], 0, pos=2, read=3),
}


def causal_model(model: CompiledTransformer, known: Known) -> CausalModel:
    """Return the variable and the words as a causal model of token ids."""

    def words(ids: Tensor) -> list[Any]:
        return [model.words[i] for i in ids[1:].tolist()]

    outputs = {value: i for i, value in enumerate(model.values or ())}
    return CausalModel(
        {known.variable: lambda ids: known.value(words(ids)), "words": words},
        lambda values: outputs[known.output(values[known.variable], values["words"])],
        known.read,
    )


def draw_prompts(model: CompiledTransformer, known: Known, causal: CausalModel) -> tuple[Tensor, int]:
    """Draw inputs without repetition, and return the rank of the variable too.

    Values that a single input has are left out: they could not be fitted and tested both.
    """
    ids = model.sample_ids(4000, seed=0).unique(dim=0)
    values = [causal.variables[known.variable](row) for row in ids]
    n_inputs = Counter(values)
    kept = torch.tensor([n_inputs[value] > 1 for value in values])
    return ids[kept], 1 if known.is_number else sum(n > 1 for n in n_inputs.values()) - 1


def align_program(name: str, **settings: Any) -> VariableAlignment:
    model, known = compile_program(name), KNOWN[name]
    causal = causal_model(model, known)
    ids, rank = draw_prompts(model, known, causal)
    return align_variables(
        model, causal, known.variable, ids, pos=known.pos, layers=[known.layer], component=known.component,
        fit=AlignmentFit(rank, **({"epochs": EPOCHS} | settings)), progress=False,
    )  # fmt: skip


def row(name: str) -> dict[str, str]:
    found = align_program(name)
    right, n_pairs = int(found.accuracy.sum()), found.accuracy.numel()
    ends = binomtest(right, n_pairs).proportion_ci()  # the interval of t would have no width where all are right
    cells = {
        "program": name,
        "variable": f"{found.variable}, layer {found.layers[0]}, rank {found.rank}",
        "accuracy": f"{right / n_pairs:.3f} ({ends.low:.3f} to {ends.high:.3f})",
    }
    cells |= {control: f"{float(each.mean()):.2f}" for control, each in found.controls.items()}
    cells["random targets"] += f" (chance {1 / found.n_outputs:.2f})"
    return cells


def main(names: Annotated[tuple[str, ...], tyro.conf.Positional] = tuple(KNOWN)) -> None:
    print(pd.DataFrame([row(name) for name in names]).to_string(index=False))


if __name__ == "__main__":
    tyro.cli(main)
