"""Shared by all tests: hypothesis profiles, the browser, JupyterLab, a summary of CPU time."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
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
hypothesis.settings.register_profile("same", UNHURRIED, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("same")

SLOW_SECONDS = 5.0
"""CPU time from which on a test of the default tier is listed at the end of a run."""
CPU_SECONDS = "CPU seconds"
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--every`, for kinds of runs that are too slow for all tests."""
    parser.addoption("--every", type=int, default=1, metavar="N", help="run only every N-th test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every N-th test."""
    items[:] = items[:: config.getoption("every")]


def cpu_seconds() -> float:
    """CPU time of this process and of the finished processes that it started."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note the CPU time at which a test starts."""
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a test's CPU time, with that of its fixtures, to its last report."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((CPU_SECONDS, cpu_seconds() - item.stash[STARTED]))
        report.user_properties.append(("slow", item.get_closest_marker("slow") is not None))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the CPU time of the run, of its largest files, and of tests that are too long for the default tier."""
    by_file: Counter[str] = Counter()
    long: list[tuple[float, str]] = []
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        properties = dict(getattr(report, "user_properties", ()))
        if CPU_SECONDS in properties:
            by_file[report.nodeid.split("::")[0]] += properties[CPU_SECONDS]
            if properties[CPU_SECONDS] > SLOW_SECONDS and not properties["slow"]:
                long.append((properties[CPU_SECONDS], report.nodeid))
    terminalreporter.section(f"{sum(by_file.values()):.0f} s of CPU time")
    for name, seconds in by_file.most_common(15):
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
    if long:
        terminalreporter.section(f"tests without the marker `slow` over {SLOW_SECONDS:.0f} s of CPU time")
        for seconds, name in sorted(long, reverse=True):
            terminalreporter.write_line(f"{seconds:6.1f} s  {name}")


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
    `asyncio.run` must do so in a separate thread or process (nbclient does).
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
        monkeypatch.setattr("mechicl.viz.page.still_svgs", lambda figures, _: [""] * len(figures))


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
