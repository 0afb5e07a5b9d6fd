"""Headless Chromium for the tests, controlled over its debugging pipe with the standard library only."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-extensions --mute-audio"
)


class Browser:
    """One tab. `problems` collects console errors and all requests that are not for local files."""

    def __init__(self, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self._out, self._in = ours[1], theirs[0]
        command = f'exec "{PATH}" {_FLAGS} --remote-debugging-pipe --user-data-dir="{profile}" about:blank'
        self._process = subprocess.Popen(
            ["bash", "-c", f"{command} 3<&{ours[0]} 4>&{theirs[1]}"],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._ids, self._buffer, self._session = itertools.count(1), b"", None
        self.problems: list[str] = []
        self._events: list[str] = []
        (tab,) = (t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send one command and return its answer. Events that arrive before the answer are handled."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._look(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, path: Path, *, wait="document.body.dataset.ready === 'yes'") -> None:
        """Load a file and wait until an expression is true in it."""
        self.problems.clear()
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._look(self._receive())
        self.wait(wait)

    def wait(self, expression: str, seconds: float = 120) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {seconds} s: {expression}; {self.problems}")
            time.sleep(0.05)

    def evaluate(self, expression: str):
        """The value of an expression (a promise is awaited)."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']['exception']['description']}")
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window in CSS pixels; a narrow window is a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """Set the colour scheme of the system to `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key, such as `Tab`, 9."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save a screenshot as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def print(self, path: Path) -> None:
        """Save the page as PDF."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(timeout=60)

    def _receive(self, seconds: float = 120):
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], seconds)[0]:
                raise TimeoutError(f"the browser said nothing for {seconds} s")
            found = os.read(self._in, 1 << 20)
            if not found:
                raise RuntimeError("the browser ended")
            self._buffer += found
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _look(self, event) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            thrown = params["exceptionDetails"]
            self.problems.append(thrown.get("exception", {}).get("description", thrown["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                self.problems.append(f"asked the network for {url}")
