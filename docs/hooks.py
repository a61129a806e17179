"""Generate pages from other files of the repository while the site is built.

- tutorials: the notebooks of `analyses/`, as they are stored, with their static pictures; none is run.
- findings/every-figure: `analyses/README.md`, the index of figures and tables.
- project/architecture, project/changelog, project/security: the files at the top of the repository.
- reference: a page for each module whose names are public.
- gallery: the sentence and the picture of each report in docs/gallery, which `make gallery` writes.

Links between files of the repository, such as from a notebook to a page of `docs/`, become links between pages.
"""

import ast
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "analyses/README.md": "findings/every-figure.md",
}
"""Files of the repository that are pages."""
ELSEWHERE = {"README.md": "index.md"}
"""The page that links to a file lead to, for files without their own page."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")
SHOWN_FIRST = [  # outputs of a cell, best first; scripts do not run in the pages
    "image/svg+xml", "image/png", "text/markdown", "text/html", "text/plain",
]  # fmt: skip
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
"""The repository. Not the site's `repo_url`, for which the theme would ask GitHub on every page."""
GALLERY = ROOT / "docs" / "gallery"
STILL = re.compile(r'id="figure0"[^>]*>(<svg.*?</svg>)</div>', re.DOTALL)
CARDS = "<!-- cards: "  # in a page: cards of the reports that follow, or of "all"
REFERENCE = re.compile(r"reference/((?!index|command)[\w.]+)\.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    notebooks = {path.stem: path for path in sorted((ROOT / "analyses").glob("*.ipynb"))}
    links = PAGES | ELSEWHERE | {f"analyses/{name}.ipynb": f"tutorials/{name}.md" for name in notebooks}
    links |= {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()}
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=with_links_to_pages(text, source, page, links)))
    for name, path in notebooks.items():
        page = f"tutorials/{name}.md"
        text, pictures = notebook_page(nbformat.read(path, as_version=4), name)
        files.append(File.generated(config, page, content=with_links_to_pages(text, f"analyses/{name}", page, links)))
        files.append(File.generated(config, f"tutorials/{path.name}", content=path.read_bytes()))
        for picture, data in pictures.items():
            files.append(File.generated(config, f"tutorials/{picture}", content=data))
    for report in sorted(GALLERY.glob("*/report.html")):
        if picture := STILL.search(report.read_text(encoding="utf-8")):
            files.append(File.generated(config, f"gallery/{report.parent.name}.svg", content=picture[1]))
    for page in nav_pages(config.nav):
        if module := REFERENCE.fullmatch(page):
            text = names_by_package() if module[1] == "analysis" else names_of(f"mechicl.{module[1]}")
            files.append(File.generated(config, page, content=text))
    return files


def without_tags(title: str) -> str:
    """Remove tags from a figure's title."""
    return re.sub(r"<[^>]+>", " ", title).replace("[", "(").replace("]", ")")


