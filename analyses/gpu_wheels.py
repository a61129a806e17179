"""The wheels that a machine without a network needs for `make gpu`, torch and its own excepted.

python analyses/gpu_wheels.py wheels --python 3.12
"""

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import tyro
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("pytest", "hypothesis", "beartype")
"""What the device tests need besides."""
THERE = re.compile(r"torch$|triton|nvidia-|cuda-")
"""What is there: a build of torch for the machine's GPU, with what comes with it."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True)
class Args:
    """Download what is missing into a folder."""

    folder: tyro.conf.Positional[Path]
    """Where the wheels go; those that are there are not downloaded again."""
    python: Annotated[str, tyro.conf.arg(metavar="VERSION")] = "3.12"
    """Version of Python on the other machine."""


def packages(python: str) -> dict[str, str]:
    """Names and versions: what mechicl requires, and what that requires, as it is installed here."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
                   "platform_system": "Linux", "platform_machine": "x86_64", "extra": ""}  # fmt: skip
    todo, pinned = [*settings["project"]["dependencies"], *TOOLS], {}
    while todo:
        requirement = Requirement(todo.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        wanted = requirement.marker is None or any(
            requirement.marker.evaluate(environment | {"extra": extra}) for extra in ("", *requirement.extras)
        )
        if name in pinned or THERE.match(name) or not wanted:
            continue
        try:
            pinned[name] = version(name)
        except PackageNotFoundError:  # for other versions of Python than this one
            continue
        todo += requires(name) or []
    return dict(sorted(pinned.items()))


def main(args: Args) -> int:
    """Download; exit code 1 names what could not be had."""
    args.folder.mkdir(parents=True, exist_ok=True)
    there = {path.name.lower().replace("_", "-") for path in args.folder.glob("*.whl")}
    known = packages(args.python)
    missing = [f"{name}=={number}" for name, number in known.items()
               if not any(wheel.startswith(f"{name.replace('.', '-')}-{number}-") for wheel in there)]  # fmt: skip
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest",
               str(args.folder), "--python-version", args.python, "--implementation", "cp", *platforms]  # fmt: skip
    failed = [each for each in missing if subprocess.run([*command, each]).returncode]
    print(f"{args.folder}: {len(known) - len(failed)} of {len(known)} wheels for Python {args.python}")
    if failed:
        print(f"could not be downloaded: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
