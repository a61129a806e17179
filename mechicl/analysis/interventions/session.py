"""A patching session: one clean and one corrupted prompt, and a set of patches that the user changes."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechicl.analysis.interventions.metrics import Metric, evaluate_metric, logit_difference, squared_error
from mechicl.analysis.interventions.patching import make_grid, patch
from mechicl.analysis.interventions.runs import position_of, replacing_hook
from mechicl.base.arguments import checked
from mechicl.base.threads import holds_models
from mechicl.models.opening.adapter import ModelAdapter, check_eval_mode, same_up_to_rounding
from mechicl.models.opening.sites import AXES, BY_KEY, Site, axes_of, has_axes_of
from mechicl.prompts import Prompts, TokenSequences
from mechicl.statistics import Result

_CODE = """import torch

clean_tokens = {clean}
corrupted_tokens = {corrupted}
every = slice(None)


def from_clean(name, *index):
    def replace(activation, hook):
        if not name.endswith("hook_resid_mid"):  # the stream itself, where the others are read by one part
            activation = activation.clone()
        activation[:, *index] = cache[name][:, *index]
        return activation

    return name, replace


interventions = [{interventions}]
with torch.no_grad():
    _, cache = model.run_with_cache(clean_tokens)
    outputs = model.run_with_hooks(corrupted_tokens, fwd_hooks=interventions)
prediction = {prediction}
"""


@dataclass(frozen=True, eq=False)
class SessionResult(Result):
    """The query's prediction `[y]`, or logits at the last position `[vocab]`, and a metric of it, in three runs.

    Attributes:
        prediction: prediction of the corrupted run with the patches; `corrupted_prediction` is that without them.
        metric: metric of `prediction`; `clean_metric` and `corrupted_metric` are those of the other two.
    """

    prediction: Float[Tensor, "out"]
    clean_prediction: Float[Tensor, "out"]
    corrupted_prediction: Float[Tensor, "out"]
    metric: float
    clean_metric: float
    corrupted_metric: float

    def samples(self) -> dict[str, Tensor]:
        """Return the metrics, of one prompt each."""
        names = ("metric", "clean_metric", "corrupted_metric")
        return {name: torch.tensor([getattr(self, name)], dtype=torch.float64) for name in names}

    @property
    def recovered(self) -> float:
        """Share of the difference of both runs' metrics that the patches recover (1: all); NaN where the runs agree.

        A squared error recovers faster than the prediction: half way to the target it is down by three quarters.
        """
        rounding = 16 * torch.finfo(self.clean_prediction.dtype).eps  # routes differ in the last bits
        if math.isclose(self.clean_metric, self.corrupted_metric, rel_tol=rounding):
            return math.nan
        return (self.metric - self.corrupted_metric) / (self.clean_metric - self.corrupted_metric)

    @property
    def prediction_recovered(self) -> float:
        """Share of the difference of both runs' predictions that the patches recover along it; NaN if they agree."""
        if same_up_to_rounding(self.clean_prediction, self.corrupted_prediction):
            return math.nan
        whole = self.clean_prediction - self.corrupted_prediction
        return float((self.prediction - self.corrupted_prediction) @ whole / whole.square().sum())


