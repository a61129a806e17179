"""What all tests share: the hypothesis profiles, the browser and JupyterLab."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

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
PATIENCE = 600_000
"""Milliseconds after which a wait of the browser fails."""

# No test depends on the speed of the machine, and every run draws the same examples; new ones are tried by
# `pytest --hypothesis-profile new`.
UNHURRIED = hypothesis.settings(deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("new", UNHURRIED)
hypothesis.settings.register_profile("same", UNHURRIED, derandomize=True)
hypothesis.settings.load_profile("same")


def patient(make: Callable[..., Any]) -> Callable[..., Any]:
    """Pages and contexts whose waits have limits of minutes, not Playwright's 30 seconds."""

    def patiently(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        made.set_default_timeout(PATIENCE)
        return made

    return patiently


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
        chromium = playwright.chromium.launch(executable_path=executable, args=BROWSER_ARGS, timeout=PATIENCE)
        for name in ("new_page", "new_context"):
            setattr(chromium, name, patient(getattr(chromium, name)))
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
