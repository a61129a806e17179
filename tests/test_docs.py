"""The documentation and the README: code prints the shown output, numbers are measured, pages work offline."""

import html
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser

from analyses.support.results import Results
from mechicl.algorithms import card
from mechicl.checkpoints import available
from mechicl.tasks import registry
from mechicl.training import PRESETS
from mechicl.viz import page as pages
from mechicl.viz.elements import figure
from tests.pages import NEEDS_SMOLLM2, ROOT, blocks, compare, compare_roughly, fences, makefile_targets, run
from tests.public import exported
from tests.scripts import import_script

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FINDINGS = sorted((DOCS / "findings").glob("*.md"))
RESULTS = ROOT / "analyses" / "results"


def name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


# ---- the code ----
MARKS = {"index.md": (), "how-to/language-models.md": (pytest.mark.slow, NEEDS_SMOLLM2)}
CODE = [
    pytest.param(path, id=name(path), marks=MARKS.get(name(path), pytest.mark.slow)) for path in PAGES if blocks(path)
]


@pytest.mark.parametrize("path", CODE)
def test_the_code_of_a_page_runs_and_prints_the_shown_output(path: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "TASK_TYPES", dict(registry.TASK_TYPES))  # undo registrations of a page
    monkeypatch.setattr(card, "CARDS", dict(card.CARDS))
    run(blocks(path), name(path))


def test_every_block_is_of_a_tested_kind():
    assert {fence.language for path in PAGES for fence in fences(path)} <= {"python", "text", "sh"}


def test_a_users_model_takes_25_lines():
    _, *opening, _ = blocks(DOCS / "how-to" / "own-module.md")
    lines = [line for block in opening for line in block.code.splitlines() if line.strip()]
    assert len(lines) <= 25
    code = "\n".join(lines)
    assert all(call in code for call in ("wrap(", "identify(", "fit_readouts(", "patch(", "report("))


def test_a_changed_number_is_noticed():
    compare("loss: 0.415 ± 0.013\n", "loss:  0.4151 ± 0.013")
    for said in ("loss: 0.416 ± 0.013", "losses: 0.415 ± 0.013", "loss: 0.415 ± 0.013\nmore"):
        with pytest.raises(AssertionError):
            compare("loss: 0.415 ± 0.013", said)
    compare_roughly("ridge: 0.415 ± 0.013\n", "descent: 0.5 ± 0.02")
    for said in ("loss: 1.416 ± 0.013", "loss: 0.415", "loss: 0.415 ± 0.013\nmore"):
        with pytest.raises(AssertionError):
            compare_roughly("loss: 0.415 ± 0.013", said)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_exist(path: Path):
    targets = makefile_targets()
    text = path.read_text(encoding="utf-8")
    lines = [line for fence in fences(path) if fence.language == "sh" for line in fence.content.splitlines()]
    lines += re.findall(r"`((?:python|mechicl|make) [^`]+)`", text)
    for line in lines:
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "make":
            assert {argument for argument in arguments if "=" not in argument} <= targets, line
        elif program == "python" and arguments[0] != "-m":
            assert (ROOT / arguments[0]).is_file(), line
        elif program == "mechicl":
            assert arguments[0] in {"list", "report", "train", "sweep", "import", "join", "env", "--version"}, line
            if arguments[0] == "train" and arguments[1:] and arguments[1].islower():
                assert arguments[1] in PRESETS, line


def test_names_are_public():
    for path in [*PAGES, PATH]:
        for room, thing in re.findall(
            r"(?<!tools\.)\b(analysis|algorithms|constructions|viz)\.(\w+)", path.read_text()
        ):
            if thing not in ("md", "html"):
                assert hasattr(importlib.import_module(f"mechicl.{room}"), thing), f"{path.name}: {room}.{thing}"


def test_every_checkpoint_has_a_row():
    text = (DOCS / "project" / "checkpoints.md").read_text(encoding="utf-8")
    assert [checkpoint for checkpoint in available() if f"| `{checkpoint}` |" not in text] == []


