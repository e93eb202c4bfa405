"""The bytes between the engine and the session's init."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from agentfly.resources.runtimes.container.sandbox import Demultiplexer
from agentfly.sandbox.mounts import INSIDE


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40))), st.integers(1, 50))
def test_streams_are_separated_for_any_chunking(pieces: list[tuple[int, bytes]], size: int) -> None:
    data = b"".join(bytes([kind, 0, 0, 0]) + len(piece).to_bytes(4, "big") + piece for kind, piece in pieces)
    stream = Demultiplexer()
    out = b"".join(stream(data[start : start + size]) for start in range(0, len(data), size))
    assert out == b"".join(piece for kind, piece in pieces if kind == 1)
    assert stream.stderr == b"".join(piece for kind, piece in pieces if kind == 2)


def test_old_python_is_rejected() -> None:
    line = f"import sys; sys.version_info = (3, 8, 1)\n{(INSIDE / 'bootstrap.py').read_text()}"
    done = subprocess.run([sys.executable, "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stderr.strip() == "this is Python 3.8; sessions need 3.9 or later"
