"""The Java processes: shared, replaced when they die, and gone when nobody needs them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.scienceworld import ScienceWorld, jvm, tasks
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.rewards import scienceworld_score
from agentfly.types import Task

TASK = Task.of({"question": "Boil.", "task_name": "boil", "variation_idx": 0})


class Apart(ScienceWorld):
    """Two in a process."""

    share_process = 2


async def started(count: int) -> list[Apart]:
    made = [Apart() for _ in range(count)]
    await asyncio.gather(*(each.start() for each in made))
    await asyncio.gather(*(each.reset(TASK) for each in made))
    return made


def pids(worlds: list[Apart]) -> list[int | None]:
    return [each._world._jvm.pid for each in worlds]


def runs(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("java")
async def test_a_process_ends_with_its_last_world_and_is_replaced_when_it_dies() -> None:
    first, second, third = worlds = await started(3)
    assert len(set(pids(worlds))) == 2
    os.kill(pids([first])[0], signal.SIGKILL)
    for world in (first, second):
        with pytest.raises(EnvironmentFault, match="Java process"):
            await world.scienceworld_step("look around")
        with pytest.raises(EnvironmentFault, match="Java process"):
            await world.check()
    assert jvm.processes() == pids([third])
    fresh = await started(2)
    assert pids(fresh)[0] != pids(fresh)[1]
    for world in (third, *fresh):
        assert "room" in (await world.scienceworld_step("look around"))["observation"]
    there = pids([*worlds, *fresh])
    await asyncio.gather(*(each.close() for each in (*worlds, *fresh)))
    assert not any(map(runs, there))
    assert not jvm.processes()


@pytest.mark.usefixtures("java")
async def test_a_chain_whose_process_is_killed_is_run_again() -> None:
    class Killed(ScienceWorld):
        deaths = 0

        async def reset(self, task: Task) -> None:
            await super().reset(task)
            if not Killed.deaths:
                Killed.deaths = 1
                os.kill(self._world._jvm.pid, signal.SIGKILL)

    script = ['<tool_call>{"name": "scienceworld_step", "arguments": {"action": "inventory"}}</tool_call>', "Enough."]
    agent = HFAgent(
        tools=[Killed],
        reward=scienceworld_score,
        template="chatml",
        backend="scripted",
        backend_config={"script": script},
    )
    (chain,) = await agent.run(TASK)
    await agent.manager.close()
    assert (chain.stop.value, chain.attempts, len(chain.failures)) == ("answer", 2, 1)
    assert "Java process" in chain.failures[0].message


@pytest.mark.usefixtures("java")
async def test_a_process_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.environments.scienceworld.gateway.ANSWER_SECONDS", 10.0)
    (world,) = await started(1)
    (pid,) = pids([world])
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentFault, match="is lost"):
        await world.scienceworld_step("look around")
    assert not runs(pid)
    await world.close()


PROGRAM = """
import asyncio, sys
from agentfly.environments.scienceworld import ScienceWorld, jvm
from agentfly.types import Task

async def main():
    world = ScienceWorld()
    await world.start()
    print(jvm.processes()[0], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_program_is_killed(how: signal.Signals) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with program:
        pid = int(program.stdout.readline())
        assert runs(pid)
        program.send_signal(how)
    deadline = time.monotonic() + 60
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


async def test_missing_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("scienceworld", reason="the simulator is in the extra 'scienceworld', which is not installed")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    world = Apart()
    with pytest.raises(ConfigError, match=r"no `java` in JAVA_HOME .*default-jre-headless"):
        await world.start()
    await world.close()
    broken = tmp_path / "bin" / "java"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'Error: no room for the heap'\n")
    broken.chmod(0o755)
    world = Apart()
    with pytest.raises(EnvironmentFault, match="did not start: Error: no room for the heap"):
        await world.start()
    await world.close()


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scienceworld", "scienceworld.constants", "py4j", "py4j.java_gateway"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "agentfly.environments.scienceworld.gateway", raising=False)
    tasks.task_names.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'agentfly\[scienceworld\]'"):
        ScienceWorld.draw_tasks("train", 1)
    world = Apart()
    with pytest.raises(ConfigError, match=r"pip install 'agentfly\[scienceworld\]'"):
        await world.start()
    await world.close()
