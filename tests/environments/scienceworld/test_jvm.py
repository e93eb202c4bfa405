"""The Java processes: shared, replaced when they die, ended with their last slot."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.scienceworld import ScienceWorld, jvm, tasks
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.rewards import scienceworld_score
from agentfly.sandbox.owner import process_name
from agentfly.types import Task

TASK = Task.of({"question": "Boil.", "task_name": "boil", "variation_idx": 0})


class Apart(ScienceWorld):
    """Two in a process."""

    share_process = 2


async def start_instances(count: int) -> list[Apart]:
    envs = [Apart() for _ in range(count)]
    await asyncio.gather(*(env.start() for env in envs))
    await asyncio.gather(*(env.reset(TASK) for env in envs))
    return envs


def pids(envs: list[Apart]) -> list[int | None]:
    return [env._jvm.pid for env in envs]


def is_running(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("java")
async def test_process_ends_with_its_last_instance_and_is_replaced_when_it_dies() -> None:
    first, second, third = envs = await start_instances(3)
    assert len(set(pids(envs))) == 2
    os.kill(pids([first])[0], signal.SIGKILL)
    for env in (first, second):
        with pytest.raises(EnvironmentFault, match="Java process"):
            await env.scienceworld_step("look around")
        with pytest.raises(EnvironmentFault, match="Java process"):
            await env.check()
    assert jvm.list_pids() == pids([third])
    fresh = await start_instances(2)
    assert pids(fresh)[0] != pids(fresh)[1]
    for env in (third, *fresh):
        assert "room" in (await env.scienceworld_step("look around"))["observation"]
    pids_after = pids([*envs, *fresh])
    await asyncio.gather(*(env.close() for env in (*envs, *fresh)))
    assert not any(map(is_running, pids_after))
    assert not jvm.list_pids()


@pytest.mark.usefixtures("java")
async def test_chain_is_retried_when_its_process_is_killed() -> None:
    class Killed(ScienceWorld):
        deaths = 0

        async def reset(self, task: Task) -> None:
            await super().reset(task)
            if not Killed.deaths:
                Killed.deaths = 1
                os.kill(self._jvm.pid, signal.SIGKILL)

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
async def test_hanging_process_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (2.0, 10.0, 60.0):  # a busy machine needs longer to start
        monkeypatch.setattr("agentfly.environments.scienceworld.java_process.ANSWER_SECONDS", seconds)
        try:
            (env,) = await start_instances(1)
            break
        except EnvironmentFault:
            continue
    (pid,) = pids([env])
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentFault, match="is lost"):
        await env.scienceworld_step("look around")
    assert not is_running(pid)
    await env.close()


PROGRAM = """
import asyncio, sys
from agentfly.environments.scienceworld import ScienceWorld, jvm
from agentfly.types import Task

async def main():
    env = ScienceWorld()
    await env.start()
    print(jvm.list_pids()[0], flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow_smoke
@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_process_ends_when_the_program_is_killed(how: signal.Signals, tmp_path: Path) -> None:
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables
    )
    with program:
        pid = int(program.stdout.readline())
        assert is_running(pid)
        program.send_signal(how)
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)
    assert len(list(tmp_path.glob("agentfly-*-scienceworld-*"))) == (how == signal.SIGKILL)


@pytest.mark.usefixtures("java")
async def test_folders_of_killed_programs_are_removed_by_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE)
    leftover = tmp_path / f"{process_name(process.pid)}-scienceworld-abc"
    await process.communicate(b"")
    used = tmp_path / f"{process_name(os.getpid())}-scienceworld-abc"
    for folder in (leftover, used):
        folder.mkdir()
        (folder / "object_type_ids.tsv").touch()
    (env,) = await start_instances(1)
    assert not leftover.exists()
    assert used.exists()
    await env.close()


@pytest.mark.usefixtures("java")
async def test_an_episode_leaves_no_file_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The simulator writes object_type_ids.tsv into the working directory of its process."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    for folder in (here, temporary):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (env,) = await start_instances(1)
    await env.scienceworld_step("look around")
    await env.scienceworld_valid_actions()
    (folder,) = temporary.glob("agentfly-*-scienceworld-*")
    assert [path.name for path in folder.iterdir()] == ["object_type_ids.tsv"]
    await env.close()
    assert not list(here.iterdir())
    assert not list(temporary.iterdir())


async def test_missing_java_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("scienceworld", reason="the simulator is in the extra 'scienceworld', which is not installed")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    env = Apart()
    with pytest.raises(ConfigError, match=r"no `java` in JAVA_HOME .*default-jre-headless"):
        await env.start()
    await env.close()
    broken = tmp_path / "bin" / "java"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'Error: no room for the heap'\n")
    broken.chmod(0o755)
    env = Apart()
    with pytest.raises(EnvironmentFault, match="did not start: Error: no room for the heap"):
        await env.start()
    await env.close()


async def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scienceworld", "scienceworld.constants", "py4j", "py4j.java_gateway"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "agentfly.environments.scienceworld.java_process", raising=False)
    tasks.task_names.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'agentfly-rl\[scienceworld\]'"):
        ScienceWorld.draw_tasks("train", 1)
    env = Apart()
    with pytest.raises(ConfigError, match=r"pip install 'agentfly-rl\[scienceworld\]'"):
        await env.start()
    await env.close()
