"""Task folders in containers: images that are built, images that are named, and what is wrong with an image."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.data import read_tasks
from agentfly.environments import TaskFolder
from agentfly.rewards import verified
from agentfly.trajectory import Trajectory
from tests.environments.task_folders.folders import WRITE_REWARD, write_task
from tests.fakes import call
from tests.resources.engine import BARE_IMAGE, IMAGE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("docker_host")]
TESTS = WRITE_REWARD.replace("#!/bin/bash", "#!/bin/sh")
DOCKERFILE = f"FROM {IMAGE}\nENV FROM_IMAGE=yes\nWORKDIR /work\nCOPY data.txt /work/\n"

NAMED = f'[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/srv/work"\nmemory_mb = 256\n'
AS_ROOT = 'import os; os.chown("done", 1000, 1000); os.setuid(1000); print("now", os.stat("done").st_uid)'
"""What package managers do."""


async def run_chain(folder: Path, *commands: str) -> Trajectory:
    backend = ScriptedBackend([*(call("bash", command=command) for command in commands), "Done."])
    agent = HFAgent(tools=[TaskFolder], reward=verified, template="chatml", backend=backend)
    try:
        (chain,) = await agent.run(read_tasks(folder), max_turns=len(commands) + 1)
    finally:
        await agent.close()
    return chain


@pytest.mark.parametrize("mode", ["shared", "separate"])
async def test_a_task_works_in_the_image_of_its_dockerfile(tmp_path: Path, mode: str) -> None:
    config = f'artifacts = ["done"]\n[environment.env]\nDECLARED = "7"\n[verifier]\nenvironment_mode = "{mode}"\n'
    files = {"environment/Dockerfile": DOCKERFILE, "environment/data.txt": "from the build\n"}
    folder = write_task(tmp_path, config=config, tests=TESTS, files=files)
    chain = await run_chain(
        folder, "pwd; cat data.txt; echo $FROM_IMAGE $DECLARED; x=5; ls /tests; cd /", "pwd; echo $x; touch /work/done"
    )
    first, second = [message.text for message in chain.messages if message.role == "tool"]
    assert first == "/work\nfrom the build\nyes 7"
    assert second == "/\n5"
    assert chain.reward == 1.0, chain.failures
    assert (await run_chain(folder)).reward == 0.0


async def test_a_task_works_in_a_named_image(tmp_path: Path) -> None:
    folder = write_task(tmp_path, config=NAMED, tests=TESTS)
    chain = await run_chain(folder, f"touch done; python3 -c '{AS_ROOT}'", "kill -9 -1")
    assert "now 1000" in chain.messages[2].text
    assert chain.reward == 1.0, chain.failures


@pytest.mark.parametrize(("agent", "verifier"), [("no-network", "public"), ("public", "no-network")])
async def test_a_separate_verifier_has_its_own_network_mode(tmp_path: Path, agent: str, verifier: str) -> None:
    config = f'{NAMED}[agent]\nnetwork_mode = "{agent}"\n'
    config += f'[verifier]\nnetwork_mode = "{verifier}"\nenvironment_mode = "separate"\n'
    has_loopback_only = '[ "$(ls /sys/class/net)" = lo ]'
    tests = TESTS.replace("[ -f done ]", has_loopback_only)
    chain = await run_chain(write_task(tmp_path, config=config, tests=tests), f"{has_loopback_only} && echo none")
    assert ("none" in chain.messages[2].text) is (agent == "no-network")
    assert chain.reward == float(verifier == "no-network"), chain.failures


FORGE_ARCHIVE = """
import io, sys, tarfile
with tarfile.open("/tmp/artifacts.tar", "w") as tar:
    tar.addfile(tarfile.TarInfo("srv/work/done"), io.BytesIO())
"""


async def test_a_replaced_tar_adds_nothing_to_the_artifacts(tmp_path: Path) -> None:
    config = f'artifacts = ["kept"]\n{NAMED}[verifier]\nenvironment_mode = "separate"\n'
    script = f"cat > /tmp/forge.py <<'END'\n{FORGE_ARCHIVE}END\n"
    script += "tar=$(command -v tar); rm $tar; printf '#!/bin/sh\\npython3 /tmp/forge.py\\n' > $tar; chmod +x $tar; tar"
    chain = await run_chain(write_task(tmp_path, config=config, tests=TESTS), f"mkdir kept; {script}")
    assert chain.reward == 0.0, chain.failures


OUTLIVE_KILL = """
import os, time
children = []
end = time.monotonic() + 40
while time.monotonic() < end and not os.path.exists("/tests/a.txt"):
    try:
        pid = os.fork()
    except OSError:
        continue
    if pid == 0:
        time.sleep(1000)
        os._exit(0)
    children.append(pid)
for pid in children:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
while time.monotonic() < end:
    open("/logs/verifier/reward.json", "w").write("1")
"""
"""Leaves no process to the command that kills it, until the verifier's files are written."""


async def test_a_chain_that_uses_up_all_processes_earns_nothing(tmp_path: Path) -> None:
    tests = TESTS.replace("echo 0", "sleep 2; echo 0")
    files = {"tests/a.txt": "", **{f"tests/b{number}.txt": "x" * 300_000 for number in range(40)}}
    script = f"cat > /tmp/outlive.py <<'END'\n{OUTLIVE_KILL}END\npython3 /tmp/outlive.py > /dev/null 2>&1 & sleep 3"
    chain = await run_chain(write_task(tmp_path, config=NAMED, tests=tests, files=files), script)
    assert chain.reward == 0.0, chain.failures


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        (
            {},
            '[environment]\ndocker_image = "localhost/nowhere:1"\n',
            "has no image 'localhost/nowhere:1': docker pull",
        ),
        ({}, f'[environment]\ndocker_image = "{BARE_IMAGE}"\n', "has no python3: take one with Python 3.9 or later"),
        ({"environment/Dockerfile": f"FROM {IMAGE}\nRUN false\n"}, "", "cannot be built"),
    ],
    ids=["missing", "without Python", "failing build"],
)
async def test_an_image_that_cannot_be_used_is_named(
    tmp_path: Path, files: dict[str, str], config: str, message: str
) -> None:
    chain = await run_chain(write_task(tmp_path, config=config, tests=TESTS, files=files))
    assert chain.reward is None
    assert message in chain.failures[-1].message
