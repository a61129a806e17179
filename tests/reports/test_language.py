"""The report on a language model, on one with random weights."""

import json

import pytest

from mechicl.reports.language import report_language
from tests.analysis.language.conftest import hf_model, language  # noqa: F401  fixtures


def test_the_page_and_its_numbers(language, tmp_path):  # noqa: F811
    path = report_language(language, tmp_path, tasks=["antonyms", "plural"], quick=True, progress=False)
    page, saved = path.read_text(encoding="utf-8"), json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "No learning in context beyond what shuffled labels give" in page
    assert "Jaccard index" in page
    assert len(saved["few_shot"]["plural"]["shuffled"]) == 4
    assert len(saved["function_vector_heads"]) == 3


def test_unknown_tasks(language, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="antonym"):
        report_language(language, tmp_path, tasks=["antonym"])
