"""A headless Chromium that is spoken to over two pipes: what a page asks for, says and shows.

The protocol is Chrome's own (``--remote-debugging-pipe``: JSON messages that end in a zero byte on file
descriptors 3 and 4), so nothing but the browser has to be installed.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0


def chromium() -> str | None:
    """Where it is, if it is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Browser:
    """One tab.

    Attributes:
        requests: addresses that were asked for.
        said: messages of the console, errors, and what was refused.
    """

    reading: int
    writing: int
    session: str = ""
    requests: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    _number: int = 0
    _rest: bytes = b""
    _events: list[str] = field(default_factory=list)

    def open(self, path: Path, *, width: int, dark: bool, media: str = "screen") -> None:
        """Load a file again, on a screen of this width."""
        self.requests.clear()
        self.said.clear()
        self._events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.as_uri())
        self.until("Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """All of the page, from its top to its end."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self.writing, content) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])

    def until(self, event: str) -> None:
        while event not in self._events:
            self._next()

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.reading], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            more = os.read(self.reading, 1 << 20)
            assert more, "Chromium is gone"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(params))


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium with one tab, ended for certain."""
    program = chromium()
    assert program, f"none of {', '.join(NAMES)} is installed"
    to_it, writing = os.pipe()
    reading, from_it = os.pipe()
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    flags += ("--hide-scrollbars", "--remote-debugging-pipe", "--no-first-run")
    with tempfile.TemporaryDirectory(prefix="rankfeed-browser-", ignore_cleanup_errors=True) as profile:
        # The shell puts the pipes where the protocol wants them.
        shell = ["bash", "-c", 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"', "bash", str(to_it), str(from_it)]
        child = subprocess.Popen(
            [*shell, program, *flags, f"--user-data-dir={profile}"],
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        try:
            tab = Browser(reading, writing)
            target = tab.call("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                tab.call(f"{domain}.enable")
            yield tab
        finally:
            os.close(writing)
            os.close(reading)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, 9)
            child.wait()
