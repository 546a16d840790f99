"""A headless Chromium, driven over its debugging pipe: JSON messages that end in NUL, on descriptors 3 and 4."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.waiting import until

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
PATIENCE_S = 60.0


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One page."""

    def __init__(self, program: str, profile: Path) -> None:
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        its_input, self._to = os.pipe()
        self._from, its_output = os.pipe()
        there = f"os.dup2({its_input}, 3), os.dup2({its_output}, 4), os.execvp(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import os, sys; {there}", *command],
            pass_fds=(its_input, its_output),
            env=os.environ | {"TMPDIR": str(profile)},  # what it leaves behind goes with its profile
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        self._read = b""
        self._calls = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """What the page threw or wrote to its console as an error."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            answer = self._next()
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")  # or another fragment alone would load nothing
        self.errors.clear()
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Its value, once that is true."""
        return until(lambda: self.value(expression), PATIENCE_S, lambda: expression)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=PATIENCE_S)
        os.close(self._to)
        os.close(self._from)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            assert ready, "chromium says nothing"
            data = os.read(self._from, 1 << 20)
            assert data, "chromium is gone"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        if said.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(said["params"]["exceptionDetails"]))
        elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
            self.errors.append(said["params"]["entry"]["text"])
        return said
