"""CPU time per turn of the rollout loop with a model that answers at once: AgentFly, a minimal loop, other frameworks.

Every framework runs in its own process. Rounds are interleaved, so that other load on the machine affects all alike; a
ratio compares a framework with the minimal loop ("floor") of the same round.

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
class Framework:
    """A framework."""

    module: str
    arguments: tuple[str, ...] = ()
    peer: str = ""
    """Its environment, created by `peers/setup.sh`; empty: this one."""
    max_chains: int = 1000
    """Larger cases are skipped."""

    @property
    def python(self) -> Path:
        return PEERS / self.peer / "bin" / "python" if self.peer else Path(sys.executable)


FRAMEWORKS = {
    "floor": Framework("floor", max_chains=10_000),
    "lean floor": Framework("floor", ("lean",), max_chains=10_000),
    "agentfly": Framework("agentfly_run", max_chains=10_000),
    "trl 1.16.0": Framework("trl_generate", peer="trl"),
    "verifiers 0.3.1": Framework("verifiers_toolenv", peer="verifiers"),
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
def running(framework: Framework) -> Iterator["Side"]:
    """The process of a framework, which ends when its input ends."""
    # Its output goes to a file: a pipe that is not read would fill up and block it.
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(
            [framework.python, "-m", f"benchmarks.sides.{framework.module}", *framework.arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
        ) as process,
    ):
        yield Side(process, printed)


class Side:
    """A running framework."""

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
            raise RuntimeError(f"a framework died:\n{self._printed.read()}")
        return line


@dataclass
class Measurement:
    """Measurements of one framework at one size."""

    microseconds: list[float] = field(default_factory=list)
    """CPU time per turn, by round."""
    tokens: int = 0
    sampled: int = 0


def measure(sides: dict[str, Side], size: Size) -> dict[str, Measurement]:
    """Run interleaved rounds; the first one is a warm-up."""
    participants = {name: side for name, side in sides.items() if size.chains <= FRAMEWORKS[name].max_chains}
    measurements = {name: Measurement() for name in participants}
    for number in range(size.rounds + 1):
        for name, side in participants.items():
            answer = side.ask(size)
            if number:
                measurements[name].microseconds.append(answer["microseconds"])
                measurements[name].tokens = answer["tokens"] // size.chains
                measurements[name].sampled = answer["sampled"] // size.chains
    return measurements


def rows(size: Size, measurements: dict[str, Measurement]) -> Iterable[list[str]]:
    floor = measurements["floor"].microseconds
    for name, side in measurements.items():
        ratio = median(measured / base for measured, base in zip(side.microseconds, floor, strict=True))
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
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FRAMEWORKS,
        default=list(FRAMEWORKS),
        help="to run besides the floor",
    )
    options = parser.parse_args(arguments)

    present = {name: framework for name, framework in FRAMEWORKS.items() if name == "floor" or name in options.only}
    absent = [name for name, framework in present.items() if not framework.python.exists()]
    by_chains, by_turns = QUICK if options.quick else (BY_CHAINS, BY_TURNS)
    header = ["chains × turns", "side", "µs per turn", "minimum", "× floor", "tokens / sampled"]
    with ExitStack() as stack:
        sides = {n: stack.enter_context(running(framework)) for n, framework in present.items() if n not in absent}
        for title, sizes in (("by the number of chains", by_chains), ("by the length of a chain", by_turns)):
            body = [row for size in sizes for row in rows(size, measure(sides, size))]
            body += [["", n, f"not installed, run benchmarks/peers/setup.sh {FRAMEWORKS[n].peer}"] for n in absent]
            print_table(f"CPU time per turn, {title}", header, body)


if __name__ == "__main__":
    main()
