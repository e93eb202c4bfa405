"""Start a trusted program by path: `python -I …/inside/__main__.py PROGRAM CONFIG`."""

import contextlib
import ctypes
import importlib
import json
import os
import re
import sys


def main() -> None:
    """Import the program as a sibling, whatever this folder is called here, and pass it its configuration."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.dirname(folder))
    program = importlib.import_module(f"{os.path.basename(folder)}.{sys.argv[1]}")
    sys.path.pop(0)
    config = json.loads(sys.argv[2])
    with contextlib.suppress(OSError):
        _blank_paths()
    program.main(config)


def _blank_paths() -> None:
    """Blank the paths in /proc/PID/cmdline: the configuration names some of the host, and every session is a fork."""
    with open("/proc/self/stat", "rb") as file:
        end = int(file.read().rpartition(b")")[2].split()[46])
    config = os.fsencode(sys.argv[-1])
    start = end - 1 - len(config)
    if end and ctypes.string_at(start, len(config)) == config:
        for path in re.finditer(rb'(?<=")/[^"]*', config):
            ctypes.memset(start + path.start(), ord(" "), len(path[0]))


if __name__ == "__main__":
    main()
