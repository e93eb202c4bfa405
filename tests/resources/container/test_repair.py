"""Repository repair in the container of a task's own image."""

import sysconfig
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.environments import Repair
from agentfly.errors import DataError
from agentfly.rewards import repaired
from agentfly.types import Task
from tests.fakes import call
from tests.resources.engine import IMAGE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("docker_host")]


async def test_the_image_of_a_task_is_where_its_chain_works() -> None:
    (row,) = Repair.draw_tasks("train", 1)
    bug = row["mutation"]
    fix = call("write_file", path=bug["path"], content=row["files"][bug["path"]].replace(bug["after"], bug["before"]))
    script = [call("run_shell", command="cat /proc/1/cmdline"), fix, "Done."]
    agent = HFAgent(tools=[Repair], reward=repaired, template="chatml", backend=ScriptedBackend(script))
    (chain,) = await agent.run({**row, "image_id": IMAGE}, max_turns=3)
    assert chain.reward == 1.0
    assert "boot" in chain.messages[3].text or "utf8" in chain.messages[3].text


async def test_the_folder_of_an_image_is_what_is_repaired() -> None:
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
        agent = HFAgent(tools=[Repair], reward=repaired, template="chatml", backend=ScriptedBackend(script))
        (chain,) = await agent.run(row, max_turns=3)
        assert chain.reward == earned, chain.failures
    world = Repair()
    await world.start()
    with pytest.raises(DataError, match="cannot be copied"):
        await world.reset(Task.of({**row, "folder": "/nowhere"}))
    await world.close()
