"""Images on their way into the record."""

import base64
import contextlib
import gzip
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentfly import tool
from agentfly.agents import HFAgent
from agentfly.errors import ConfigError, DataError
from agentfly.runs.directory import RunDirectory, RunWriter
from agentfly.trajectory import CallStatus, StopReason
from agentfly.types import Image
from agentfly.vision.images import MAX_PIXELS, ImageConfig, fetch_image, normalize_image, open_image
from tests.fakes import Recording, byte_agent, call

PIL_Image = pytest.importorskip("PIL.Image")


def encode(pixels: Any, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    pixels.save(buffer, format=format, **options)
    return buffer.getvalue()


def picture(width: int, height: int, color: Any = "red", mode: str = "RGB") -> Any:
    return PIL_Image.new(mode, (width, height), color)


def bomb() -> bytes:
    """A PNG whose header claims 60,000 x 60,000 pixels."""
    data = bytearray(encode(picture(1, 1)))
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    return bytes(data)


ANIMATED = encode(picture(8, 8), "GIF", save_all=True, append_images=[picture(8, 8, "blue")])
BROKEN = {
    "cut off": (encode(picture(64, 64, "blue"))[:-30], "cannot be decoded"),
    "not an image": (b"\x89PNG" + b"x" * 80, "cannot be decoded"),
    "bomb": (bomb(), "cannot be decoded|rejected"),
    "narrow": (encode(picture(20_000, 20)), "20000 x 20 pixels is rejected: one side"),
    "animated": (ANIMATED, "2 frames; give one of them"),
    "animated, cut off": (ANIMATED[:-19], "cannot be decoded"),
    "animated, cut off in a header": (ANIMATED[: ANIMATED.rindex(b",") + 5], "cannot be decoded"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_image_is_rejected_with_the_reason(name: str) -> None:
    data, reason = BROKEN[name]
    with pytest.raises(DataError, match=reason):
        normalize_image(Image.of(data))


def test_reason_is_the_same_in_every_run() -> None:
    """A model may see it: no address of an object in it."""
    with pytest.raises(DataError, match=r"it is not a PNG, JPEG, GIF or WebP file, or it is damaged$"):
        open_image(Image("data:image/png;base64,JVBERi0xLjQ="))


@pytest.mark.parametrize("url", ["data:image/svg+xml,<svg/>", "data:image/png;utf8,xyz", "data:"])
def test_data_uri_without_base64_is_rejected_with_the_reason(url: str) -> None:
    with pytest.raises(DataError, match="is a data: URI without ';base64,'"):
        normalize_image(Image(url))


def test_type_in_a_data_uri_does_not_matter() -> None:
    data = base64.b64encode(encode(picture(3, 3), "JPEG")).decode()
    assert open_image(Image(f"data:text/plain;charset=utf-8;base64,{data}")).size == (3, 3)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "RGBX", "P", "RGBA"])
def test_pillow_image_keeps_its_colors(mode: str) -> None:
    red, green, blue = open_image(Image.of(picture(3, 3).convert(mode))).getpixel((0, 0))
    assert (red > 250, green, blue) == (True, 0, 0)


@pytest.mark.parametrize("size", [(1, 1), (13, 7), (640, 480)])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_normalized_image_is_an_rgb_png_and_stays_the_same(size: tuple[int, int], format: str) -> None:
    out = normalize_image(Image.of(encode(picture(*size), format)))
    assert out.url.startswith("data:image/png;base64,")
    assert open_image(out).size == size
    assert normalize_image(out) == out


def test_transparent_pixels_become_white() -> None:
    out = open_image(normalize_image(Image.of(encode(picture(2, 2, (255, 0, 0, 0), "RGBA")))))
    assert out.getpixel((0, 0)) == (255, 255, 255)


def test_large_image_is_scaled_down_with_its_proportions() -> None:
    out = open_image(normalize_image(Image.of(encode(picture(6000, 1500)))))
    assert out.width * out.height <= MAX_PIXELS
    assert abs(out.width / out.height - 4) < 0.01


def test_pixels_do_not_depend_on_metadata() -> None:
    plain = normalize_image(Image.of(encode(picture(5, 5))))
    assert normalize_image(Image.of(encode(picture(5, 5), dpi=(300, 300)))) == plain


@pytest.mark.parametrize("name", BROKEN)
async def test_bad_image_of_a_tool_is_a_tool_error(name: str) -> None:
    @tool
    async def shoot() -> dict[str, Any]:
        """Take a screenshot."""
        return {"observation": "here", "image": BROKEN[name][0]}

    agent = byte_agent([call("shoot"), "done"], tools=[shoot])
    (trajectory,) = await agent.run("Go.")
    assert [called.status for called in trajectory.calls] == [CallStatus.ERROR]
    assert trajectory.stop is StopReason.ANSWER


def seeing_agent(script: list[str], **settings: Any) -> HFAgent:
    agent = byte_agent(Recording(script), **settings)
    assert agent.template is not None
    agent.template.shows_images = True  # the byte tokenizer has no placeholder
    agent.template._renderer.image = "[image]"
    return agent


async def test_bad_image_of_a_task_ends_its_chain_only() -> None:
    rows = [{"question": "?"}, {"question": "?", "image": Image.of(BROKEN["cut off"][0]).url}]
    good, bad = await seeing_agent(["done"]).run(rows)
    assert bad.stop is StopReason.AGENT_FAULT
    assert "cannot be decoded" in bad.failures[0].message
    assert good.stop is StopReason.ANSWER


async def test_address_is_not_fetched_unless_allowed() -> None:
    row = {"question": "?", "image": "http://127.0.0.1:9/a.png"}
    with pytest.raises(DataError, match="allows fetching"):
        await seeing_agent(["done"]).run(row)
    with pytest.raises(DataError, match="cannot be fetched"):
        await seeing_agent(["done"], image_config={"fetch": True}).run(row)
    assert "cannot be shown: " in seeing_agent(["done"]).visible(("see ", Image("http://127.0.0.1:9/a.png")))


def test_address_of_a_file_is_never_fetched() -> None:
    with pytest.raises(DataError, match="not http or https"):
        fetch_image(Image("file:///etc/hostname"))


def test_orientation_of_a_photo_is_applied() -> None:
    orientation = PIL_Image.Exif()
    orientation[0x0112] = 6  # turned by 90 degrees
    data = encode(picture(40, 20), "JPEG", exif=orientation)
    assert open_image(Image.of(data)).size == (20, 40)
    assert open_image(Image.of(encode(picture(40, 20), "JPEG", exif=b"Exif\0\0damaged"))).size == (40, 20)


@pytest.mark.parametrize("options", [{}, {"transparency": 1}])
def test_16_bits_of_gray_are_scaled(options: dict[str, int]) -> None:
    gray = PIL_Image.new("I;16", (2, 2), 128 * 257)
    assert open_image(Image.of(encode(gray, **options))).getpixel((0, 0)) == (128, 128, 128)


def test_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(b"x")
                    stopped.wait(0.01)

        def log_message(self, *_: Any) -> None: ...

    stopped = threading.Event()
    monkeypatch.setattr("agentfly.vision.images.FETCH_SECONDS", 0.5)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        with pytest.raises(DataError, match="not complete after"):
            fetch_image(Image(f"http://127.0.0.1:{server.server_port}/"))
        server.shutdown()


@pytest.fixture
def web() -> Iterator[str]:
    """A server with one image of 30 x 10 pixels, `/text`, and `/gzip` with an encoding that no client asked for."""
    files = {"/a.png": encode(picture(30, 10)), "/text": b"not an image", "/gzip": gzip.compress(bytes(1 << 26))}

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in files else 404)
            if self.path == "/gzip":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(files.get(self.path, b"missing"))

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def test_allowed_address_is_fetched_into_the_record(web: str) -> None:
    agent = seeing_agent(["done"], image_config={"fetch": True})
    (trajectory,) = await agent.run({"question": "?", "image": f"{web}/a.png"})
    (image,) = [block for block in trajectory.messages[0].content if isinstance(block, Image)]
    assert open_image(image).size == (30, 10)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/missing", "404"),
        ("/text", "are not a PNG, JPEG, GIF or WebP image"),
        ("/a.png", "larger than"),
        ("/gzip", "sent with the encoding gzip"),  # 64 MiB, if it were decompressed
    ],
)
def test_unusable_answer_is_not_an_image(web: str, path: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "/a.png":
        monkeypatch.setattr("agentfly.vision.images.MAX_FETCHED_BYTES", 20)
    with pytest.raises(DataError, match=reason):
        normalize_image(fetch_image(Image(web + path)))


def test_address_that_is_no_text_cannot_be_fetched() -> None:
    with pytest.raises(DataError, match="cannot be fetched"):
        fetch_image(Image("http://127.0.0.1/\ud800"))


def test_unknown_image_setting_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no setting 'fetching'; it has fetch"):
        ImageConfig.parse({"fetching": True})


async def test_run_directory_stores_each_image_once(tmp_path: Path) -> None:
    @tool
    async def shoot() -> dict[str, Any]:
        """Take a screenshot."""
        return {"observation": "here", "image": encode(picture(20, 10, "green"))}

    agent = byte_agent([call("shoot"), call("shoot"), "done"], tools=[shoot])
    image = Image.of(encode(picture(30, 10)))
    result = await agent.run({"question": "?", "image": image.url}, num_chains=2)
    with RunWriter.create(tmp_path / "run", {}) as writer:
        assert writer.write_trajectories(1, result.trajectories) == []
    stored = RunDirectory(tmp_path / "run")
    assert [record.trajectory for record in stored.trajectories(1)] == list(result.trajectories)
    files = list(stored.images.iterdir())
    assert [base64.b64encode(file.read_bytes()).decode() in image.url for file in files].count(True) == 1
    assert b"base64" not in stored.trajectory_file(1).read_bytes()
