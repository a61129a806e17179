"""Metrics of a run: one JSON object per line, in a file that only grows."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from mechicl.base.files import check_file, read_bytes

METRICS_FILE = "metrics.jsonl"
_MOST_BYTES = 2**30  # of a file that is read: ten million lines of one seed


class Metrics:
    """The metrics of a run in progress, cut to the `n_bytes` that its last save covers."""

    def __init__(self, folder: Path, n_bytes: int = 0):
        self.path = folder / METRICS_FILE
        self.path.touch()
        check_file(self.path)
        os.truncate(self.path, n_bytes)
        with open(self.path, "rb") as file:
            self._digest = hashlib.file_digest(file, "sha256")
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()

    def write(self, line: dict[str, Any]) -> None:
        """Append a line."""
        data = (json.dumps(line) + "\n").encode()
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:  # the error of a full disk has no file name
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._digest.update(data)

    def sync(self) -> tuple[int, str]:
        """Write everything to disk; return the file's number of bytes and their SHA-256."""
        os.fsync(self._file.fileno())
        return self._file.tell(), self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """The lines of a run, without one that a kill cut short; ValueError if the file is a device or too large."""
        try:
            text = read_bytes(folder / METRICS_FILE, _MOST_BYTES).decode("utf-8", errors="replace")
        except FileNotFoundError:
            return []
        lines = []
        for line in text.splitlines():
            with suppress(ValueError, RecursionError):
                lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict)]

    @staticmethod
    def last_step(folder: Path) -> int:
        """The step of a run's last line; 0 if there is none."""
        return next((line["step"] for line in reversed(Metrics.read(folder)) if type(line.get("step")) is int), 0)
