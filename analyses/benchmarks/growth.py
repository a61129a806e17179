"""How the time of training, predicting and searching circuits grows, compared with the growth of the work.

The work is what torch's operations read and write, in bytes; by width, where large products take the time, it is the
number of their floating-point operations. All times are CPU times of one thread.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.apart import Apart
from benchmarks.our_training import GPT2, linear_config
from benchmarks.roofline import Counted, Step
from benchmarks.rows import Row, Settings, row
from mechicl.models import build
from mechicl.statistics import interval
from mechicl.training import TrainingConfig
from mechicl.viz import save
from mechicl.viz.elements import BELOW, add_line, colors_for, panel, panels, tick_log_axes

SIZES: Mapping[str, Sequence[Any]] = {
    "prompts": (512, 1024, 2048, 4096, 8192),
    "points": (20, 40, 80, 160, 320),
    "width": (16, 32, 64, 128, 256),
    "layers": (1, 2, 4, 8, 16),
    "models": (1, 2, 4, 8, 16),
    "edges": ((2, 2), (3, 2), (3, 3), (4, 3)),  # heads and layers of a program that is compiled
}
GROWING = {
    "training": ("prompts", "points", "width", "layers", "models"),
    "predicting": ("prompts", "points", "width", "layers"),
    "all outputs": ("layers",),
    "circuit search": ("edges",),
}
PROPORTIONAL = ("prompts", "points", "layers", "models")
IN_PRODUCTS = ("width",)
MARGIN = 0.1  # by which the slope of time may exceed that of the work
Work = tuple[float, Callable[[], object]]
SECONDS = 0.06  # of the calls that one time is the mean of


def config_of(by: str, size: int) -> TrainingConfig:
    """Return a training of linear attention, or by width of a GPT-2 style model, with one of its sizes changed."""
    if by == "width":
        model = GPT2.model.replace(n_layers=2, n_heads=4, d_model=size, d_mlp=4 * size)
        return GPT2.replace(model=model, seeds=(0,), batch_size=32, routes="rule")
    sizes = {"prompts": 2000 if by == "layers" else 512, "points": 10, "layers": 2, "models": 1} | {by: size}
    return linear_config(
        sizes["layers"], 1000, sizes["prompts"], n_seeds=sizes["models"], n_context=sizes["points"]
    ).replace(routes="rule")


# The makers return a size and a function that does the work.


def training(by: str, size: int) -> Work:
    """A training step: draw prompts, run both passes, and update."""
    step = Step(config_of(by, size))

    def run() -> None:
        step.passes(step.draw())
        step.update()

    return size, run


def predicting(by: str, size: int, *, all_outputs: bool = False) -> Work:
    """Predict the queries of a batch, or compute the outputs at all positions, so that no layer can skip some."""
    config = config_of(by, size)
    model = build(config.model, 0).eval()
    prompts = config.task.sample(config.batch_size, seed=0)
    tokens = model.encode(prompts)
    return size, torch.no_grad()(lambda: model(tokens) if all_outputs else model.predict(prompts))


def circuit_search(_: str, size: Sequence[int]) -> Work:
    """Search the circuit of a compiled program, whose size is its number of edges."""
    from benchmarks.circuits import N_PROMPTS, compile_by_tracr, wide_program  # needs a compiler of programs
    from mechicl.analysis.circuits import find_circuit
    from mechicl.interop import from_tracr
    from mechicl.models.opening.sites import list_edges

    model = from_tracr(compile_by_tracr(wide_program(*size)))
    ids = model.sample_ids(N_PROMPTS, seed=0)
    return len(list_edges(model)), lambda: find_circuit(model, ids, effects=False, progress=False)


MAKE: Mapping[str, Callable[[str, Any], Work]] = {
    "training": training, "predicting": predicting, "all outputs": partial(predicting, all_outputs=True),
    "circuit search": circuit_search,
}  # fmt: skip


class Costs:
    """Costs of one kind of work, measured in a separate process."""

    def __init__(self, what: str):
        torch.set_num_threads(1)
        self.what = what

    def measure(self, by: str, rounds: int) -> dict[str, list[Any]]:
        """Return sizes, the work and each round's milliseconds, `[round size]`; sizes alternate."""
        sizes, calls = zip(*(MAKE[self.what](by, size) for size in SIZES[by]), strict=True)
        work = [work_of(call, by) for call in calls]
        repeats = [math.ceil(SECONDS / max(cpu_seconds(call), 1e-6)) for call in calls]
        times = [[1e3 * cpu_seconds(*pair) for pair in zip(calls, repeats, strict=True)] for _ in range(rounds)]
        return {"sizes": list(sizes), "work": work, "milliseconds": times}


def cpu_seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """The mean CPU time of a call."""
    started = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - started) / repeats


def work_of(call: Callable[[], object], by: str) -> float:
    """Megabytes that torch's operations read and write; by width, MFLOP of products of matrices."""
    if by in IN_PRODUCTS:
        with FlopCounterMode(display=False) as flops:
            call()
        return flops.get_total_flops() / 1e6
    with Counted() as counted:
        call()
    return counted.n_bytes / 1e6


