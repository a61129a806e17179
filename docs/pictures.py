"""Draws the pictures of the documentation: `python docs/pictures.py`.

Each is the `figure` that the code of a page makes, so that page and picture say the same.
"""

import os
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from tests.pages import blocks, run  # noqa: E402  the repository's root has to be on the path first

PICTURES = {"images/families.svg": "index.md", "images/layers.svg": "findings/layers.md"}
"""Pictures, and the pages whose code makes them."""
WIDTH = 720


def main() -> None:
    """Run the pages, and write what they draw."""
    for picture, page in PICTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            figure = run(blocks(DOCS / page), page)["figure"]
        path = DOCS / picture
        figure.write_image(path, width=WIDTH)
        print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
