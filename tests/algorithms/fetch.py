"""Fetch the frameworks whose numbers the algorithms are compared with.

They land in `.cache/references/NAME/`, out of git and out of our environment: each as its wheel and the few that it
imports besides ours. A folder is there whole or not at all, and names its pins in `source.txt`. What cannot be fetched
is named in one line, and never fails the run: its tests skip and say why.

    python tests/algorithms/fetch.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "references"
PINS = {
    "verl": (
        "verl==0.9.1",
        "antlr4-python3-runtime==4.9.3",
        "codetiming==1.4.0",
        "omegaconf==2.3.0",
        "orjson==3.13.0",
        "pyvers==0.2.3",
        "tensordict==0.15.3",
    ),
    "trl": ("trl==1.16.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "pandas==3.1.1"),
}
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--retries=1", "--no-deps")
TIMEOUT_S = 300


def main() -> None:
    absent = [name for name in PINS if not is_there(name)]
    print(f"» references: {len(PINS) - len(absent)} there, {len(absent)} to fetch", flush=True)
    for name in absent:
        problem = fetch(name)
        print(f"  {name:<16} " + (f"missing, so its tests skip: {problem}" if problem else "ready"), flush=True)


def is_there(name: str) -> bool:
    mark = CACHE / name / "source.txt"
    return mark.is_file() and mark.read_text() == _source(name)


def fetch(name: str) -> str | None:
    """Fetch one folder; return why it could not be had, or None."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=CACHE) as scratch:
        filled = Path(scratch) / name
        command = (sys.executable, *PIP, "--target", str(filled), *PINS[name])
        try:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"pip took more than {TIMEOUT_S} s"
        except subprocess.CalledProcessError as error:
            errors = [line for line in error.stderr.decode(errors="replace").splitlines() if line.startswith("ERROR")]
            return (errors or ["pip failed"])[0][:160]
        (filled / "source.txt").write_text(_source(name))
        if not is_there(name):  # another run may have been quicker, and tests may read its files
            shutil.rmtree(CACHE / name, ignore_errors=True)
            filled.rename(CACHE / name)
    return None


def _source(name: str) -> str:
    """The pins, and the Python whose wheels these are."""
    return "\n".join((*PINS[name], f"python {sys.version_info.major}.{sys.version_info.minor}", ""))


if __name__ == "__main__":
    main()
