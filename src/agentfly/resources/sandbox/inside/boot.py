"""What `python3 -c` runs first in a container: it takes the trusted programs from stdin and starts one of them.

They live in the memory of this process only: the container need not be writable, and user code finds no file of theirs.
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

_HEAD, _AWAKE = struct.Struct(">Ic"), b'{"awake": 1}'


class Sources(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Imports modules from texts."""

    def __init__(self, texts: "dict[str, str]") -> None:
        self.texts = texts

    def find_spec(self, name: str, path: Any, target: Any = None) -> "importlib.machinery.ModuleSpec | None":
        """How to load a module that is here."""
        return importlib.util.spec_from_loader(name, self) if name in self.texts else None

    def is_package(self, name: str) -> bool:
        """Only the outermost is one."""
        return "." not in name

    def get_source(self, name: str) -> str:
        """Its text."""
        return self.texts[name]

    def get_filename(self, name: str) -> str:
        """A name for tracebacks; there is no such file."""
        return "/agentfly/" + name.replace(".", "/") + ("/__init__.py" if self.is_package(name) else ".py")


def _exactly(size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = os.read(0, size - len(parts))
        if not part:
            raise SystemExit(0)  # the host is gone
        parts += part
    return parts


def main() -> None:
    """Say that Python runs, take a frame with the texts and the configuration, and start."""
    if sys.version_info < (3, 9):  # noqa: UP036 (an image may have any)
        raise SystemExit(f"this is Python {sys.version_info[0]}.{sys.version_info[1]}; sessions need 3.9 or later")
    os.write(1, _HEAD.pack(len(_AWAKE), b"A") + _AWAKE)
    told = json.loads(_exactly(_HEAD.unpack(_exactly(_HEAD.size))[0]))
    sources = Sources(told["sources"])
    sys.meta_path.insert(0, sources)
    program = importlib.import_module(told["program"])
    sys.meta_path.remove(sources)
    program.main(told["config"])


if __name__ == "__main__":
    main()
