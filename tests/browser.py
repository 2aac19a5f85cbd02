"""A headless Chromium of the system, controlled by the DevTools protocol over a pipe.

It needs no package, no download and no port. A test starts in half a second.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_CHROMIUM = next((found for found in map(shutil.which, _NAMES) if found), None)
needs_chromium = pytest.mark.skipif(
    _CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"
)
_TIMEOUT_S = 120.0
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
# Chromium reads commands from the descriptor 3 and answers on 4.
_EXEC = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A connection to one tab: sends commands and records messages of the tab."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._held = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._read()).get("id") != self._number:
            self._note(message)
        assert "error" not in message, message["error"]
        return dict(message["result"])

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._held:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._answers], [], [], left)[0], "no answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["exception"]["description"])
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, expression: str, seconds: float = _TIMEOUT_S) -> Any:
        """Wait until an expression is true. It may fail while a page loads."""
        deadline = time.monotonic() + seconds
        guarded = f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()"
        while not (value := self.value(guarded)):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.errors}"
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        """Load a page and its modules."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key: Enter, Escape, Tab."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def look(self, width: int, height: int, *, dark: bool) -> None:
        """Set the size of the window and the preferred colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Return the visible page as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile in the folder ``profile``."""
    assert _CHROMIUM is not None
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    options = [*_OPTIONS, f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # it refuses to run otherwise
    # Larger than the protocol's descriptors, so that none is closed before it is copied.
    theirs = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (theirs_in, theirs_out)]
    process = subprocess.Popen(
        [sys.executable, "-c", _EXEC, *map(str, theirs), _CHROMIUM, *options],
        pass_fds=theirs,
        stderr=subprocess.DEVNULL,
    )
    for number in (theirs_in, theirs_out, *theirs):
        os.close(number)
    try:
        yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(_TIMEOUT_S)
        os.close(commands)
        os.close(answers)
