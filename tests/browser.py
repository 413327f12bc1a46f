"""A headless Chromium for tests: driven by the DevTools protocol over a pair of pipes."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any, Final

DEADLINE_S: Final = 60.0
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """The program; None if the machine has none."""
    return next((found for name in _NAMES if (found := shutil.which(name)) is not None), None)


class Browser:
    """One page. ``problems`` are the errors and warnings of its console, and what it failed to load."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self.problems: list[str] = []
        self._process = process
        self._write, self._read = write, read
        self._rest = b""
        self._session = ""
        self._last_id = 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False, scale: float = 1.0) -> None:
        """Load a page in a window of this size, in CSS pixels."""
        self.resize(width, height, scale)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def run(self, script: str) -> Any:
        """The value of a script's expression, which may be a promise. Raises: AssertionError, if the script fails."""
        result = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, deadline_s: float = DEADLINE_S) -> Any:
        """The value of the expression as soon as it is true. Raises: AssertionError after the deadline."""
        end = time.monotonic() + deadline_s
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"waited {deadline_s:.0f} s for: {script}; problems: {self.problems}"
            time.sleep(0.05)
        return value

    def screenshot(self, file: Path) -> None:
        """Write what the window shows as a PNG."""
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last_id:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select([self._read], [], [], DEADLINE_S)[0], "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, f"the browser ended with status {self._process.wait()}"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        value: dict[str, Any] = json.loads(message)
        return value

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.problems.append(str([each.get("value") for each in parameters["args"]]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                entry = parameters["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")


@contextmanager
def browsing(program: str, folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in ``folder``. It ends with the context."""
    to_child, write = os.pipe()
    read, from_child = os.pipe()
    command = [
        *(program, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
        *("--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking"),
        *("--hide-scrollbars", "--force-color-profile=srgb", f"--user-data-dir={folder / 'profile'}", "about:blank"),
    ]
    # The browser reads from descriptor 3, and writes to 4.
    script = f'exec 3<&{to_child} 4>&{from_child} && exec "$@"'
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command], pass_fds=(to_child, from_child), stdout=log, stderr=log
        )
    os.close(to_child)
    os.close(from_child)
    try:
        yield Browser(process, write, read)
    finally:
        os.close(write)
        os.close(read)
        process.terminate()
        process.wait(DEADLINE_S)
