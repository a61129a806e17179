"""The wheel contains the checkpoints and works without the repository."""

import email
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import mechicl

REPOSITORY = Path(__file__).parents[1]
CHECKPOINTS = REPOSITORY / "checkpoints"


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


@pytest.mark.slow
def test_the_wheel_contains_the_library_its_checkpoints_and_the_licence(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.getinfo(name).file_size for name in archive.namelist()}

    shipped = {path: f"mechicl/_checkpoints/{path.relative_to(CHECKPOINTS).as_posix()}" for path in files(CHECKPOINTS)}
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


@pytest.mark.slow
def test_installed_wheel_lists_its_checkpoints_without_the_repository(wheel: Path, tmp_path: Path):
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=elsewhere)

    # With -S no .pth file is read, so the editable install does not bring the repository back;
    # the dependencies are found because site-packages is named as a plain folder.
    path = os.pathsep.join([str(target), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])

    def python(*arguments: str) -> str:
        return run(sys.executable, "-S", *arguments, cwd=elsewhere, PYTHONPATH=path)

    where = "import os, sys, mechicl; print(mechicl.__file__, *map(os.path.realpath, sys.path), sep='\\n')"
    package, *search_path = python("-c", where).splitlines()
    assert Path(package).is_relative_to(target)
    assert os.path.realpath(REPOSITORY) not in search_path

    listed = python("-m", "mechicl.cli", "list")
    assert [path.name for path in CHECKPOINTS.iterdir() if path.is_dir() and path.name not in listed] == []


def test_a_report_needs_no_extra_and_every_other_set_up_is_one_of_them():
    def dry_run(target: str) -> str:
        command = ("make", "--dry-run", "--what-if=pyproject.toml", "--no-print-directory", target)
        return run(*command, cwd=REPOSITORY, MAKEFLAGS="")

    assert "--editable ." in dry_run("report")
    assert "--extra" not in dry_run("report")
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for target, extra in (("test", "test"), ("wheel", "test"), ("setup", "test"), ("notebooks", "notebooks")):
        assert f"--extra {extra} " in dry_run(target)
        assert extra in extras
