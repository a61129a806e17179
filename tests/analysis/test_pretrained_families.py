"""Analyses of families opened as `HookedTransformer`s, against the same analyses of bridges and plain computations."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import einsum
from torch import Tensor
from transformer_lens.model_bridge.sources import build_bridge_from_module

from mechicl import analysis
from mechicl.analysis.interventions import logit_difference
from mechicl.analysis.layers import direct_logit_attribution, logit_lens
from mechicl.models import HookedTransformer
from mechicl.models.opening.adapter import ModelAdapter
from mechicl.models.opening.edits import check_edits
from mechicl.models.pretrained.loading import from_transformers
from mechicl.viz import plot
from tests.families import token_ids
from tests.models.pretrained.variants import make_variant

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

FAMILIES = {
    "GPT-2": "tied embeddings", "Llama": "grouped keys", "Llama 3": "scaled rotary positions", "GPT-J": "parallel",
    "Gemma 2": "norms on both sides, soft caps, windows", "Gemma 3": "two rotary bases, norms of queries and keys",
    "OLMo 2": "norms after", "BLOOM": "ALiBi", "Mistral": "windows", "GPT-Neo": "windows in some layers",
}  # fmt: skip
IDS, OTHERS = token_ids(0, 4), token_ids(1, 4)
CORRECT, WRONG = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8])
METRIC = logit_difference(CORRECT, WRONG)
QUIET: dict[str, Any] = {"metrics": METRIC, "progress": False}
REPEATED = torch.cat([IDS[:, :4], IDS[:, :4]], 1)


@functools.cache
def opened(name: str) -> tuple[Any, HookedTransformer, Any]:
    theirs = make_variant(name)
    return theirs, from_transformers(HookedTransformer, theirs), open_bridge(name)


def open_bridge(name: str) -> Any:
    theirs = make_variant(name)
    return build_bridge_from_module(theirs, type(theirs).__name__, hf_config=theirs.config).eval()


def swept(analyse: Callable[..., Any], *args: Any) -> Callable[[Any], Tensor]:
    return lambda model: analyse(model, IDS, OTHERS, *args, **QUIET).effect()


def scored(model: Any) -> Tensor:
    result = analysis.score_heads(model, sequences=REPEATED, progress=False)
    chance = [result.chance_by_layer[name][:, None].expand(-1, model.cfg.n_heads) for name in result.samples()]
    return torch.stack([*(score.mean(-1) for score in result.samples().values()), *chance])


def circuit(model: Any) -> Tensor:
    found = analysis.find_circuit(model, IDS, METRIC, tolerance=0.1, search="acdc", progress=False)
    return torch.tensor([sorted(map(hash, map(str, found.edges)))], dtype=torch.float64)


ANALYSES: dict[str, Callable[[Any], Tensor]] = {
    **{f"patch {part}": swept(analysis.patch, part) for part in ("z", "pattern", "mlp_out", "resid_post")},
    **{f"patch {part}": swept(analysis.patch, part, ("layer", "pos")) for part in ("q", "k", "v")},
    "attribute": swept(analysis.attribute, "z", ("layer", "pos", "head")),
    "ablate": lambda model: analysis.ablate(model, IDS, "z", **QUIET).effect(),
    "mask-ig": lambda model: analysis.score_edges(model, IDS, **QUIET).scores,
    "eap-ig": lambda model: analysis.score_edges(model, IDS, scoring="eap-ig", **QUIET).scores,
    "score_heads": scored,
    "find_circuit": circuit,
    "logit_lens": lambda model: logit_lens(model, IDS, at="positions").logits,
    "attribution": lambda model: direct_logit_attribution(model, IDS, CORRECT, WRONG).contributions,
}
UNUSED_PATTERNS = ("GPT-J", "GPT-Neo")  # their bridges ignore edits of patterns


PAIRS = list(itertools.product(FAMILIES, ANALYSES))  # every third in the default tier: all families, all analyses


@pytest.mark.parametrize(
    ("name", "analyse"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if (i + i // len(ANALYSES)) % 3 else ())
        for i, pair in enumerate(PAIRS)
    ],
)
def test_an_analysis_of_ours_is_that_of_the_bridge(name: str, analyse: str):
    _, ours, bridge = opened(name)
    if analyse == "patch pattern" and name in UNUSED_PATTERNS:
        with pytest.raises(ValueError, match="ignores edits"):
            ANALYSES[analyse](bridge)
        return
    mine, expected = ANALYSES[analyse](ours), ANALYSES[analyse](bridge)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(mine, expected.to(mine), atol=2e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(("name", "cap"), [("Llama", None), ("Gemma 2", 30.0), ("OLMo 2", None)])
@torch.no_grad()
def test_the_lens_is_the_norm_and_the_head_of_transformers_after_each_layer(name: str, cap: float | None):
    theirs, ours, _ = opened(name)
    run = theirs(IDS, output_hidden_states=True)
    expected = torch.stack([theirs.lm_head(theirs.model.norm(stream)) for stream in run.hidden_states[:-1]])
    expected = torch.cat([cap * (expected / cap).tanh() if cap else expected, run.logits[None]])
    lens = logit_lens(ours, IDS, IDS.roll(-1, 1), at="positions")
    torch.testing.assert_close(lens.logits, expected, atol=1e-5, rtol=0)
    logs = expected.double().log_softmax(-1)  # [layer prompt pos token]
    of_answers = logs.gather(-1, IDS.roll(-1, 1).expand(len(logs), -1, -1)[..., None])
    for found, by_position, tolerance in (
        (lens.log_probabilities, of_answers[..., 0], 1e-4),
        (lens.ranks, (logs > of_answers).sum(-1), 1e-6),
        (lens.divergences, (logs[-1].exp() * (logs[-1] - logs)).sum(-1), 1e-4),
    ):
        torch.testing.assert_close(found.double(), by_position.double().mean(-1), atol=tolerance, rtol=0)
    last = logit_lens(ours, IDS)
    assert torch.equal(last.answers, run.logits[:, -1].argmax(-1))
    assert not last.ranks[-1].any()
    with pytest.raises(ValueError, match=r"answers must be \[4\] for at='query'"):
        logit_lens(ours, IDS, IDS)


@pytest.mark.parametrize(("name", "after"), [("GPT-2", ""), ("Llama", ""), ("Gemma 2", "ln1_post"), ("OLMo 2", "ln1")])
@torch.no_grad()
def test_contributions_are_writes_through_the_scales_of_the_run(name: str, after: str):
    theirs, ours, _ = opened(name)
    result = direct_logit_attribution(ours, IDS, CORRECT, WRONG)
    _, cache = ours.run_with_cache(IDS)
    rows = torch.arange(len(IDS))
    direction = (ours.ln_final.get_parameter("w")[:, None] * ours.W_U).T / cache["ln_final.hook_scale"][:, -1, :, None]
    direction = direction[rows, CORRECT] - direction[rows, WRONG]
    for layer, head in itertools.product(range(ours.cfg.n_layers), range(ours.cfg.n_heads)):
        written = cache[f"blocks.{layer}.attn.hook_z"][:, -1, head] @ ours.W_O[layer, head]
        if after:
            weight = getattr(ours.blocks[layer], after).w
            written = written / cache[f"blocks.{layer}.{after}.hook_scale"][:, -1] * weight
        centred = written - written.mean(-1, keepdim=True) if name == "GPT-2" else written
        expected = einsum(centred, direction, "prompt d, prompt d -> prompt")
        row = result.contributions[result.components.index(f"head {layer}.{head}")]
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)
    logits = theirs(IDS).logits[:, -1]
    torch.testing.assert_close(result.logits, logits[rows, CORRECT] - logits[rows, WRONG], atol=1e-5, rtol=0)
    torch.testing.assert_close(result.errors, result.logits - result.contributions.sum(0))
    assert result.errors.abs().max() < 1e-5 < result.contributions.abs().max()
    assert ("soft cap" in result.components) is (name == "Gemma 2")
    printed = next(line for line in str(result).splitlines() if "largest error of a sum" in line)
    assert printed.split()[-1] == f"{float(result.errors.abs().max()):.2g}"
    assert list(result.to_dataframe()["component"]) == list(result.components)
    assert plot(result).to_dict()["data"][0]["y"][-1] == "logit"


def test_answers_and_sums_of_contributions_are_checked():
    _, ours, _ = opened("Llama")
    with pytest.raises(ValueError, match="answers and wrong must be 4 ids below"):
        direct_logit_attribution(ours, IDS, CORRECT + 1000)
    scaled = from_transformers(HookedTransformer, make_variant("Llama"))
    scaled.unembed.register_forward_hook(lambda part, args, out: out + out.square())
    with pytest.raises(ValueError, match="do not add up to the logits"):
        direct_logit_attribution(scaled, IDS, CORRECT, WRONG)


# ---- patterns of heads, and runs ----
def test_patterns_of_the_user_are_scored_against_uniform_attention():
    _, ours, _ = opened("Gemma 2")
    n_pos = REPEATED.shape[1]
    two_before = torch.eye(n_pos).roll(2, 0).tril()
    patterns: Any = {"two_before": two_before, "first": lambda ids: torch.eye(1, n_pos).expand(len(ids), n_pos, -1)}
    patterns["lens"] = "induction_head"
    result = analysis.score_heads(ours, sequences=REPEATED, patterns=patterns, progress=False)
    _, cache = ours.run_with_cache(REPEATED)
    window, kinds = ours.cfg.window_size, ours.cfg.attn_types
    assert window is not None
    assert kinds is not None
    for layer in range(ours.cfg.n_layers):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"].double()
        expected = torch.stack([pattern[..., pos, pos - 2] for pos in range(2, n_pos)]).mean(0).T
        torch.testing.assert_close(result["two_before"][layer], expected)
        torch.testing.assert_close(result["first"][layer], pattern[..., 0].mean(-1).T)
        local = kinds[layer] == "local"
        visible = [min(pos + 1, window if local else n_pos) for pos in range(n_pos)]
        chance = sum(1 / visible[pos] for pos in range(2, n_pos)) / (n_pos - 2)
        assert result.chance_by_layer["two_before"][layer] == pytest.approx(chance)
        first = sum(1 / seen for pos, seen in enumerate(visible) if seen == pos + 1) / n_pos
        assert result.chance_by_layer["first"][layer] == pytest.approx(first)
    torch.testing.assert_close(result["lens"], result["induction"])
    for wrong, named in (
        ({"induction": two_before}, "other names"),
        ({"x": two_before[:2]}, r"must be \[query key\]"),
        ({"x": 2 * two_before}, "between 0 and 1"),
        ({"x": torch.zeros(n_pos, n_pos)}, "not all 0"),
        ({"x": "name_mover_head"}, "is not one of"),
    ):
        with pytest.raises(ValueError, match=named):
            analysis.score_heads(ours, sequences=REPEATED, patterns=wrong, progress=False)


def test_the_hooks_of_a_bridge_are_checked_once_while_its_parts_stay(monkeypatch: pytest.MonkeyPatch):
    bridge = open_bridge("GPT-2")
    runs: list[int] = []
    run = ModelAdapter.run
    monkeypatch.setattr(ModelAdapter, "run", lambda self, *args, **kw: runs.append(1) or run(self, *args, **kw))
    names = ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"]

    def count() -> int:
        runs.clear()
        check_edits(ModelAdapter(bridge), IDS, names)
        return len(runs)

    assert count() > 0
    assert count() == 0
    bridge.blocks[0].ln2.register_forward_hook(lambda part, args, out: None)
    assert count() > 0
