"""The wheel contains the checkpoints and works without the repository."""

import email
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import mechicl

REPOSITORY = Path(__file__).parents[1]
CHECKPOINTS = REPOSITORY / "checkpoints"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
EXCLUDED = {Path(path).name for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]}
"""Checkpoints that only scripts of `analyses/` read."""
MOST_MB = 40


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command and return its output; its errors are in the failure's message."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def files(folder: Path) -> list[Path]:
    """The files of a folder, without bytecode."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is published: the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, REPOSITORY, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def pythons() -> dict[str, Path]:
    """Interpreters of the versions in the metadata, on the path or in pyenv; the running one for its version."""
    found = {"{}.{}".format(*sys.version_info[:2]): Path(sys.executable)}
    for name in PROJECT["project"]["classifiers"]:
        version = name.rpartition(" ")[2]
        places = [f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
        for place in places if "Python :: 3." in name and version not in found else []:
            done = subprocess.run(
                ["sh", "-c", f"{place} -c 'import sys; print(sys.executable)'"], capture_output=True, text=True
            )
            if done.returncode == 0:
                found[version] = Path(done.stdout.strip())
                break
    return found


def test_excluded_checkpoints_exist_and_only_analyses_read_them():
    assert all((CHECKPOINTS / name).is_dir() for name in EXCLUDED)
    pages = [path for folder in ("mechicl", "docs/how-to") for path in files(REPOSITORY / folder)]
    loads = {f'load("{name}"' for name in EXCLUDED}
    assert not [
        path for path in pages if path.suffix in (".py", ".md") and any(each in path.read_text() for each in loads)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("version", pythons())
def test_one_installation_and_one_command_write_a_report(version: str, wheel: Path, tmp_path: Path):
    """Without the repository; uv uses the indexes that pip has in the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {
        f"UV_{name[4:]}": os.environ[name] for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL") if name in os.environ
    }
    environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"

    def call(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    uv = [sys.executable, "-m", "uv"]
    made = call(*uv, "venv", "--python", pythons()[version], "bare")
    assert made.returncode == 0, made.stderr
    programs = tmp_path / "bare" / ("Scripts" if os.name == "nt" else "bin")
    constraints = REPOSITORY / "constraints.txt"
    installed = call(*uv, "pip", "install", "--python", programs / "python", "--constraint", constraints, wheel)
    if "CI" not in os.environ and "error sending request" in installed.stderr:
        pytest.skip("no network")
    assert installed.returncode == 0, installed.stderr
    where = call(programs / "python", "-c", "import mechicl; print(mechicl.__file__)").stdout.strip()
    assert Path(where).is_relative_to(tmp_path)
    listed = call(programs / "mechicl", "list").stdout.split()
    assert {path.name for path in CHECKPOINTS.iterdir() if path.is_dir()} - set(listed) == EXCLUDED
    reported = call(programs / "mechicl", "report", "lsa-1l", "--out", "report")
    assert reported.returncode == 0, reported.stderr
    assert "lsa-1l" in (tmp_path / "report/report.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "report/report.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_wheel_contains_the_library_its_checkpoints_and_the_licence(wheel: Path):
    assert wheel.stat().st_size <= MOST_MB * 1e6
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.getinfo(name).file_size for name in archive.namelist()}
    shipped = {
        path: f"mechicl/_checkpoints/{path.relative_to(CHECKPOINTS).as_posix()}"
        for path in files(CHECKPOINTS)
        if path.relative_to(CHECKPOINTS).parts[0] not in EXCLUDED
    }
    library = {path: path.relative_to(REPOSITORY).as_posix() for path in files(REPOSITORY / "mechicl")}
    assert len(shipped) > 2
    assert {"mechicl/py.typed", "mechicl/sources.bib", "mechicl/viz/explorer.js"} <= set(library.values())
    for path, name in (shipped | library).items():
        assert contents.pop(name, None) == path.stat().st_size, name
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in contents)
    assert all(name.split("/")[0].endswith(".dist-info") for name in contents), "unexpected files"


@pytest.mark.slow
def test_the_source_distribution_is_complete(built: Path):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        contents = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CITATION.cff", "pyproject.toml", "mechicl/py.typed"} <= contents
    assert not any(name.startswith(("tests/", "analyses/", ".venv")) for name in contents)


@pytest.mark.slow
def test_metadata_passes_the_checks_of_an_index(built: Path, wheel: Path):
    checked = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built, NO_COLOR="1")
    assert checked.count("PASSED") == 2
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == mechicl.__version__
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert {"Source", "Issues", "Changelog"} <= set(urls)
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras >= {"docs", "figures", "notebooks", "test"}


def test_the_citation_is_of_this_version_and_has_what_the_format_asks_for():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    for entry in (citation, citation["preferred-citation"]):
        assert entry["type"] == "software"
        assert entry["authors"] == [{"name": "mechicl developers"}]
        assert entry["title"].startswith("mechicl")
        assert str(entry["version"]) == mechicl.__version__
        assert entry["license"] == "MIT"
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]


def test_a_report_needs_no_extra_and_every_other_set_up_is_one_of_them():
    def dry_run(target: str) -> str:
        command = ("make", "--dry-run", "--what-if=pyproject.toml", "--no-print-directory", target)
        return run(*command, cwd=REPOSITORY, MAKEFLAGS="")

    assert "--editable ." in dry_run("report")
    assert "--extra" not in dry_run("report")
    extras = PROJECT["project"]["optional-dependencies"]
    for target, extra in (("test", "test"), ("wheel", "test"), ("setup", "test"), ("notebooks", "notebooks")):
        assert f"--extra {extra} " in dry_run(target)
        assert extra in extras
