"""First program in a container, run by `python3 -c`: receives the trusted programs on stdin and starts one of them.

They exist only in the memory of this process: the container need not be writable, and user code finds no file of them.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import struct
import sys
from typing import Any

_HEADER = struct.Struct(">Ic")
_AWAKE = b'{"awake": 1}'


class SourceLoader(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Imports modules from source texts in memory."""

    def __init__(self, sources: "dict[str, str]") -> None:
        self.sources = sources

    def find_spec(self, name: str, path: Any, target: Any = None) -> "importlib.machinery.ModuleSpec | None":
        """Return the spec of a module whose source is known."""
        return importlib.util.spec_from_loader(name, self) if name in self.sources else None

    def is_package(self, name: str) -> bool:
        """Whether it is the package itself."""
        return "." not in name

    def get_source(self, name: str) -> str:
        """Return the source text."""
        return self.sources[name]

    def get_filename(self, name: str) -> str:
        """Return a name for tracebacks; the file does not exist."""
        return "/agentfly/" + name.replace(".", "/") + ("/__init__.py" if self.is_package(name) else ".py")


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise SystemExit(0)  # the host is gone
        data += part
    return data


def main() -> None:
    """Report that Python runs, read one frame with the sources and the configuration, start the program."""
    if sys.version_info < (3, 9):  # noqa: UP036 (an image may have any)
        raise SystemExit(f"this is Python {sys.version_info[0]}.{sys.version_info[1]}; sessions need 3.9 or later")
    os.write(1, _HEADER.pack(len(_AWAKE), b"A") + _AWAKE)
    length, _ = _HEADER.unpack(_read_exactly(_HEADER.size))
    message = json.loads(_read_exactly(length))
    loader = SourceLoader(message["sources"])
    sys.meta_path.insert(0, loader)
    program = importlib.import_module(message["program"])
    sys.meta_path.remove(loader)
    program.main(message["config"])


if __name__ == "__main__":
    main()
