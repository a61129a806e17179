"""The patching widget: its messages, and clicks and keys in a page. `tests/test_notebooks.py` uses it in JupyterLab."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import traitlets
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect
from torch import Tensor

from mechicl.analysis import PatchingSession, patch
from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.models.opening.sites import Site
from mechicl.tasks import LinearRegression
from mechicl.viz import PatchingExplorer
from mechicl.viz.explorer import SCRIPT, STYLE

TRAITS = ("component", "head", "preview", "state", "background")
LIVE = """({ traits, source }) => {
  const listeners = [];
  const model = {
    get: (name) => traits[name],
    set: (name, value) => { traits[name] = value; tell(`change:${name}`); },
    save_changes: () => ask({ component: traits.component, head: traits.head, preview: traits.preview }, null),
    send: (message) => ask({}, message),
    on: (event, listener) => listeners.push([event, listener]),
    off: () => {},
  };
  const tell = (event, content) => listeners.forEach(([name, listener]) => name === event && listener(content));
  const ask = async (changed, message) => {
    const answer = await window.python(changed, message);
    const same = (name) => JSON.stringify(traits[name]) === JSON.stringify(answer.traits[name]);
    const news = Object.keys(traits).filter((name) => !same(name));
    Object.assign(traits, answer.traits);
    for (const name of news) tell(`change:${name}`);
    for (const content of answer.sent) tell("msg:custom", content);
  };
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  return import(url).then((widget) => { widget.default.render({ model, el: document.querySelector("main") }); });
}"""
DARK = """<style>:root { --jp-layout-color0: #111; --jp-layout-color1: #212121; --jp-layout-color2: #424242;
--jp-border-color2: #616161; --jp-ui-font-color1: #fff; --jp-ui-font-color2: #b3b3b3 }
body { background: #111 }</style>"""


def live(browser: Browser, explorer: PatchingExplorer, *, width: int = 1300, dark: bool = False) -> Page:
    """A page with the widget, whose messages this process answers as a kernel does."""
    page, sent = browser.new_page(viewport={"width": width, "height": 900}), []
    explorer.send = lambda content, buffers=None: sent.append(content)

    def traits() -> dict[str, Any]:
        return {name: getattr(explorer, name) for name in TRAITS}

    def answer(changed: dict[str, Any], message: dict[str, Any] | None) -> dict[str, Any]:
        sent.clear()
        for name, value in changed.items():
            setattr(explorer, name, value)
        if message is not None:
            explorer._handle_custom_msg(message, [])
        return {"traits": traits(), "sent": [*sent]}

    page.expose_function("python", answer)
    page.set_content(
        f"<!doctype html><style>{STYLE.read_text()} body {{ margin: 8px }}</style>{DARK if dark else ''}"
        f"<body data-jp-theme-light={'false' if dark else 'true'}><main></main>"
    )
    page.evaluate(LIVE, {"traits": traits(), "source": SCRIPT.read_text()})
    return page


def cell(page: Page, layer: int, pos: int) -> Locator:
    return page.locator(f'.cell[data-layer="{layer}"][data-pos="{pos}"]')


def patches(page: Page) -> list[str]:
    return [text.removesuffix(" ×") for text in page.locator(".chip").all_inner_texts()]


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


def click(explorer: PatchingExplorer, *cells: tuple[int, int]) -> dict:
    return send(explorer, "toggle", cells=cells, component=explorer.component, head=explorer.head)


def patched(explorer: PatchingExplorer) -> float:
    (prediction,) = explorer.state["results"]["A"]["prediction"]
    return prediction


def finish(explorer: PatchingExplorer) -> dict:
    """Compute all that a browser would ask for."""
    while explorer.background["left"]:
        send(explorer, "more")
    return explorer.background


def test_a_click_patches_and_the_same_click_removes_the_patch():
    explorer = explorer_of(regression())
    before, site = explorer.state, Site("z", 1, pos=8, head=1)
    state = send(explorer, "toggle", cells=[(1, 8)], component="z", head=1)  # before the choice of "z" arrives
    explorer.component, explorer.head = "z", 1
    assert explorer.session.interventions == (site,)
    result = explorer.session.result()
    assert patched(explorer) == result.prediction.item() != before["results"]["A"]["prediction"][0]
    assert state["target"] == explorer.session.clean.query.ys[0].tolist()
    assert state["results"]["A"]["prediction_recovered"] == result.prediction_recovered
    assert state["results"]["A"]["recovered"] == result.recovered
    way = (result.prediction - result.corrupted_prediction) / (result.clean_prediction - result.corrupted_prediction)
    assert result.prediction_recovered == pytest.approx(way.item(), rel=1e-5)
    assert result.prediction_recovered != pytest.approx(result.recovered, abs=0.01)
    assert [p["words"] for p in state["sides"]["A"]] == [str(site)]
    assert 'from_clean("blocks.1.attn.hook_z", 8, 1)' in state["code"]
    assert click(explorer, (1, 8))["results"] == before["results"]


def test_a_range_is_one_step_and_its_first_cell_decides():
    explorer = explorer_of(regression())
    click(explorer, (0, 3))
    rectangle = [(layer, pos) for layer in (1, 0) for pos in (4, 3, 2)]
    click(explorer, *rectangle)  # the first is not patched: the others are added
    sites = {Site("resid_post", layer, pos=pos) for layer, pos in rectangle}
    assert set(explorer.session.interventions) == sites
    assert len(explorer.session.interventions) == 6
    click(explorer, (0, 3), (0, 4), (0, 5))  # the first is patched: all are removed
    assert set(explorer.session.interventions) == sites - {Site("resid_post", 0, pos=3), Site("resid_post", 0, pos=4)}
    send(explorer, "undo")
    send(explorer, "undo")
    assert explorer.session.interventions == (Site("resid_post", 0, pos=3),)
    click(explorer, (1, 7), (1, 8))
    first, _, last = map(str, explorer.session.interventions)
    for _ in range(2):  # a second click before the browser shows the answer to the first takes out nothing else
        state = send(explorer, "remove", names=[first, last])
        assert explorer.session.interventions == (Site("resid_post", 1, pos=7),)
        assert not state["error"]
    send(explorer, "undo")
    assert len(explorer.session.interventions) == 3


def test_two_sets_of_patches_are_compared():
    explorer = explorer_of(regression())
    click(explorer, (0, 8))
    one = patched(explorer)
    state = send(explorer, "compare")  # B starts as a copy of A
    assert state["side"] == "B"
    assert state["sides"]["A"] == state["sides"]["B"]
    assert state["results"]["A"] == state["results"]["B"]
    state = click(explorer, (1, 8))
    both = PatchingSession(explorer.session.model, explorer.session.clean, explorer.session.corrupted)
    both.toggle(Site("resid_post", 0, pos=8), Site("resid_post", 1, pos=8))
    assert state["results"]["A"]["prediction"] == [one]
    assert state["results"]["B"]["prediction"] == both.result().prediction.tolist()
    assert state["results"]["B"]["recovered"] == both.result().recovered
    send(explorer, "clean", prompt=2)
    assert {each.clean_prompt for each in explorer.sessions.values()} == {2}
    send(explorer, "undo")
    assert not send(explorer, "undo")["can_undo"]  # each has its own history
    assert send(explorer, "side", side="A")["can_undo"]
    send(explorer, "side", side="B")
    state = send(explorer, "compare")
    assert state["side"] == "A"
    assert list(state["sides"]) == ["A"]


STAGES = ("resid_pre", "q", "k", "v", "pattern", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")


def test_a_patch_has_a_reason_if_and_only_if_it_changes_nothing():
    starts = {"seen": "", "hidden": "hidden by ", "repeated": "no effect: patches", "without effect": "no effect: both"}
    model, kinds = regression(), dict.fromkeys(starts, 0)
    session = explorer_of(model).session
    clean, corrupted = (model.encode(prompts[:1]) for prompts in (session.clean, session.corrupted))
    _, cache = model.run_with_cache(clean)

    def output(sites: list[Site]) -> Tensor:
        def replace(site: Site) -> tuple[str, Callable]:
            def hook(activation: Tensor, hook: Any) -> Tensor:
                activation = activation.clone()
                activation[(0, *site.index)] = cache[site.hook_name][(0, *site.index)]
                return activation

            return site.hook_name, hook

        with torch.no_grad():
            return model.run_with_hooks(corrupted, fwd_hooks=[replace(site) for site in sites])[0, -1]

    draws = torch.Generator().manual_seed(0)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=draws))

    def drawn() -> Site:
        component, layer, pos = ("resid_pre", "resid_post", "z", "q", "pattern")[draw(5)], draw(2), 8 - draw(2)
        heads = {} if component.startswith("resid") or draw(2) else {"head": draw(2)}
        return Site(component, layer, **({"query": pos} if component == "pattern" else {"pos": pos}), **heads)

    for _ in range(12):
        session.clear()
        session.toggle(*{drawn() for _ in range(4)})
        ordered = sorted(session.interventions, key=lambda site: (site.layer, STAGES.index(site.component)))
        for place, site in enumerate(ordered):
            reason = session.why_no_effect(site)
            differs = [not torch.allclose(output(sites), output([each for each in sites if each != site]), atol=1e-6)
                       for sites in (ordered, ordered[place:], [site])]  # fmt: skip
            kind = "repeated" if differs[1] else "hidden" if differs[2] else "without effect"
            kind = "seen" if differs[0] else kind
            kinds[kind] += 1
            assert reason.startswith(starts[kind])
            assert bool(reason) == (kind != "seen")
            named = [each for each in ordered if f"hidden by {each}," in reason]
            for each in named:
                assert torch.allclose(output([site, each]), output([each]), atol=1e-6)
    assert min(kinds.values()) >= 3


@pytest.mark.parametrize(("component", "head"), [("resid_pre", None), ("z", None), ("z", 1), ("pattern", 0)])
def test_the_preview_equals_a_sweep_of_patch(component, head):
    explorer = explorer_of(regression())
    send(explorer, "clean", prompt=1)
    click(explorer, (1, 8))  # the preview is of each patch alone
    explorer.component, explorer.head = component, head
    assert explorer.background["effects"] == []
    sizes = []
    while explorer.background["left"]:
        send(explorer, "more")
        sizes.append(len(explorer.background["effects"]))
    assert len({*sizes}) >= 2  # in several pieces
    session, along = explorer.session, "query" if component == "pattern" else "pos"
    axes = {"layer": None, along: None} | ({} if head is None else {"head": [head]})
    swept = patch(session.model, session.clean[1:2], session.corrupted[1:2], component, axes, progress=False)
    effects = torch.zeros(2, 9)
    for layer, pos, effect in explorer.background["effects"]:
        effects[layer, pos] = effect
    assert sizes[-1] == effects.numel()
    torch.testing.assert_close(effects, swept.recovered().reshape(2, 9).float(), rtol=1e-4, atol=1e-5)
    assert effects.abs().max() > 0.05
    explorer.head, before = None, explorer.background["effects"]
    explorer.component, explorer.head = component, head
    assert explorer.background["effects"] == before  # nothing is computed twice
    assert not explorer.background["left"]


def test_a_preview_that_is_undefined_says_why():
    model = regression()
    prompts = LinearRegression(x_dim=3, n_context=4).sample(2, seed=0)
    explorer = PatchingExplorer(PatchingSession(model, prompts, prompts))
    assert "have the same squared error" in finish(explorer)["error"]
    assert explorer.background["effects"] == []


def test_errors_are_displayed_until_the_next_action():
    explorer = explorer_of(regression())
    before = explorer.state["results"]
    state = click(explorer, (1, 9))
    assert "pos must be 0 to 8" in state["error"]
    assert state["results"] == before
    assert click(explorer, (1, 8))["error"] == ""
    explorer.session.model.train()
    assert "call model.eval()" in send(explorer, "undo")["error"]


def test_changes_made_in_python_are_shown_after_refresh():
    explorer = explorer_of(regression())
    explorer.session.toggle(Site("z", 0, pos=2))
    explorer.refresh()
    assert len(explorer.state["sides"]["A"]) == 1
    with pytest.raises(traitlets.TraitError, match=r"component must be one of .*'mlp_out'"):
        explorer.component = "mlp_out"


class Letters:
    padding_side = "right"

    def decode(self, ids: list[int]) -> str:
        return "abcd\n"[ids[0]]


def test_several_targets_and_tokens_are_compared_by_their_metric():
    explorer = explorer_of(regression(y_dim=2))
    assert explorer.state["metric_name"] == "squared error"
    assert len(explorer.state["results"]["A"]["prediction"]) == len(explorer.state["target"]) == 2
    cfg = TransformerConfig(
        prompt_format="token_ids", d_vocab=5, n_ctx=4, n_heads=2, d_model=16, d_head=8, attention="softmax",
        keys="causal",
    )  # fmt: skip
    ids, model = torch.tensor([[0, 1, 2, 4], [3, 2, 1, 4]]), HookedTransformer(cfg).eval()
    state = PatchingExplorer(PatchingSession(model, ids[:1], ids[1:])).state
    assert state["metric_name"] == "logit difference"
    assert state["results"]["A"]["clean_prediction"].split(" ")[0] in "01234"
    assert state["labels"] == ["0/3", "1/2", "2/1", "4"]
    model.tokenizer = Letters()  # type: ignore[assignment]
    state = PatchingExplorer(PatchingSession(model, ids[:1], ids[1:])).state
    assert state["results"]["A"]["clean_prediction"].split(" ")[0] in "abcd⏎"
    assert state["labels"] == ["a/d", "b/c", "c/b", "⏎"]


def test_numbers_that_are_not_finite_do_not_break_the_display():
    def infinite(predictions: Tensor) -> Tensor:
        return predictions[:, 0] / 0

    state = explorer_of(regression(y_dim=2), metric=infinite).state
    numbers = state["results"]["A"]
    assert [numbers[name] for name in ("metric", "clean_metric", "corrupted_metric", "recovered")] == [None] * 4


def test_a_picture_shows_the_state_of_the_widget_and_escapes_labels(browser: Browser):
    explorer = explorer_of(regression())
    explorer.component, explorer.head = "z", 1
    for site in (Site("z", 1, pos=8, head=1), Site("z", 0, pos=2, head=0), Site("resid_pre", 1)):
        explorer.session.toggle(site)
    explorer.refresh()
    explorer.state = explorer.state | {"labels": ["</script><b>"] + [f"position {i}" for i in range(1, 9)]}
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
    assert page.locator("tr[data-run=patched] .way").all_inner_texts() == expected
    marks = page.locator("circle").evaluate_all(
        "marks => marks.map((m) => [m.dataset.run, parseFloat(m.getAttribute('cx'))])"
    )
    places = dict(marks)
    way = (places["patched"] - places["corrupted"]) / (places["clean"] - places["corrupted"])
    assert way == pytest.approx(result.prediction_recovered, abs=1e-4)  # the dot agrees with the table
    assert errors == []
    page.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., tuple[PatchingExplorer, Page]]]:
    """Opens an explorer in a page, which must not raise errors."""
    pages, errors = [], []

    def open_page(component: str = "resid_post", **options: Any) -> tuple[PatchingExplorer, Page]:
        explorer = explorer_of(regression())
        explorer.component = component
        page = live(browser, explorer, **options)
        page.on("pageerror", lambda error: errors.append(str(error)))
        pages.append(page)
        return explorer, page

    yield open_page
    for page in pages:
        page.close()
    assert errors == []


