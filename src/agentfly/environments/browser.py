"""A headless Chromium with one page, driven by the DevTools protocol over a pipe.

No port is opened and no driver program is needed. Chromium exits when the pipe closes, so it does not outlive the
process that started it, whatever ends that process. The page has no network: the files that it may load are served by
the owner of the browser, every other request is blocked, and no host name resolves.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import itertools
import json
import mimetypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from agentfly import threads
from agentfly.environment import Environment
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.sandbox.owner import process_name
from agentfly.vision.images import COORDINATE_MAX

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
ANSWER_SECONDS = 100.0
"""Seconds without an answer after which the browser counts as hung."""
_END_SECONDS = 5.0
"""Seconds that a browser has to end by itself."""
ORIGIN = "http://page.test"
"""Where the files that the owner serves appear to be."""
Key = Literal[
    "Enter", "Tab", "Escape", "Backspace", "Delete", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Home", "End",
    "PageUp", "PageDown", "Space",
]  # fmt: skip
Coordinate = Annotated[int, Field(ge=0, le=COORDINATE_MAX)]
"""A position in a screenshot: 0 is its left or upper edge, 1000 its right or lower edge, whatever its size."""
_KEY_CODES: dict[str, int] = {
    "Enter": 13, "Tab": 9, "Escape": 27, "Backspace": 8, "Delete": 46, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37,
    "ArrowRight": 39, "Home": 36, "End": 35, "PageUp": 33, "PageDown": 34, "Space": 32,
}  # fmt: skip
_KEY_TEXTS = {"Enter": "\r", "Tab": "\t", "Space": " "}
_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-startup-window", "--no-first-run", "--no-default-browser-check",
    "--disable-default-apps", "--disable-dev-shm-usage", "--disable-extensions", "--disable-gpu", "--no-zygote",
    "--disable-features=SpareRendererForSitePerProcess", "--mute-audio",
    # No network.
    "--host-resolver-rules=MAP * ~NOTFOUND", "--force-webrtc-ip-handling-policy", "--no-pings", "--disable-sync",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp", "--disable-background-networking",
    "--disable-component-update",
    # What is painted depends on the page alone, not on the screen or on parts of earlier frames that could be reused.
    "--force-device-scale-factor=1", "--force-color-profile=srgb", "--hide-scrollbars", "--disable-lcd-text",
    "--font-render-hinting=none", "--disable-checker-imaging", "--disable-partial-raster",
    "--disable-threaded-animation", "--disable-threaded-scrolling", "--run-all-compositor-stages-before-draw",
)  # fmt: skip
_LAUNCH = "import os, sys; os.dup2({0}, 3); os.dup2({1}, 4); os.execv(sys.argv[1], sys.argv[1:])"
"""Chromium reads commands from descriptor 3 and writes answers to 4. A child cannot be given these numbers without
running code between fork and exec, which is unsafe in a process with threads."""
_TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
_REFUSED = "the browser refused: "
_NAVIGATED = f"{_REFUSED}Inspected target navigated or closed"
"""The answer to a command whose document was replaced while it ran, such as after a click on a link."""
_STYLE = "* { caret-color: transparent !important; transition: none !important; animation: none !important; }"
_ADD_STYLE = f"""addEventListener("DOMContentLoaded", () =>
  document.head.append(Object.assign(document.createElement("style"), {{ textContent: "{_STYLE}" }})));"""
"""A blinking caret and animations would make screenshots differ."""


def find_chromium() -> str:
    """The path of a Chromium or Chrome. Raises ConfigError if there is none."""
    for name in PROGRAMS:
        if (path := shutil.which(name)) is not None:
            return path
    raise ConfigError(
        f"a browser is not installed: there is no {', '.join(PROGRAMS)} in PATH; apt-get install chromium"
    )


class Browser:
    """A Chromium process with one page. Methods raise EnvironmentFault if the process is lost or hangs."""

    def __init__(self, width: int, height: int) -> None:
        """Prepare a page of `width` × `height` pixels; `start` starts the process."""
        self._size = {"width": width, "height": height}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, concurrent.futures.Future[Any]] = {}
        self._loaded: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loading = set[str]()
        """Ids of the requests of the current document and its frames that are not complete."""
        self._serve: Callable[[str], bytes | None] = lambda path: None
        self._process: subprocess.Popen[bytes] | None = None
        self._session = ""
        self._failure = "the browser has not been started"

    @property
    def pid(self) -> int | None:
        """Process id. None before `start` and after `close`."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and open a blank page."""
        path = find_chromium()
        # The name contains this process, so that a later one can remove the folder if this one is killed.
        prefix = f"{process_name(os.getpid())}-browser-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        try:
            self._launch(path)  # not in a thread: a cancellation could leave the process behind
            context = await self._send("Target.createBrowserContext", {"disposeOnDetach": True}, session="")
            target = {"url": "about:blank", **context, **self._size}
            created = await self._send("Target.createTarget", target, session="")
            self._main_frame = created["targetId"]
            attach = {"targetId": self._main_frame, "flatten": True}
            self._session = (await self._send("Target.attachToTarget", attach, session=""))["sessionId"]
            await self._send("Browser.setDownloadBehavior", {"behavior": "deny", **context}, session="")
            metrics = {**self._size, "deviceScaleFactor": 1, "mobile": False}
            await self._send("Emulation.setDeviceMetricsOverride", metrics)
            await self._send("Emulation.setFocusEmulationEnabled", {"enabled": True})
            await self._send("Page.enable")
            await self._send("Network.enable")
            await self._send("Page.addScriptToEvaluateOnNewDocument", {"source": _ADD_STYLE})
            await self._send("Fetch.enable", {"patterns": [{"urlPattern": "*"}]})
        except BaseException:
            await self.close()
            raise

    def _launch(self, path: str) -> None:
        read_commands, self._commands = _open_pipe()
        answers, write_answers = _open_pipe()
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # Chromium's own sandbox refuses root
        arguments = (path, *_OPTIONS, *sandbox, f"--user-data-dir={self._folder.name}")
        self._output = Path(self._folder.name, "stderr")
        try:
            with self._output.open("wb") as stderr:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _LAUNCH.format(read_commands, write_answers), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=(read_commands, write_answers),
                    start_new_session=True,  # Ctrl-C goes to this process only, which closes its browsers
                )
        except BaseException:
            os.close(self._commands)
            os.close(answers)
            raise
        finally:
            os.close(read_commands)
            os.close(write_answers)
        self._failure = ""
        self._reader = threading.Thread(target=self._read, args=(answers,), name="agentfly-browser", daemon=True)
        self._reader.start()

    # ── the page ──

    async def open(self, path: str, serve: Callable[[str], bytes | None]) -> None:
        """Load a page and wait until it is complete.

        serve: returns the content of a path, such as `/core/core.js`, or None if the page may not have it.
        """
        # To the corner: what lies under the mouse of the last page would be highlighted.
        corner = {"x": self._size["width"] - 1, "y": self._size["height"] - 1}
        await self._send("Input.dispatchMouseEvent", {"type": "mouseMoved", **corner})
        self._serve = serve
        self._loaded = concurrent.futures.Future()
        result = await self._send("Page.navigate", {"url": ORIGIN + path})
        if "errorText" in result:
            raise EnvironmentFault(f"the browser cannot open {path!r:.80}: {result['errorText']}")
        await self._wait(self._loaded, f"loading {path!r:.80}")

    async def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; promises are awaited."""
        arguments = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        result = await self._send("Runtime.evaluate", arguments)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details.get("text")
            raise EnvironmentFault(f"the page raised {str(text)!r:.300}")
        return result["result"].get("value")

    async def screenshot(self, width: int | None = None, height: int | None = None) -> bytes:
        """The page as PNG: its upper left part of `width` × `height` pixels. None: as much as the window shows."""
        size = {"width": width or self._size["width"], "height": height or self._size["height"]}
        arguments = {"format": "png", "clip": {"x": 0, "y": 0, "scale": 1, **size}}
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            try:
                # After two frames, what the last event changed has been painted. A new style may have begun to load
                # images.
                await self.evaluate(_TWO_FRAMES)
                if not self._loading:
                    return base64.b64decode((await self._send("Page.captureScreenshot", arguments))["data"])
            except EnvironmentFault as fault:
                if str(fault) != _NAVIGATED:
                    raise
            await asyncio.sleep(0.005)
        raise EnvironmentFault(f"the page has not loaded in {ANSWER_SECONDS:g} s")

    async def click(self, x: float, y: float) -> None:
        """Click with the left button at a point of the page, in pixels."""
        await self._send("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            await self._send("Input.dispatchMouseEvent", event)

    async def scroll(self, x: float, y: float, down: float) -> None:
        """Turn the mouse wheel over a point; `down` is in pixels, negative to scroll up."""
        event = {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": down}
        await self._send("Input.dispatchMouseEvent", event)

    async def type_text(self, text: str) -> None:
        """Type text into the focused element, character by character; a line break presses Enter."""
        for character in text:
            if character == "\n":
                await self.press_key("Enter")
                continue
            key = {"key": character, "text": character, "unmodifiedText": character}
            await self._send("Input.dispatchKeyEvent", {"type": "keyDown", **key})
            await self._send("Input.dispatchKeyEvent", {"type": "keyUp", "key": character})

    async def press_key(self, key: Key) -> None:
        """Press and release a key."""
        code = _KEY_CODES[key]
        event = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": _KEY_TEXTS[key]} if key in _KEY_TEXTS else {}
        await self._send("Input.dispatchKeyEvent", {"type": "keyDown" if text else "rawKeyDown", **event, **text})
        await self._send("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    async def close(self) -> None:
        """End the process and remove its files."""
        if not self._failure:
            self._failure = "the browser is closed"
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                os.close(self._commands)
            await threads.call(_end, process)
            await threads.call(self._reader.join)
        if hasattr(self, "_folder"):
            await threads.call(self._folder.cleanup)

    # ── the protocol: JSON messages, each ended by a zero byte ──

    async def _send(self, method: str, arguments: Mapping[str, Any] | None = None, session: str | None = None) -> Any:
        """Send a command and return its result. session: of the page by default. Empty for the browser."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        number = next(self._ids)
        self._pending[number] = future
        self._write(number, method, arguments or {}, self._session if session is None else session)
        return await self._wait(future, method)

    def _write(self, number: int, method: str, arguments: Mapping[str, Any], session: str) -> None:
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if session:
            message["sessionId"] = session
        data = memoryview(json.dumps(message).encode() + b"\0")
        try:
            with self._lock:
                if self._failure:
                    raise EnvironmentFault(self._failure)
                while data:
                    data = data[os.write(self._commands, data) :]
        except OSError as error:
            raise EnvironmentFault(f"the browser is gone: {error}") from error

    async def _wait(self, future: concurrent.futures.Future[Any], what: str) -> Any:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise EnvironmentFault(f"the browser did not answer in {ANSWER_SECONDS:g} s: {what}") from error

    def _read(self, answers: int) -> None:
        """Deliver answers and events until the process ends."""
        received = b""
        with open(answers, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                *messages, received = (received + data).split(b"\0")
                for message in messages:
                    with contextlib.suppress(EnvironmentFault):  # the process is gone: the next read says so
                        self._handle(json.loads(message))
        last = self._output.read_text(errors="replace").strip()[-300:] if self._output.exists() else ""
        self._fail(f"the browser's process has ended; its last output: {last or '(none)'}")

    def _fail(self, reason: str) -> None:
        """Make running and later calls raise EnvironmentFault, with the first reason given."""
        with self._lock:
            self._failure = self._failure or reason
        for future in (*self._pending.values(), self._loaded):
            _resolve(future, EnvironmentFault(self._failure))

    def _handle(self, message: dict[str, Any]) -> None:
        if "id" in message:
            if (future := self._pending.pop(message["id"], None)) is not None:
                refused = f"{_REFUSED}{message['error'].get('message')}" if "error" in message else ""
                _resolve(future, EnvironmentFault(refused) if refused else message["result"])
            return
        session, event = message.get("sessionId", ""), message.get("params", {})
        if message["method"] == "Fetch.requestPaused":
            path = event["request"]["url"].partition("?")[0].partition("#")[0].removeprefix(ORIGIN)
            body = self._serve(path) if path.startswith("/") else None
            answer: dict[str, Any] = {"requestId": event["requestId"]}
            if body is None:
                # The page stays where it is if it would leave. Its frames, images and scripts fail.
                leaves = event["resourceType"] == "Document" and event["frameId"] == self._main_frame
                answer["errorReason"] = "Aborted" if leaves else "BlockedByClient"
                self._write(next(self._ids), "Fetch.failRequest", answer, session)
            else:
                kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
                headers = [{"name": "Content-Type", "value": f"{kind}; charset=utf-8"}]
                answer |= {"responseCode": 200, "responseHeaders": headers, "body": base64.b64encode(body).decode()}
                self._write(next(self._ids), "Fetch.fulfillRequest", answer, session)
        elif message["method"] == "Network.requestWillBeSent":
            self._loading.add(event["requestId"])
        elif message["method"] in ("Network.loadingFinished", "Network.loadingFailed"):
            self._loading.discard(event["requestId"])
        elif message["method"] == "Page.frameNavigated" and event["frame"]["id"] == self._main_frame:
            # Chromium does not report the end of requests that a document leaves behind, such as that for its icon.
            # The id of the new document's own request is that of its loader.
            self._loading &= {event["frame"]["loaderId"]}
        elif message["method"] == "Page.loadEventFired":
            _resolve(self._loaded, None)
        elif message["method"] == "Inspector.targetCrashed":
            self._fail("the page has crashed")
        elif message["method"] == "Page.javascriptDialogOpening":  # the page waits for an answer
            self._write(next(self._ids), "Page.handleJavaScriptDialog", {"accept": True}, session)


class BrowserEnvironment(Environment):
    """An environment whose instances have a browser each."""

    window_size: ClassVar[tuple[int, int]] = (768, 768)
    """Width and height of the page, in pixels."""
    screenshot_size: ClassVar[tuple[int, int] | None] = None
    """Width and height of the upper left part that screenshots show, in pixels of the page. None: all of it."""
    _browser: Browser | None = None

    async def start(self) -> None:
        """Start the browser."""
        await super().start()
        self._browser = Browser(*self.window_size)
        await self._browser.start()

    @classmethod
    def to_pixels(cls, x: int, y: int) -> tuple[float, float]:
        """The point of the page at coordinates of the screenshot."""
        width, height = cls.screenshot_size or cls.window_size
        return min(x * width / COORDINATE_MAX, width - 1), min(y * height / COORDINATE_MAX, height - 1)

    @property
    def browser(self) -> Browser:
        """The started browser."""
        if self._browser is None:
            raise EnvironmentFault(f"this {type(self).__name__} is closed")
        return self._browser

    async def check(self) -> None:
        await self.browser.evaluate("1")

    async def close(self) -> None:
        browser, self._browser = self._browser, None
        if browser is not None:
            await browser.close()
        await super().close()


def _resolve(future: concurrent.futures.Future[Any], result: Any) -> None:
    """Set a result, or an exception, unless the waiting call was cancelled or has its result."""
    if not future.done() and future.set_running_or_notify_cancel():
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _open_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are not 3 and 4, which the browser's process replaces."""
    import fcntl

    ends = os.pipe()
    try:
        high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    finally:
        for end in ends:
            os.close(end)
    return high[0], high[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process whose pipe was closed has ended, then kill what is left of it and its children."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
