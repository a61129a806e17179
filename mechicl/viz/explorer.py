"""Patching by clicking: a notebook widget for a `PatchingSession`."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mechicl.analysis.interventions.session import PatchingSession, SessionResult
from mechicl.base.arguments import checked
from mechicl.models.opening.sites import BY_KEY, Site, axes_of
from mechicl.statistics.results import largest
from mechicl.viz.export import Html

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise ImportError("viz.PatchingExplorer needs anywidget: pip install 'mechicl[widgets]'") from error

HERE = Path(__file__).parent
SCRIPT, STYLE = HERE / "explorer.js", HERE / "explorer.css"
TRAITS = ("component", "head", "state")  # of which the drawing is made
_STILL = """(() => {
  const place = document.currentScript.previousElementSibling;
  const traits = TRAITS;
  const nothing = () => {};
  const model = { get: (name) => traits[name], on: nothing, off: nothing };
  const source = new Blob([SOURCE], { type: "text/javascript" });
  import(URL.createObjectURL(source)).then((widget) => {
    widget.default.render({ model, el: place });
    place.removeAttribute("data-waiting");
  });
})();"""


class PatchingExplorer(anywidget.AnyWidget):
    """A grid of layers and positions; a click patches in the clean run's activation there, or removes the patch.

    Scores and patterns are patched one query position at a time, its whole row.

    Args:
        session: the patching session that is shown and changed. After changing it in Python call `refresh`.
        labels: names of the positions; by default the session's.
        token_names: for models of tokens, a name for each token id; by default the ids.

    Attributes:
        component: name of the activation that clicks patch, such as "resid_post".
        head: number of the head that clicks patch; None for all heads, and for components without heads.
        state: the displayed state, as plain data.
        last_seconds: seconds from the last click's arrival to the new predictions.

    Example:
        >>> PatchingExplorer(PatchingSession(model, prompts, corrupt(prompts, "labels")))
    """

    _esm, _css = SCRIPT, STYLE
    component = traitlets.Unicode().tag(sync=True)
    head = traitlets.Int(None, allow_none=True).tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    last_seconds = traitlets.Float(0.0).tag(sync=True)

    @checked
    def __init__(
        self,
        session: PatchingSession,
        labels: Sequence[str] | None = None,
        token_names: Sequence[str] | None = None,
    ):
        if labels is not None and len(labels) != session.n_pos:
            raise ValueError(f"labels must have one entry per position, {session.n_pos}, got {len(labels)}")
        self.session, self._labels, self._token_names = session, labels, token_names
        components = list(session.components)
        started = time.perf_counter()
        state = self._displayed()
        first = "resid_post" if "resid_post" in components else components[0]
        super().__init__(component=first, state=state, last_seconds=time.perf_counter() - started)
        self.on_msg(self._answer)

    @traitlets.validate("component")
    def _known(self, proposal: Any) -> str:
        if proposal["value"] not in self.session.components:
            raise traitlets.TraitError(
                f"component must be one of {tuple(self.session.components)}, got {proposal['value']!r}"
            )
        return proposal["value"]

    def picture(self) -> Html:
        """Return the widget's current state as a picture that does not react to clicks; `viz.save` writes it to a file.

        Example:
            >>> viz.save(explorer.picture(), "patches.html")
        """
        traits, script = {name: getattr(self, name) for name in TRAITS}, _STILL
        for name, part in {"TRAITS": traits, "SOURCE": SCRIPT.read_text(encoding="utf-8")}.items():
            script = script.replace(name, json.dumps(part).replace("<", "\\u003c"))  # no "</script>" in a label
        return Html(
            f"<div><style>{STYLE.read_text(encoding='utf-8')}</style>"
            f'<div class="mechicl-explorer-still" data-waiting inert></div><script>{script}</script></div>'
        )

    def refresh(self) -> None:
        """Show the session's current state."""
        self._act(lambda: None)

    def _answer(self, _: Any, message: dict[str, Any], buffers: Any) -> None:
        session = self.session
        actions: dict[str, Callable[[], None]] = {
            "toggle": lambda: session.toggle(self._site(message["layer"], message["pos"])),
            "remove": lambda: session.toggle(session.interventions[message["index"]]),
            "clear": session.clear,
            "undo": session.undo,
            "redo": session.redo,
            "clean": lambda: setattr(session, "clean_prompt", message["prompt"]),
            "corrupted": lambda: setattr(session, "corrupted_prompt", message["prompt"]),
        }
        self._act(actions[message["kind"]])

    def _act(self, action: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            action()
            state = self._displayed()
        except Exception as error:  # a notebook hides what a message handler raises
            state = {**self.state, "error": f"{type(error).__name__}: {error}"}
        with self.hold_sync():
            self.last_seconds = time.perf_counter() - started
            self.state = state

    def _site(self, layer: int, pos: int) -> Site:
        where = {"query": pos} if axes_of(self.component) == BY_KEY else {"pos": pos}
        return Site(self.component, layer, head=self.head, **where)

    def _displayed(self) -> dict[str, Any]:
        session, result = self.session, self.session.result()
        return {
            "n_layers": session.n_layers,
            "labels": list(session.labels if self._labels is None else self._labels),
            "components": [
                {"name": name, "heads": heads, "along": "query" if axes_of(name) == BY_KEY else "pos"}
                for name, heads in session.components.items()
            ],
            "prompts": {
                "clean": [session.clean_prompt, len(session.clean)],
                "corrupted": [session.corrupted_prompt, len(session.corrupted)],
            },
            "interventions": [_described(site) for site in session.interventions],
            "can_undo": session.can_undo,
            "can_redo": session.can_redo,
            "metric_name": session.metric_name,
            "runs": [
                {"name": name, "prediction": self._as_text(prediction), "metric": f"{metric:.4g}"}
                for name, (prediction, metric) in _runs(result).items()
            ],
            "recovered": {
                "prediction": _finite(result.prediction_recovered) if session.target is not None else None,
                "metric": _finite(result.recovered),
            },
            "scale": self._scale(result),
            "code": session.code(),
            "error": "",
        }

    def _as_text(self, prediction: Tensor) -> str:
        if self.session.target is not None:
            return ", ".join(f"{value:.4g}" for value in prediction.tolist())
        (ids, tie), names = largest(prediction, 3), self._token_names
        best = [f"{i if names is None else names[i]} ({prediction[i].item():.3g})" for i in ids]
        return ", ".join([*best, *([tie] if tie else [])])

    def _scale(self, result: SessionResult) -> dict[str, Any]:
        """Return the points of a number line: the predictions if they are single numbers, otherwise the metric."""
        target, runs = self.session.target, _runs(result)
        title, points = self.session.metric_name, {name: metric for name, (_, metric) in runs.items()}
        if target is not None and len(target) == 1:
            title = "prediction for the query"
            points = {name: prediction.item() for name, (prediction, _) in runs.items()} | {"target": target.item()}
        return {"title": title, "points": {name: _finite(value) for name, value in points.items()}}


def _runs(result: SessionResult) -> dict[str, tuple[Tensor, float]]:
    return {
        "clean": (result.clean_prediction, result.clean_metric),
        "corrupted": (result.corrupted_prediction, result.corrupted_metric),
        "patched": (result.prediction, result.metric),
    }


def _described(site: Site) -> dict[str, Any]:
    return {
        "words": str(site), "component": site.component, "layer": site.layer, "head": site.head,
        "pos": site.query if axes_of(site.component) == BY_KEY else site.pos, "whole": site.key is None,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