# ---- the findings ----
@cache
def printed(command: str) -> str:
    """The text of a script's saved results, found by its command."""
    script, *options = command.split()
    for path in RESULTS.glob(f"{Path(script).stem}*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        made = data["command"].removeprefix("python ").removeprefix("analyses/").split()
        if made[0] == script and (not options or made[1:] == options):
            return str(Results.read(path))
    raise AssertionError(f"no results file was made by {command}")


def measured_cells() -> list[tuple[str, str, str]]:
    """Page, command and cell of every measured value in the tables of findings.

    The command is in the column "script", or above the table.
    """
    cells = []
    for path in FINDINGS:
        command, header = "", []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("|"):
                header = []
                commands = re.findall(r"`python analyses/([^`]+)`", line)
                command = commands[-1] if commands else command
                continue
            row = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not header:
                header = row
            elif not set(row[0]) <= set("-") and any(word.startswith("measured") for word in header):
                named = row[header.index("script")].strip("`") if "script" in header else command
                columns = [i for i, word in enumerate(header) if word.startswith("measured")]
                cells += [(path.name, named, row[column]) for column in columns]
    return cells


VALUE = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?: ± [\d.]+)?")


def test_measured_numbers_are_those_in_the_results_files():
    cells = measured_cells()
    assert len(cells) > 40
    wrong = []
    for page, command, cell in cells:
        assert command, f"{page}: no command is named above the table with {cell!r}"
        text = printed(command).replace(",", "")
        every = [float(value) for value in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", text)]
        for value in VALUE.findall(cell):
            plain = value.rstrip(",").replace(",", "")
            if " ± " in plain:
                same = plain in text
            else:  # a number without an interval may have more digits in the file
                digits = len(plain.partition(".")[2])
                same = any(f"{number:.{digits}f}" == plain for number in every)
            if not same:
                wrong.append((page, command, value))
    assert wrong == []


def test_the_table_of_verdicts_is_the_scripts():
    script = import_script("does_it_run_table")
    results = script.read_results()
    assert list(results) == list(script.MODELS)
    assert script.make_table(results) in (DOCS / "findings" / "does-it-run.md").read_text(encoding="utf-8")


# ---- the site ----
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of any part of the build is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path):
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    names = [name for name, _ in exported()]
    assert len(names) > 200
    assert [thing for thing in names if f'id="{thing}"' not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize(("module", "text"), [
    ("analysis.behaviour", 'Float[Tensor, "prompt"]'),  # shapes as written
    ("analysis.weights", "W_KQ = W_Q W_Kᵀ (with the score scale) and W_PV = W_V W_O, both [layer head"),  # in one item
])  # fmt: skip
def test_annotations_and_docstrings_are_shown_whole(site: Path, module: str, text: str):
    page = (site / "reference" / f"{module}.html").read_text(encoding="utf-8")
    assert text in " ".join(html.unescape(re.sub(r"<[^>]+>", "", page)).split())


@pytest.mark.slow
def test_pages_need_no_network_and_show_their_pictures(site: Path, browser: Browser):
    context = browser.new_context(viewport={"width": 400, "height": 900}, offline=True)
    page = context.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(pages) > 40
    for path in pages:
        page.goto(path.as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        missing = page.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)")
        assert (path.name, wide, missing, errors) == (path.name, 0, [], [])
    for path in [site / "index.html", site / "gallery.html", *pages[:: len(pages) // 9]]:
        for width in (390, 600, 768, 1300):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(path.as_uri())
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert (path.name, width, wide) == (path.name, width, 0)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()


@pytest.mark.slow
def test_only_heatmaps_keep_their_colours_in_the_dark(site: Path):
    text = (site / "findings" / "layers.html").read_text(encoding="utf-8")
    assert re.search(r'<img class="heatmap"[^>]* src="[^"]*/layers\.svg"', text)
    assert 'class="heatmap"' not in (site / "findings" / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_tutorials_show_every_picture_of_their_notebooks(site: Path):
    for path in sorted((ROOT / "analyses").glob("*.ipynb")):
        outputs = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", [])]
        drawn = [o for o in outputs if any("plotly" in kind or "image/" in kind for kind in o.get("data", {}))]
        text = (site / "tutorials" / f"{path.stem}.html").read_text(encoding="utf-8")
        assert len(re.findall(rf'<img [^>]*src="{path.stem}_files/', text)) == len(drawn) > 0, path.name
        assert (site / "tutorials" / path.name).read_bytes() == path.read_bytes()
        assert re.search(rf'href="https://colab[^"]*/mechicl/blob/main/analyses/{path.name}"', text)


# ---- the readme: short, its code is the first page's, and what it names exists ----
PATH = ROOT / "README.md"
README = PATH.read_text(encoding="utf-8")
FIRST_PAGE = ROOT / "docs" / "index.md"


def test_it_is_short_and_its_picture_is_small():
    assert len(README.splitlines()) <= 150
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert (ROOT / picture).stat().st_size <= 80_000
    (code,) = blocks(PATH)
    assert len([line for line in code.code.splitlines() if line.strip()]) <= 15


def test_its_code_and_what_that_prints_are_those_of_the_first_page_which_is_run():
    (readme,) = blocks(PATH)
    page = blocks(FIRST_PAGE)
    assert lines(readme.code) == [line for block in page for line in lines(block.code)]
    assert lines(readme.output) == [line for block in page for line in lines(block.output)]


def lines(text: str | None) -> list[str]:
    return [line for line in (text or "").splitlines() if line.strip()]


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)", README)
    assert len(targets) > 20
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_numbers_of_the_findings_are_on_their_pages():
    part = README.partition("## What it found")[2].partition("\n## ")[0]
    for item in re.split(r"\n(?=\d\. )", part):
        pages = "".join(
            (ROOT / page).read_text(encoding="utf-8") for page in re.findall(r"docs/findings/[\w-]+\.md", item)
        )
        for number in re.findall(r"\d+\.\d+ ± \d+\.\d+", item):
            assert number in pages, number


def test_numbers_of_the_findings_are_those_of_the_index():
    part = README.partition("## What it found")[2].partition("\n## ")[0]
    results = [Results.read(path) for path in sorted((ROOT / "analyses" / "results").glob("*.json"))]
    rows = [row for comparison in results for row in comparison.rows]
    claims = [claim for comparison in results for claim in comparison.claims]
    rows += [row for claim in claims for each in (*claim.lines.values(), *claim.controls.values()) for row in each]
    printed = {str(row) for row in rows}
    numbers = re.findall(r"-?\d[\d.]* ± [\d.]*\d|-?\d[\d.]* \([\d.-]+ to [\d.-]*\d\)|\d+ of \d+ seeds", part)
    assert numbers
    for number in numbers:
        assert number in printed, f"{number}: no results file prints it"


# ---- the gallery ----


def test_a_card_has_the_sentence_and_the_picture_of_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hooks = importlib.import_module("docs.hooks")
    monkeypatch.setattr(hooks, "GALLERY", tmp_path)
    assert "make gallery" in hooks.cards(["all"])
    for name in ("b", "a", "c", "d"):
        report = tmp_path / name / "report.html"
        report.parent.mkdir()
        answer = pages.Section(
            f"{name} behaves like ridge regression", "", figure("errors", "x", "y").add_scatter(y=[1, 2])
        )
        report.write_text(pages.page(name, "lead", [], opening=answer).replace('px"></div>', 'px"><svg></svg></div>'))
    assert re.findall(r"<span>(\w) behaves like ridge regression</span>", hooks.cards(["all"])) == ["a", "b", "c", "d"]
    shown = hooks.cards(["missing", "d", "a", "c", "b"])
    assert re.findall(r'href="gallery/(\w)/report.html"', shown) == ["d", "a", "c"]
    assert re.findall(r'src="gallery/(\w).svg"', shown) == ["d", "a", "c"]
