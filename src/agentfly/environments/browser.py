"""A headless Chromium with one page, driven by Playwright with the system's Chromium.

The page has no network: the files that it may load are served by the owner of the browser, every other request is
blocked, and no host name resolves. Chromium ends with the process that started it, whatever ends that process:
Playwright's driver notices that its pipe is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from agentfly import threads
from agentfly.environment import Environment
from agentfly.errors import ConfigError, EnvironmentFault, require_extra
from agentfly.sandbox.owner import process_name
from agentfly.vision.images import COORDINATE_MAX

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page, Playwright, Request, Route

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
ANSWER_SECONDS = 100.0
"""Seconds without an answer after which the browser counts as hung."""
ORIGIN = "http://page.test"
"""Where the files that the owner serves appear to be."""
Key = Literal[
    "Enter", "Tab", "Escape", "Backspace", "Delete", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Home", "End",
    "PageUp", "PageDown", "Space",
]  # fmt: skip
Coordinate = Annotated[int, Field(ge=0, le=COORDINATE_MAX)]
"""A position in a screenshot: 0 is its left or upper edge, 1000 its right or lower edge, whatever its size."""
_OPTIONS = (
    "--disable-gpu", "--no-zygote", "--disable-features=SpareRendererForSitePerProcess",
    # No network.
    "--host-resolver-rules=MAP * ~NOTFOUND", "--force-webrtc-ip-handling-policy", "--no-pings",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    # What is painted depends on the page alone, not on the screen or on parts of earlier frames that could be reused.
    "--force-device-scale-factor=1", "--disable-lcd-text", "--font-render-hinting=none", "--disable-checker-imaging",
    "--disable-partial-raster", "--disable-threaded-animation", "--disable-threaded-scrolling",
    "--run-all-compositor-stages-before-draw",
)  # fmt: skip
_TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
_STYLE = "* { caret-color: transparent !important; transition: none !important; animation: none !important; }"
_ADD_STYLE = f"""addEventListener("DOMContentLoaded", () =>
  document.head.append(Object.assign(document.createElement("style"), {{ textContent: "{_STYLE}" }})));"""
"""A blinking caret and animations would make screenshots differ."""
_NAVIGATED = ("Execution context was destroyed", "Inspected target navigated")
"""What Playwright's errors say where a document was replaced while a command ran, such as after a click on a link."""

_Result = TypeVar("_Result")


def find_chromium() -> str:
    """The path of a Chromium or Chrome. Raises ConfigError if there is none."""
    for name in PROGRAMS:
        if (path := shutil.which(name)) is not None:
            return path
    raise ConfigError(
        f"a browser is not installed: there is no {', '.join(PROGRAMS)} in PATH; apt-get install chromium"
    )


class _Driver:
    """Playwright's driver process, and the event loop that talks to it, in a thread that all browsers share.

    An environment may be used from one event loop after another, but Playwright's objects belong to one loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Await a coroutine in the driver's event loop."""
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def start(self) -> Playwright:
        """The started driver; `stop` is called once for every `start`."""
        with require_extra("a browser", "gui"):
            from playwright.async_api import async_playwright

        with self._lock:
            if not self._users:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="agentfly-browser", daemon=True)
                self._thread.start()
                starting = asyncio.run_coroutine_threadsafe(async_playwright().start(), self._loop)
                self._playwright = starting.result(ANSWER_SECONDS)
            self._users += 1
            return self._playwright

    def stop(self) -> None:
        """End the driver after its last user."""
        with self._lock:
            self._users -= 1
            if not self._users:
                assert self._loop is not None
                asyncio.run_coroutine_threadsafe(self._playwright.stop(), self._loop).result(ANSWER_SECONDS)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()


_DRIVER = _Driver()


