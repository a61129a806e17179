"""Patching by clicking: a notebook widget for a `PatchingSession`."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
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
TRAITS = ("component", "head", "state", "background")  # of which the drawing is made
_STILL = """(() => {
  const place = document.currentScript.previousElementSibling;
  const traits = TRAITS;
  const nothing = () => {};
  const model = { get: (name) => traits[name], on: nothing, off: nothing, still: true };
  const source = new Blob([SOURCE], { type: "text/javascript" });
  import(URL.createObjectURL(source)).then((widget) => {
    widget.default.render({ model, el: place });
    place.removeAttribute("data-waiting");
  });
})();"""


class PatchingExplorer(anywidget.AnyWidget):
    """A grid of layers and positions; a click patches in the clean run's activation there, or removes the patch.

    Dragging does so for a range. Scores and patterns are patched one query position at a time, its whole row. The
    effect of each patch alone colours its cell; it is computed piece by piece, between other requests. A second set of
    patches, B, can be compared with the session's own, A.

    Args:
        session: the patching session that is shown and changed. After changing it in Python call `refresh`.

    Attributes:
        component: name of the activation that clicks patch, such as "resid_post".
        head: number of the head that clicks patch; None for all heads, and for components without heads.
        preview: compute the effects of single patches.
        sessions: the patching session of each set of patches, "A" and "B" (only while they are compared).
        side: the set that is changed.
        state: the displayed state, as plain data.
        background: what is computed after the answer to a click: effects of single patches, and patches without effect.

    Example:
        >>> PatchingExplorer(PatchingSession(model, prompts, corrupt(prompts, "labels")))
    """

    _esm, _css = SCRIPT, STYLE
    component = traitlets.Unicode().tag(sync=True)
    head = traitlets.Int(None, allow_none=True).tag(sync=True)
    preview = traitlets.Bool(True).tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    background = traitlets.Dict().tag(sync=True)

    @checked
    def __init__(self, session: PatchingSession):
        self.side, self.sessions = "A", {"A": session}
        self._unchecked = list(session.interventions)  # patches whose effect among the others is not known yet
        self._reasons: dict[Site, str] = {}
        self._effects: dict[tuple[Any, ...], list[Any]] = {}  # cells, remaining pieces or None, and error of each sweep
        components = list(session.components)
        super().__init__(component="resid_post" if "resid_post" in components else components[0])
        self.observe(lambda _: self._show_background(), ["component", "head", "preview"])
        self.on_msg(self._answer)
        self.state = self._displayed()
        self._show_background()

    @property
    def session(self) -> PatchingSession:
        """The session of the set of patches that is changed."""
        return self.sessions[self.side]

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
        """Show the session's current state, and compute the effects of single patches again."""
        self._effects.clear()
        self._act(lambda: None)

    def _answer(self, _: Any, message: dict[str, Any], buffers: Any) -> None:
        session, kind = self.session, message["kind"]
        actions: dict[str, Callable[[], None]] = {
            "toggle": lambda: session.toggle(*(_site(message, *cell) for cell in message["cells"])),
            "remove": lambda: self._remove(message["names"]),
            "clear": session.clear,
            "undo": session.undo,
            "redo": session.redo,
            "clean": lambda: self._choose(clean_prompt=message["prompt"]),
            "corrupted": lambda: self._choose(corrupted_prompt=message["prompt"]),
            "compare": self._compare,
            "side": lambda: setattr(self, "side", message["side"]),
        }
        if kind == "more":
            self._compute_more()
            self.send({"kind": "more"})
        else:
            self._act(actions[kind])

    def _act(self, action: Callable[[], None]) -> None:
        try:
            action()
            state = self._displayed()
        except Exception as error:  # a notebook hides what a message handler raises
            state = {**self.state, "error": f"{type(error).__name__}: {error}"}
        with self.hold_sync():
            self.state, self._unchecked = state, list(self.session.interventions)
            self._show_background()

    def _remove(self, names: Sequence[str]) -> None:
        # by name: a number would mean another patch after an earlier click that the browser does not show yet
        if sites := [site for site in self.session.interventions if str(site) in names]:
            self.session.toggle(*sites)

    def _choose(self, **prompt: int) -> None:
        for session, (name, number) in itertools.product(self.sessions.values(), prompt.items()):
            setattr(session, name, number)

    def _compare(self) -> None:
        self.sessions = {"A": self.sessions["A"]} | ({} if "B" in self.sessions else {"B": self.session.copy()})
        self.side = [*self.sessions][-1]

    # ---- what is computed after the answer to a click: the browser requests one piece at a time ----

    @property
    def _sweep(self) -> tuple[Any, ...]:
        return self.component, self.head, self.session.clean_prompt, self.session.corrupted_prompt

    def _compute_more(self) -> None:
        pieces = self.session.single_effects(self.component, self.head)  # nothing is computed yet
        sweep = self._effects.setdefault(self._sweep, [[], pieces, ""])
        try:
            if self._unchecked:
                site = self._unchecked.pop(0)
                self._reasons[site] = self.session.why_no_effect(site)
            elif self.preview and sweep[1] is not None:
                sweep[0] += [(layer, pos, self._plain(effect)) for layer, pos, effect in next(sweep[1])]
        except StopIteration:
            sweep[1] = None
        except Exception as error:
            sweep[1:] = None, str(error)
        self._show_background()

    def _show_background(self) -> None:
        cells, pieces, error = self._effects.get(self._sweep, ([], "all", ""))
        self.background = {
            "effects": [*cells],
            "reasons": {str(site): self._reasons.get(site, "") for site in self.session.interventions},
            "left": bool(self._unchecked) or (self.preview and pieces is not None),
            "error": error,
        }

    def _displayed(self) -> dict[str, Any]:
        session = self.session
        return {
            "n_layers": session.n_layers,
            "labels": session.labels,
            "components": [{"name": name, "heads": heads} for name, heads in session.components.items()],
            "prompts": {
                "clean": [session.clean_prompt, len(session.clean)],
                "corrupted": [session.corrupted_prompt, len(session.corrupted)],
            },
            "side": self.side,
            "sides": {
                side: [{"words": str(site), **asdict(site)} for site in each.interventions]
                for side, each in self.sessions.items()
            },
            "can_undo": session.can_undo,
            "can_redo": session.can_redo,
            "metric_name": session.metric_name,
            "target": self._plain(session.target),
            "results": {side: self._numbers(each.result()) for side, each in self.sessions.items()},
            "code": session.code(),
            "error": "",
        }

    def _numbers(self, result: SessionResult) -> dict[str, Any]:
        shares = {"recovered": result.recovered, "prediction_recovered": result.prediction_recovered}
        return {name: self._plain(value) for name, value in (vars(result) | shares).items()}

    def _plain(self, value: Any) -> Any:
        """Return a number, numbers of a prediction, or of logits the three best tokens as text; None if not finite."""
        if not isinstance(value, Tensor):
            return value if value is not None and abs(value) < float("inf") else None
        if self.session.target is not None:
            return [self._plain(each) for each in value.tolist()]
        ids, tie = largest(value, 3)
        names = self.session.token_names([int(i) for i in ids])
        best = [f"{name} ({value[i].item():.3g})" for i, name in zip(ids, names, strict=True)]
        return ", ".join([*best, *([tie] if tie else [])])


def _site(chosen: dict[str, Any], layer: int, pos: int) -> Site:
    component = chosen["component"]
    where = {"query": pos} if axes_of(component) == BY_KEY else {"pos": pos}
    return Site(component, layer, head=chosen["head"], **where)