def test_the_keyboard_is_enough(opened):
    explorer, page = opened()
    keys = page.keyboard
    for _ in range(20):  # the grid is one stop of the tab key
        keys.press("Tab")
        if page.evaluate("document.activeElement.matches('.cell')"):
            break
    expect(cell(page, 0, 8)).to_be_focused()  # the query
    # not the last layer of the query, which hides all other patches one by one
    for key in ("ArrowUp", "ArrowLeft", "Enter", "ArrowLeft", "Shift+ArrowLeft", "Shift+ArrowDown"):
        keys.press(key)
    selected = page.locator(".cell.selected")
    expect(selected).to_have_count(4)
    keys.press("Escape")
    expect(selected).to_have_count(0)
    # in one layer only: of two layers, one would hide the other, which is found some time later
    for key, n_selected in (("Home", 0), ("Shift+ArrowRight", 2)):
        keys.press(key)
        expect(selected).to_have_count(n_selected)
    keys.press("Space")
    expect(page.locator(".chip")).to_have_count(2)
    assert patches(page) == ["resid_post of layer 0, pos 0 to 1", "resid_post of layer 1, pos 7"]
    expect(cell(page, 0, 1)).to_be_focused()
    keys.press("Control+z")
    expect(page.locator(".chip")).to_have_count(1)
    keys.press("Control+Shift+z")
    expect(page.locator(".chip")).to_have_count(2)
    # the patches themselves, and buttons; keys act wherever the focus is, also after it is gone
    page.get_by_role("button", name="take out: resid_post of layer 0").focus()
    for left in (1, 0):
        keys.press("Enter")
        expect(page.locator(".chip")).to_have_count(left)
    keys.press("Control+z")
    expect(page.locator(".chip")).to_have_count(1)
    page.get_by_role("button", name="clear").focus()
    keys.press("Enter")
    expect(page.locator(".chip")).to_have_count(0)
    assert explorer.session.interventions == ()


