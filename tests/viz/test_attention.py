"""Attention pictures: offline, escaped, labelled, one script for many."""

from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2Config, GPT2LMHeadModel

from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.viz import attention_html, html, init_notebook, model_attention, prompt_attention
from mechicl.viz.html import Html

LIBRARY = "var CircuitsVis="


def model_and_prompts(**options):
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
    picture = attention_html(torch.eye(3)[None], [attack, "b", "c"], [attack])
    path = tmp_path / "attention.html"
    path.write_text(f"<!doctype html><html><head><title>fine</title></head><body>{picture._repr_html_()}</body></html>")
    page, requests = opened(browser, path)
    page.wait_for_function("document.body.innerText.includes('document.title')")
    assert page.title() == "fine"
    assert requests == [path.as_uri()]
    page.close()


def test_a_saved_picture_draws_what_attends_and_in_red_what_is_negative(tmp_path: Path, browser: Browser):
    pattern = torch.tensor([[[1.0, -2.0], [0.0, 1.0]]])
    page, requests = opened(browser, attention_html(pattern, ["a", "b"]).save(tmp_path / "saved.html"))
    page.locator("canvas").nth(1).wait_for()
    box = page.locator("canvas").nth(1).bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) > 100
    reddest, bluest = (
        page.locator("canvas")
        .nth(1)
        .evaluate(
            """async (canvas) => {
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
        )
    )
    assert reddest > 100  # -2, in full colour
    assert 40 < bluest < 100  # 1, in half of it
    assert "Negative attention, down to -2, is red" in page.locator("figcaption").inner_text()
    assert len(requests) == 1
    page.close()


def test_a_models_prompt_is_labelled_by_its_format():
    model, prompts = model_and_prompts()
    picture = prompt_attention(model, prompts[:1])
    assert '["x1", "y1", "x2", "y2", "x3", "y3", "query"]' in picture.body
    assert "head 1" in picture.body
    assert not model.has_hooks()
    with pytest.raises(ValueError, match="one prompt"):
        prompt_attention(model, prompts)


def test_all_layers_are_drawn_or_those_asked_for_with_one_script():
    model, prompts = model_and_prompts(n_layers=3)
    picture = model_attention(model, prompts[:1])
    assert picture.body.count("<figure") == 3
    assert picture.script.count(LIBRARY) == 1
    assert LIBRARY not in picture.body
    chosen = model_attention(model, prompts[:1], layers=[2, 0])
    assert [chosen.body.find(f"layer {i}") >= 0 for i in range(3)] == [True, False, True]
    assert prompt_attention(model, prompts[:1], layer=1).body in picture.body
    with pytest.raises(ValueError, match=r"no hook 'blocks.3.attn.hook_pattern'"):
        model_attention(model, prompts[:1], layers=[3])


def test_models_of_tokens_are_labelled_by_ids_or_by_names():
    cfg = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=16)
    model = build_bridge_from_module(GPT2LMHeadModel(cfg).eval(), "GPT2LMHeadModel", hf_config=cfg)
    ids = torch.tensor([[7, 3, 19]])
    assert '["7", "3", "19"]' in model_attention(model, ids).body
    assert '["a", "b", "c"]' in model_attention(model, ids, labels=["a", "b", "c"]).body


def test_wrong_numbers_of_labels_are_refused():
    with pytest.raises(ValueError, match="one label a position"):
        attention_html(torch.eye(3)[None], ["a", "b"])
    with pytest.raises(ValueError, match="need 1 names"):
        attention_html(torch.eye(2)[None], ["a", "b"], ["h", "i"])


def test_a_notebook_gets_the_script_once(monkeypatch: pytest.MonkeyPatch):
    displayed: list = []
    monkeypatch.setattr(html, "_shown", set())
    monkeypatch.setattr(html, "display", displayed.append)
    picture = attention_html(torch.eye(2)[None], ["a", "b"])
    assert picture._repr_html_().count(LIBRARY) == 1
    init_notebook()
    assert [shown.data.count(LIBRARY) for shown in displayed] == [1]
    assert picture._repr_html_() == picture.body
    assert Html("<p>plain</p>")._repr_html_() == "<p>plain</p>"


def test_a_picture_without_its_script_says_so_and_is_drawn_when_it_comes(tmp_path: Path, browser: Browser):
    picture = attention_html(torch.eye(2)[None], ["a", "b"])
    path = tmp_path / "late.html"
    path.write_text(f"<!doctype html><html><head><meta charset='utf-8'></head><body>{picture.body}</body></html>")
    page, _ = opened(browser, path)
    page.get_by_text("run the cell with init_notebook()").wait_for()
    page.add_script_tag(content=picture.script)
    page.locator("canvas").nth(1).wait_for()
    assert "init_notebook" not in page.locator("figure .attention-heads").inner_text()
    page.close()
