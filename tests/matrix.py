"""Run the quick tests on every supported Python that is installed: `make matrix`, or `make matrix VERSIONS=3.12`.

Each version has a virtual environment of its own, `.venv-3.x`, with the core and pytest only.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13")  # as the classifiers in pyproject.toml


def find_python(version: str) -> str | None:
    """Return an interpreter of this version: from PATH, or one that pyenv has installed."""
    candidates = [f"python{version}", *sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))]
    for candidate in candidates:
        if (path := shutil.which(candidate)) is None:
            continue
        # A pyenv shim exists also for versions that are not activated, and fails.
        show = [path, "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(show, capture_output=True, text=True).stdout.strip() == version:
            return path
    return None


def run_tests(python: str, version: str, arguments: list[str]) -> int:
    """Create or update the environment of this version and run the quick tests in it; return the exit status."""
    folder = ROOT / f".venv-{version}"
    inside = str(folder / "bin" / "python")
    if not folder.is_dir():
        subprocess.run([python, "-m", "venv", folder], check=True)
    install = [inside, "-m", "pip", "-qq", "--disable-pip-version-check", "install", "--constraint", "constraints.txt"]
    subprocess.run([*install, "--editable", ".[test]"], cwd=ROOT, check=True)
    return subprocess.run([inside, "-m", "pytest", "--quick", *arguments], cwd=ROOT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"such as 3.12; default: {' '.join(VERSIONS)}")
    options, pytest_arguments = parser.parse_known_args()
    failed = []
    for version in options.versions or VERSIONS:
        if (python := find_python(version)) is None:
            print(f"» Python {version}: skipped, not installed (or without ensurepip)", flush=True)
            continue
        print(f"» Python {version}: {python}", flush=True)
        if run_tests(python, version, pytest_arguments or ["-n", "2", "--dist", "loadfile"]):
            failed.append(version)
    if failed:
        print(f"the quick tests fail on Python {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