def test_dragging_patches_a_range_and_a_click_a_cell(opened):
    explorer, page = opened("z")
    cell(page, 1, 6).hover()
    page.mouse.down()
    cell(page, 0, 4).hover()
    expect(page.locator(".cell.selected")).to_have_count(6)
    page.mouse.up()
    expect(page.locator(".chip")).to_have_count(2)
    expect(page.locator(".cell.selected")).to_have_count(0)
    assert len(explorer.session.interventions) == 6
    cell(page, 0, 4).click()
    expect(page.locator('.cell[aria-pressed="true"]')).to_have_count(5)
    cell(page, 0, 0).hover()  # a drag that leaves the grid patches nothing
    page.mouse.down()
    cell(page, 0, 2).hover()
    page.locator(".runs").hover()
    page.mouse.up()
    cell(page, 1, 0).hover()
    expect(page.locator(".cell.selected")).to_have_count(0)
    assert len(explorer.session.interventions) == 5


def test_hidden_patches_are_greyed_with_the_reason_and_the_preview_is_complete(opened):
    explorer, page = opened()
    for layer in (0, 1):
        cell(page, layer, 8).click()
    reason = "hidden by resid_post of layer 1, pos 8, which replaces all that it changes"
    expect(page.locator(".reason")).to_have_text(reason)
    expect(page.locator(".chip.idle")).to_have_text("resid_post of layer 0, pos 8 ×")
    hidden, active = cell(page, 0, 8), cell(page, 1, 8)
    assert reason in (hidden.get_attribute("title") or "")
    color = "cell => getComputedStyle(cell).backgroundImage"
    assert "gradient" in hidden.evaluate(color)
    assert active.evaluate(color) == "none"
    active.click()
    expect(page.locator(".chip.idle")).to_have_count(0)
    expect(page.locator("progress")).to_be_hidden()  # all is computed
    effects = {(layer, pos): effect for layer, pos, effect in explorer.background["effects"]}
    assert len(effects) == 18
    expect(page.locator(".cell.known")).to_have_count(18)
    expect(page.locator(".cell.negative")).to_have_count(sum(effect < 0 for effect in effects.values()))
    cell(page, 1, 2).hover()
    expect(page.locator(".effect")).to_have_text("layer 1, x2, alone: 0.0 %")
    page.locator(".runs").hover()
    (layer, pos), best = max(effects.items(), key=lambda item: item[1])
    assert f"alone: {100 * best:.1f} %" in (cell(page, layer, pos).get_attribute("aria-label") or "")
    page.get_by_label("effect of each patch alone").click()
    expect(page.locator(".cell.known")).to_have_count(0)
    assert not explorer.preview
    page.get_by_label("component").select_option("z")
    assert not explorer.background["left"]  # nothing is computed without the preview
    page.get_by_label("effect of each patch alone").click()
    expect(page.locator(".cell.known")).to_have_count(18)


