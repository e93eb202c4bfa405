"""The browser: its page has no network, and the process ends with its owner."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from PIL import Image as Pillow

from agentfly.environments import browser as module
from agentfly.environments.browser import Browser
from agentfly.errors import ConfigError, EnvironmentFault
from tests.environments.browsers import needs_browser

PAGE = """<!doctype html><title>start</title><body style="margin: 0">
<style>button, input { position: absolute; left: 0; width: 80px; height: 40px }</style>
<button style="top: 0" onclick="document.title = 'clicked'">Hi</button>
<input id="field" style="top: 50px">
<div style="height: 2000px"></div>"""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    started = Browser(160, 210)
    await started.start()
    yield started
    await started.close()


async def show(browser: Browser, page: str) -> None:
    await browser.open("/page.html", lambda path: page.encode() if path == "/page.html" else None)


def chromium_processes(owner: psutil.Process) -> list[psutil.Process]:
    """The processes of browsers that a process has started."""
    return [process for process in owner.children(recursive=True) if "--headless" in " ".join(process.cmdline())]


def test_missing_browser_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"a browser is not installed.*apt-get install chromium"):
        module.find_chromium()


async def test_program_that_ends_is_a_fault_with_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho no display >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    broken = Browser(160, 210)
    with pytest.raises(EnvironmentFault, match=r"did not start: .*the browser's last output: no display"):
        await broken.start()


class TestRunning:
    pytestmark = needs_browser

    async def test_mouse_keys_and_text(self, browser: Browser) -> None:
        await show(browser, PAGE)
        await browser.click(40, 20)
        assert await browser.evaluate("document.title") == "clicked"
        await browser.click(40, 60)
        await browser.type_text("Zoë 确定!")
        await browser.press_key("Backspace")
        await browser.press_key("Space")
        assert await browser.evaluate("field.value") == "Zoë 确定 "
        await browser.scroll(80, 100, 300)
        await browser.evaluate("new Promise(done => scrollY ? done(0) : addEventListener('scroll', () => done(0)))")
        assert await browser.evaluate("scrollY") > 0

    async def test_screenshots_are_deterministic(self, browser: Browser) -> None:
        await show(browser, PAGE)
        await browser.click(40, 60)  # a caret would blink
        first = await browser.screenshot()
        with Pillow.open(io.BytesIO(first)) as image:
            assert image.size == (160, 210)
        await browser.evaluate("new Promise(done => setTimeout(() => done(0), 700))")
        assert await browser.screenshot() == first
        with Pillow.open(io.BytesIO(await browser.screenshot(80, 50))) as image:
            assert image.size == (80, 50)

    async def test_page_reaches_nothing_but_its_files(self, browser: Browser, request: pytest.FixtureRequest) -> None:
        received = list[bytes]()

        async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.append(await reader.read(100))
            writer.close()

        server = await asyncio.start_server(record, "127.0.0.1", 0)
        request.addfinalizer(server.close)
        port = server.sockets[0].getsockname()[1]
        await show(browser, PAGE)
        ways = f"""
        Promise.allSettled([
          fetch("http://127.0.0.1:{port}/"),
          fetch("http://localhost:{port}/"),
          fetch("file:///etc/passwd"),
          fetch("/missing.txt"),
          new Promise((done, fail) => {{
            const socket = new WebSocket("ws://127.0.0.1:{port}/"); socket.onopen = done; socket.onerror = fail;
          }}),
          new Promise((done, fail) => {{
            const image = new Image(); image.onload = done; image.onerror = fail; image.src = "http://127.0.0.1:{port}/a";
          }}),
          new Promise((done, fail) => {{
            const frame = document.createElement("iframe");
            frame.src = "http://127.0.0.1:{port}/f";
            frame.onload = fail;  // also for the page that says that it was blocked
            document.body.append(frame);
          }}),
        ]).then((all) => all.map((each) => each.status))
        """
        assert await browser.evaluate(ways) == ["rejected"] * 7
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            datagrams.bind(("127.0.0.1", 0))
            datagrams.setblocking(False)
            gathering = f"""
            new Promise((done) => {{
              const urls = "stun:127.0.0.1:{datagrams.getsockname()[1]}";
              const peer = new RTCPeerConnection({{iceServers: [{{urls}}]}});
              peer.createDataChannel("a");
              peer.onicegatheringstatechange = () => peer.iceGatheringState === "complete" && done(0);
              peer.createOffer().then((offer) => peer.setLocalDescription(offer));
            }})
            """
            await browser.evaluate(gathering)
            with pytest.raises(BlockingIOError):
                datagrams.recv(100)
        await browser.evaluate(f"void open('http://127.0.0.1:{port}/popup')")
        # A link elsewhere leaves the page as it is.
        await browser.evaluate(f"location.href = 'http://127.0.0.1:{port}/elsewhere'")
        await browser.screenshot()
        assert await browser.evaluate("document.title") == "start"
        with pytest.raises(EnvironmentFault, match="cannot open"):
            await browser.open("/missing.html", lambda path: None)
        await show(browser, PAGE)
        assert await browser.evaluate("document.title") == "start"
        assert not received

    async def test_screenshot_waits_for_the_document_that_replaces_the_last_one(self, browser: Browser) -> None:
        """A click on a link is answered before the next document is there; its images are waited for, too."""
        square = Pillow.new("RGB", (40, 40), "red")
        square.save(png := io.BytesIO(), "PNG")

        def serve(path: str) -> bytes | None:
            link = b'<body style="margin: 0"><a href="/next.html" style="font-size: 40px">next</a>'
            after = b'<title>next</title><body style="margin: 0"><img src="/square.png" style="display: block">'
            return {"/first.html": link, "/next.html": after, "/square.png": png.getvalue()}.get(path)

        for _ in range(5):
            await browser.open("/first.html", serve)
            await browser.click(20, 20)
            await browser.screenshot()  # of either document
            await browser._do(browser.page.wait_for_url("**/next.html"), "the link leads nowhere")
            with Pillow.open(io.BytesIO(await browser.screenshot())) as image:
                assert image.convert("RGB").getpixel((20, 20)) == (255, 0, 0)

    async def test_page_that_does_not_load_is_a_fault(self, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
        await show(browser, PAGE)
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
        with pytest.raises(EnvironmentFault, match=r"did not answer in 0\.5 s: the page raised"):
            await browser.evaluate("new Promise(() => 0)")

    async def test_alert_does_not_hang_and_errors_are_raised(self, browser: Browser) -> None:
        await show(browser, PAGE.replace("document.title = 'clicked'", "alert(1)"))
        await browser.click(40, 20)
        assert await browser.evaluate("1 + 1") == 2
        with pytest.raises(EnvironmentFault, match="ReferenceError"):
            await browser.evaluate("nothing_of_that_name")

    async def test_killed_browser_is_a_fault(self, browser: Browser) -> None:
        for process in chromium_processes(psutil.Process()):
            process.kill()
        with pytest.raises(EnvironmentFault, match="browser"):
            await browser.evaluate("1")
        with pytest.raises(EnvironmentFault, match="browser"):
            await browser.screenshot()

    async def test_crashed_page_is_a_fault(self, browser: Browser) -> None:
        await show(browser, PAGE)
        with pytest.raises(EnvironmentFault):
            await browser._do(browser.page.goto("chrome://crash"), "no crash")
        with pytest.raises(EnvironmentFault, match="the page has crashed"):
            await browser.evaluate("1")

    def test_browser_ends_when_its_owner_is_killed(self) -> None:
        program = """
import asyncio, os, signal
from agentfly.environments.browser import Browser
async def main():
    browser = Browser(160, 210)
    await browser.start()
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
        owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        with owner, owner.stdout:
            owner.stdout.readline()
            started = psutil.Process(owner.pid).children(recursive=True)
            assert chromium_processes(psutil.Process(owner.pid))
            owner.kill()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
