"""What analyses/README.md says about each paper, and how the results files that it reads are made."""

from .entry import Paper
from .fu import FU
from .made import MADE, NOT_INDEXED, UNSAVED
from .natan import NATAN
from .nertinger import NERTINGER
from .oswald import OSWALD
from .oswald_appendix import OSWALD_APPENDIX

PAPERS = (
    Paper(
        "von Oswald et al. 2023, Transformers learn in-context by gradient descent",
        "x ~ U(-1/2, 1/2), d = n = 10 unless said otherwise: the paper prints U(-1, 1), but its losses and "
        "eigenvalues are "
        "those of an interval of length 1, and its plotted loss is half the mean squared error.",
        (*OSWALD, *OSWALD_APPENDIX),
    ),
    Paper(
        "Fu et al. 2024, Transformers learn higher-order optimization methods for in-context learning",
        "The models are small: 8 layers, width 64, d = 5, 20 points, where the paper has 12 layers, width 256, d = "
        "20, 40 "
        "points. Layers are read by linear readouts in closed form.",
        FU,
    ),
    Paper(
        "Bar Natan, Deutch and Magar, Why can GPT learn in-context?",
        "Another model and other tasks than the paper's, so that its numbers are no target: what can be compared is "
        "their signs and order. `python analyses/icl_against_finetuning.py --model NAME --tasks ...` measures its six "
        "data sets, where they and a language model can be had.",
        NATAN,
    ),
    Paper(
        "Nertinger, Decoding in-context learning: the role of preconditioned gradient descent in transformers",
        "One layer on 20 points in 5 dimensions. Measured losses are relative to the best linear layer's on the same "
        "prompts, times its exact loss.",
        NERTINGER,
    ),
)

__all__ = ["MADE", "NOT_INDEXED", "PAPERS", "UNSAVED"]
