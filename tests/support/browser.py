"""Drive a headless Chromium through the DevTools protocol, over a pair of pipes.

Pipes make a port and an extra package unnecessary. The browser reads commands from descriptor 3, and writes
answers and events to descriptor 4. Each message is JSON text that ends with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser's program; ``None`` if it is not installed."""

_WAIT = """new Promise((resolve, reject) => {
  const begun = performance.now();
  (function look() {
    let value = null;
    try { value = (%s); } catch (error) { value = null; }
    if (value) resolve(value);
    else if (performance.now() - begun > %d) reject(new Error("still false: " + %s));
    else setTimeout(look, 20);
  })();
})"""
_START = """import os, sys
if os.fork():
    os._exit(0)
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Enter": 13, " ": 32, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
_TEXTS = {"Enter": "\r"}


class Browser:
    """A browser process that keeps its profile in a temporary folder."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            *(["--no-sandbox"] if os.getuid() == 0 else []),
        ]
        # The browser must not be a child of the test process. Otherwise, the check for leftover child
        # processes would report the processes of the browser's tabs.
        subprocess.run(
            [sys.executable, "-c", _START, str(commands), str(answers), CHROMIUM, *options, "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        os.close(commands)
        os.close(answers)
        self._unread = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)  # makes the browser exit and close its end of the other pipe
        while os.read(self._from, 1 << 20):
            pass
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return the result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def events(self, session: str) -> list[dict[str, Any]]:
        """Return the events of a tab that have arrived so far. Events arrive along with answers."""
        return [event for event in self._events if event.get("sessionId") == session]

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser did not answer {method} within {TIMEOUT_S:.0f} s")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise EOFError(f"the browser ended during {method}")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    @contextmanager
    def tab(self, address: str, width: int = 1440, height: int = 900, *, dark: bool = False) -> Iterator[Tab]:
        """Open a URL in a new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.show(width, height, dark=dark)
        tab.call("Page.navigate", url=address)
        try:
            yield tab
        finally:
            self.call("Target.closeTarget", targetId=target)


class Tab:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def show(self, width: int, height: int, *, dark: bool) -> None:
        """Set the size of the window and the preferred colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression, wait if it returns a promise, and return the value."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        return self.evaluate(_WAIT % (condition, int(TIMEOUT_S * 500), json.dumps(condition)))

    def text(self, selector: str) -> str:
        """Return the text of the first element that a CSS selector matches."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements that a CSS selector matches."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.evaluate(f"{found}.map((one) => one.textContent)"))

    def click(self, selector: str) -> None:
        event = "new MouseEvent('click', {bubbles: true})"
        self.evaluate(f"document.querySelector({json.dumps(selector)}).dispatchEvent({event})")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = _KEYS.get(key, ord(key[0].upper()))
        text = {"text": _TEXTS.get(key, key)} if len(key) == 1 or key in _TEXTS else {}
        for kind, extra in (("keyDown", text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save a PNG image of the window, or of the whole page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def complaints(self) -> list[str]:
        """Return script errors, violations of the content security policy, and other errors and warnings."""
        found = []
        for event in self._events():
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(str(details.get("exception", {}).get("description") or details["text"]))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
                found.append(str(parameters["args"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        return found

    def requests(self) -> list[str]:
        """Return the URLs that the page has requested, including the URL of the page."""
        sent = [event["params"] for event in self._events() if event["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]

    def _events(self) -> list[dict[str, Any]]:
        """Return all events of the tab so far."""
        # All earlier events arrive before the answer to this call.
        self.evaluate("new Promise((resolve) => setTimeout(resolve))")
        return self._browser.events(self._session)