def test_a_and_b_are_drawn_and_saved(opened):
    explorer, page = opened()
    cell(page, 0, 8).click()
    page.get_by_role("button", name="compare A/B").click()
    expect(page.locator(".runs tr[data-run=B]")).to_be_visible()
    cell(page, 1, 8).click()
    cell(page, 0, 8).click()
    expect(page.locator('ul[aria-label="patches of A"] .chip')).to_have_text(["resid_post of layer 0, pos 8"])
    expect(page.locator('ul[aria-label="patches of B"] .chip')).to_have_text(["resid_post of layer 1, pos 8 ×"])
    assert page.locator(".cell.compared").evaluate_all("cells => cells.map((c) => c.dataset.layer)") == ["0"]
    marks = page.locator("circle").evaluate_all("marks => marks.map((mark) => mark.dataset.run)")
    assert set(marks) == {"clean", "corrupted", "A", "B"}
    save, copy = page.get_by_role("button", name="save picture"), page.get_by_role("button", name="copy as code")
    boxes = [button.bounding_box() for button in (save, copy)]
    assert 0 < boxes[1]["x"] - boxes[0]["x"] - boxes[0]["width"] < 10  # next to each other
    with page.expect_download() as download:
        save.click()
    assert download.value.suggested_filename == "patches.png"
    with Image.open(io.BytesIO(download.value.path().read_bytes())) as image:
        found = {color for count, color in image.convert("RGB").getcolors(2**24) or [] if count > 40}
    for color in ((0x67, 0x41, 0xD9), (0xC2, 0x41, 0x0C), (0x1F, 0x6F, 0xB4)):  # B, A, clean
        assert color in found
    copy.click()  # this page may not use the clipboard
    expect(page.locator("pre")).to_be_visible()
    selected = page.evaluate("getSelection().toString()")
    assert 'from_clean("blocks.1.hook_resid_post", 8)' in selected
    assert explorer.side == "B"
    page.get_by_role("button", name="A", exact=True).click()
    expect(page.locator("pre")).to_contain_text('from_clean("blocks.0.hook_resid_post", 8)')


