"""Headless Chromium over its own pipe (DevTools protocol): load a page, act on it, collect what it complains about."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Tab:
    """One page. complaints: console errors, exceptions, refused loads. requests: every address that was asked for."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(time.monotonic() + 60)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, address: str, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && document.querySelector('.answers, #item p') !== null")

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"].get("exception", {}).get("description", expression))
        return done["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def press(self, key: str, code: int, text: str = "") -> None:
        """One real key stroke."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path, *, full: bool = False) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _read(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("chromium does not answer")
            self._buffer += os.read(self.reader, 1 << 20)
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, about: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"])[:500])
        elif (method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert")) or (
            method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning")
        ):
            self.complaints.append(json.dumps(about)[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])


@contextlib.contextmanager
def tab() -> Iterator[Tab]:
    """A fresh browser with one page; ended and cleaned up afterwards."""
    assert BINARY is not None
    to_browser, ours = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        line = f'exec "$@" 3<&{to_browser[0]} 4>&{ours[1]}'
        command = ["bash", "-c", line, "bash", BINARY, *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            command, pass_fds=(to_browser[0], ours[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser[0])
        os.close(ours[1])
        try:
            yield Tab(ours[0], to_browser[1])
        finally:
            process.terminate()
            process.wait(20)
            os.close(ours[0])
            os.close(to_browser[1])
