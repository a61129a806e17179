"""Count the planted faults that the tests notice. `python tests/mutants.py --root . --n 200 --seed 0`.

A mutant is the library with one small fault: a comparison, an arithmetic operation, a number, a condition or a
default changed in one place of `algorithms/`, `constructions/` or `analysis/`. Each is run against the test files that
mirror its module or name what it changes, until one fails. Prints every survivor, and the share that was killed.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

PACKAGES = ("algorithms", "constructions", "analysis")
COMPARISONS = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.Mod: ast.Mult,
}  # fmt: skip
OUTCOMES = {0: "survived", 1: "killed", 2: "killed"}  # what pytest returns: 2, where a module cannot be imported


@dataclass(frozen=True)
class Mutant:
    """One fault: the source of a file with one node changed."""

    file: str
    line: int
    name: str
    change: str
    source: str


def changed(node: ast.AST) -> ast.expr | None:
    """Return an expression with another operator, number or truth value; None if it has none that is changed."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            return ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp() if type(node.op) in ARITHMETIC and not isinstance(node.left, ast.JoinedStr):
            return ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return node.operand
        case ast.BoolOp():
            return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.Constant(value=bool()):
            return ast.Constant(not node.value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value + 1)
    return None


def mutants_of(root: Path, file: Path) -> list[Mutant]:
    """List every mutant of a file; annotations, decorators, error messages and docstrings stay unchanged."""
    lines, mutants = file.read_text().splitlines(keepends=True), []

    def add(node: ast.expr, new: ast.expr, name: str) -> None:
        line, text = lines[node.lineno - 1].encode(), ast.unparse(new)
        text = text if isinstance(node, ast.Constant) else f"({text})"
        replaced = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
        source = "".join([*lines[: node.lineno - 1], replaced.decode(), *lines[node.lineno :]])
        try:
            ast.parse(source)
        except SyntaxError:  # inside an f-string, say
            return
        change = f"{ast.unparse(node)}  ->  {ast.unparse(new)}"
        mutants.append(Mutant(str(file.relative_to(root)), node.lineno, name, change, source))

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name if name.startswith("_") or not name or node.name[0] != "_" else name
        new = changed(node)
        if new is not None and isinstance(node, ast.expr) and node.lineno == node.end_lineno:
            add(node, new, name)
        for field, child in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for item in child if isinstance(child, list) else [child]:
                if isinstance(item, ast.AST):
                    visit(item, name)

    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            visit(statement, "")
    return mutants


def tests_for(root: Path, mutant: Mutant) -> list[str]:
    """List the test files of the mutant's module, then those of other packages that name the changed function."""
    module = Path(mutant.file)
    mirrored = Path("tests", *module.parts[1:-1])
    files = [root / mirrored / f"test_{module.stem}.py", root / mirrored.parent / f"test_{module.parent.name}.py"]
    named = re.compile(rf"\b{re.escape(mutant.name)}\b|\b{re.escape(module.stem)}\b")
    others = [
        path
        for package in PACKAGES
        for path in sorted((root / "tests" / package).rglob("test_*.py"))
        if path not in files and named.search(path.read_text())
    ]
    others.sort(key=lambda path: (path.parent != root / mirrored, path.stat().st_size))
    chosen = [path for path in files if path.exists()] + others
    return [str(path.relative_to(root)) for path in chosen] or [str(mirrored)]


def try_mutant(tree: Path, mutant: Mutant, tests: list[str], limit: float) -> str:
    """Run tests in a copy of the tree with the mutant, and return "killed", "survived", "time" or "error"."""
    before = (tree / mutant.file).read_text()
    (tree / mutant.file).write_text(mutant.source)
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, timeout=limit)
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        (tree / mutant.file).write_text(before)
    return OUTCOMES.get(done.returncode, "error")


def main() -> None:
    """Sample, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("."))
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300, help="seconds a mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log", type=Path, help="lines of JSON, one a mutant; those already there are not run again")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    files = [path for package in PACKAGES for path in sorted((root / "mechicl" / package).rglob("*.py"))]
    every = [mutant for path in files for mutant in mutants_of(root, path)]
    sample = random.Random(arguments.seed).sample(every, min(arguments.n, len(every)))
    print(f"{len(every)} mutants in {len(files)} files; {len(sample)} of them, seed {arguments.seed}", flush=True)
    log = arguments.log or Path(tempfile.mkdtemp()) / "mutants.jsonl"
    known = {(m["file"], m["line"], m["change"]): m for m in map(json.loads, log.open())} if log.exists() else {}
    trees = SimpleQueue[Path]()

    def row_of(mutant: Mutant) -> dict[str, Any]:
        row = known.get((mutant.file, mutant.line, mutant.change))
        if row is None:
            tree, begun = trees.get(), time.monotonic()
            outcome = try_mutant(tree, mutant, tests_for(root, mutant), arguments.limit)
            trees.put(tree)
            row = {"file": mutant.file, "line": mutant.line, "name": mutant.name, "change": mutant.change}
            row |= {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1)}
            with log.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        return row

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        for worker in range(arguments.workers):
            tree = Path(folder, str(worker))
            shutil.copytree(root, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "report", "runs"))
            trees.put(tree)
        rows = list(pool.map(row_of, sample))
    for row in rows:
        if row["outcome"] not in ("killed", "time"):
            print(f"{row['outcome']}  {row['file']}:{row['line']} {row['name']}: {row['change']}")
    killed = sum(row["outcome"] in ("killed", "time") for row in rows)
    late = sum(row["outcome"] == "time" for row in rows)
    share = killed / len(rows)
    error = 1.96 * (share * (1 - share) / len(rows)) ** 0.5
    print(f"killed {killed} of {len(rows)} ({share:.3f} ± {error:.3f}), {late} of them by the limit of time")


if __name__ == "__main__":
    main()
