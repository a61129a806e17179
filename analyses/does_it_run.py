"""Does a trained model run the algorithm that it is like? Hypotheses tested by interventions, with controls.

python analyses/does_it_run.py --checkpoint gpt2-8l
"""

from typing import Any

from analyses.support.script import Option, script
from mechicl.checkpoints import load_checkpoint
from mechicl.reports import Comparison
from mechicl.reports.causes import causal_part


@script(checkpoint="gpt2-8l", n_prompts=1024, seed=Option(0, "seed of the prompts, fits and shuffled weights"))
def compare(args: Any) -> Comparison:
    """All hypotheses on all seeds of a checkpoint."""
    checkpoint = load_checkpoint(args.checkpoint)
    rows, sections, data = causal_part(
        checkpoint, checkpoint.task, n_prompts=args.n_prompts, seed=args.seed, control=args.control
    )
    lead = (
        f"{checkpoint.name}: hypotheses fitted to the model and tested on {args.n_prompts} prompts (seed {args.seed}) "
        f"by exchanging, skipping, repeating and freezing what its layers do; intervals are over seeds where there are "
        f"several."
    )
    return Comparison(f"Does {checkpoint.name} run the algorithm?", lead, rows, sections, data)


if __name__ == "__main__":
    compare.run()