def names_of(module: str) -> str:
    """Return the page of a module: its names, and functions that share their name with a file of the package.

    Griffe takes `mechicl.algorithms.newton` for the file rather than the function.
    """
    parts, folder = [f"::: {module}\n"], source(module).parent
    for node in ast.walk(ast.parse(source(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and source(module).name == "__init__.py":
            for name in (alias.name for alias in node.names):
                if (folder / f"{name}.py").is_file():
                    options = "{heading_level: 2, show_root_full_path: false}"
                    anchor = f'<a id="{module}.{name}"></a>'
                    parts.append(f"{anchor}\n\n::: {node.module}.{name}\n    options: {options}\n")
    return "\n".join(parts)


def names_by_package() -> str:
    """Return the page of `mechicl.analysis`: a table of its names, with links to the pages of its packages."""
    lines = ["::: mechicl.analysis\n    options: {members: false}\n", "| name | what |", "|---|---|"]
    for node in ast.walk(ast.parse(source("mechicl.analysis").read_text(encoding="utf-8"))):  # imports for types too
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mechicl.analysis."):
            page = f"{node.module}.md".removeprefix("mechicl.")
            for name in (alias.name for alias in node.names):
                link = f"[`{name}`]({page}#{node.module}.{name}){{#mechicl.analysis.{name}}}"
                lines.append(f"| {link} | {summary(node.module or '', name)} |")
    lines += ["", "## Packages", "", "| package | question |", "|---|---|"]
    for path in sorted((ROOT / "mechicl" / "analysis").glob("*/__init__.py")):
        name, words = path.parent.name, ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        link = f"[`{name}`](analysis.{name}.md){{#mechicl.analysis.{name}}}"
        lines.append(f"| {link} | {words.splitlines()[0]} |")
    return "\n".join(lines) + "\n"


def source(module: str) -> Path:
    """Return the file of a module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def summary(module: str, name: str) -> str:
    """Return the first line of a name's docstring, following imports."""
    for node in ast.parse(source(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.ImportFrom) and name in (alias.name for alias in node.names):
            return summary(node.module or "", name)
    raise ValueError(f"{module} does not define {name}")


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Hide the side bars of pages without neighbours, and of the wide index."""
    if page.file.src_uri == "findings/every-figure.md":
        page.meta["hide"] = ["navigation", "toc"]
    elif page.parent is None:
        page.meta["hide"] = ["navigation"]
    markdown = re.sub(r"^\|.*", lambda row: row[0].replace(" ± ", "\u00a0±\u00a0"), markdown, flags=re.MULTILINE)
    return re.sub(rf"{CARDS}(.*) -->", lambda match: cards(match[1].split()), markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark drawings with heatmaps, whose colours are not inverted in the dark, and break module names at dots."""

    def marked(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), match[1]))
        file = files.get_file_from_path(path)
        return (
            match[0].replace("<img", '<img class="heatmap"') if file and b"<image" in file.content_bytes else match[0]
        )

    html = re.sub(r"(<h1[^>]*>)([\w.]+)", lambda match: match[1] + match[2].replace(".", ".<wbr>"), html)
    return re.sub(r'<img\b[^>]*\bsrc="([^":]+\.svg)"[^>]*>', marked, html)


def cards(names: list[str]) -> str:
    """Return cards of built reports, all or the first three of `names`: picture and sentence, linked to the report."""
    built = [report.parent.name for report in sorted(GALLERY.glob("*/report.html"))]
    shown = []
    for name in built if names == ["all"] else [name for name in names if name in built][:3]:
        text = (GALLERY / name / "report.html").read_text(encoding="utf-8")
        sentence = text.partition("<h1>")[2].partition("</h1>")[0]
        picture = f'<img src="gallery/{name}.svg" alt="{sentence}">' if STILL.search(text) else ""
        shown.append(f'<a href="gallery/{name}/report.html">{picture}<span>{sentence}</span></a>')
    return f'<div class="gallery">{"".join(shown)}</div>' if shown else "*`make gallery` builds these reports.*"


def nav_pages(nav: Any) -> list[str]:
    """Return all pages in the navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in nav_pages(entry)]


def with_links_to_pages(text: str, source: str, page: str, pages: dict[str, str]) -> str:
    """Point links to files at their pages; links to other files become code."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path not in pages:
            return words if words.startswith("`") else f"{words} (`{path}`)"
        return f"[{words}]({posixpath.relpath(pages[path], posixpath.dirname(page))}{anchor})"

    return LINK.sub(link, text)


def notebook_page(notebook: NotebookNode, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by path."""
    titles = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if any(kind.startswith("image/") for kind in data):  # what scripts would draw has its picture
                layout = data.get("application/vnd.plotly.v1+json", {}).get("layout", {})
                titles.append(layout.get("title", {}).get("text", "output of the cell above"))
                output["data"] = {kind: value for kind, value in data.items() if kind.startswith("image/")}
            elif "text/html" in data:
                data["text/html"] = f'<div class="output-table">{data["text/html"]}</div>'
    exporter = MarkdownExporter(config={"NbConvertBase": {"display_data_priority": SHOWN_FIRST}})
    text, resources = exporter.from_notebook_node(notebook, {"output_files_dir": f"{name}_files", "unique_key": name})
    text = re.sub(r"!\[(?:png|svg|jpeg)\]", lambda _: f"![{without_tags(titles.pop(0))}]", text)
    colab = SOURCE.replace("https://github.com", "https://colab.research.google.com/github")
    head = (
        f"*This page shows a notebook with its stored outputs and static pictures: [download it]({name}.ipynb), or "
        f"[open it in Colab]({colab}/blob/main/analyses/{name}.ipynb).*"
    )
    title, _, rest = text.lstrip().partition("\n")
    return f"{title}\n\n{head}\n{rest}", dict(resources["outputs"])
