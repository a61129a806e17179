"""Which packages may import which, what the top-level package shows, and examples in docstrings."""

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mechicl
from mechicl import algorithms, analysis, constructions, tasks
from mechicl.checkpoints import load, load_checkpoint
from mechicl.learners import AlgorithmLearner
from mechicl.prompts import TokenSequences

ROOT = Path(mechicl.__file__).parent


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table of ARCHITECTURE.md whose first column has a heading."""
    lines = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


LEVELS = [re.findall(r"`(\w+)/`", packages) for _, packages, _ in rows_of("level")]
"""A package imports from levels below its own, and on its own level from packages named before it."""
BETWEEN_QUESTIONS = {
    name.strip("`"): set(re.findall(r"`(\w+)`", others)) for name, _, others in rows_of("package of `analysis/`")
}
MODULES = sorted(ROOT.rglob("*.py"))


@functools.cache
def imports(path: Path) -> set[str]:
    """The modules of mechicl that a file imports anywhere, functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("mechicl.") for name in names if name.startswith("mechicl.")}


def package(module: str) -> str:
    return module.split(".")[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_package_has_a_level():
    packages = {package(module_of(path)) for path in MODULES} - {""}
    assert packages == {name for level in LEVELS for name in level}
    assert {path.parent.name for path in (ROOT / "analysis").glob("*/__init__.py")} == set(BETWEEN_QUESTIONS)


def test_packages_import_only_from_packages_before_them():
    order = [name for level in LEVELS for name in level]
    for path in MODULES:
        here = package(module_of(path))
        if here:  # not the top-level module, which names all packages
            others = {package(name) for name in imports(path)} - {here}
            assert others <= set(order[: order.index(here)]), path


def test_no_module_imports_the_top_level_package():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert "mechicl" not in names, path
            if isinstance(node, ast.ImportFrom) and node.module == "mechicl":
                assert all((ROOT / alias.name).is_dir() for alias in node.names), path


def test_packages_import_few_others():
    pairs = {(package(module_of(path)), package(name)) for path in MODULES for name in imports(path)}
    assert sum(a != b for a, b in pairs) <= 120


def test_questions_use_each_other_only_as_is_allowed():
    crossings = 0
    for path in (ROOT / "analysis").glob("*/*.py"):
        question = path.parent.name
        others = {name.split(".")[1] for name in imports(path) if name.startswith("analysis.")} - {question}
        assert others <= BETWEEN_QUESTIONS[question], path
        crossings += len(others)
    assert crossings <= 20


def test_there_is_no_circle():
    graph = {module_of(path): imports(path) for path in MODULES}
    known = set(graph)
    edges = {
        module: {name if name in known else name.rpartition(".")[0] for name in names} & known
        for module, names in graph.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in edges[module] - {module}:
                visit(target, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_no_public_function_has_ten_parameters():
    """Settings that belong together are one object. The signatures of TransformerLens' methods stay."""
    many = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name == "__init__"):
                names = {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                if len(names - {"self", "cls"}) > 9:
                    many.append(f"{module_of(path)}.{node.name}")
    assert many == [
        "models.prompted.forward",
        "models.transformer.lens_pretrained.from_pretrained",
        "models.transformer.texts.generate",
    ]


# ---- examples in docstrings ----
NAMES = {
    "torch": torch, "algorithms": algorithms, "constructions": constructions, "load": load,
    "load_checkpoint": load_checkpoint, "AlgorithmLearner": AlgorithmLearner, "TokenSequences": TokenSequences,
    **{name: getattr(tasks, name) for name in tasks.__all__},
}  # fmt: skip


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Names that every example of the analyses may use."""
    checkpoint = load_checkpoint("gpt2-8l")
    prompts = checkpoint.task.sample(16, seed=1)
    names = NAMES | {"model": checkpoint.models[0], "task": checkpoint.task, "prompts": prompts}
    for module in filter(inspect.ismodule, vars(analysis).values()):
        names |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return names


EXAMPLES = [name for name in analysis.__all__ if inspect.isroutine(getattr(analysis, name))]
SLOW = ("test_hypotheses", "fit_subspace")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in EXAMPLES]
)
def test_examples_run(name: str, names: dict[str, Any]):
    text = inspect.getdoc(getattr(analysis, name)) or ""
    lines = re.findall(r"^ *(?:>>>|\.\.\.) ?(.*)$", text.partition("Example:")[2], flags=re.MULTILINE)
    assert lines, f"{name} has no example"
    exec("\n".join(lines), dict(names))


EXAMPLES_MODULES = (
    "algorithms.discrete", "algorithms.stepwise.copying", "algorithms.stepwise.inverses", "algorithms.token_counts",
    "analysis.behaviour.token_identification", "base.threads", "constructions.hiding", "constructions.supports",
    "interop.tracr", "learners.token_learners", "tasks.boolean_functions", "tasks.gaussian_clusters",
    "tasks.sampling", "tasks.token_sequences",
)  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES_MODULES)
def test_examples_of_a_module_run(name):
    module = importlib.import_module(f"mechicl.{name}")
    names = NAMES | {each: getattr(analysis, each) for each in analysis.__all__}
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(module, extraglobs=names, optionflags=options)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize(
    ("statement", "absent"),
    [("import mechicl.algorithms, mechicl.tasks", ("transformers", "transformer_lens", "pandas")),
     ("import mechicl.analysis", ("torch",)),
     ("from mechicl.analysis import identify", ("mechicl.analysis.circuits", "mechicl.analysis.language"))],
)  # fmt: skip
def test_what_is_not_needed_is_not_imported(statement: str, absent: tuple[str, ...]):
    code = f"import sys; {statement}; print([name for name in {absent} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_lazy_names_of_the_analyses_are_the_exported_ones():
    every = [*analysis._NAMES, *analysis._PLACES]
    assert sorted(every) == sorted(analysis.__all__)
    for name in every:
        assert getattr(analysis, name) is not None
    with pytest.raises(AttributeError, match="no_such"):
        _ = analysis.no_such  # pyright: ignore[reportAttributeAccessIssue]
