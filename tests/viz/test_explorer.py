"""The patching widget: its messages and traits. `tests/test_notebooks.py` clicks on it in JupyterLab."""

import pytest
import torch
import traitlets
from playwright.sync_api import Browser
from torch import Tensor

from mechicl.analysis import PatchingSession
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.sites import Site
from mechicl.tasks import LinearRegression
from mechicl.viz import PatchingExplorer


def regression(y_dim: int = 1) -> HookedTransformer:
    cfg = TransformerConfig(
        x_dim=3, y_dim=y_dim, n_context=4, prompt_format="interleaved", n_layers=2, n_heads=2, d_model=8, d_head=4,
        attention="softmax", keys="causal", initializer_range=0.5,
    )  # fmt: skip
    return HookedTransformer(cfg, seed=1).eval()


def explorer_of(model: HookedTransformer, **options) -> PatchingExplorer:
    task = LinearRegression(x_dim=3, n_context=4, y_dim=model.cfg.y_dim)
    return PatchingExplorer(PatchingSession(model, task.sample(3, seed=0), task.sample(3, seed=1), **options))


def send(explorer: PatchingExplorer, kind: str, **content) -> dict:
    """Send a message as the browser does, and return the state after it."""
    explorer._handle_custom_msg({"kind": kind, **content}, [])
    return explorer.state


def patched(explorer: PatchingExplorer) -> str:
    return explorer.state["runs"][2]["prediction"]


def test_a_click_patches_and_the_same_click_removes_the_patch():
    explorer = explorer_of(regression())
    before = explorer.state
    explorer.component, explorer.head = "z", 1
    state = send(explorer, "toggle", layer=1, pos=8)
    site = Site("z", 1, pos=8, head=1)
    assert explorer.session.interventions == (site,)
    result = explorer.session.result()
    assert patched(explorer) == f"{result.prediction.item():.4g}" != before["runs"][2]["prediction"]
    assert state["scale"]["points"]["patched"] == result.prediction.item()
    assert state["scale"]["points"]["target"] == explorer.session.clean.query.ys[0].item()
    assert state["recovered"] == {"prediction": result.prediction_recovered, "metric": result.recovered}
    way = (result.prediction - result.corrupted_prediction) / (result.clean_prediction - result.corrupted_prediction)
    assert result.prediction_recovered == pytest.approx(way.item(), rel=1e-5)
    assert result.prediction_recovered != pytest.approx(result.recovered, abs=0.01)
    assert [p["words"] for p in state["interventions"]] == [str(site)]
    assert 'from_clean("blocks.1.attn.hook_z", 8, 1)' in state["code"]
    assert send(explorer, "toggle", layer=1, pos=8)["runs"] == before["runs"]


def test_undo_redo_clear_and_removal():
    explorer = explorer_of(regression())
    start = patched(explorer)
    assert not explorer.state["can_undo"]
    send(explorer, "toggle", layer=0, pos=8)
    one = patched(explorer)
    send(explorer, "toggle", layer=1, pos=8)
    send(explorer, "remove", index=1)
    assert patched(explorer) == one
    send(explorer, "undo")
    send(explorer, "clear")
    assert patched(explorer) == start
    send(explorer, "undo")
    assert len(explorer.state["interventions"]) == 2
    send(explorer, "redo")
    assert explorer.state["interventions"] == []


def test_prompts_are_chosen_and_all_runs_follow():
    explorer = explorer_of(regression())
    send(explorer, "clean", prompt=2)
    state = send(explorer, "corrupted", prompt=1)
    model, session = explorer.session.model, explorer.session
    expected = model.predict(session.clean)[2], model.predict(session.corrupted)[1]
    assert [run["prediction"] for run in state["runs"][:2]] == [f"{value.item():.4g}" for value in expected]
    assert state["prompts"] == {"clean": [2, 3], "corrupted": [1, 3]}


def test_patterns_are_patched_by_query_position():
    explorer = explorer_of(regression())
    explorer.component, explorer.head = "pattern", 0
    send(explorer, "toggle", layer=1, pos=8)
    assert explorer.session.interventions == (Site("pattern", 1, head=0, query=8),)
    assert explorer.state["interventions"][0]["pos"] == 8


