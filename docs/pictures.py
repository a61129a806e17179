"""Draws the pictures of the documentation: `python docs/pictures.py`.

Each is the `figure` that the code of a page makes, so that page and picture say the same.
"""

import os
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from mechicl import viz  # noqa: E402  the repository's root has to be on the path first
from tests.pages import blocks, run  # noqa: E402

PICTURES = {"images/families.svg": "index.md", "images/layers.svg": "findings/layers.md"}
"""Pictures, and the pages whose code makes them."""
WIDTH = 7.0
"""Inches, of 96 pixels on a page."""


def main() -> None:
    """Run the pages, and write what they draw."""
    for picture, page in PICTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            figure = run(blocks(DOCS / page), page)["figure"]
        path = DOCS / picture
        viz.save(figure, path, width=WIDTH, font_size=9)
        print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