class PatchingSession:
    """Patch activations of one prompt interactively: patches are added and removed one at a time.

    Each patch replaces an activation of the corrupted run by the clean run's. The state is a pair of prompts and the
    `interventions`. No hook stays on the model between calls. Its weights must not change during a session: the clean
    run is cached until another clean prompt is chosen.

    Args:
        model: a mechicl model in eval mode, or any with TransformerLens' hook names (`TransformerBridge`).
        clean: prompts, or token ids `[prompt pos]`, whose activations are patched in. One is used at a time: see
            `clean_prompt`.
        corrupted: the prompts to patch them into, with the same number of positions.
        metric: a function of predictions `[prompt ...]` that returns `[prompt]`, called with one prompt at a time. By
            default the squared error to the clean prompt's target, or for tokens the logit of the clean run's top token
            minus that of the corrupted run's (always 0 where both are the same token).

    Example:
        >>> session = PatchingSession(model, prompts, corrupt(prompts, "labels"))
        >>> session.toggle(Site("z", layer=3, pos=40, head=1))
        >>> session.result().recovered
    """

    @checked
    def __init__(
        self,
        model: Any,
        clean: Prompts | TokenSequences | Int[Tensor, "prompt pos"],
        corrupted: Prompts | TokenSequences | Int[Tensor, "prompt pos"],
        *,
        metric: Metric | None = None,
    ):
        clean, corrupted = (each.read if isinstance(each, TokenSequences) else each for each in (clean, corrupted))
        if isinstance(clean, Prompts) != isinstance(corrupted, Prompts):
            raise TypeError("clean and corrupted must be of the same kind, got prompts and token ids")
        self._adapter = ModelAdapter(model)
        lengths = [
            self._adapter.encode(each if isinstance(each, Tensor) else each[:1]).shape[1] for each in (clean, corrupted)
        ]
        if lengths[0] != lengths[1]:
            raise ValueError(f"clean prompts have {lengths[0]} positions and corrupted ones {lengths[1]}")
        if not len(clean) or not len(corrupted):
            raise ValueError(f"no prompts to compare: {len(clean)} clean and {len(corrupted)} corrupted")
        self.model, self.metric = model, metric
        self.clean: Any = clean
        self.corrupted: Any = corrupted
        self.n_layers, self.n_pos = self._adapter.n_layers, lengths[0]
        self._clean_prompt = self._corrupted_prompt = 0
        self._tried: set[Site] = set()  # sites at which edits have an effect
        self._past: list[tuple[Site, ...]] = [()]
        self._future: list[tuple[Site, ...]] = []

    # ---- the prompts ----

    @property
    def clean_prompt(self) -> int:
        """Index of the clean prompt; setting it chooses the corrupted prompt of the same index too."""
        return self._clean_prompt

    @clean_prompt.setter
    def clean_prompt(self, number: int) -> None:
        self._clean_prompt = _check_number("clean", number, len(self.clean))
        self.__dict__.pop("_clean_run", None)
        if number < len(self.corrupted):
            self.corrupted_prompt = number

    @property
    def corrupted_prompt(self) -> int:
        """Index of the corrupted prompt; it can be set separately."""
        return self._corrupted_prompt

    @corrupted_prompt.setter
    def corrupted_prompt(self, number: int) -> None:
        self._corrupted_prompt = _check_number("corrupted", number, len(self.corrupted))
        self.__dict__.pop("_corrupted_prediction", None)

    @property
    def labels(self) -> list[str]:
        """A label for each position, by the prompt format; or tokens, "clean/corrupted" where they differ."""
        if isinstance(self.clean, Prompts):
            form = self.model.cfg.format  # None where the user's own encode lays prompts out
            return form.labels(self.clean.n_context) if form else [str(pos) for pos in range(self.n_pos)]
        names = (self.token_names(part[0].tolist()) for part in (self._clean_part, self._corrupted_part))
        return [a if a == b else f"{a}/{b}" for a, b in zip(*names, strict=True)]

    @checked
    def token_names(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token id by the model's tokenizer; the ids themselves if it has none."""
        tokenizer = getattr(self.model, "tokenizer", None)
        return [str(i) if tokenizer is None else tokenizer.decode([i]).replace("\n", "⏎") for i in ids]

    @property
    def target(self) -> Float[Tensor, "y"] | None:
        """The clean prompt's target; None for tokens."""
        return self._clean_part.query.ys[0] if isinstance(self.clean, Prompts) else None

    # ---- the patches ----

    @property
    def interventions(self) -> tuple[Site, ...]:
        """The patched sites, in the order in which they were added."""
        return self._past[-1]

    @property
    def components(self) -> dict[str, int | None]:
        """The model's components, with the number of heads of each; None for those without heads."""
        heads = {}
        for component in AXES:
            names = (Site(component, layer).hook_name for layer in range(self.n_layers))
            shape = next((self._clean_run[1][name].shape for name in names if name in self._clean_run[1]), None)
            if shape is not None and has_axes_of(component, shape):
                axes = axes_of(component)
                heads[component] = shape[1 + axes.index("head")] if "head" in axes else None
        return heads

    @property
    def can_undo(self) -> bool:
        """True if `undo` has an effect."""
        return len(self._past) > 1

    @property
    def can_redo(self) -> bool:
        """True if `redo` has an effect."""
        return bool(self._future)

    @checked
    def toggle(self, site: Site, *more: Site) -> None:
        """Add patches at sites (each a component of a layer, at a position, ...), or remove them if the first is there.

        Sites that are already patched stay patched when others are added. One `undo` reverts the whole call.
        """
        sites, now = (site, *more), self.interventions
        for each in sites:
            self._check(each)
        left = tuple(other for other in now if other not in sites)
        self._remember(left if site in now else tuple(dict.fromkeys((*now, *sites))))

    def clear(self) -> None:
        """Remove all patches; `undo` restores them."""
        if self.interventions:
            self._remember(())

    def undo(self) -> None:
        """Revert the last `toggle` or `clear`, if any."""
        if self.can_undo:
            self._future.append(self._past.pop())

    def redo(self) -> None:
        """Revert the last `undo`, if any."""
        if self._future:
            self._past.append(self._future.pop())

    def copy(self) -> "PatchingSession":
        """Return a session with the same prompts and patches, and a history that starts here."""
        other = copy.copy(self)
        other._past, other._future = [self.interventions], []
        return other

    # ---- results ----

    @holds_models
    @torch.no_grad()
    def result(self) -> SessionResult:
        """Run the patched, the clean and the corrupted prompt: predictions, metrics, and the share `recovered`."""
        check_eval_mode(self.model)
        clean, corrupted = self._clean_run[0], self._corrupted_prediction
        patched = self._predict(self.interventions)
        name, metric = self._metric()
        values = [float(evaluate_metric(name, metric, prediction)) for prediction in (patched, clean, corrupted)]
        return SessionResult(patched[0], clean[0], corrupted[0], *values)

    @checked
    def single_effects(self, component: str, head: int | None = None) -> Iterator[list[tuple[int, int, float]]]:
        """Yield (layer, position, share recovered) of every patch of a component alone, a layer at a time.

        The shares are those of `patch(...).recovered()`, with the session's prompts and metric.
        """
        if math.isnan(self.result().recovered):
            raise ValueError(f"clean and corrupted run have the same {self.metric_name}: shares of it are undefined")
        along, prompts = "query" if axes_of(component) == BY_KEY else "pos", (self._clean_part, self._corrupted_part)
        metric, chosen = dict([self._metric()]), {} if head is None else {"head": [head]}
        for layer in range(self.n_layers):
            axes = {"layer": [layer], along: None, **chosen}
            swept = patch(self.model, *prompts, component, axes, metrics=metric, progress=False)
            yield [(layer, pos, share) for pos, share in enumerate(swept.recovered().flatten().tolist())]

    @checked
    def why_no_effect(self, site: Site) -> str:
        """Return why a patch of the session changes nothing, such as another patch that hides it; "" if it does."""
        order = [*self._clean_run[1]]
        patches = sorted(self.interventions, key=lambda each: order.index(each.hook_name))
        later, others = patches[patches.index(site) + 1 :], [each for each in patches if each != site]

        def adds_nothing(given: Sequence[Site]) -> bool:
            return self._adapter.same_up_to_rounding(self._predict([*given, site]), self._predict(given))

        if not adds_nothing(others):
            return ""
        if not adds_nothing(later):
            return "no effect: patches before it already make what it changes clean"
        if adds_nothing([]):
            return "no effect: both runs have the same activation here, or nothing that follows reads it"
        there = [each for each in later if position_of(each) in (None, position_of(site))]
        hiding = next((each for each in there if adds_nothing([each])), None)
        return f"hidden by {hiding or 'later patches'}, which replace{'s' if hiding else ''} all that it changes"

    @property
    def metric_name(self) -> str:
        """Name of the metric, such as "squared error" or "logit difference"."""
        return self._metric()[0]

    def hooks(self) -> list[tuple[str | Callable[..., Any], Callable[..., Any]]]:
        """Return the patches as `(hook name, function)`, for `run_with_hooks(corrupted_tokens, fwd_hooks=...)`."""
        return [self._hook(site) for site in self.interventions]

    def code(self) -> str:
        """Return Python code for the same interventions, given `model`, `clean` and `corrupted`; sets `prediction`."""
        lines = ""
        for site in self.interventions:
            index = ["every" if part == slice(None) else str(part) for part in site.index]
            lines += f'    from_clean("{site.hook_name}", {", ".join(index)}),\n'
        return _CODE.format(
            clean=self._tokens_code("clean", self.clean_prompt),
            corrupted=self._tokens_code("corrupted", self.corrupted_prompt),
            interventions=f"\n{lines}" if lines else "",
            prediction="model.decode(outputs)[0, -1]" if isinstance(self.clean, Prompts) else "outputs[0, -1]",
        )

    # ---- details ----

    @property
    def _clean_part(self) -> Any:
        return self.clean[self.clean_prompt : self.clean_prompt + 1]

    @property
    def _corrupted_part(self) -> Any:
        return self.corrupted[self.corrupted_prompt : self.corrupted_prompt + 1]

    @cached_property
    @holds_models
    @torch.no_grad()
    def _clean_run(self) -> tuple[Tensor, dict[str, Tensor]]:
        check_eval_mode(self.model)
        prediction, cache = self._adapter.run_with_cache(self._adapter.encode(self._clean_part))
        names = [Site(component, layer).hook_name for component in AXES for layer in range(self.n_layers)]
        return prediction, {name: cache[name] for name in cache if name in names}  # in the order of the run

    @cached_property
    @torch.no_grad()
    def _corrupted_prediction(self) -> Tensor:
        # hooked like all runs of a session, so that they differ by the patches alone and not by rounding
        return self._patched([(next(iter(self._clean_run[1])), lambda activation, hook: None)])

    def _patched(self, hooks: list[Any]) -> Tensor:
        return self._adapter.run(self._adapter.encode(self._corrupted_part), hooks)

    @holds_models
    @torch.no_grad()
    def _predict(self, sites: Sequence[Site]) -> Tensor:
        return self._patched([self._hook(site) for site in sites]) if sites else self._corrupted_prediction

    def _hook(self, site: Site) -> tuple[str | Callable[..., Any], Callable[..., Any]]:
        whole = (slice(None), slice(None), site)
        return site.hook_name, replacing_hook([whole], self._clean_run[1][site.hook_name], copy=True)

    def _metric(self) -> tuple[str, Metric]:
        if self.metric is not None:
            return getattr(self.metric, "__name__", "metric"), self.metric
        if isinstance(self.clean, Prompts):
            return "squared error", squared_error(self._clean_part)
        correct, wrong = self._clean_run[0].argmax(-1), self._corrupted_prediction.argmax(-1)
        return "logit difference", logit_difference(correct, wrong)

    def _remember(self, interventions: tuple[Site, ...]) -> None:
        self._past.append(interventions)
        self._future.clear()

    def _check(self, site: Site) -> None:
        if site not in self._tried:
            axes = ["layer", *(axis for axis in axes_of(site.component) if getattr(site, axis) is not None)]
            cell = {axis: getattr(site, axis) for axis in axes}
            make_grid(self._adapter, self._adapter.encode(self._clean_part), site.component, cell)
            self._tried.add(site)

    def _tokens_code(self, name: str, number: int) -> str:
        part = f"{name}[{number}:{number + 1}]"
        return f"model.encode({part})" if isinstance(self.clean, Prompts) else f"{part}.to(model.cfg.device)"


def _check_number(which: str, number: int, n_prompts: int) -> int:
    if not 0 <= number < n_prompts:
        raise ValueError(f"{which}_prompt must be 0 to {n_prompts - 1}, got {number}")
    return number
