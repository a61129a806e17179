"""Count the planted faults that the tests notice. `python tests/mutants.py --root . --n 200 --seed 0`.

A mutant is the library with one small fault: a comparison, an arithmetic operation, a number, a condition or a
default changed in one place of `algorithms/`, `constructions/` or `analysis/`. Each is run against the test files that
mirror its module or name what it changes, until one fails. Prints every survivor, and the share that was killed.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

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


def mutants_of(root: Path, file: Path) -> list[Mutant]:
    """List every mutant of a file; annotations, decorators, error messages and docstrings stay unchanged."""
    tree = ast.parse(file.read_text())
    lines, mutants = file.read_text().splitlines(keepends=True), []

    def add(node: ast.expr, changed: ast.expr, name: str) -> None:
        if node.lineno != node.end_lineno:
            return
        line = lines[node.lineno - 1].encode()
        text = ast.unparse(changed)
        if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
            text = f"({text})"
        replaced = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
        source = "".join([*lines[: node.lineno - 1], replaced.decode(), *lines[node.lineno :]])
        try:
            ast.parse(source)
        except SyntaxError:  # inside an f-string, say
            return
        change = f"{ast.unparse(node)}  ->  {ast.unparse(changed)}"
        mutants.append(Mutant(str(file.relative_to(root)), node.lineno, name, change, source))

    def visit(node: ast.AST, name: str) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name if name.startswith("_") or not name or node.name[0] != "_" else name
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            changed = copy.deepcopy(node)
            changed.ops = [COMPARISONS[type(node.ops[0])]()]
            add(node, changed, name)
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.JoinedStr):
            changed = copy.deepcopy(node)
            changed.op = ARITHMETIC[type(node.op)]()
            add(node, changed, name)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            add(node, node.operand, name)
        if isinstance(node, ast.BoolOp):
            changed = copy.deepcopy(node)
            changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            add(node, changed, name)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                add(node, ast.Constant(not node.value), name)
            elif isinstance(node.value, int | float):
                add(node, ast.Constant(node.value + 1), name)
        for field, child in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for item in child if isinstance(child, list) else [child]:
                if isinstance(item, ast.AST):
                    visit(item, name)

    for statement in tree.body:
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


def start(tree: Path, mutant: Mutant, tests: list[str]) -> int:
    """Write the mutant into a copy of the tree, run the tests there in a fork, and return the process id."""
    (tree / mutant.file).write_text(mutant.source)
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was imported before the fork
        code = int(pytest.main([*options, *tests]))
    finally:
        os._exit(code)


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

    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != root / "tests"]
    import beartype  # noqa: F401  what every child needs is imported once, before the forks
    import datasets  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import pandas  # noqa: F401
    import plotly.graph_objects  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch
    import transformer_lens  # noqa: F401
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    log = arguments.log or Path(tempfile.mkdtemp()) / "mutants.jsonl"
    known = {(m["file"], m["line"], m["change"]): m for m in map(json.loads, log.open())} if log.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        idle = [Path(folder, str(worker)) for worker in range(arguments.workers)]
        for tree in idle:
            shutil.copytree(root, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "report", "runs"))
        waiting = [m for m in sample if (m.file, m.line, m.change) not in known]
        rows = [known[m.file, m.line, m.change] for m in sample if (m.file, m.line, m.change) in known]
        running: dict[int, tuple[Mutant, Path, float]] = {}
        while waiting or running:
            while waiting and idle:
                mutant, tree = waiting.pop(0), idle.pop()
                running[start(tree, mutant, tests_for(root, mutant))] = (mutant, tree, time.monotonic())
            time.sleep(0.1)
            for pid, (mutant, tree, begun) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                seconds = time.monotonic() - begun
                if not done and seconds < arguments.limit:
                    continue
                outcome = "time"
                if done:
                    outcome = OUTCOMES.get(os.waitstatus_to_exitcode(status), "error")
                else:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                shutil.copy(root / mutant.file, tree / mutant.file)
                idle.append(tree)
                del running[pid]
                row = {"file": mutant.file, "line": mutant.line, "name": mutant.name, "change": mutant.change}
                rows.append(row | {"outcome": outcome, "seconds": round(seconds, 1)})
                with log.open("a") as lines:
                    lines.write(json.dumps(rows[-1]) + "\n")
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
