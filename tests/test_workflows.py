"""Workflows and forms of GitHub: valid by its schemas, and without steps that the Makefile does not have."""

import json
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml

from tests.pages import ROOT, makefile_targets

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize(("schema", "files"), [
    ("github-workflows", WORKFLOWS),
    ("github-issue-forms", FORMS),
    ("citation-file-format", [ROOT / "CITATION.cff"]),
])  # fmt: skip
def test_files_fit_their_schemas(schema: str, files: list[Any]):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile_only(path: Any):
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        named = job.get("strategy", {}).get("matrix", {}).get("target", [])
        for step in job["steps"]:
            if "run" in step:
                make, target, *variables = shlex.split(step["run"].replace("${{ matrix.target }}", "TARGETS"))
                assert make == "make"
                assert set(named if target == "TARGETS" else [target]) <= makefile_targets()
                check_variables(variables)


def check_variables(words: list[str]) -> None:
    """Assert that the Makefile reads each variable, and that the packages in PKG have tests."""
    for word in words:
        name, _, value = word.partition("=")
        assert f"$({name}" in MAKEFILE
        if name == "PKG":
            assert all((ROOT / "tests" / package).is_dir() for package in value.split())


def test_the_workflows_test_every_python_that_the_metadata_names():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    pythons = [name.rpartition(" ")[2] for name in classifiers if "Python :: 3." in name]
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["linux"]["strategy"]["matrix"]["python"] == pythons
    assert f"VERSIONS ?= {' '.join(pythons)}\n" in MAKEFILE


def test_the_development_container_calls_the_makefile():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    make, *targets = container["postCreateCommand"].split()
    assert make == "make"
    assert set(targets) <= makefile_targets()


def test_environments_of_other_versions_run_the_default_tests():
    def dry_run(*words: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "--dist worksteal tests/base tests/prompts" in dry_run("quick", "PKG=base prompts")
    oldest, newest = dry_run("oldest"), dry_run("newest")
    assert "--resolution lowest-direct" in oldest
    assert ".venv-oldest/bin/pytest" in oldest
    assert ".venv-newest/bin/pytest" in newest
    assert "--constraint constraints.txt" not in newest.replace("--build-constraint constraints.txt", "")
