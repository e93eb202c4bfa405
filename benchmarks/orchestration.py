"""CPU time per turn of the rollout loop with a model that answers at once: ours, a plain floor, the peers.

Every side is a process of its own. Repetitions are interleaved, one of each side and round again, so that
whatever else the machine does falls on all alike; a ratio compares a side with the floor of the same round.

    python -m benchmarks.orchestration [--quick]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.table import print_table

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".cache" / "peers"


@dataclass(frozen=True)
class Kind:
    """A side that may take part."""

    module: str
    arguments: tuple[str, ...] = ()
    peer: str = ""
    """The environment of `peers/setup.sh` it runs in; empty: this one."""
    most_chains: int = 1000
    """It sits larger cases out."""

    @property
    def python(self) -> Path:
        return PEERS / self.peer / "bin" / "python" if self.peer else Path(sys.executable)


KINDS = {
    "floor": Kind("floor", most_chains=10_000),
    "lean floor": Kind("floor", ("lean",), most_chains=10_000),
    "agentfly": Kind("agentfly_run", most_chains=10_000),
    "trl 1.16.0": Kind("trl_generate", peer="trl"),
    "verifiers 0.3.1": Kind("verifiers_toolenv", peer="verifiers"),
}


@dataclass(frozen=True)
class Size:
    chains: int
    turns: int
    rounds: int


BY_CHAINS = [Size(100, 5, 9), Size(1000, 5, 7), Size(10_000, 5, 3)]
BY_TURNS = [Size(10, 5, 15), Size(10, 10, 15), Size(10, 20, 11), Size(10, 40, 9)]
QUICK = [Size(20, 5, 2)], [Size(5, 5, 2), Size(5, 10, 2)]


@contextmanager
def running(kind: Kind) -> Iterator["Side"]:
    """A side's process, which ends when its input does."""
    # What it prints goes to a file: a pipe that nobody reads would fill up and stop it.
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(
            [kind.python, "-m", f"benchmarks.sides.{kind.module}", *kind.arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
        ) as process,
    ):
        yield Side(process, printed)


class Side:
    """A running side."""

    def __init__(self, process: subprocess.Popen[str], printed: IO[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._questions, self._answers, self._printed = process.stdin, process.stdout, printed
        self._read()

    def ask(self, size: Size) -> dict[str, Any]:
        self._questions.write(json.dumps({"chains": size.chains, "turns": size.turns}) + "\n")
        self._questions.flush()
        answer: dict[str, Any] = json.loads(self._read())
        if answer["reward"] != size.chains:
            raise RuntimeError(f"{size.chains} chains earned {answer['reward']}; every chain should have earned 1")
        return answer

    def _read(self) -> str:
        line = self._answers.readline()
        if not line:
            self._printed.seek(0)
            raise RuntimeError(f"a side died:\n{self._printed.read()}")
        return line


@dataclass
class Measured:
    """One side at one size."""

    microseconds: list[float] = field(default_factory=list)
    """CPU time per turn, by round."""
    tokens: int = 0
    sampled: int = 0


def measure(sides: dict[str, Side], size: Size) -> dict[str, Measured]:
    """Interleaved rounds; the first warms up and is not counted."""
    taking_part = {name: side for name, side in sides.items() if size.chains <= KINDS[name].most_chains}
    measured = {name: Measured() for name in taking_part}
    for number in range(size.rounds + 1):
        for name, side in taking_part.items():
            answer = side.ask(size)
            if number:
                measured[name].microseconds.append(answer["microseconds"])
                measured[name].tokens = answer["tokens"] // size.chains
                measured[name].sampled = answer["sampled"] // size.chains
    return measured


def rows(size: Size, measured: dict[str, Measured]) -> Iterable[list[str]]:
    floor = measured["floor"].microseconds
    for name, side in measured.items():
        ratio = median(own / base for own, base in zip(side.microseconds, floor, strict=True))
        yield [
            f"{size.chains:,} × {size.turns}",
            name,
            f"{median(side.microseconds):.0f}",
            f"{min(side.microseconds):.0f}",
            f"{ratio:.2f}",
            f"{side.tokens} / {side.sampled}",
        ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="CPU time per turn of the rollout loop.")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures mean little")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=list(KINDS), help="sides to run; the floor always does"
    )
    options = parser.parse_args(arguments)

    present = {name: kind for name, kind in KINDS.items() if name == "floor" or name in options.only}
    absent = [name for name, kind in present.items() if not kind.python.exists()]
    by_chains, by_turns = QUICK if options.quick else (BY_CHAINS, BY_TURNS)
    header = ["chains × turns", "side", "µs per turn", "least", "× floor", "tokens / sampled"]
    with ExitStack() as stack:
        sides = {n: stack.enter_context(running(kind)) for n, kind in present.items() if n not in absent}
        for title, sizes in (("by the number of chains", by_chains), ("by the length of a chain", by_turns)):
            body = [row for size in sizes for row in rows(size, measure(sides, size))]
            body += [["", n, f"not installed, run benchmarks/peers/setup.sh {KINDS[n].peer}"] for n in absent]
            print_table(f"CPU time per turn, {title}", header, body)


if __name__ == "__main__":
    main()
