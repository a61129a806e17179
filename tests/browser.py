"""JupyterLab: notebooks run in a real server, and are shown in a real browser."""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, BrowserContext, Page

SETTINGS = {
    "labconfig/page_config.json": {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}},
    # every cell is in the document, also those that are not in view
    "lab/user-settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
}

KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


class JupyterLab:
    """A server in a separate folder, with separate settings; `close` ends it and its kernels."""

    def __init__(self, folder: Path, browser: Browser):
        self.root, self._browser = folder / "notebooks", browser
        self._contexts: list[BrowserContext] = []
        self.root.mkdir()
        for name, settings in SETTINGS.items():
            path = folder / "config" / name
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(settings))
        self._log = folder / "server.log"
        self._token, port = secrets.token_hex(16), _free_port()
        self.url = f"http://127.0.0.1:{port}"
        folders = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
        environment = {f"JUPYTER_{name}": str(folder / part) for name, part in folders.items()}
        options = {
            "ServerApp.root_dir": self.root,
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": port,
            "ServerApp.port_retries": 0,
            "ServerApp.allow_root": True,
            "IdentityProvider.token": self._token,
            "LabApp.extension_manager": "readonly",
            "LabApp.check_for_updates_class": "jupyterlab.handlers.announcements.NeverCheckForUpdate",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", "--no-browser", *arguments],
                cwd=folder,
                env=os.environ | environment | {"IPYTHONDIR": str(folder / "ipython")},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_until_up()

    def drive_notebook(self, path: Path, *, timeout: float = 1200, width: int = 1280, height: int = 1000) -> Page:
        """Open a copy of a notebook, run all of its cells in at most `timeout` seconds, and return the page.

        Raises:
            AssertionError: a cell failed; the message is its error.
        """
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        written = sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in notebook.cells)
        page = self._opened(notebook, path.name, width, height)
        page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$")).click()
        page.locator(".lm-Menu-item", has_text=re.compile("^Run All Cells$")).click()

        numbers = page.locator(".jp-CodeCell .jp-InputPrompt", has_text=re.compile(r"\[\d+\]"))
        errors = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
        end = time.monotonic() + timeout
        while numbers.count() < written and not errors.count():
            assert time.monotonic() < end, f"{numbers.count()} of {written} cells ran in {timeout} s\n{self.log()}"
            page.wait_for_timeout(100)
        assert not errors.count(), f"{path.name}: {errors.first.inner_text()}"
        return page

    def _opened(self, notebook: nbformat.NotebookNode, name: str, width: int, height: int) -> Page:
        notebook.metadata.kernelspec = KERNEL  # without one, JupyterLab opens a dialog
        nbformat.write(notebook, self.root / name)
        context = self._browser.new_context(viewport={"width": width, "height": height})
        self._contexts.append(context)
        page = context.new_page()
        page.goto(f"{self.url}/lab/tree/{name}?reset&token={self._token}")
        # earlier JupyterLab would open a dialog for the kernel
        page.locator("#jp-main-statusbar", has_text=f"{KERNEL['display_name']} | Idle").wait_for()
        return page

    def log(self) -> str:
        """Return the end of the server's log."""
        return self._log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Close the pages, and end the server and its kernels."""
        for context in self._contexts:
            context.close()
        self._server.terminate()  # it shuts its kernels down
        try:
            self._server.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _wait_until_up(self) -> None:
        request = urllib.request.Request(f"{self.url}/api/status", headers={"Authorization": f"token {self._token}"})
        end = time.monotonic() + 600
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60):
                    return
            except OSError:
                if self._server.poll() is not None or time.monotonic() > end:
                    self.close()
                    raise RuntimeError(f"JupyterLab did not start:\n{self.log()}") from None
                time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
