"""Repository repair in the container of a task's own image."""

import importlib
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.environments import Repair, RepairJudge
from agentfly.errors import DataError
from agentfly.rewards import repair_success
from agentfly.types import Task
from tests.fakes import call
from tests.resources.engine import IMAGE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("docker_host")]


async def test_chain_runs_in_the_image_of_its_task() -> None:
    (row,) = Repair.draw_tasks("train", 1)
    bug = row["mutation"]
    fix = call("write_file", path=bug["path"], content=row["files"][bug["path"]].replace(bug["after"], bug["before"]))
    script = [call("run_shell", command="ls /usr/bin"), fix, "Done."]
    agent = HFAgent(tools=[Repair], reward=repair_success, template="chatml", backend=ScriptedBackend(script))
    (chain,) = await agent.run({**row, "image_id": IMAGE}, max_turns=3)
    assert chain.reward == 1.0
    (programs,) = [message.text for message in chain.messages if "dash" in message.text]
    assert "awk" not in programs  # the image has hardly any


async def test_repair_in_the_folder_of_an_image() -> None:
    row: dict[str, Any] = {
        "question": "?",
        "image_id": IMAGE,
        "folder": f"{sysconfig.get_path('stdlib')}/wsgiref",
        "package": "headers",
        "tests": "from headers import Headers\n\n\ndef test_get():\n    assert Headers([('a', 'b')]).get('A') == 'b'\n",
        "fail_to_pass": ["test_get"],
        "pass_to_pass": [],
    }
    spoil = call("run_shell", command="echo x > headers.py")
    for script, earned in ((["Done."], 1.0), ([spoil, "Done."], 0.0)):
        agent = HFAgent(tools=[Repair], reward=repair_success, template="chatml", backend=ScriptedBackend(script))
        (chain,) = await agent.run(row, max_turns=3)
        assert chain.reward == earned, chain.failures
    world = Repair()
    await world.start()
    with pytest.raises(DataError, match="cannot be copied"):
        await world.reset(Task.of({**row, "folder": "/nowhere"}))
    await world.close()


def files_of(*libraries: str) -> dict[str, str]:
    """The sources of libraries that an image may lack."""
    homes = [Path(str(importlib.import_module(name).__file__)) for name in libraries]
    sources = {home.name: home for home in homes if home.stem != "__init__"}
    for folder in (home.parent for home in homes if home.stem == "__init__"):
        sources |= {path.relative_to(folder.parent).as_posix(): path for path in folder.rglob("*.py")}
    return {name: path.read_text() for name, path in sources.items()}


async def test_pytest_runs_in_a_fresh_container_of_the_image() -> None:
    row = {
        "image_id": IMAGE,
        "package": "warm",
        "files": files_of("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "py", "pygments"),
        "tests": {"tests/test_warm.py": "from warm import is_warm\n\n\ndef test_warm():\n    assert is_warm(21)\n"},
    }
    judge = RepairJudge()
    await judge.start()
    for sign, passed in ((">", {"tests/test_warm.py::test_warm"}), ("<", set())):
        run = await judge.run_pytest(row, {"warm.py": f"def is_warm(t):\n    return t {sign} 20\n".encode()})
        assert run.valid, run.output
        assert run.passed_tests == passed
