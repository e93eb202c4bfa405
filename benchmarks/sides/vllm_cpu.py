"""vLLM on a CPU for `benchmarks.engine`: reads lines of turns, answers each with the tokens and the CPU time.

Run with the interpreter of an environment that has vLLM: `make vllm` creates one.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from agentfly.backends import open_backend
from agentfly.backends.base import Request
from agentfly.models import resolve
from agentfly.sandbox.inside.process_tree import descendants
from agentfly.types import Sampling

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU time of this process and its descendants, in which vLLM runs."""
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


async def answer(backend: Any, turns: list[dict[str, Any]]) -> int:
    async def one(turn: dict[str, Any]) -> int:
        await asyncio.sleep(turn["at"])
        request = Request(turn["prompt"], Sampling(max_tokens=turn["count"]))
        return len((await backend.generate(request)).logprobs)

    return sum(await asyncio.gather(*map(one, turns)))


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of vLLM must not mix with the answers
    backend = open_backend("vllm", model=resolve(sys.argv[1]), dtype="float32", kv_memory=int(sys.argv[2]))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        before = cpu_seconds()
        tokens = asyncio.run(answer(backend, json.loads(line)))
        print(json.dumps([tokens, cpu_seconds() - before]), file=answers, flush=True)
    asyncio.run(backend.close())


if __name__ == "__main__":
    main()
