"""Workflows and forms of GitHub: valid by its schemas, and without steps that the Makefile does not have."""

import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.pages import ROOT, makefile_targets

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
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
        commands = [step["run"] for step in job["steps"] if "run" in step]
        for command in commands:
            make, target = command.split(maxsplit=1)
            assert make == "make"
            assert set(named if "matrix.target" in target else [target]) <= makefile_targets()
