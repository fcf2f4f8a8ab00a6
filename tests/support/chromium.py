"""A real browser without a window, driven by its own DevTools protocol over a websocket.

Keys and clicks are the browser's own events, at places where elements are. What a tab complains of
(console, exceptions, broken rules) and what it asks for are kept. Every wait has an end.
"""

import asyncio
import base64
import json
import os
import re
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.servers import ROOT, WAIT_S

OURS = ROOT / "build/tools/chromium"
NAMES = ("chromium-headless-shell", "chromium")
START_S = 30.0
# No rule of a page's is needed for a test to be safe: nothing but this machine can be reached.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-dev-shm-usage", "--remote-debugging-port=0", "--window-size=1280,900"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
KEYS = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9}


def program() -> tuple[str, dict[str, str]]:
    """The browser, and what its environment must have besides; skips the test if there is none."""
    ours = OURS / "usr/lib/chromium/chromium-headless-shell"
    if ours.exists():
        libraries = sorted({str(path.parent) for path in OURS.glob("**/*.so*")})
        added = {"LD_LIBRARY_PATH": ":".join(libraries), "XDG_DATA_HOME": str(OURS / "usr/share")}
        if (OURS / "etc/fonts").is_dir():
            added["FONTCONFIG_PATH"] = str(OURS / "etc/fonts")
        return str(ours), added
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("Chromium is not here: run tests/install_chromium.sh (make tools)")
    return found, {}


class Tab:
    """A page in the browser. What it complained of and asked for is told by what it did so far."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.asked: list[str] = []  # Addresses.
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        return self._browser.send(method, params, self._session)

    def heard(self, method: str, said: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.asked.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(said["args"])[:500])
            case "Log.entryAdded":
                self.complaints.append(f"{said['entry'].get('url', '')} {said['entry']['text']}")

    def show(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """What a script comes to. A page may forbid `eval` to itself; this is not the page."""
        told = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, script: str, within_s: float = WAIT_S) -> Any:
        """The first value that is true."""
        end = time.monotonic() + within_s
        while not (value := self.value(script)):
            assert time.monotonic() < end, f"not within {within_s:g} s: {script}\n{self.text()}"
            time.sleep(0.02)
        return value

    def text(self, of: str = "body") -> str:
        """What a person reads there."""
        return str(self.value(f"document.querySelector({json.dumps(of)}).innerText"))

    def read(self, of: str, pattern: str, within_s: float = WAIT_S) -> str:
        """The same, once it is like this."""
        place, like = json.dumps(of), json.dumps(pattern)
        now = f"document.querySelector({place})?.innerText ?? ''"
        self.wait(f"new RegExp({like}).test({now})", within_s)
        return self.text(of)

    def click(self, of: str) -> None:
        """In its middle, wherever that is and whatever lies on it."""
        box = self.value(
            f"(() => {{ const one = document.querySelector({json.dumps(of)});"
            "one.scrollIntoView({block: 'nearest'}); const box = one.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **where)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, control: bool = False) -> None:
        code = KEYS.get(key, ord(key[0].upper()))
        made = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 * control}
        if key == "Enter" and not control:
            made["text"] = "\r"
        self.send("Input.dispatchKeyEvent", type="keyDown", **made)
        self.send("Input.dispatchKeyEvent", type="keyUp", **made)

    def fill(self, of: str, text: str) -> None:
        """In place of what is written there."""
        self.click(of)
        self.value(f"document.querySelector({json.dumps(of)}).select()")
        self.type(text)

    def picture(self, path: Path, scheme: str = "light", width: int = 1280) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """One that runs, at the other end of a websocket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: Any) -> None:
        self._loop, self._socket = loop, socket
        self._number = 0
        self._tabs: dict[str, Tab] = {}

    def open(self, address: str) -> Tab:
        """In a context of its own, which knows nothing of other tabs."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )
        attached = {"targetId": target["targetId"], "flatten": True}
        session = self.send("Target.attachToTarget", attached)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        tab.show(address)
        return tab

    def send(self, method: str, params: dict[str, Any] | None = None, session: str = "") -> Any:
        """What it answers. What it tells meanwhile goes to the tabs that it is about."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        message |= {"sessionId": session} if session else {}
        return self._loop.run_until_complete(asyncio.wait_for(self._exchange(message), WAIT_S))

    async def _exchange(self, message: dict[str, Any]) -> Any:
        await self._socket.send_json(message)
        async for frame in self._socket:
            told = json.loads(frame.data)
            if told.get("id") == message["id"]:
                assert "error" not in told, f"{message}: {told['error']}"
                return told["result"]
            if (tab := self._tabs.get(told.get("sessionId", ""))) is not None:
                tab.heard(told["method"], told["params"])
        raise AssertionError("the browser has gone")


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser that keeps what it has in a folder, and is gone after the block."""
    command, added = program()
    home = {"HOME": str(folder), "OMP_NUM_THREADS": "1", **added}
    process = subprocess.Popen(
        [command, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        env=os.environ | home,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    loop = asyncio.new_event_loop()
    try:
        address = _address(process)
        session = loop.run_until_complete(_session())
        try:
            connecting = session.ws_connect(address, max_msg_size=0, heartbeat=None)
            socket = loop.run_until_complete(asyncio.wait_for(connecting, START_S))
            try:
                yield Browser(loop, socket)
            finally:
                loop.run_until_complete(socket.close())
        finally:
            loop.run_until_complete(session.close())
    finally:
        process.terminate()
        try:
            process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        loop.close()


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()  # It belongs to the loop that runs when it is made.


def _address(process: "subprocess.Popen[bytes]") -> str:
    """Where it listens, by its own word."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    said, end = b"", time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while time.monotonic() < end and process.poll() is None:
            if selector.select(0.5):
                said += process.stderr.read() or b""
            if (found := re.search(rb"listening on (ws://\S+)", said)) is not None:
                os.set_blocking(process.stderr.fileno(), True)
                return found[1].decode()
    raise AssertionError(f"the browser does not listen: {said.decode(errors='replace')[-2000:]}")
