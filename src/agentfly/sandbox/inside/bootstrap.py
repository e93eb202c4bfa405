"""First program in a container, run by `python3 -c` with the source of `frames` as its argument.

It receives the trusted programs on stdin and starts one of them. They exist only in the memory of this process: the
container need not be writable, and user code finds no file of them.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from typing import Any

_MAX_SOURCES = 16 << 20


class SourceLoader(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Imports modules from source texts in memory."""

    def __init__(self, sources: "dict[str, str]") -> None:
        self.sources = sources

    def find_spec(self, name: str, path: Any, target: Any = None) -> "importlib.machinery.ModuleSpec | None":
        return importlib.util.spec_from_loader(name, self) if name in self.sources else None

    def is_package(self, name: str) -> bool:
        """Whether it is a package: one that another module is in."""
        return any(module.startswith(name + ".") for module in self.sources)

    def get_source(self, name: str) -> str:
        return self.sources[name]

    def get_filename(self, name: str) -> str:
        """Return a name for tracebacks; the file does not exist."""
        return "/agentfly/" + name.replace(".", "/") + ("/__init__.py" if self.is_package(name) else ".py")


def main() -> None:
    """Report that Python runs, read one frame with the sources and the configuration, start the program."""
    if sys.version_info < (3, 9):  # noqa: UP036 (an image may have any)
        raise SystemExit(f"this is Python {sys.version_info[0]}.{sys.version_info[1]}; sessions need 3.9 or later")
    loader = SourceLoader({"frames": sys.argv[1]})
    sys.meta_path.insert(0, loader)
    frames: Any = importlib.import_module("frames")
    del sys.modules["frames"]
    host = frames.PipeChannel(0, 1)
    host.sendall(frames.pack(frames.ANSWER, b'{"awake": 1}'))
    try:
        message = json.loads(frames.receive(host, _MAX_SOURCES)[1])
    except EOFError:
        raise SystemExit(0) from None  # the host is gone
    loader.sources = message["sources"]
    program = importlib.import_module(message["program"])
    sys.meta_path.remove(loader)
    program.main(message["config"])


if __name__ == "__main__":
    main()
