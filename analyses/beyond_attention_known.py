"""Does the causal test find the algorithm of hand-written layers with a state, and reject all others?"""

from typing import Any

from known_answers import ALIKE, SAME
from known_answers import _others as others_of
from known_answers import _own as own_of
from known_answers import compare as known_answers

from analyses.support.script import Option, script
from mechicl.constructions import known_models
from mechicl.reports import Comparison, Row


@script(n_prompts=Option(64, "prompts of the interventions"), seed=Option(0, "seed of prompts and disguises"))
def compare(args: Any) -> Comparison:
    """Weakest R² of each layer's own hypothesis, and of those of all other hand-written models."""
    options = known_answers.options(n_prompts=args.n_prompts, seed=args.seed)
    plain, hidden = (known_models(recurrent=True, hidden=each, seed=args.seed) for each in (False, True))
    everyone, rows, above = [*plain, *known_models()], [], 0
    for known, copy in zip(plain, hidden, strict=True):
        others = sorted(others_of(known, everyone, options), key=lambda pair: -pair.weakest)
        rows.append(Row(f"{known.name}: own hypothesis", None, own_of(known, options).weakest))
        rows.append(Row(f"{known.name}: own hypothesis, hidden", None, own_of(copy, options).weakest))
        near = [pair for pair in others if pair.weakest > ALIKE]
        above += len(near)
        note = "; ".join(f"{pair.hypothesis} {pair.weakest:.4f} ({pair.reason or 'no reason'})" for pair in near)
        rows.append(Row(f"{known.name}: best of {len(others)} others", None, others[0].weakest, "",
                        note or others[0].hypothesis))  # fmt: skip
    lead = (
        f"Weakest R² on {args.n_prompts} prompts. Others are the algorithms of all other hand-written models; those "
        f"above {ALIKE:g} are named, with the reason. The same steps with the same numbers give at least {SAME:g}."
    )
    return Comparison("Known answers: layers with a state", lead, rows, (), {"others_above": above})


if __name__ == "__main__":
    compare.run()