COLORS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const root = document.querySelector(".mechicl-explorer");
  const texts = root.querySelectorAll(".chip, .reason, .runs td, .runs th, .keys, .effect, .patches b, .scale text");
  const color = (text) => getComputedStyle(text)[text.closest("svg") ? "fill" : "color"];
  const paper = pixel(getComputedStyle(root).getPropertyValue("--paper"));
  return [paper, [...texts].map((text) => [text.textContent, pixel(color(text))])];
}"""


def luminance(color: list[float]) -> float:
    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (each / 255 for each in color)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1300, False), (1300, True)])
def test_nothing_overflows_and_texts_have_contrast(browser: Browser, width: int, dark: bool):
    explorer = explorer_of(regression())
    click(explorer, (0, 8))
    send(explorer, "compare")
    page = live(browser, explorer, width=width, dark=dark)
    cell(page, 1, 8).click()
    expect(page.locator(".reason")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper_color, colors = page.evaluate(COLORS)
    paper, texts = luminance(paper_color), {text: luminance(color) for text, color in colors if text}
    assert paper < 0.1 if dark else paper > 0.9
    assert len(texts) > 15
    assert {t: c for t, c in texts.items() if (max(c, paper) + 0.05) / (min(c, paper) + 0.05) < 4.5} == {}
    page.close()
