"""Clamped trainings against a plain loop with hooks of torch, saves, ensembles, sweeps, and the errors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mechicl.algorithms.stepwise import Hypothesis, ResidualDescent
from mechicl.checkpoints import Snapshots, save, stack_models
from mechicl.constructions import gradient_descent
from mechicl.models import HookedTransformer, build
from mechicl.training import Clamp, Curriculum, Ramp, TrainingConfig, train, train_interchange
from mechicl.training.metrics import Metrics
from tests.faults.saves import differences
from tests.training.runs import (
    EXACT_READER,
    INTERLEAVED,
    LSTM,
    READER,
    TASK,
    WORDS,
    assert_close,
    assert_same_bits,
    interrupted,
    plain_loss,
    plain_training,
    reading,
    small,
    weights,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    """A checkpoint of two models with snapshots, whose weights are random and different."""
    models = [build(EXACT_READER, seed) for seed in (3, 8)]
    earlier = stack_models([build(EXACT_READER, seed) for seed in (103, 108)])
    snapshots = Snapshots((5, 10), {n: torch.stack([w, stack_models(models)[n]]) for n, w in earlier.items()})
    curve = {"eval_step": [10], "eval_loss": [[2.0, 1.0]], "step": [10], "loss": [[2.0, 1.0]]}
    folder = tmp_path_factory.mktemp("source") / "source"
    return str(save(folder, models, {"seeds": [3, 8], "curve": curve}, snapshots))


# ---- the loop against plain PyTorch with hand-written hooks ----
def activation_of(model: HookedTransformer, part: torch.nn.Module, ids: Tensor) -> Tensor:
    """The output of a part in a plain forward pass."""
    kept: list[Tensor] = []
    handle = part.register_forward_hook(lambda module, inputs, output: kept.append(output.detach()))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return kept[0]


def pattern(model: Any) -> torch.nn.Module:
    return model.blocks[0].attn.hook_pattern


def values(model: Any) -> torch.nn.Module:
    return model.blocks[1].attn.hook_z


def attn_out(model: Any) -> torch.nn.Module:
    return model.blocks[0].hook_attn_out


def set_value(z: Tensor, ids: Tensor, earlier: Any) -> Tensor:
    new = z.clone()
    new[:, 3:6, 1] = 0.5
    return new


def set_mean(z: Tensor, ids: Tensor, earlier: Any) -> Tensor:
    return torch.stack([z[:, :, 0], (z.detach()[:, :, 1].sum(dim=0) / len(z)).expand(len(z), -1, -1)], dim=2)


def copy_head(seed: int, head: int) -> Callable[..., Tensor]:
    model = build(EXACT_READER, seed)

    def copied(attention: Tensor, ids: Tensor, earlier: Any) -> Tensor:
        return torch.stack([activation_of(model, pattern(model), ids)[:, head], attention[:, 1]], dim=1)

    return copied


def freeze(attention: Tensor, ids: Tensor, earlier: Any) -> Tensor:
    return activation_of(earlier, pattern(earlier), ids)


def cut(written: Tensor, ids: Tensor, earlier: Any) -> Tensor:
    return torch.cat([written[:, :2], written[:, 2:].detach()], dim=1)


CASES: dict[str, tuple[dict[str, Any], Any, range, Any]] = {
    "a value": ({"component": "z", "layer": 1, "head": 1, "pos": range(3, 6), "value": 0.5}, values, range(100),
                set_value),
    "the mean": ({"component": "z", "layer": 1, "head": 1, "method": "mean"}, values, range(100), set_mean),
    "another model": ({"component": "pattern", "layer": 0, "head": 0, "method": "copy", "source_seed": 3}, pattern,
                      range(100), copy_head(3, 0)),
    "another head": ({"component": "pattern", "layer": 0, "head": (0,), "method": "copy", "source_head": 1}, pattern,
                     range(100), copy_head(8, 1)),
    "a snapshot": ({"component": "pattern", "layer": 0, "head": 0, "method": "copy", "snapshot": 5}, pattern,
                   range(100), copy_head(108, 0)),
    "the initial weights": ({"component": "pattern", "layer": 0, "method": "freeze", "steps": (0, 20)}, pattern,
                            range(20), freeze),
    "earlier weights": ({"component": "pattern", "layer": 0, "method": "freeze", "snapshot": 20, "steps": (30, 90)},
                        pattern, range(30, 90), freeze),
    "no gradient": ({"component": "attn_out", "layer": 0, "pos": range(2, 12), "method": "detach"}, attn_out,
                    range(100), cut),
    "a hook by its name": ({"component": "blocks.0.hook_attn_out", "method": "detach", "steps": (0, 75)}, attn_out,
                           range(75), lambda written, ids, earlier: written.detach()),
}  # fmt: skip


QUICK = ("the mean", "another head", "earlier weights", "no gradient")  # one of each kind; the others are slow


@pytest.mark.parametrize(
    "case", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_a_clamped_training_equals_a_plain_loop_with_hooks(tmp_path, source, case):
    fields, part, span, edit = CASES[case]
    if fields.get("method") == "copy":
        fields = {**fields, "source": source}
    config = reading(model=EXACT_READER, steps=100, gradient_clip=None, seeds=(5,), save_every=100, eval_every=100,
                     interventions=(Clamp(**fields),))  # fmt: skip
    result = train(config, tmp_path / "clamped", progress=False)
    expected, losses = plain_training(config, part, span, edit)
    assert_close(weights(result), expected, atol=1e-9)
    assert [line["loss"][0] for line in Metrics.read(tmp_path / "clamped")[1:]] == pytest.approx(losses, rel=1e-9)
    free, _ = plain_training(config, part, range(0), edit)
    assert max((expected[name] - free[name]).abs().max().item() for name in free) > 1e-3  # the clamp has an effect


# ---- saves, ensembles, sweeps ----
FROZEN = Clamp("pattern", 0, head=1, method="freeze", snapshot=3, steps=(4, 9))


def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path, source):
    """Interrupted before, at and after the step that weights are frozen at, and after the clamps."""
    clamps = (FROZEN, Clamp("z", 1, head=0, method="copy", source=source, source_seed="own", steps=(2, 12)))
    config = reading(model=EXACT_READER, seeds=(3, 8), interventions=clamps, save_every=2, n_snapshots=3)
    whole = train(config, tmp_path / "whole", progress=False)
    for at in (2, 4, 6, 10):
        folder = tmp_path / f"until {at}"
        interrupted(config, folder, at)
        resumed = train(config, folder, progress=False)
        for i in range(2):
            assert_same_bits(weights(resumed, i), weights(whole, i))
        assert not differences(tmp_path / "whole", folder)
        assert resumed.record["curve"] == whole.record["curve"]
    assert whole.snapshot_steps == config.snapshot_steps
    assert 3 in whole.snapshot_steps  # at which weights are frozen


def test_a_source_that_changed_since_the_save_is_refused(tmp_path, source):
    copied = tmp_path / "source"
    save(copied, [build(READER, 1)])
    config = reading(interventions=(Clamp("z", 0, method="copy", source=str(copied)),))
    interrupted(config, tmp_path / "run", 5)
    save(copied, [build(READER, 2)])
    with pytest.raises(ValueError, match=r"the source of interventions\[0\] had other weights: use another folder"):
        train(config, tmp_path / "run", progress=False)


def test_a_run_with_clamps_does_not_continue_one_without(tmp_path):
    config = reading(interventions=(FROZEN,))
    train(config, tmp_path / "with", progress=False)
    train(reading(), tmp_path / "without", progress=False)
    for folder, other in (("with", reading()), ("without", config)):
        with pytest.raises(ValueError, match=r"another config \(interventions: "):
            train(other, tmp_path / folder, progress=False)


@pytest.mark.parametrize(("model", "clamp"), [
    (EXACT_READER, Clamp("pattern", 0, method="freeze")),
    (INTERLEAVED.replace(dtype="float64", n_layers=2), Clamp("z", 1, head=0, pos=(2, 3), method="mean")),
    (LSTM, Clamp("resid_post", 0, method="freeze", steps=(3, 9))),
    (LSTM, Clamp("hook_embed", method="detach")),
])  # fmt: skip
def test_each_seed_of_a_clamped_ensemble_equals_its_run_alone(tmp_path, model, clamp):
    task = WORDS if model is EXACT_READER else TASK
    config = small(task=task, model=model, seeds=(0, 5), interventions=(clamp,), steps=20)
    together = train(config, tmp_path / "together", progress=False)
    free = train(config.replace(interventions=()), tmp_path / "free", progress=False)
    for i, seed in enumerate(config.seeds):
        alone = train(config.replace(seeds=(seed,)), tmp_path / f"{seed}", progress=False)
        assert_close(weights(together, i), weights(alone), atol=1e-10)
        assert together.record["curve"]["eval_loss"][-1][i] == pytest.approx(alone.record["curve"]["eval_loss"][-1][0])
        assert any((weights(free, i)[n] - w).abs().max() > 1e-4 for n, w in weights(alone).items())


def test_each_seed_can_be_given_the_sources_model_of_its_own_seed(tmp_path, source):
    own = Clamp("pattern", 0, method="copy", source=source, source_seed="own")
    config = reading(model=EXACT_READER, seeds=(3, 8), interventions=(own,))
    together = train(config, tmp_path / "together", progress=False)
    for i, seed in enumerate(config.seeds):
        given = config.replace(seeds=(seed,), interventions=(replace(own, source_seed=seed),))
        assert_close(weights(together, i), weights(train(given, tmp_path / f"{seed}", progress=False)), atol=1e-10)


def test_the_record_contains_the_clamps_and_held_out_losses_are_those_with_them(tmp_path):
    clamp = Clamp("z", 1, head=(0, 1), steps=(3, 8))
    config = reading(model=EXACT_READER, interventions=(clamp,), eval_every=1)
    result = train(config, tmp_path, progress=False)
    assert TrainingConfig.from_dict(result.record["training"]) == config
    assert "interventions" not in reading().to_dict()  # records without clamps do not change
    model, sequences = result.models[0], WORDS.sample(config.eval_prompts, seed=config.eval_seed)
    with torch.no_grad():
        free = plain_loss(model, sequences).item()
        with values(model).register_forward_hook(lambda *parts: 0 * parts[-1]):
            clamped = plain_loss(model, sequences).item()
    assert result.record["curve"]["eval_loss"][-1] == pytest.approx([free], rel=1e-9)
    whole = train(config.replace(interventions=(replace(clamp, steps=None),)), tmp_path / "whole", progress=False)
    assert whole.record["curve"]["eval_loss"][0][0] != result.record["curve"]["eval_loss"][0][0]
    assert clamped != pytest.approx(free, rel=1e-3)


def test_positions_that_a_shorter_prompt_lacks_are_left_out(tmp_path):
    curriculum = Curriculum(points=Ramp(2, 5, 1, 3))
    clamp = Clamp("z", 0, pos=(0, 8), value=1.0)
    train(small(model=INTERLEAVED, curriculum=curriculum, interventions=(clamp,)), tmp_path, progress=False)


# ---- errors ----
@pytest.mark.parametrize(("fields", "words"), [
    ({"component": "zz", "layer": 0}, "needs a layer, and the full name of a hook has none"),
    ({"component": "z"}, "needs a layer"),
    ({"component": "pattern", "layer": 0, "pos": 3}, r"'pattern' has the axes .* not \['pos'\]"),
    ({"component": "z", "layer": 0, "head": ()}, "head has no place"),
    ({"component": "z", "layer": 0, "source": "x"}, "method='value' has no source"),
    ({"component": "z", "layer": 0, "source_head": 0}, "method='value' has no source_head"),
    ({"component": "z", "layer": 0, "method": "mean", "value": 1.0}, "method='mean' has no value"),
    ({"component": "z", "layer": 0, "method": "copy"}, "needs a source"),
    ({"component": "resid_pre", "layer": 0, "method": "copy", "source": "x", "source_head": 1}, "has no heads"),
    ({"component": "attn_scores", "layer": 0}, "would unmask hidden keys"),
    ({"component": "z", "layer": 0, "steps": (5, 5)}, "steps must be two numbers, the lower first"),
    ({"component": "z", "layer": 0, "method": "freeze", "snapshot": 6, "steps": (5, 8)}, "after the first clamped"),
])  # fmt: skip
def test_clamps_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Clamp(**fields)


def test_clamps_that_do_not_fit_the_run_are_refused(tmp_path, source):
    for clamp, changes, words in [
        (Clamp("z", 0, steps=(0, 13)), {}, r"steps=\(0, 13\) is outside the run of 12 steps"),
        (Clamp("z", 0), {"compile": True}, "interventions need hooks"),
        (Clamp("z", 0), {"fused_attention": True}, "interventions need hooks"),
    ]:
        with pytest.raises(ValueError, match=words):
            reading(interventions=(clamp,), **changes)
    other = str(save(tmp_path / "other", [build(READER.replace(n_heads=3, d_head=4), 0)]))
    regression = str(save(tmp_path / "regression", [gradient_descent(x_dim=3, n_context=4, step_size=0.1)]))
    for clamp, words in [
        (Clamp("z", 2), r"interventions\[0\]: the model has no hook 'blocks.2.attn.hook_z'"),
        (Clamp("mlp_out", 0), r"interventions\[0\]: the model has no hook 'blocks.0.hook_mlp_out'"),
        (Clamp("hook_nothing"), "the model has no hook 'hook_nothing'"),
        (Clamp("z", 0, head=(0, 2)), r"head must be 0 to 1, got \[2\]"),
        (Clamp("pattern", 0, key=12), r"key must be 0 to 11, got \[12\]"),
        (Clamp("z", 0, method="copy", source="nowhere"), "no checkpoint 'nowhere'"),
        (Clamp("z", 0, method="copy", source=source, source_seed=4), "has no seed 4; it has"),
        (Clamp("z", 0, method="copy", source=source, source_seed="own"), "has no seed 0; it has"),
        (Clamp("z", 0, method="copy", source=source, snapshot=7), r"has snapshots of the steps \[5, 10\], not of 7"),
        (Clamp("z", 0, method="copy", source=other), r"has an activation \[12, 3, 4\] at .* the model \[12, 2, 4\]"),
        (Clamp("z", 0, method="copy", source=source, source_layer=2), "the model has no hook 'blocks.2.attn.hook_z'"),
        (Clamp("z", 0, method="copy", source=other, source_head=3), "source_head must be 0 to 2, got 3"),
        (Clamp("z", 0, method="copy", source=regression), "cannot run on the prompts of this training"),
    ]:
        with pytest.raises(ValueError, match=words):
            train(reading(interventions=(clamp,)), tmp_path / "run", progress=False)
    config = small(interventions=(Clamp("z", 0),), model=INTERLEAVED)
    with pytest.raises(ValueError, match="no curriculum and no interventions"):
        train_interchange(config, Hypothesis(ResidualDescent(1, step_size=0.1)), progress=False)
