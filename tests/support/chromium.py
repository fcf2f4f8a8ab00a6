"""A real browser without a window: the system's Chromium, driven by playwright.

Keys and clicks are the browser's own events, at the positions of elements. A tab records complaints
(console, exceptions, violations of the policy) and requested addresses. Every wait has a time-out.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.support.servers import ROOT, WAIT_S

if TYPE_CHECKING:
    import playwright.sync_api

INSTALLED = ROOT / "build/tools/chromium"
NAMES = ("chromium-headless-shell", "chromium")
START_S = 240.0
SIZE = {"width": 1280, "height": 900}
# The sandbox is not needed: only this machine can be reached.
FLAGS = ("--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")


def program() -> tuple[str, dict[str, str]]:
    """The browser and extra environment variables; skips the test if no browser is installed."""
    installed = INSTALLED / "usr/lib/chromium/chromium-headless-shell"
    if installed.exists():
        libraries = sorted({str(path.parent) for path in INSTALLED.glob("**/*.so*")})
        added = {
            "LD_LIBRARY_PATH": ":".join(libraries),
            "XDG_DATA_HOME": str(INSTALLED / "usr/share"),
        }
        if (INSTALLED / "etc/fonts").is_dir():
            added["FONTCONFIG_PATH"] = str(INSTALLED / "etc/fonts")
        return str(installed), added
    executable = next((path for path in map(shutil.which, NAMES) if path), None)
    if executable is None:
        pytest.skip("Chromium is not here: run tests/install_chromium.sh (make tools)")
    return executable, {}


class Tab:
    """A page in the browser, with the complaints and the requested addresses so far."""

    def __init__(self, page: "playwright.sync_api.Page") -> None:
        self._page = page
        self._session = page.context.new_cdp_session(page)
        self.complaints: list[str] = []
        self.requested: list[str] = []  # Addresses.
        page.set_default_timeout(1000 * WAIT_S)
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text))

    def send(self, method: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self._session.send(method, params)

    def show(self, address: str) -> None:
        self._page.goto(address)

    def value(self, script: str) -> Any:
        return self._page.evaluate(script)

    def wait(self, script: str, within_s: float = WAIT_S) -> Any:
        """Return the first true value of the script.

        A page's policy can forbid `eval`, which playwright's own wait uses.
        """
        end = time.monotonic() + within_s
        while not (value := self.value(script)):
            assert time.monotonic() < end, f"not within {within_s:g} s: {script}\n{self.text()}"
            self._page.wait_for_timeout(20)
        return value

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return self._page.inner_text(selector)

    def read(self, selector: str, pattern: str, within_s: float = WAIT_S) -> str:
        """Return the visible text of an element once it matches the pattern."""
        from playwright.sync_api import expect

        first = self._page.locator(selector).first
        expect(first).to_contain_text(
            re.compile(pattern), use_inner_text=True, timeout=1000 * within_s
        )
        return first.inner_text()

    def click(self, selector: str) -> None:
        """Click the middle of an element as soon as it can be clicked."""
        self._page.click(selector)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self._page.keyboard.type(text)

    def press(self, key: str, *, control: bool = False) -> None:
        self._page.keyboard.press(f"Control+{key}" if control else key)

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of an input."""
        self.click(selector)
        self._page.locator(selector).select_text()
        self._page.keyboard.insert_text(text)

    def resize(self, width: int) -> None:
        self._page.set_viewport_size({"width": width, "height": SIZE["height"]})

    def screenshot(
        self, path: Path, scheme: Literal["light", "dark"] = "light", width: int = SIZE["width"]
    ) -> None:
        self._page.emulate_media(color_scheme=scheme)
        self.resize(width)
        self._page.screenshot(path=path, full_page=True)


class Browser:
    """A running browser."""

    def __init__(self, browser: "playwright.sync_api.Browser") -> None:
        self._browser = browser

    def open(self, address: str) -> Tab:
        """Open a page in its own context, which shares nothing with other tabs."""
        context = self._browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_viewport_size({"width": SIZE["width"], "height": SIZE["height"]})
        tab = Tab(page)
        tab.show(address)
        return tab


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Run a browser with its files in a folder; it ends with the block."""
    from playwright.sync_api import sync_playwright

    command, added = program()
    folder.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=command,
            args=[*FLAGS],
            env={**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", **added},
            timeout=1000 * START_S,
        )
        try:
            yield Browser(browser)
        finally:
            browser.close()
