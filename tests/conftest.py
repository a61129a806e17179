"""What all tests share: the hypothesis profiles, the browser and JupyterLab."""

import os
import shutil
import sys
from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser import JupyterLab

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# No deadline anywhere: a first call into torch is slow, and machines are shared.
# CI draws the same examples in every run; elsewhere new ones keep being tried.
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, headless. Without one the test is skipped, or fails under CI.

    Playwright keeps an event loop running in this thread until the session ends, so tests that call
    `asyncio.run` must do so in a thread or process of their own (nbclient does).
    """
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        reason = f"no browser: none of {', '.join(BROWSERS)} is on the PATH (`make browser` installs one)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=BROWSER_ARGS)
        yield chromium
        chromium.close()


@pytest.fixture(autouse=True)
def no_stills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without SVGs of their figures, which take a browser seconds; `tests/viz/test_page.py` tests them."""
    if "mechicl.viz.page" in sys.modules:
        monkeypatch.setattr("mechicl.viz.page.still_svgs", lambda figures: [""] * len(figures))


@pytest.fixture(scope="session")
def jupyter_lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterLab]:
    """A JupyterLab server, whose `drive_notebook(path)` runs a notebook and returns its page in the browser."""
    lab = JupyterLab(tmp_path_factory.mktemp("lab"), browser)
    yield lab
    lab.close()


@pytest.fixture
def unchecked_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the type checks that only the tests have: a value of another type meets the library's own errors."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
