"""Analyses and training on a second device: on a pretended one everywhere, on a GPU where there is one (-m gpu)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mechicl import algorithms, analysis
from mechicl.analysis.finetuning import FineTuning
from mechicl.analysis.finetuning.prompt_contexts import prompt_shots
from mechicl.learners import AlgorithmLearner
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.prompts import Prompts
from mechicl.statistics import Result
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig, train
from tests.pretend_device import Pretended, pretend_device

TASK = LinearRegression(x_dim=3, n_context=6)
GPT = TransformerConfig(
    x_dim=3, n_context=6, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=16, d_mlp=16, attention="softmax",
    normalization_type="LN", initializer_range=0.2,
)  # fmt: skip
LSA = TransformerConfig(x_dim=3, n_context=6, n_layers=2, initializer_range=0.2)
DESCENT = AlgorithmLearner(algorithms.gradient_descent, {"steps": 2, "step_size": 0.1})
ANALYSES: dict[str, Callable[[HookedTransformer, Prompts], Any]] = {
    "predict": lambda model, prompts: model.predict(prompts),
    "predict_prefixes": lambda model, prompts: model.predict_prefixes(prompts),
    "align": lambda model, prompts: analysis.align(model, DESCENT, prompts),
    "sensitivities": lambda model, prompts: analysis.behaviour.sensitivities(model, prompts),
    "induced_weights": lambda model, prompts: analysis.behaviour.induced_weights(model, prompts),
    "readouts": lambda model, prompts: analysis.fit_readouts(model, prompts, progress=False).errors(prompts),
    "head_ablation": lambda model, prompts: analysis.ablate(model, prompts, "z", axes=("layer", "head")),
    "patch": lambda model, prompts: analysis.patch(model, prompts, prompts[torch.arange(len(prompts)).flip(0)]),
    "attribute": lambda model, prompts: analysis.attribute(model, prompts, prompts[torch.arange(len(prompts)).flip(0)]),
    "finetuning": lambda model, prompts: analysis.compare_with_finetuning(
        model, prompt_shots(model, prompts[:1]), FineTuning(0.01, epochs=2), progress=False
    ),
    "newton": lambda _, prompts: algorithms.newton(prompts, steps=[1, 2]).predictions,
    "ridge": lambda _, prompts: algorithms.ridge(prompts, penalty=0.1).predictions,
}


def values_of(result: Any) -> dict[str, torch.Tensor]:
    """All tensors of a result, on the CPU."""
    tensors = result.samples() if isinstance(result, Result) else {"value": result}
    return {name: value.detach().cpu() for name, value in tensors.items()}


def same_on(device: torch.device, name: str, prompts_there: bool, tolerance: float) -> None:
    analyse = ANALYSES[name]
    for config in (GPT, LSA):
        model = HookedTransformer(config, seed=3).double().eval()
        prompts = TASK.sample(5, seed=0, dtype=torch.float64)
        try:
            expected = values_of(analyse(model, prompts))
        except ValueError:  # not for this kind of model, on any device
            continue
        model = model.to(device)
        measured = values_of(analyse(model, prompts.to(device) if prompts_there else prompts))
        assert set(measured) == set(expected)
        for key, value in expected.items():
            assert not isinstance(measured[key], Pretended)
            assert_close(measured[key], value, atol=tolerance, rtol=tolerance, equal_nan=True, msg=f"{name}: {key}")


@pytest.fixture
def pretended() -> Iterator[torch.device]:
    with pretend_device() as device:
        yield device


@pytest.mark.parametrize(("name", "prompts_there"), [
    *((name, True) for name in ANALYSES),
    *((name, False) for name in ("predict", "predict_prefixes", "align", "patch")),
])  # fmt: skip
def test_analyses_on_a_pretended_device(pretended, name, prompts_there):
    same_on(pretended, name, prompts_there, 1e-9)


def test_the_pretended_device_refuses_what_a_gpu_refuses(pretended):
    there, here = torch.ones(3, device=pretended), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(there, here)
    with pytest.raises(RuntimeError, match="same device"):
        here[there.long()]
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert (there + 1).sum().item() == 6
    assert there[torch.tensor([0, 1])].device == pretended
    assert (there * torch.tensor(2.0)).cpu().tolist() == [2.0, 2.0, 2.0]
    here.copy_(there)


# ---- on a GPU ----
gpu = pytest.mark.gpu
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@gpu
@no_gpu
@pytest.mark.parametrize("prompts_there", [True, False])
@pytest.mark.parametrize("name", list(ANALYSES))
def test_analyses_on_a_gpu(name, prompts_there):
    same_on(torch.device("cuda"), name, prompts_there, 1e-6)


CONFIG = TrainingConfig(task=TASK, model=GPT, steps=6, batch_size=8, eval_every=3, eval_prompts=16, save_every=3)


@gpu
@no_gpu
@pytest.mark.parametrize("fields", [
    {}, {"tf32": True}, {"mixed_precision": "bf16"}, {"fused_attention": True}, {"compile": True},
    {"compile": True, "seeds": (0, 1)},
    # in float32, SOAP amplifies one rounding of the weights to whole steps
    {"compile": True, "optimizer": "soap", "model": GPT.replace(dtype="float64")},
], ids=lambda fields: " ".join(fields) or "plain")  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_training_on_a_gpu_goes_on_where_it_was_stopped(tmp_path, fields):
    config = CONFIG.replace(**fields)
    whole = train(config, tmp_path / "whole", progress=False)

    def stop(step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", progress=False, on_save=stop)
    resumed = train(config, tmp_path / "stopped", progress=False)
    tolerance = 1e-2 if "mixed_precision" in fields or "tf32" in fields else 1e-4
    for (name, a), b in zip(whole.models[0].named_parameters(), resumed.models[0].parameters(), strict=True):
        if "optimizer" in fields and name.endswith("b_K"):
            continue  # softmax ignores it: its gradient is rounding, and SOAP's update has the sign of that
        assert_close(a, b, atol=tolerance, rtol=tolerance)
    assert resumed.record["hardware"] != "cuda"


@gpu
@no_gpu
def test_a_run_from_another_kind_of_device_is_refused(tmp_path):
    train(CONFIG.replace(steps=3, cpu=True), tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"another (kind of device|config)"):
        train(CONFIG.replace(steps=3), tmp_path, progress=False)
