"""Attention pictures: offline, escaped, labelled."""

from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser

from mechicl.models import HookedTransformer, TransformerConfig
from mechicl.tasks import LinearRegression
from mechicl.viz import attention_html, prompt_attention


def test_labels_are_text_and_never_markup(tmp_path: Path, browser: Browser):
    attack = "</script><script>document.title='owned'</script><b>"
    html = attention_html(torch.eye(3)[None], [attack, "b", "c"], [attack])
    path = tmp_path / "attention.html"
    path.write_text(f"<!doctype html><html><head><title>fine</title></head><body>{html}</body></html>")
    page = browser.new_page(viewport={"width": 900, "height": 900})
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.body.innerText.includes('document.title')")
    assert page.title() == "fine"
    assert requests == [path.as_uri()]
    page.close()


def test_negative_attention_keeps_its_sign_and_softmax_starts_at_zero():
    assert '"minValue": -2.0' in attention_html(torch.tensor([[[1.0, -2.0], [0.0, 1.0]]]), ["a", "b"])
    assert '"minValue": 0.0' in attention_html(torch.full((1, 2, 2), 0.5), ["a", "b"])


def test_a_models_prompt_is_labelled_by_its_format():
    cfg = TransformerConfig(
        x_dim=2, n_context=3, prompt_format="interleaved", attention="softmax", d_model=8, n_heads=2
    )
    model, prompts = HookedTransformer(cfg), LinearRegression(x_dim=2, n_context=3).sample(2, seed=0)
    html = prompt_attention(model, prompts[:1])
    assert '["x1", "y1", "x2", "y2", "x3", "y3", "query"]' in html
    assert "head 1" in html
    assert not model.has_hooks()
    with pytest.raises(ValueError, match="one prompt"):
        prompt_attention(model, prompts)


def test_wrong_numbers_of_labels_are_refused():
    with pytest.raises(ValueError, match="one label a position"):
        attention_html(torch.eye(3)[None], ["a", "b"])
    with pytest.raises(ValueError, match="need 1 names"):
        attention_html(torch.eye(2)[None], ["a", "b"], ["h", "i"])