class Browser:
    """A Chromium process with one page. Methods raise EnvironmentFault if the process is lost or hangs."""

    def __init__(self, width: int, height: int) -> None:
        """Prepare a page of `width` × `height` pixels; `start` starts the process."""
        self._width, self._height = width, height
        self._context: BrowserContext | None = None
        self._page: Page | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._loading: set[Request] = set()
        """Requests of the current document and its frames that are not complete."""
        self._serve: Callable[[str], bytes | None] = lambda path: None
        self._failure = "the browser has not been started"

    async def start(self) -> None:
        """Start the process and open a blank page."""
        path = find_chromium()
        playwright = await threads.call(_DRIVER.start)
        # The name contains this process, so that a later one can remove the folder if this one is killed.
        prefix = f"{process_name(os.getpid())}-browser-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self._failure = ""
        try:
            await self._do(self._launch(playwright, path), "the browser did not start")
        except BaseException:
            await self.close()
            raise

    async def _launch(self, playwright: Playwright, path: str) -> None:
        assert self._folder is not None
        self._context = context = await playwright.chromium.launch_persistent_context(
            self._folder.name,
            executable_path=path,
            args=list(_OPTIONS),
            chromium_sandbox=os.geteuid() != 0,  # Chromium's own sandbox refuses root
            handle_sigint=False,  # Ctrl-C is for this process only, which closes its browsers
            handle_sigterm=False,
            handle_sighup=False,
            viewport={"width": self._width, "height": self._height},
            device_scale_factor=1,
            accept_downloads=False,
            service_workers="block",
        )
        context.on("close", lambda _: self._fail("the browser's process has ended"))
        self._page = page = context.pages[0] if context.pages else await context.new_page()
        page.on("crash", lambda _: self._fail("the page has crashed"))
        page.on("dialog", lambda dialog: dialog.accept())  # the page waits for an answer
        page.on("request", lambda request: self._loading.add(request))
        page.on("requestfinished", lambda request: self._loading.discard(request))
        page.on("requestfailed", lambda request: self._loading.discard(request))
        # Chromium does not report the end of requests that a document leaves behind, such as that for its icon.
        page.on("framenavigated", lambda frame: self._loading.clear() if frame == page.main_frame else None)
        await context.add_init_script(_ADD_STYLE)
        context.on("page", lambda popup: popup.close())
        await context.route("**/*", lambda route: route.abort("blockedbyclient"))  # of a popup before it is closed
        await page.route("**/*", self._answer)

    async def _answer(self, route: Route) -> None:
        """Answer a request of the page with a file of the owner, or refuse it."""
        request = route.request
        path = request.url.partition("?")[0].partition("#")[0].removeprefix(ORIGIN)
        body = self._serve(path) if path.startswith("/") else None
        if body is not None:
            kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
            await route.fulfill(body=body, content_type=f"{kind}; charset=utf-8")
            return
        # The page stays where it is if it would leave. Its frames, images and scripts fail.
        leaves = request.is_navigation_request() and request.frame == self.page.main_frame
        await route.abort("aborted" if leaves else "blockedbyclient")

    # ── the page ──

    async def open(self, path: str, serve: Callable[[str], bytes | None]) -> None:
        """Load a page and wait until it is complete.

        serve: returns the content of a path, such as `/core/core.js`, or None if the page may not have it.
        """
        self._serve = serve
        # To the corner: what lies under the mouse of the last page would be highlighted.
        await self._do(self.page.mouse.move(self._width - 1, self._height - 1), "the browser refused to move the mouse")
        await self._do(
            self.page.goto(ORIGIN + path, timeout=1000 * ANSWER_SECONDS), f"the browser cannot open {path!r:.80}"
        )

    async def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; promises are awaited."""
        return await self._do(self.page.evaluate(expression), "the page raised")

    async def screenshot(self, width: int | None = None, height: int | None = None) -> bytes:
        """The page as PNG: its upper left part of `width` × `height` pixels. None: as much as the window shows."""
        clip: Any = {"x": 0, "y": 0, "width": width or self._width, "height": height or self._height}
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            try:
                # After two frames, what the last event changed has been painted. A new style may have begun to load
                # images.
                await self.evaluate(_TWO_FRAMES)
                if not self._loading:
                    return await self._do(self.page.screenshot(clip=clip), "the browser refused a screenshot")
            except EnvironmentFault as fault:
                if not any(reason in str(fault) for reason in _NAVIGATED):
                    raise
            await asyncio.sleep(0.005)
        raise EnvironmentFault(f"the page has not loaded in {ANSWER_SECONDS:g} s")

    async def click(self, x: float, y: float) -> None:
        """Click with the left button at a point of the page, in pixels."""
        await self._do(self.page.mouse.click(x, y), "the browser refused a click")

    async def scroll(self, x: float, y: float, down: float) -> None:
        """Turn the mouse wheel over a point; `down` is in pixels, negative to scroll up."""
        await self._do(self.page.mouse.move(x, y), "the browser refused to move the mouse")
        await self._do(self.page.mouse.wheel(0, down), "the browser refused to scroll")

    async def type_text(self, text: str) -> None:
        """Type text into the focused element, character by character; a line break presses Enter."""
        await self._do(self.page.keyboard.type(text), "the browser refused text")

    async def press_key(self, key: Key) -> None:
        """Press and release a key."""
        await self._do(self.page.keyboard.press(key), "the browser refused a key")

    async def close(self) -> None:
        """End the process and remove its files."""
        self._failure = self._failure or "the browser is closed"
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._context is not None:
            with contextlib.suppress(Exception):  # it may be gone
                async with asyncio.timeout(ANSWER_SECONDS):
                    await _DRIVER.run(self._context.close())
        await threads.call(_DRIVER.stop)
        await threads.call(folder.cleanup)

    @property
    def page(self) -> Page:
        """Playwright's page, whose methods run in the driver's event loop."""
        if self._failure or self._page is None:
            raise EnvironmentFault(self._failure)
        return self._page

    async def _do(self, command: Coroutine[Any, Any, _Result], action: str) -> _Result:
        """Run one command. `action`: what it does, for the error."""
        from playwright.async_api import Error

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await _DRIVER.run(command)
        except TimeoutError as error:
            raise EnvironmentFault(f"the browser did not answer in {ANSWER_SECONDS:g} s: {action}") from error
        except Error as error:
            message, _, log = error.message.partition("\nBrowser logs:")
            output = " ".join(line.partition("[err]")[2].strip() for line in log.splitlines() if "[err]" in line)
            hint = f"; the browser's last output: {output[-300:]}" if output else ""
            raise EnvironmentFault(self._failure or f"{action}: {message[:300]}{hint}") from error

    def _fail(self, reason: str) -> None:
        """Make later calls raise EnvironmentFault, with the first reason."""
        self._failure = self._failure or reason


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
