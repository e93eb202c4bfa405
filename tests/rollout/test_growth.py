"""Memory does not grow with the number of finished chains. `benchmarks/growth.py` measures more workloads."""

import subprocess
import sys

import pytest

PROGRAM = '''
import asyncio, ctypes, gc, json, resource, sys
from pathlib import Path
from random import Random
from agentfly import Environment, tool
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend

random = Random(0)

def text(words):
    return " ".join("".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(words))

class Notes(Environment):
    @tool
    async def note(self, text: str) -> str:
        """Write a text down."""
        return f"noted: {text}"

def script(turn):
    call = json.dumps({"name": "note", "arguments": {"text": text(15)}})
    return text(10) if turn.turn else f"<tool_call>\\n{call}\\n</tool_call>"

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

agent = HFAgent("bytes", tools=[Notes], template="chatml", backend=ScriptedBackend(script))

def check(result):
    assert all(chain.stop.value == "answer" for chain in result)

def one_loop_per_run(chains):
    for _ in range(chains):
        check(agent.run_sync(text(15)))

def one_loop(chains):
    for _ in range(chains // 50):
        check(runner.run(agent.run([text(15) for _ in range(50)])))

with asyncio.Runner() as runner:
    run = {"one_loop": one_loop, "one_loop_per_run": one_loop_per_run}[sys.argv[1]]
    run(600)  # caches of a fixed size are full after this
    growth = []
    for _ in range(3):
        before = resident()
        run(400)
        growth.append((resident() - before) / 400)
    print(min(growth))  # a leak grows in every round; the allocator takes a megabyte now and then
'''


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and calls glibc's malloc_trim")
@pytest.mark.parametrize("loops", ["one_loop", "one_loop_per_run"])
def test_memory_does_not_grow_with_the_number_of_chains(loops: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, loops], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 1_000, "bytes per chain"
