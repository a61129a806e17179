# pyright: reportArgumentType=false, reportCallIssue=false
"""Prompts, sequences, shots and formats that are refused, and the words of each refusal."""

from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
import pytest
import torch

from mechicl.prompts import Interleaved, Paired, Prompts, TokenSequences, prompt_format
from tests.prompts.test_sequences import COUNTING, SHOTS

XS, YS = torch.zeros(3, 4, 2), torch.zeros(3, 4, 1)
PROMPTS, OTHER = Prompts(XS, YS), Prompts(XS[:, :3], YS[:, :3])
MASKED = np.ma.masked_array(np.zeros((2, 3, 4)), mask=np.zeros((2, 3, 4)))
MASKED[0, 1, 2] = np.ma.masked
LARGE = Prompts(torch.full((1, 1, 1), 1e6), torch.zeros(1, 1, 1))
ids, no = torch.zeros(2, 4).long(), torch.zeros(2, 4).bool()
CALLS = [
    (partial(Prompts, XS[0], YS[0]), r"xs \[prompt point x\]"),
    (partial(Prompts, XS, YS[..., 0]), r"ys\[\.\.\., None\]"),
    (partial(Prompts, XS, torch.zeros(3, 5, 1)), "differ in prompts or points"),
    (partial(Prompts, XS[:, :0], YS[:, :0]), "one point"),
    (partial(Prompts, XS[..., :0], YS), "one input and one target dimension"),
    (partial(Prompts, XS, YS[..., :0]), "one input and one target dimension"),
    (partial(Prompts, XS, YS.double()), "same dtype and device"),
    (partial(Prompts, XS.long(), YS), "xs must be floating point"),
    (partial(Prompts, XS, YS.bool()), "ys must be floating point"),
    (partial(Prompts, XS.long().numpy(), YS), "xs must be floating point"),
    (partial(Prompts, [[[0.0]]], [[[0.0]]]), "xs must be a torch tensor or a numpy array, got list"),
    (partial(Prompts, XS.to("meta"), YS.to("meta")), "xs is on the device 'meta'"),
    (partial(Prompts, MASKED, np.zeros((2, 3, 1))), "xs is a masked array"),
    *((partial(PROMPTS.__getitem__, index), "a slice, indices or a mask") for index in (0, "a", XS > 0)),
    (lambda: list(PROMPTS), "a slice, indices or a mask"),
    *((partial(PROMPTS.prefix, n), "n_context must be 0 to 3") for n in (-1, 4)),
    (partial(PROMPTS.split, 0), "size"),
    (partial(PROMPTS.permuted), "an order or a seed"),
    (partial(PROMPTS.permuted, [0, 1, 2], seed=0), "not both"),
    (partial(PROMPTS.permuted, torch.tensor([0.5, 1.2, 2.9])), "order must be a tensor of ints"),
    *(
        (partial(PROMPTS.permuted, order), "order")
        for order in ([0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1], torch.tensor([[0, 1, 2]]))
    ),
    (partial(PROMPTS.with_query, XS[:, 0, :1]), "xs must be"),
    (lambda: PROMPTS + OTHER, "same .*got"),
    (partial(Prompts.concatenate, []), "one or more batches"),
    (partial(PROMPTS.to, torch.int64), "floating point"),
    (partial(LARGE.to, torch.float16), "not finite"),  # 1e6 overflows half precision
    (partial(Interleaved(2, 1).encode, PROMPTS, torch.zeros(2, 1)), "paired format"),
    *(
        (partial(layout(x_dim, y_dim).encode, PROMPTS), "cannot encode prompts with x_dim=2, y_dim=1")
        for layout in (Paired, Interleaved)
        for x_dim, y_dim in ((1, 1), (3, 1), (2, 2))  # some would be broadcast
    ),
    (partial(Paired(2, 1).labels, 10**7), "n_context"),
    (partial(prompt_format, "pairs", x_dim=1, y_dim=1), "name must be 'paired' or 'interleaved', got 'pairs'"),
    (partial(TokenSequences, ids[0], no[0]), r"ids must be a tensor of ints \[prompt pos\]"),
    (partial(TokenSequences, ids, no[:, :3]), r"got \(2, 4\) and \(2, 3\)"),
    (partial(TokenSequences, ids.float(), no), r"ids must be a tensor of ints \[prompt pos\], got a tensor of float32"),
    (partial(TokenSequences, ids, ids), "predictable must be a tensor of bools"),
    (partial(TokenSequences, ids, ~no), "first token"),
    (partial(TokenSequences, ids - 1, no), "negative"),
    (partial(TokenSequences.concatenate, [COUNTING, TokenSequences(ids[:, :3], no[:, :3])]), "one length"),
    *(
        (partial(replace, SHOTS, **{name: value}), words)
        for name, value, words in (
            ("zero_shot", (), "zero_shot"),
            ("examples", (), "examples"),
            ("in_context", SHOTS.in_context[:1], "in_context must have 2 entries, got 1"),
            ("targets", torch.tensor([1]), "targets must have 2"),
            ("query_lengths", (1, 2, 3), "query_lengths must have 2"),
            ("example_targets", torch.tensor([1]), "example_targets must have 2"),
            ("example_spans", ((1, 2),), "example_spans must have 2"),
            ("query_lengths", (0, 1), "query_lengths must fit"),
            ("query_lengths", (1, 4), "query_lengths must fit"),
            ("example_spans", ((1, 0), (4, 1)), "example_spans must fit"),
            ("example_spans", ((1, 2), (4, 3)), "example_spans must fit"),
            ("example_spans", ((-1, 2), (4, 1)), "example_spans must fit"),
            ("example_spans", ((6, 2), (4, 1)), "example_spans must fit"),
            ("targets", torch.tensor([1, 9]), r"choices \[1, 2, 3\], got \[9\]"),
            ("example_targets", torch.tensor([0, 1]), r"choices \[1, 2, 3\], got \[0\]"),
        )
    ),
]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("call", "words"), CALLS)
def test_what_is_wrong_is_named(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


@pytest.mark.parametrize("bad", [float("nan"), -inf])
@pytest.mark.parametrize("name", ["xs", "ys"])
def test_a_value_that_is_not_finite_is_refused_with_its_position(bad, name):
    values = {"xs": torch.zeros(5, 4, 2), "ys": torch.zeros(5, 4, 1)}
    values[name][3, 2, 0] = bad
    values[name][4, 0, 0] = bad
    with pytest.raises(ValueError, match=rf"^{name} has a value that is not finite, first in prompt 3, point 2$"):
        Prompts(**values)
