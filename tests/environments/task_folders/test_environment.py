"""Task folders in real sandbox sessions: shell, files, oracle, and what a chain cannot do to its verifier."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from agentfly.agents import ExternalAgent, HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.data import read_tasks
from agentfly.environments import TaskFolder
from agentfly.environments.task_folders.environment import filter_archive
from agentfly.rewards import verified
from agentfly.sandbox import SandboxUnavailable, open_sandbox
from agentfly.trajectory import FailureKind, Trajectory
from tests.environments.task_folders.folders import write_task
from tests.fakes import call

pytestmark = pytest.mark.asyncio(loop_scope="session")
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="session")
async def _needs_a_sandbox() -> None:
    try:
        await (await open_sandbox()).close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")


async def run_chain(folder: Path, *commands: str, env_class: Any = TaskFolder) -> Trajectory:
    """A chain whose model runs these commands, or makes these calls, one a turn."""
    script = [command if "tool_call" in command else call("bash", command=command) for command in commands]
    backend = ScriptedBackend([*script, "Done."])
    agent = HFAgent(tools=[env_class], reward=verified, template="chatml", backend=backend)
    try:
        (chain,) = await agent.run(read_tasks(folder), max_turns=len(script) + 1)
    finally:
        await agent.close()
    return chain


def observations(chain: Trajectory) -> list[str]:
    return [message.text for message in chain.messages if message.role == "tool"]


async def test_the_shell_keeps_its_state(tmp_path: Path) -> None:
    chain = await run_chain(
        write_task(tmp_path, files={"environment/data/numbers.txt": "3\n4\n"}),
        'cat data/numbers.txt; cd data; x="it\'s 7"; export y=8; greet() { echo hello $1; }; a=(1 2)',
        'pwd; echo "$x" $(printenv y) ${a[1]}; greet you; exit 3',
        '(exit 5); mkdir -p "/app/o\'dd dir"; cd "/app/o\'dd dir"',
        "pwd; touch /app/done; cd /app; sleep 1000 & echo started",
    )
    first, second, _, last = observations(chain)
    assert first == "3\n4"
    assert second.startswith("/app/data\nit's 7 8 2\nhello you")
    assert "3" in second  # the exit status
    assert last.startswith("/app/o'dd dir\nstarted")
    assert chain.reward == 1.0, chain.failures


async def test_files_are_read_and_edited_in_the_working_folder(tmp_path: Path) -> None:
    chain = await run_chain(
        write_task(
            tmp_path, config='[environment]\nworkdir = "/app/project"\n', files={"environment/a.txt": "one two"}
        ),
        call("edit_file", path="a.txt", old="two", new="three"),
        call("read_file", path="/app/project/a.txt"),
        call("write_file", path="/app/other/new.txt", content="x"),
        "pwd; cat a.txt ../other/new.txt; touch done",
        call("undo_edit", path="a.txt"),
        call("undo_edit", path="/app/other/new.txt"),
        "cat a.txt; ls ../other",
        call("read_file", path="/etc/passwd"),
    )
    texts = observations(chain)
    assert texts[1] == "one three"
    assert texts[3] == "/app/project\none threex"
    assert texts[6] == "one two"
    assert "outside the session's folder" in texts[7]
    assert chain.reward == 1.0, chain.failures


async def test_a_reward_object_gives_metrics(tmp_path: Path) -> None:
    tests = '#!/bin/bash\necho \'{"reward": 0.5, "style": 2}\' > /logs/verifier/reward.json\n'
    chain = await run_chain(write_task(tmp_path, tests=tests))
    assert chain.score is not None
    assert chain.reward == 0.5
    assert chain.score.metrics["style"] == 2


@pytest.mark.parametrize("mode", ["", SEPARATE], ids=["shared", "separate"])
async def test_forged_rewards_and_verifiers_earn_nothing(tmp_path: Path, mode: str) -> None:
    chain = await run_chain(
        write_task(tmp_path, config=mode),
        "ls /tests; mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 000 /tests",
        "rm -rf /session/tests /session/logs; ln -s /session/app /session/tests; ln -s /session/app /session/logs",
        "echo 1 > /app/reward.txt; setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' & echo",
    )
    assert chain.reward == 0.0, chain.failures
    assert observations(chain)[0] == "(no output)"  # the tests are not there while the agent works


async def test_a_separate_verifier_gets_the_artifacts_only(tmp_path: Path) -> None:
    tests = "#!/bin/bash\nls /app /app/kept > /logs/verifier/list\n[ -f /app/kept/done ] && [ ! -e /app/other ]\n"
    tests += "[ $? = 0 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    config = f'artifacts = ["kept", "/app/missing"]\n{SEPARATE}'
    collect = config + '[[verifier.collect]]\ncommand = "mv collected kept/done"\n'
    assert (await run_chain(write_task(tmp_path, "a", config=config, tests=tests), "touch other")).reward == 0.0
    for name, text, command in (("b", config, "touch other kept/done"), ("c", collect, "touch other collected")):
        chain = await run_chain(write_task(tmp_path, name, config=text, tests=tests), f"mkdir kept; {command}")
        assert chain.reward == 1.0, chain.failures


async def test_breaking_the_verifier_earns_nothing_and_is_scored(tmp_path: Path) -> None:
    tests = "#!/bin/bash\npython3 check.py\necho 1 > /logs/verifier/reward.txt\n"
    folder = write_task(
        tmp_path, tests=tests, files={"environment/check.py": ""}, config="[verifier]\ntimeout_sec = 10\n"
    )
    chain = await run_chain(folder, "echo 'import time; time.sleep(60)' > check.py")
    assert chain.reward == 0.0, chain.failures
    assert chain.score is not None
    assert chain.score.metrics["verifier_broken"] == 1.0


BREAK_ARTIFACTS = {
    "too large": "head -c 70000000 /dev/zero > kept/big",
    "a folder in the way": "mkdir /logs/artifacts.tar",
    "linked folder": "mkdir /tmp/x; rm -rf /session/logs; ln -s /tmp/x /session/logs",
}
USE_UP_MEMORY = "(sleep 1; head -c 400000000 /dev/zero > x) > /dev/null 2>&1 & sleep 3"


@pytest.mark.parametrize("command", BREAK_ARTIFACTS.values(), ids=BREAK_ARTIFACTS)
async def test_artifacts_that_cannot_be_taken_earn_nothing_and_are_scored(tmp_path: Path, command: str) -> None:
    folder = write_task(tmp_path, config=f'artifacts = ["kept"]\n{SEPARATE}')
    chain = await run_chain(folder, f"mkdir kept; {command}")
    assert chain.reward == 0.0, chain.failures


async def test_ending_the_session_earns_nothing_and_is_scored(tmp_path: Path) -> None:
    """Its files use up the memory, where the kernel kills even the first process."""
    folder = write_task(tmp_path, config="[environment]\nmemory_mb = 128\nstorage_mb = 1000\n")
    chain = await run_chain(folder, USE_UP_MEMORY)
    assert chain.reward == 0.0, chain.failures


async def test_a_replaced_session_has_the_limits_of_the_task(tmp_path: Path) -> None:
    folder = write_task(tmp_path, config="[environment]\nmemory_mb = 128\nstorage_mb = 1000\n")
    fill, size = "head -c 400000000 /dev/zero > x", "df -m /app | tail -1 | tr -s ' ' | cut -d ' ' -f 2"
    chain = await run_chain(folder, fill, fill, size)
    assert any("A fresh session was started" in text for text in observations(chain))
    assert observations(chain)[-1] == "1000"


@pytest.mark.parametrize("value", ["'[' * 60_000", "'1' + '0' * 4000"], ids=["nested", "huge"])
async def test_reward_files_that_python_cannot_hold_are_not_valid(tmp_path: Path, value: str) -> None:
    folder = write_task(
        tmp_path,
        tests="#!/bin/bash\npython3 check.py > /logs/verifier/reward.json\n",
        files={"environment/check.py": "print(0)"},
    )
    chain = await run_chain(folder, f'echo "print({value})" > check.py')
    assert chain.reward == 0.0, chain.failures
    assert chain.score is not None
    assert chain.score.metrics["verifier_broken"] == 1.0


async def test_artifacts_are_packed_while_processes_and_links_are_broken(tmp_path: Path) -> None:
    """An honest chain: it leaves a server that writes a log, a link to nowhere and a file that nobody reads."""
    tests = (
        "#!/bin/bash\n[ -f kept/done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
    )
    folder = write_task(tmp_path, config=f'artifacts = ["kept"]\n{SEPARATE}', tests=tests)
    chain = await run_chain(
        folder,
        "mkdir kept; cd kept; touch done locked; chmod 000 locked; ln -s nowhere link; mkfifo pipe",
        "(while :; do head -c 100000 /dev/zero >> log; sleep .01; done) > /dev/null 2>&1 & echo",
    )
    assert chain.reward == 1.0, chain.failures


def pack(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return archive.getvalue()


def make_member(name: str, kind: bytes = tarfile.REGTYPE, *, linkname: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, linkname, mode
    return info


async def test_a_forged_archive_holds_declared_files_only() -> None:
    """In a container the agent is root, and can replace `tar`."""
    archive = pack(
        (make_member("app/kept", tarfile.DIRTYPE, mode=0o755), b""),
        (make_member("app/kept/a", mode=0o4755), b"a"),
        (make_member("app/kept/b", tarfile.LNKTYPE, linkname="app/kept/a"), b""),
        (make_member("app/kept/\nüñ" + "x" * 200), b"c"),
        (make_member("app/kept/c", tarfile.LNKTYPE, linkname="bin/bash"), b""),
        (make_member("app/kept/d", tarfile.SYMTYPE, linkname="/bin"), b""),
        (make_member("app/kept/../../bin/bash"), b"x"),
        (make_member("app/kept/e", tarfile.CHRTYPE), b""),
        (make_member("app/keptx"), b"x"),
        (make_member("bin/bash"), b"x"),
        (make_member("/bin/bash"), b"x"),
    )
    with tarfile.open(fileobj=io.BytesIO(filter_archive(archive, ["/app/kept"]))) as tar:
        assert tar.getnames() == ["app/kept", "app/kept/a", "app/kept/b", "app/kept/\nüñ" + "x" * 200]
        assert tar.getmember("app/kept/a").mode == 0o755
        content = tar.extractfile("app/kept/b")
        assert content is not None
        assert content.read() == b"a"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (
            "#!/bin/bash\necho no reward\n",
            "wrote neither /logs/verifier/reward.json nor reward.txt; it printed: no reward",
        ),
        ("#!/bin/bash\necho nan > /logs/verifier/reward.txt\n", "no valid reward.txt"),
        ("#!/bin/bash\necho '{}' > /logs/verifier/reward.json\n", "the object is empty"),
    ],
    ids=["none", "nan", "empty"],
)
async def test_a_task_without_a_valid_reward_is_not_scored(tmp_path: Path, tests: str, message: str) -> None:
    chain = await run_chain(write_task(tmp_path, tests=tests))
    assert chain.reward is None
    assert chain.failures[-1].kind is FailureKind.REWARD
    assert message in chain.failures[-1].message


async def test_the_time_of_a_task_is_shared_by_all_its_commands(tmp_path: Path) -> None:
    folder = write_task(tmp_path, config="[agent]\ntimeout_sec = 2.0\n")
    chain = await run_chain(folder, "touch done; sleep 600", "echo more")
    assert observations(chain)[1] == "The 2 seconds of this task are used up: no further command is run."
    assert chain.reward == 1.0, chain.failures


async def test_variables_of_the_host_are_read_only_where_they_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Allowed(TaskFolder):
        host_variables = frozenset({"TASK_KEY"})

    monkeypatch.setenv("TASK_KEY", "it's secret")
    tests = '#!/bin/bash\n[ "$KEY-$OTHER" = "it\'s secret-7" ] && echo 1 > /logs/verifier/reward.txt\n'
    config = '[environment.env]\nOTHER = "${UNSET_NAME:-7}"\n[verifier.env]\nKEY = "${TASK_KEY}"\n'
    folder = write_task(tmp_path, config=config, tests=tests)
    chain = await run_chain(folder, "echo $KEY-$OTHER", env_class=Allowed)
    assert observations(chain) == ["-7"]
    assert chain.reward == 1.0, chain.failures
    refused = await run_chain(folder)
    assert "TASK_KEY of the host, which is not in TaskFolder.host_variables" in refused.failures[-1].message


async def test_a_program_works_in_the_folder_through_the_gateway(tmp_path: Path) -> None:
    """Its loop is its own: it calls the model over HTTP and runs the replies in the task's shell."""

    async def program(env: TaskFolder, base_url: str, api_key: str, model: str, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as client:
            while True:
                response = await client.post("/chat/completions", json={"model": model, "messages": messages})
                reply = response.raise_for_status().json()["choices"][0]["message"]["content"]
                if not reply.startswith("$ "):
                    return str(reply)
                result = await env.bash(reply.removeprefix("$ "))
                messages += [{"role": "assistant", "content": reply}]
                messages += [{"role": "user", "content": str(result["observation"])}]

    backend = ScriptedBackend(["$ touch done; pwd", "It is made."])
    agent = ExternalAgent(program=program, reward=verified, template="chatml", backend=backend)
    (chain,) = await agent.run(read_tasks(write_task(tmp_path)))
    await agent.close()
    assert chain.reward == 1.0, chain.failures
    assert len(chain.turns) == 2
    assert "/app" in [message.text for message in chain.messages]
