"""Attention pictures: offline, escaped, labelled, one script for many."""

from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.viz import export, init_notebook, prompt_attention
from mechicl.viz.attention import attention_html
from mechicl.viz.export import Html

LIBRARY = "var CircuitsVis="
EXTREMES = """async (canvas) => {
    await new Promise((resolve) => setTimeout(resolve, 500));
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let red = 0, blue = 0;
    for (let i = 0; i < data.length; i += 4)
        if (data[i + 3] === 255) {
            red = Math.max(red, data[i] - data[i + 2]);
            blue = Math.max(blue, data[i + 2] - data[i]);
        }
    return [red, blue];
}"""


def model_and_prompts(**options: Any):
    cfg = TransformerConfig(
        x_dim=2, n_context=3, prompt_format="interleaved", attention="softmax", d_model=8, n_heads=2, **options
    )
    return HookedTransformer(cfg), LinearRegression(x_dim=2, n_context=3).sample(2, seed=0)


def opened(browser: Browser, path: Path) -> tuple[Page, list[str]]:
    page = browser.new_page(viewport={"width": 900, "height": 900})
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    return page, requests


def test_labels_are_text_and_never_markup(tmp_path: Path, browser: Browser):
    attack = "</script><script>document.title='owned'</script><b>"
    picture = attention_html(torch.eye(3)[None], [attack, "b", "c"])
    path = tmp_path / "attention.html"
    path.write_text(f"<!doctype html><html><head><title>fine</title></head><body>{picture._repr_html_()}</body></html>")
    page, requests = opened(browser, path)
    page.locator("canvas").nth(1).wait_for()
    assert page.title() == "fine"
    assert requests == [path.as_uri()]
    page.close()


def test_a_saved_picture_draws_negative_attention_in_red(tmp_path: Path, browser: Browser):
    pattern = torch.tensor([[[1.0, -2.0], [0.0, 1.0]]])
    page, requests = opened(browser, attention_html(pattern, ["a", "b"]).save(tmp_path / "saved.html"))
    canvas = page.locator("canvas").nth(1)
    canvas.wait_for()
    box = canvas.bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) > 100
    reddest, bluest = canvas.evaluate(EXTREMES)
    assert reddest > 100  # -2, in full colour
    assert 40 < bluest < 100  # 1, in half of it
    assert "Negative attention, down to -2, is red" in page.locator("figcaption").inner_text()
    assert len(requests) == 1
    page.close()


def test_positions_are_labelled_by_the_prompt_format_by_ids_or_by_the_caller():
    model, prompts = model_and_prompts()
    picture = prompt_attention(model, prompts[:1])
    assert '["x1", "y1", "x2", "y2", "x3", "y3", "query"]' in picture.body
    assert "head 1" in picture.body
    assert not model.has_hooks()
    cfg = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=16)
    bridge = build_bridge_from_module(GPT2LMHeadModel(cfg).eval(), "GPT2LMHeadModel", hf_config=cfg)
    ids = torch.tensor([[7, 3, 19]])
    assert '["7", "3", "19"]' in prompt_attention(bridge, ids).body
    assert '["a", "b", "c"]' in prompt_attention(bridge, ids, labels=["a", "b", "c"]).body


def test_all_layers_are_drawn_or_the_chosen_ones_with_one_script():
    model, prompts = model_and_prompts(n_layers=3)
    picture = prompt_attention(model, prompts[:1])
    assert picture.body.count("<figure") == 3
    assert picture.script.count(LIBRARY) == 1
    assert LIBRARY not in picture.body
    chosen = prompt_attention(model, prompts[:1], layer=[2, 0])
    assert [chosen.body.find(f"layer {i}") >= 0 for i in range(3)] == [True, False, True]
    assert prompt_attention(model, prompts[:1], layer=1).body in picture.body


def test_a_notebook_gets_the_script_once(monkeypatch: pytest.MonkeyPatch):
    displayed: list = []
    monkeypatch.setattr(export, "_shown", set())
    monkeypatch.setattr("IPython.display.display", displayed.append)
    picture = attention_html(torch.eye(2)[None], ["a", "b"])
    assert picture._repr_html_().count(LIBRARY) == 1
    init_notebook()
    assert [shown.data.count(LIBRARY) for shown in displayed] == [1]
    assert picture._repr_html_() == picture.body
    assert Html("<p>plain</p>")._repr_html_() == "<p>plain</p>"


def test_a_picture_without_its_script_reports_it_and_is_drawn_when_it_comes(tmp_path: Path, browser: Browser):
    picture = attention_html(torch.eye(2)[None], ["a", "b"])
    path = tmp_path / "late.html"
    path.write_text(f"<!doctype html><html><head><meta charset='utf-8'></head><body>{picture.body}</body></html>")
    page, _ = opened(browser, path)
    page.get_by_text("run the cell with init_notebook()").wait_for()
    page.add_script_tag(content=picture.script)
    page.locator("canvas").nth(1).wait_for()
    assert "init_notebook" not in page.locator("figure .attention-heads").inner_text()
    page.close()