def test_errors_are_displayed_until_the_next_action():
    explorer = explorer_of(regression())
    before = explorer.state["runs"]
    state = send(explorer, "toggle", layer=1, pos=9)
    assert "pos must be 0 to 8" in state["error"]
    assert state["runs"] == before
    assert send(explorer, "toggle", layer=1, pos=8)["error"] == ""
    explorer.session.model.train()
    assert "call model.eval()" in send(explorer, "undo")["error"]


def test_changes_made_in_python_are_shown_after_refresh():
    explorer = explorer_of(regression())
    explorer.session.toggle(Site("z", 0, pos=2))
    explorer.refresh()
    assert len(explorer.state["interventions"]) == 1
    with pytest.raises(traitlets.TraitError, match=r"component must be one of .*'mlp_out'"):
        explorer.component = "mlp_out"
    with pytest.raises(ValueError, match="labels"):
        PatchingExplorer(explorer.session, labels=["a"])


def test_several_targets_and_tokens_are_compared_by_their_metric():
    explorer = explorer_of(regression(y_dim=2))
    assert explorer.state["scale"]["title"] == "squared error"
    assert len(patched(explorer).split(", ")) == 2
    cfg = TransformerConfig(
        prompt_format="token_ids", d_vocab=5, n_ctx=4, n_heads=2, d_model=16, d_head=8, attention="softmax",
        keys="causal",
    )  # fmt: skip
    ids = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    session = PatchingSession(HookedTransformer(cfg).eval(), ids[:1], ids[1:])
    state = PatchingExplorer(session, token_names="abcde").state
    assert state["scale"]["title"] == "logit difference"
    assert state["runs"][0]["prediction"].split(" ")[0] in "abcde"
    assert state["labels"] == ["0/3", "1/2", "2/1", "3/0"]


def test_numbers_that_are_not_finite_do_not_break_the_display():
    def infinite(predictions: Tensor) -> Tensor:
        return predictions[:, 0] / 0

    state = explorer_of(regression(y_dim=2), metric=infinite).state
    assert set(state["scale"]["points"].values()) == {None}
    assert state["recovered"]["metric"] is None


def test_a_picture_shows_the_state_of_the_widget_and_escapes_labels(browser: Browser):
    explorer = explorer_of(regression())
    explorer.component, explorer.head = "z", 1
    for site in (Site("z", 1, pos=8, head=1), Site("z", 0, pos=2, head=0), Site("resid_pre", 1)):
        explorer.session.toggle(site)
    explorer._labels = ["</script><b>"] + [f"position {i}" for i in range(1, 9)]
    explorer.refresh()
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(f"<!doctype html><html>{explorer.picture().document()}</html>")
    page.wait_for_selector(".mechicl-explorer-still:not([data-waiting])")
    options = page.locator("select option")
    shown = options.evaluate_all("all => all.filter((option) => option.selected).map((option) => option.textContent)")
    assert shown == ["prompt 0", "prompt 0", "z (2 patched)", "head 1 (1 patched)"]
    assert {"resid_pre (1 patched)", "head 0 (1 patched)", "all heads"} <= set(options.all_inner_texts())
    cells = "cells => cells.map((cell) => [Number(cell.dataset.layer), Number(cell.dataset.pos)])"
    assert page.locator('.cell[aria-pressed="true"]').evaluate_all(cells) == [[1, 8]]
    assert page.locator(".cell.besides").evaluate_all(cells) == [[1, pos] for pos in range(9)] + [[0, 2]]
    assert page.locator("tbody th", has_text="layer").all_inner_texts() == ["layer 1", "layer 0"]  # 0 at the bottom
    assert page.locator("tfoot th", has_text="b>").inner_text() == "</script><b>"
    result = explorer.session.result()
    expected = [f"{100 * share:.1f} %" for share in (result.prediction_recovered, result.recovered)]
    assert page.locator("tr.recovered td").all_inner_texts() == expected
    marks = page.locator("circle").evaluate_all(
        "marks => marks.map((m) => [m.dataset.run, Number(m.getAttribute('cx'))])"
    )
    places = dict(marks)
    way = (places["patched"] - places["corrupted"]) / (places["clean"] - places["corrupted"])
    assert way == pytest.approx(result.prediction_recovered, abs=1e-4)  # the dot agrees with the table
    assert errors == []
    page.close()
