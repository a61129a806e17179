"""Counting tokens comes before counting pairs: phases of training on Markov chains (after Edelman et al. 2024).

python analyses/sweep_markov.py                        # from the table in analyses/results/
python analyses/sweep_markov.py --folder runs/sweeps   # train it: `mechicl sweep markov`
"""

from typing import Any

from analyses.support.script import script
from analyses.support.sweeps import SweepArgs, count, over_seeds
from mechicl.algorithms import references
from mechicl.learners import token_log_probabilities
from mechicl.reports import Comparison, Row
from mechicl.sweeps import SWEEPS
from mechicl.sweeps.measures.general import HELD_OUT
from mechicl.tasks import MarkovChains

LAYERS = "model.n_layers"
SHARES = [i / 20 for i in range(21)]
"""Of bigrams in mixtures."""


@script(base=SweepArgs)
def compare(args: Any) -> Comparison:
    """When each phase begins, of two layers and of one, which cannot count pairs by an induction head."""
    table = args.table("markov")
    rows = []
    for n_layers, part in table.frame.groupby(LAYERS):
        name, n = count(n_layers, "layer"), len(part)
        counts = {
            "with a unigram phase": part["unigram_from"].notna(),
            "with a bigram phase": part["bigram_from"].notna(),
            "whose unigram phase comes before a bigram one": part["order"] == 1,
        }
        rows += [Row(f"{name}: seeds {words}", None, f"{each.sum()} of {n} seeds") for words, each in counts.items()]
        for column, words in {
            "unigram_from": "first step nearest to unigrams",
            "bigram_from": "first step nearest to bigrams",
            "least_to_unigram": "least divergence from unigrams",
            "final_to_unigram": "divergence from unigrams at the end",
            "final_to_bigram": "divergence from bigrams at the end",
            "loss": "loss at the end (nats)",
        }.items():
            if part[column].notna().any():
                rows.append(over_seeds(f"{name}: {words}", part[column]))
    apart = float(table.frame["apart"].iloc[0])
    rows.append(Row("divergence of bigrams from unigrams", None, apart, "prompts"))
    rows += mixtures()
    lead = (
        "Attention alone, width 32, two heads a layer, 2,000 steps of Adam at a constant rate on Markov chains of"
        " 3 states, 32 tokens. Divergences are Kullback-Leibler, of the learner's probabilities from the model's,"
        " in nats a token, on 500 held-out sequences at 40 snapshots; a model is in the phase of the learner "
        "(uniform, unigrams, bigrams) that it is nearest to. Medians with bootstrap intervals over eight seeds. One "
        "layer is the control."
    )
    return Comparison("Markov chains: the order of phases", lead, rows)


def mixtures(n_prompts: int = 500) -> list[Row]:
    """The control: who mixes equal chances with bigrams, and never counts tokens, is how near to unigrams?"""
    task = SWEEPS["markov"].sweep().base.task
    assert isinstance(task, MarkovChains)
    sequences = task.sample(n_prompts, seed=HELD_OUT)
    logs = {name: token_log_probabilities(each, sequences) for name, each in references(task).items()}
    counted = sequences.predictable[:, 1:]
    least, named = float("inf"), 0
    for share in SHARES:
        mixed = ((1 - share) * logs["uniform"].exp() + share * logs["bigram"].exp()).log()
        divergences = {
            name: (each.exp() * (each - mixed)).sum(-1)[counted].mean().item() for name, each in logs.items()
        }
        least = min(least, divergences["unigram"])
        named += min(divergences, key=divergences.__getitem__) == "unigram"
    words = "mixtures of equal chances and bigrams"
    return [
        Row(f"{words}: least divergence from unigrams", None, least, "prompts"),
        Row(f"{words}: how many are nearest to unigrams", None, f"{named} of {len(SHARES)}", "prompts"),
    ]


if __name__ == "__main__":
    compare.run()
