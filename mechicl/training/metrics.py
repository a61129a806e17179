"""What a run measures on its way: one JSON object a line, in a file that only grows."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """The metrics of a run in progress; lines of steps after its last save go when it resumes.

    Args:
        folder: of the run.
        n_bytes: of the file that its last save covers.
    """

    def __init__(self, folder: Path, n_bytes: int = 0):
        self.path = folder / METRICS_FILE
        self.path.touch()
        os.truncate(self.path, n_bytes)
        self._digest = hashlib.sha256(self.path.read_bytes())
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        data = (json.dumps(line) + "\n").encode()
        self._file.write(data)
        self._file.flush()
        self._digest.update(data)

    def sync(self) -> tuple[int, str]:
        """See that everything is on disk; the number of bytes that there are, and their SHA-256."""
        os.fsync(self._file.fileno())
        return self._file.tell(), self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """The lines of a run; one that a kill cut short is left out."""
        try:
            text = (folder / METRICS_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        lines = []
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return lines
