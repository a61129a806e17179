"""Which route a training takes, by a clock of the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mechicl.base.threads import using_threads
from mechicl.models import HookedTransformer, TransformerConfig, build
from mechicl.models.transformer import fast
from mechicl.tasks import LinearRegression
from mechicl.training import TrainingConfig, train
from mechicl.training.data import make_generators, sample_batch
from mechicl.training.ensemble import Ensemble
from mechicl.training.routes import Route, choose_route, use_route
from mechicl.training.whole_steps import mark_of_compiled
from tests.training.runs import interrupted, small

CPU = torch.device("cpu")
THREE_LAYERS = TrainingConfig(
    task=LinearRegression(x_dim=4, n_context=6), model=TransformerConfig(x_dim=4, n_context=6, n_layers=3),
    steps=20, batch_size=8, routes="measured", eval_prompts=8, save_every=10, cpu=True,
)  # fmt: skip


class Clock:
    """A clock on which each pass takes the time that a function of the current route gives."""

    def __init__(self, ensemble: Ensemble, seconds: Callable[[str | None, int], float]):
        self.ensemble, self.seconds, self.now, self.calls = ensemble, seconds, 0.0, 0

    def __call__(self) -> float:
        self.calls += 1
        if self.calls % 2 == 0:  # the end of a pass
            model = self.ensemble.template
            assert isinstance(model, HookedTransformer)
            self.now += self.seconds(model.blocks[0].attn.route, torch.get_num_threads())
        return self.now


def choose(
    config: TrainingConfig, seconds: Callable[[str | None, int], float],
    compiled: Callable[[int], float] | None = None,
) -> tuple[Route, Ensemble, Clock]:  # fmt: skip
    ensemble = Ensemble([build(config.model, seed) for _, seed in config.members])
    clock = Clock(ensemble, seconds)
    with using_threads():
        return choose_route(config, ensemble, CPU, clock, compiled), ensemble, clock


def have_cores(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    for module in ("base.threads", "training.routes"):
        monkeypatch.setattr(f"mechicl.{module}.n_cores", lambda: n)


@pytest.mark.parametrize("fastest", ["plain", "folded", "merged", "associative"])
def test_the_fastest_route_is_chosen(fastest: str):
    route, ensemble, _ = choose(THREE_LAYERS, lambda attention, threads: 0.1 if attention == fastest else 0.2)
    assert route == Route(attention=fastest, threads=1)
    use_route(ensemble, route)
    assert [block.attn.route for block in ensemble.template.blocks] == [fastest, fastest, None]  # pyright: ignore
    assert ensemble.flat.grad is None


def test_the_rule_stays_unless_another_route_is_notably_faster():
    assert choose(THREE_LAYERS, lambda attention, threads: 0.2 if attention is None else 0.195)[0] == Route()
    assert choose(THREE_LAYERS, lambda attention, threads: 1.0)[0] == Route()


def test_route_and_number_of_threads_are_chosen_together(monkeypatch: pytest.MonkeyPatch):
    have_cores(monkeypatch, 3)

    def seconds(attention: str | None, threads: int) -> float:
        return {("merged", 1): 0.2, ("folded", 3): 0.1}.get((attention or "", threads), 0.3)

    with using_threads(3):
        assert choose(THREE_LAYERS, seconds)[0] == Route(attention="folded", threads=3)


@pytest.mark.parametrize(
    "changes", [{"routes": "rule"}, {"routes": None}, {"compile": True}, {"fused_attention": True}]
)
def test_what_is_not_measured(changes: dict[str, Any]):
    route, _, clock = choose(THREE_LAYERS.replace(**changes), lambda *_: 1.0)
    assert (route, clock.calls) == (Route(compiled="compile" in changes), 0)
    longer = choose(THREE_LAYERS.replace(routes=None, steps=10_000), lambda *_: 1.0)[2]
    assert longer.calls > 0


LONG = THREE_LAYERS.replace(steps=10_000, save_every=10_000)


@pytest.mark.parametrize(("config", "compiled", "expected"), [
    (LONG, 0.005, True),
    (LONG, 0.02, False),  # it is slower
    (LONG.replace(steps=2000), 0.005, None),  # 10 s would be saved, and compiling takes 11.5
    (LONG.replace(compile=False), 0.005, None),
    (LONG.replace(target_loss=0.1), 0.005, None),  # may end soon
    (LONG.replace(target_loss=0.1, steps=20_000), 0.005, True),
    (LONG.replace(mixed_precision="bf16"), 0.005, None),
    (LONG.replace(routes="rule"), 0.005, None),
])  # fmt: skip
def test_long_runs_are_compiled_if_that_is_faster(config: TrainingConfig, compiled: float, expected: bool | None):
    asked: list[int] = []
    route = choose(config, lambda *_: 0.01, lambda threads: asked.append(threads) or compiled)[0]
    assert route.compiled == bool(expected)
    assert set(asked) == (set() if expected is None else {1})


def test_steps_that_were_compiled_before_are_compiled_for_shorter_runs(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    short = LONG.replace(steps=2000)
    assert not choose(short, lambda *_: 0.01, lambda _: 0.005)[0].compiled
    mark_of_compiled(short.replace(seeds=(3,), steps=100_000)).touch()
    assert choose(short, lambda *_: 0.01, lambda _: 0.005)[0].compiled
    assert not choose(short.replace(batch_size=4), lambda *_: 0.01, lambda _: 0.005)[0].compiled


def test_the_threads_of_compiled_steps_do_not_depend_on_those_of_the_route_that_was_timed_last(monkeypatch: Any):
    have_cores(monkeypatch, 2)
    monkeypatch.setattr("mechicl.base.threads.WORTH_A_THREAD", 1000)  # multiplications
    asked: list[int] = []
    with using_threads(2):
        choose(LONG, lambda attention, threads: 0.01 * threads, lambda threads: asked.append(threads) or 0.005)
    assert set(asked) == {2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_run_that_chose_compiled_steps_is_a_compiled_run_also_when_it_resumes(tmp_path: Path, monkeypatch: Any):
    def compiled_if_possible(routes: list[Route], timed: Callable[[Route], float]) -> tuple[Route, float]:
        for route in (*routes, *routes):
            timed(route)
        return routes[-1], 1.0

    monkeypatch.setattr("mechicl.training.routes._fastest", compiled_if_possible)
    monkeypatch.setattr("mechicl.training.routes.COMPILE_SECONDS", (0.0, 0.0))
    config = small(steps=500, eval_every=500, save_every=250)
    chosen = train(config, tmp_path / "chosen", progress=False)
    assert chosen.record["route"]["compiled"]
    assert "compile" not in chosen.record["training"]
    interrupted(config, tmp_path / "resumed", 250)
    results = [chosen, train(config, tmp_path / "resumed", progress=False)]
    results.append(train(config.replace(compile=True), tmp_path / "asked", progress=False))
    first, *others = (torch.cat([weight.flatten() for weight in each.models[0].parameters()]) for each in results)
    assert [torch.equal(first, other) for other in others] == [True, True]


def test_measuring_changes_neither_weights_nor_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # the clock does not move, so the rule's route is kept, so all bits are the same
    monkeypatch.setattr("mechicl.training.routes.choose_route.__defaults__", (lambda: 0.0, None))
    each = {
        routes: train(THREE_LAYERS.replace(routes=routes), tmp_path / routes, progress=False)
        for routes in ("rule", "measured")
    }
    rule, measured = (result.models[0].state_dict() for result in each.values())
    assert all(torch.equal(rule[name], measured[name]) for name in rule)
    assert each["measured"].record["training"]["routes"] == "measured"
    assert each["measured"].record["route"] == {"attention": None, "prompts_last": None, "compiled": False}


def test_a_resumed_run_keeps_its_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken: list[str] = []
    original = fast._associative
    monkeypatch.setattr(fast, "_associative", lambda *args: taken.append("associative") or original(*args))
    choices = iter([Route("associative", None, 1)])
    monkeypatch.setattr("mechicl.training.loop.choose_route", lambda *_, **__: next(choices))
    interrupted(THREE_LAYERS, tmp_path, 10)
    taken.clear()
    result = train(THREE_LAYERS.replace(routes="rule"), tmp_path, progress=False)  # the option may change
    assert taken
    assert result.record["route"] == {"attention": "associative", "prompts_last": None, "compiled": False}
    with pytest.raises(StopIteration):
        train(THREE_LAYERS, tmp_path / "new", progress=False)


def test_prompts_are_the_same_in_both_layouts():
    config = THREE_LAYERS.replace(model=THREE_LAYERS.model.replace(n_layers=1))
    assert config.model.prefers_prompts_last  # pyright: ignore
    last, first = (
        sample_batch(config, build(config.model, 0), make_generators(config, CPU), 0, prompts_last=prompts_last).tokens
        for prompts_last in (True, False)
    )
    assert torch.equal(last, first)
    assert (last[0].stride(0), first[0].stride(2)) == (1, 1)