def straightness(sizes: Any, values: Any) -> float:
    """The share of the variance of values that a straight line through them explains."""
    sizes, values = np.asarray(sizes, dtype=float), np.asarray(values, dtype=float)
    slope, start = np.polyfit(sizes, values, 1)
    return 1 - float(np.var(values - start - slope * sizes) / np.var(values))


def power_law(sizes: Any, values: Any) -> tuple[float, float]:
    """Fit values by scale * sizes ** slope, by least squares on logarithmic axes; returns the slope and the scale."""
    slope, start = np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float)), 1)
    return float(slope), float(np.exp(start))


def medians(costs: Mapping[str, Any]) -> list[float]:
    return [median(times) for times in zip(*costs["milliseconds"], strict=True)]


def rows_of(what: str, by: str, costs: dict[str, Any]) -> list[Row]:
    """The slope of the time, and the straightness of what should be proportional."""
    sizes, name = costs["sizes"], f"{what} by {by}"
    work = power_law(sizes, costs["work"])[0]
    slopes = torch.tensor([power_law(sizes, times)[0] for times in costs["milliseconds"]], dtype=torch.float64)
    detail = "; ".join(
        f"{unit}: " + ", ".join(f"x{size} {value:.3g}" for size, value in zip(sizes, values, strict=True))
        for unit, values in (("ms", medians(costs)), ("MFLOP" if by in IN_PRODUCTS else "MB", costs["work"]))
    )
    found = row(f"{name}: slope on logarithmic axes", interval(slopes), f"<= {max(work, 1) + MARGIN:.2f}",
                f"of the work {work:.2f}; {detail}", over="rounds", data={"what": what, "by": by, **costs})  # fmt: skip
    if by not in PROPORTIONAL:
        return [found]
    line = straightness(sizes, medians(costs))
    return [found, row(f"{name}: variance that a straight line explains", [line], ">= 0.98")]


def measure(settings: Settings) -> list[Row]:
    rows, rounds = [], max(settings.rounds, 3)
    for what, names in GROWING.items():
        with Apart("growth:Costs", ours=True, one_core=True, what=what) as process:
            for by in names:
                rows += rows_of(what, by, process.call("measure", by, 3 if what == "circuit search" else rounds))
    return rows


def picture(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Draw the costs in the rows of results: a panel for each size, with the fitted lines and the work in grey."""
    columns = 3
    fig = panels("Time on one core by size", [f"by {by}" for by in SIZES], columns=columns, vertical_spacing=0.2)
    fig.update_xaxes(type="log", ticks="", showgrid=False)
    fig.update_yaxes(type="log", exponentformat="power", ticks="", showgrid=False)
    colors = dict(zip(GROWING, colors_for(list(GROWING)), strict=True))
    shown: set[str] = set()
    ticks: dict[str, list[float]] = {}
    for costs in filter(None, (each.get("data") for each in rows)):
        what, sizes, times = costs["what"], costs["sizes"], medians(costs)
        place = panel(list(SIZES).index(costs["by"]), columns)
        work = [times[-1] * value / costs["work"][-1] for value in costs["work"]]
        slope, scale = power_law(sizes, times)
        add_line(fig, sizes, work, "growth of the work", "#b0b0b0", width=1.5, place=place,
                 showlegend=not shown, legendrank=2000)  # fmt: skip
        add_line(fig, sizes, [scale * size**slope for size in sizes], what, colors[what], width=1.5, place=place,
                 showlegend=False)  # fmt: skip
        add_line(fig, sizes, times, what, colors[what], place=place, mode="markers",
                 marker={"color": colors[what], "size": 6}, showlegend=what not in shown)  # fmt: skip
        shown.add(what)
        ticks[costs["by"]] = sizes[:: max(len(sizes) // 2, 1)]
    fig.update_yaxes(title_text="milliseconds", col=1)
    tick_log_axes(fig).update_layout(height=520, legend=BELOW | {"y": -0.12})
    for by, values in ticks.items():
        place = panel(list(SIZES).index(by), columns)
        fig.update_xaxes(tickvals=values, ticktext=[f"{value:,}" for value in values], **place)
    return fig.update_xaxes(showline=True, linecolor="#b0b0b0").update_yaxes(showline=True, linecolor="#b0b0b0")


def save_light(fig: go.Figure, path: Path) -> None:
    """Save a picture as SVG without plotly's empty groups and unused clip paths, which are a third of a small one."""
    save(fig, path, width=7.0, font_size=9)
    svg, n_left = path.read_text(), 1
    while n_left:  # a group whose groups were all empty is empty
        svg, n_left = re.subn(r"<g[^<>]*/>|<g[^<>]*></g>", "", svg)
    used = set(re.findall(r"url\(#([\w-]+)\)", svg.replace("&quot;", "")))
    clip = r'<clipPath[^<>]*id="([\w-]+)"[^<>]*>.*?</clipPath>'
    path.write_text(re.sub(clip, lambda found: found[0] if found[1] in used else "", svg, flags=re.DOTALL))
