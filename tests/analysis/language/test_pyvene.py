"""Alignment search against pyvene's, on a model of `transformers` that was trained for some seconds."""

import copy
import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from mechicl.analysis.language import AlignmentFit, CausalModel, align_variables
from tests.tools import imported

pytestmark = pytest.mark.slow
N, ASK_FIRST, ASK_SECOND, NOISE = 5, 25, 26, range(27, 32)
"""Tokens 0 to 24 are pairs of two variables with N values, the next two select one of them, the last have no meaning.
Answers are tokens 0 to 4 for the first variable, and 5 to 9 for the second."""
POS = 1  # of the pair


def first_of(row):
    return int(row[POS]) // N


def output(values):
    return values["first"] if values["query"] == ASK_FIRST else N + values["second"]


CAUSAL = CausalModel(
    {"first": first_of, "second": lambda row: int(row[POS]) % N, "query": lambda row: int(row[2])}, output
)


@pytest.fixture(scope="module")
def ids():
    return torch.tensor(list(itertools.product(NOISE, range(N * N), (ASK_FIRST, ASK_SECOND))))


@pytest.fixture(scope="module")
def trained(ids):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=4, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config)
    targets = torch.tensor([output(CAUSAL.values(row)) for row in ids])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        optimizer.zero_grad()
        cross_entropy(model(ids).logits[:, -1], targets).backward()
        optimizer.step()
    model.eval().requires_grad_(False)
    assert (model(ids).logits[:, -1].argmax(-1) == targets).all()
    return model


def draw_pairs(ids, n, seed):
    """Pairs of prompts whose query selects the first variable, which differs."""
    generator = torch.Generator().manual_seed(seed)
    base, source = (ids[torch.randint(len(ids), (8 * n,), generator=generator)] for _ in range(2))
    changes = (base[:, 2] == ASK_FIRST) & (base[:, POS] // N != source[:, POS] // N)
    return base[changes][:n], source[changes][:n], source[changes][:n, POS] // N


def intervenable(pyvene, model, rank):
    block = pyvene.RepresentationConfig(0, "block_input", "pos", 1, low_rank_dimension=rank)
    config = pyvene.IntervenableConfig([block], pyvene.LowRankRotatedSpaceIntervention)
    return pyvene.IntervenableModel(config, model)


def exchanged(wrapped, base, source):
    """Logits of the answers after pyvene's exchange in the first block's input."""
    places = {"sources->base": ([[[POS]] * len(base)], [[[POS]] * len(base)])}
    _, outputs = wrapped({"input_ids": base}, [{"input_ids": source}], places)
    return outputs.logits[:, -1, : 2 * N]


@pytest.mark.parametrize("rank", [N - 1, 1])
def test_the_same_variable_as_pyvene(trained, ids, rank):
    """Both find subspaces of about the same accuracy, and pyvene measures the same accuracy of ours as we do."""
    pyvene = imported("pyvene")
    torch.manual_seed(1)
    wrapped = intervenable(pyvene, trained, rank)
    (intervention,) = wrapped.interventions.values()
    shuffled = ids[torch.randperm(len(ids))]
    base, source, targets = draw_pairs(shuffled[: len(ids) // 2], 512, 0)
    best = trained(base).logits[:, -1, : 2 * N].topk(2).values
    scale = max(1.0, 8.0 / float((best[:, 0] - best[:, 1]).mean()))  # as in ours, so that the losses are alike
    optimizer = torch.optim.Adam(intervention.parameters(), lr=1e-2)
    for _ in range(30):
        for part in torch.randperm(len(base)).split(32):
            optimizer.zero_grad()
            cross_entropy(scale * exchanged(wrapped, base[part], source[part]), targets[part]).backward()
            optimizer.step()
    bridge = build_bridge_from_module(copy.deepcopy(trained), "GPT2LMHeadModel", hf_config=trained.config).eval()
    found = align_variables(
        bridge, CAUSAL, "first", ids, pos=POS, layers=[0], component="resid_pre", fit=AlignmentFit(rank), progress=False
    )
    base, source, targets = draw_pairs(shuffled[len(ids) // 2 :], 512, 1)
    with torch.no_grad():
        theirs = (exchanged(wrapped, base, source).argmax(-1) == targets).float().mean()
        intervention.rotate_layer.weight = found.bases[0]
        ours_in_theirs = (exchanged(wrapped, base, source).argmax(-1) == targets).float().mean()
    assert abs(found.accuracy.mean() - theirs) < 0.1
    assert abs(found.accuracy.mean() - ours_in_theirs) < 0.1
