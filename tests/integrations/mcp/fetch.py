"""Install the reference servers of the Model Context Protocol, pinned, into `.cache/mcp/`, out of git.

Those of PyPI get a virtual environment of their own, those of npm a folder. What cannot be installed is named in one
line, and never fails the run: its tests skip and say why.

    python tests/integrations/mcp/fetch.py
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "mcp"
PYPI = ("mcp-server-time==2026.10.19", "mcp-server-git==2026.10.19", "mcp-server-fetch==2026.10.24")
NPM = tuple(f"@modelcontextprotocol/server-{name}@2026.8.31" for name in ("everything", "filesystem", "memory"))
TIMEOUT_S = 600


def find_server(name: str) -> Path | None:
    """The program of a reference server, say `time`; None if it is not installed as pinned."""
    for folder, pins, programs in ((CACHE / "pypi", PYPI, "bin"), (CACHE / "npm", NPM, "node_modules/.bin")):
        program = folder / programs / f"mcp-server-{name}"
        if program.exists() and is_installed(folder, pins):
            return program
    return None


def is_installed(folder: Path, pins: tuple[str, ...]) -> bool:
    mark = folder / "source.txt"
    return mark.is_file() and mark.read_text().split() == list(pins)


def install_pypi(folder: Path) -> list[str]:
    venv.create(folder, with_pip=True, clear=True)
    return [str(folder / "bin" / "python"), "-m", "pip", "-qq", "--disable-pip-version-check", "install", *PYPI]


def install_npm(folder: Path) -> list[str]:
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise OSError("npm is not installed")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return ["npm", "install", "--loglevel=error", "--no-audit", "--no-fund", "--prefix", str(folder), *NPM]


def main() -> None:
    for kind, pins, prepare in (("pypi", PYPI, install_pypi), ("npm", NPM, install_npm)):
        folder = CACHE / kind
        if is_installed(folder, pins):
            continue
        print(f"» installing {', '.join(pins)}", flush=True)
        try:
            command = prepare(folder)
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.strip() and "warn" not in line.lower()]
            print(f"  missing, so their tests skip: {lines[0] if lines else error}", flush=True)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"  missing, so their tests skip: {error}", flush=True)
        else:
            (folder / "source.txt").write_text("\n".join(pins) + "\n")


if __name__ == "__main__":
    sys.exit(main())
