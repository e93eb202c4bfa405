"""Start a trusted program by path: `python -I …/inside/__main__.py PROGRAM CONFIG`."""

import importlib
import json
import os
import sys


def main() -> None:
    """Import the program as a sibling, whatever this folder is called here, and give it its configuration."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.dirname(folder))
    program = importlib.import_module(f"{os.path.basename(folder)}.{sys.argv[1]}")
    sys.path.pop(0)
    program.main(json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
