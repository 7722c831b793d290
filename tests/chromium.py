"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 60.0
WAIT_S = 120.0


def installed() -> str | None:
    """The program, where there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Its calls block."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: Any) -> None:
        self._loop, self._socket = loop, socket
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; its result."""
        return self._loop.run_until_complete(self._call(method, params))

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        mine = next(self._ids)
        await self._socket.send_json({"id": mine, "method": method, "params": params})
        while True:
            message = json.loads(await self._socket.receive_str())
            if message.get("id") != mine:
                self.events.append(message)
                continue
            assert "error" not in message, (method, message["error"])
            result: dict[str, Any] = message["result"]
            return result

    def open(self, url: str) -> None:
        """Go there and wait until all is loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, timeout_s: float = WAIT_S) -> None:
        """Wait until it is true."""
        deadline = time.monotonic() + timeout_s
        while not self.read(expression):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {expression}"
            time.sleep(0.05)

    def press(self, key: str, *, ctrl: bool = False) -> None:
        """Press and release a key that has a name."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36}
        what = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, modifiers=2 * ctrl, **what)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """Of the window."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def scheme(self, name: str) -> None:
        """ "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def problems(self) -> list[str]:
        """What the page has complained about."""
        self.read("1")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(one["params"]) for one in self.events if one.get("method") in kinds]

    def screenshot(self, path: Path) -> None:
        """The window as a PNG."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )


@contextmanager
def chromium(directory: Path) -> Iterator[Page]:
    """A browser with a new profile in `directory`; it ends with the block."""
    program = installed()
    assert program is not None, "chromium is not installed (on Debian: apt install chromium)"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    flags += ["--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--no-proxy-server"]
    flags += [f"--user-data-dir={directory}", "about:blank"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([program, *flags], stdout=log, stderr=log)
    loop = asyncio.new_event_loop()
    try:
        port = _port(directory / "DevToolsActivePort", process)
        with _tab(loop, port) as page:
            yield page
    finally:
        process.terminate()
        process.wait(20)
        loop.close()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + START_S
    while not (file.exists() and file.read_text().count("\n")):
        assert process.poll() is None, (file.parent / "log").read_text()
        assert time.monotonic() < deadline, (file.parent / "log").read_text()
        time.sleep(0.05)
    return int(file.read_text().split()[0])


@contextmanager
def _tab(loop: asyncio.AbstractEventLoop, port: int) -> Iterator[Page]:
    def run(make: Callable[[], Any]) -> Any:
        return loop.run_until_complete(make())

    async def connect() -> tuple[aiohttp.ClientSession, Any]:
        session = aiohttp.ClientSession(trust_env=False)
        async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
            (tab,) = [one for one in await reply.json() if one["type"] == "page"]
        socket = await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        return session, socket

    session, socket = run(connect)
    page = Page(loop, socket)
    for domain in ("Page", "Runtime", "Log"):
        page.call(f"{domain}.enable")
    try:
        yield page
    finally:
        run(socket.close)
        run(session.close)
