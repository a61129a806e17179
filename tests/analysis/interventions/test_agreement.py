"""Interventions on bridges of many families: equal to runs of the plain model, or refused with the reason."""

import pytest

from tests.analysis.interventions.agreement import COMPONENTS, TOLERANCE, agreement_of
from tests.families import open_family

FAMILIES = (  # one of each kind; those of agreement.py are twice as many
    "GPT-2", "GPT-Neo", "GPT-J", "GPT-NeoX", "OPT", "BLOOM", "XGLM", "Llama", "Mixtral", "Qwen3", "Gemma 2", "Phi",
    "Phi-3", "Falcon", "MPT", "OLMo 2", "CodeGen", "GPT-BigCode", "Granite", "Cohere", "GLM 4", "GPT", "BERT", "Mamba",
    "RecurrentGemma", "T5",
)  # fmt: skip
IGNORED = {"attn_scores", "pattern"}
REFUSED = {  # what is refused because the model ignores it
    "GPT-Neo": IGNORED,
    "GPT-J": IGNORED,
    "XGLM": IGNORED,
    "OPT": IGNORED,
    "BERT": IGNORED,
    "GPT": {"resid_post"},
}
ABSENT = {
    "T5": set(COMPONENTS),
    "Mamba": set(COMPONENTS) - {"resid_pre", "resid_post"},
    "RecurrentGemma": set(COMPONENTS) - {"resid_pre", "resid_post"},
}
PARALLEL = {"GPT-J", "GPT-NeoX", "Phi", "Falcon", "CodeGen", "Cohere", "Cohere 2"}


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:])]
)
def test_each_component_is_right_or_refused(family):
    bridge, plain = open_family(family)
    for component in COMPONENTS:
        agreement = agreement_of(bridge, plain, component, [1], [0])
        if component in REFUSED.get(family, ()):
            assert agreement.refusal is not None
            assert "ignores edits" in agreement.refusal or "does not fire" in agreement.refusal
        elif component in ABSENT.get(family, {"resid_mid"} if family in PARALLEL else ()):
            assert "the model has no hook" in (agreement.refusal or "")
        else:
            assert agreement.refusal is None, component
            assert agreement.difference is not None
            assert agreement.difference < TOLERANCE, component
