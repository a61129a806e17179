"""The wheel stands alone: it holds the checkpoints, and works without the repository."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
CHECKPOINTS = REPOSITORY / "checkpoints"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command and return its output; its errors are in the failure's message."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def checkpoint_names() -> list[str]:
    return sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, REPOSITORY, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_holds_the_library_its_checkpoints_and_the_licence(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.getinfo(name).file_size for name in archive.namelist()}

    shipped = [path for path in CHECKPOINTS.rglob("*") if path.is_file()]
    expected = {f"mechicl/_checkpoints/{path.relative_to(CHECKPOINTS).as_posix()}": path for path in shipped}
    assert shipped, "there are no checkpoints to ship"
    assert {name: held.get(name) for name in expected} == {name: path.stat().st_size for name, path in expected.items()}
    assert "mechicl/__init__.py" in held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)
    folders = {name.split("/")[0] for name in held}
    assert "mechicl" in folders
    assert all(folder == "mechicl" or folder.endswith(".dist-info") for folder in folders)
    assert not any("tests" in Path(name).parts or "__pycache__" in name for name in held)


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

    names = checkpoint_names()
    listed = python("-m", "mechicl.cli", "list")
    assert names
    assert [name for name in names if name not in listed] == []
