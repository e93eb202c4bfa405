"""Tools of MCP servers as actions of environments, with a server of the official package and with hostile ones."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from agentfly import Environment, Task, tool
from agentfly.environment import Pool
from agentfly.errors import ConfigError, EnvironmentFault, ToolTimeout
from agentfly.integrations.mcp import MCPServer, mcp_server
from agentfly.integrations.mcp.tools import MAX_TOOLS, SchemaArguments, choose_names
from agentfly.resources import ResourceManager
from agentfly.tooling import Context, Toolbox, ToolResult
from agentfly.trajectory import CallStatus, FailureKind, StopReason
from agentfly.types import ToolCall
from agentfly.vision.images import open_image
from tests.fakes import byte_agent
from tests.fakes import call as call_text

FOLDER = Path(__file__).parent
COUNTER = (sys.executable, str(FOLDER / "counter_server.py"))


class Counter(MCPServer):
    command = COUNTER
    timeout = 60.0


def hostile(kind: str, **settings: Any) -> type[MCPServer]:
    return mcp_server((sys.executable, str(FOLDER / "hostile_server.py"), kind), name="Hostile", **settings)


async def call(server: type[MCPServer], environment: Environment, name: str, **arguments: object) -> ToolResult:
    tool = Toolbox([server]).find(ToolCall(name, arguments))
    assert not isinstance(tool, ToolResult)
    return await tool.run(arguments, context=Context(Task.of("x")), environments={server: environment})


async def call_once(server: type[MCPServer], **arguments: object) -> ToolResult:
    """Call `say` in a new instance."""
    manager = ResourceManager()
    try:
        async with manager.leases(Task.of("x")) as leases:
            return await call(server, await leases.get(server), "say", **(arguments or {"text": "hello"}))
    finally:
        await manager.close()


def processes_below(pid: int | None) -> list[psutil.Process]:
    assert pid is not None
    return psutil.Process(pid).children(recursive=True)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


async def test_schemas_results_images_errors_and_progress_of_the_official_package():
    manager = ResourceManager()
    names = {tool.name: tool for tool in Counter.tools()}
    assert list(names) == ["add", "clear", "close", "divide", "point", "picture", "broken_picture", "work"]
    function = names["add"].schema["function"]
    assert function["description"] == "Add to the counter."
    assert function["parameters"]["properties"]["times"]["type"] == "integer"
    async with manager.leases(Task.of("x")) as leases:
        env = await leases.get(Counter)
        assert (await call(Counter, env, "add", times=3)).observation == "The counter shows 3."
        assert (await call(Counter, env, "add", times="4")).observation == "The counter shows 7."  # text of a model
        assert (await env.add(times=1))["observation"] == "The counter shows 8."
        assert (await call(Counter, env, "close")).observation == "closed, says the server"

        rejected = await call(Counter, env, "add", number=1)
        assert rejected.status is CallStatus.INVALID
        assert "'times' is missing" in str(rejected.observation)
        rejected = await call(Counter, env, "add", times="many")
        assert rejected.status is CallStatus.INVALID
        assert "'times': 'many' is not of type 'integer'" in str(rejected.observation)
        for value in ("\ud800", float("nan"), {"deep": float("inf")}):
            rejected = await call(Counter, env, "picture", color=value)
            assert "cannot be written as JSON" in str(rejected.observation)
        failed = await call(Counter, env, "divide", by=0)
        assert failed.status is CallStatus.INVALID
        assert "division by zero" in str(failed.observation)

        structured = await call(Counter, env, "point", x=2)
        assert structured.info["structured"] == {"x": 2, "y": 2}
        picture = await call(Counter, env, "picture", color="red")
        (image,) = picture.observation
        assert open_image(image).getpixel((0, 0)) == (255, 0, 0)
        broken = await call(Counter, env, "broken_picture")
        assert str(broken.observation).startswith("before\n[image: an image that cannot be shown:")

        worked = await call(Counter, env, "work", steps=2)
        assert worked.info["progress"] == ["1/2 step 1", "2/2 step 2"]
    await manager.close()


async def test_each_chain_has_its_own_server_and_a_fresh_state():
    manager = ResourceManager({Counter: Pool(max_instances=2)})

    async def count(times: int) -> tuple[str, int | None]:
        async with manager.leases(Task.of("x")) as leases:
            env = await leases.get(Counter)
            (env.folder / "note").write_text("x")  # fails if the folder is not this chain's own
            assert len(list(env.folder.iterdir())) == 1
            await call(Counter, env, "add", times=times)
            return str((await call(Counter, env, "add", times=times)).observation), env.pid

    results = await asyncio.gather(*(count(times) for times in (1, 10, 100)))
    assert [text for text, _ in results] == [f"The counter shows {n}." for n in (2, 20, 200)]
    assert manager.num_instances == 2
    pids = [pid for _, pid in results]
    await manager.close()
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)


async def test_reset_tool_resets_instead_of_a_restart_and_is_hidden():
    class Resettable(Counter):
        reset_tool = "clear"

    assert "clear" not in [tool.name for tool in Resettable.tools()]
    manager = ResourceManager()
    pids = set()
    for start in (5, 7):
        async with manager.leases(Task.of({"question": "x", "reset": {"start": start}})) as leases:
            env = await leases.get(Resettable)
            pids.add(env.pid)
            assert (await call(Resettable, env, "add", times=1)).observation == f"The counter shows {start + 1}."
    assert len(pids) == 1
    await manager.close()


async def test_prepare_fills_the_folder_before_the_server_starts():
    class Prepared(MCPServer):
        command = (*COUNTER, "{folder}")

        async def prepare(self, task: Task) -> None:
            assert self.pid is None
            (self.folder / "data").write_text(task.question)

    manager = ResourceManager()
    for question in ("one", "two"):
        async with manager.leases(Task.of(question)) as leases:
            env = await leases.get(Prepared)
            (server,) = processes_below(env.pid)
            assert server.cwd() == str(env.folder)
            assert server.cmdline()[-1] == str(env.folder)
            assert (env.folder / "data").read_text() == question
    folder = env.folder
    await manager.close()
    assert not folder.exists()


async def test_stateless_server_is_one_connection_for_all_chains():
    class Shared(Counter):
        stateful = False

    manager = ResourceManager()

    async def count() -> int | None:
        async with manager.leases(Task.of("x")) as leases:
            env = await leases.get(Shared)
            await call(Shared, env, "add", times=1)
            return env.pid

    assert len(set(await asyncio.gather(*(count() for _ in range(8))))) == 1
    async with manager.leases(Task.of("x")) as leases:
        last = await call(Shared, await leases.get(Shared), "add", times=1)
    assert last.observation == "The counter shows 9."
    await manager.close()


def test_tools_are_filtered_renamed_and_prefixed():
    server = mcp_server(COUNTER, include=["add", "clear"], rename={"add": "more"}, prefix="count.")
    assert Toolbox([server]).names == ["count_more", "count_clear"]

    def choose(**settings: Any) -> list[str]:
        defaults: dict[str, Any] = {"include": None, "exclude": (), "rename": {}, "prefix": ""}
        return list(choose_names(["a.b", "a_b", "c"], **{**defaults, **settings}).values())

    assert choose() == ["a_b", "a_b_2", "c"]
    assert choose(exclude=["a.b"], prefix="x_") == ["x_a_b", "x_c"]
    assert choose(rename={"c": "d" * 100}) == ["a_b", "a_b_2", "d" * 64]
    with pytest.raises(ConfigError, match=r"include names 'd', which the server does not offer; it has a\.b, a_b, c"):
        choose(include=["d"])


def test_collision_with_another_tool_names_the_settings():
    @tool
    def say(text: str) -> str:
        """Another tool of this name."""
        return text

    with pytest.raises(ConfigError, match=r"two tools are named 'say': .*set prefix= or rename= of the server's class"):
        Toolbox([say, hostile("well_behaved")])


async def test_agent_runs_chains_with_mcp_tools_over_several_turns():
    agent = byte_agent([call_text("add", times=2), call_text("add", times=3), "5"], tools=[Counter])
    result = await agent.run("Count.", max_turns=4, num_chains=3)
    for trajectory in result.trajectories:
        observations = [m.text for m in trajectory.messages if m.role == "tool"]
        assert observations == ["The counter shows 2.", "The counter shows 5."]
        assert trajectory.stop is StopReason.ANSWER
    await agent.close()


async def test_killed_server_is_a_typed_failure_and_the_chain_is_retried():
    killed: list[int] = []

    class Killed(Counter):
        async def call_tool(self, name, arguments):
            if not killed:
                (server,) = processes_below(self.pid)
                killed.append(server.pid)
                os.kill(server.pid, signal.SIGKILL)
            return await super().call_tool(name, arguments)

    agent = byte_agent([call_text("add", times=1), "done"], tools=[Killed])
    (trajectory,) = await agent.run("Count.", max_turns=3)
    assert trajectory.stop is StopReason.ANSWER
    assert [m.text for m in trajectory.messages if m.role == "tool"] == ["The counter shows 1."]
    (failure,) = trajectory.failures
    assert failure.kind is FailureKind.ENVIRONMENT
    assert "it was killed by signal 9" in failure.message
    await agent.close()


@pytest.mark.slow_smoke
@pytest.mark.parametrize("ending", ["close", "kill"])
def test_no_process_is_left(tmp_path, ending):
    """Neither after `close` nor if the program is killed, whatever sessions the server's children moved to."""
    program = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from tests.integrations.mcp.test_environment import hostile, ResourceManager, Task
async def main():
    server, manager = hostile("orphans"), ResourceManager()
    server.load_tools()
    async with manager.leases(Task.of("x")) as leases:
        print((await leases.get(server)).pid, flush=True)
        if {ending!r} == "kill":
            await asyncio.sleep(3600)
    sys.stdin.readline()
    await manager.close()
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        guardian = int(process.stdout.readline())
        while len(left := processes_below(guardian)) < 2:
            pass
        if ending == "kill":
            process.kill()
        else:
            process.stdin.write("\n")
            process.stdin.close()
        wait_until_gone(left)
        process.wait(60)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (
            "exits",
            r"does not start: it ended with exit code 1; the end of its stderr:\nno license found in /etc/license",
        ),
        ("old_protocol", r"does not start: .*1999-01-01; this client speaks the protocol versions 2024-11-05, "),
        (
            "malformed_schema",
            r"the input schema of the MCP tool 'say' of the server Hostile is malformed: 'no such type'",
        ),
        ("long_description", r"the tools of Hostile are described in 800,\d+ bytes; .* The largest is 'say'"),
    ],
)
def test_server_that_does_not_start_is_explained(kind, problem):
    with pytest.raises(ConfigError, match=f"(?s){problem}"):
        hostile(kind).load_tools()


def test_start_of_a_silent_server_times_out_with_its_stderr():
    # A busy machine takes two seconds to start the interpreter that writes to stderr.
    with pytest.raises(ConfigError, match=r"(?s)it did not answer within 6 s; .*waiting for the moon"):
        hostile("silent", start_timeout=6.0).load_tools()


def test_settings_are_validated():
    with pytest.raises(ConfigError, match="has neither a command nor a url"):
        mcp_server()
    with pytest.raises(ConfigError, match="mcp_server has no setting 'colour'; it has command, url, env"):
        mcp_server(COUNTER, colour="red")
    with pytest.raises(ConfigError, match="starts 'no-such-program', which is not installed"):
        mcp_server(["no-such-program"]).load_tools()
    with pytest.raises(ConfigError, match="command is a list such as"):
        mcp_server("uvx mcp-server-time")


@pytest.mark.slow_smoke
@pytest.mark.parametrize("kind", ["flood", "flood_notifications", "endless_line"])
async def test_flood_is_a_fault_within_bounded_memory(kind):
    initial_bytes = psutil.Process().memory_info().rss
    with pytest.raises(EnvironmentFault, match=r"the MCP server Hostile is lost: it (wrote|sent)"):
        await call_once(hostile(kind, max_bytes=1 << 20))
    assert psutil.Process().memory_info().rss - initial_bytes < 200 << 20


@pytest.mark.parametrize("kind", ["large", "large_id_last"])
async def test_result_that_is_too_large_is_answered(kind):
    result = await call_once(hostile(kind))
    assert result.status is CallStatus.INVALID
    assert "bytes; at most 16,777,216 are read" in str(result.observation)
    assert (await call_once(hostile(kind, max_bytes=100 << 20, max_length=100))).observation.startswith("x" * 50)


async def test_server_that_never_answers_is_a_fault_if_stateful_and_an_error_if_shared():
    with pytest.raises(ToolTimeout, match=r"'say' gave neither an answer nor progress for 0.5 s"):
        await call_once(hostile("never_answers", timeout=0.5))
    result = await call_once(hostile("never_answers", timeout=0.5, stateful=False))
    assert result.status is CallStatus.ERROR


@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [
        ("malformed_result", CallStatus.ERROR, "the MCP server sent a malformed result"),
        ("server_error", CallStatus.ERROR, "error -32603: the disk is full"),
        ("invalid_json", CallStatus.OK, "ok"),
        ("logs_to_stdout", CallStatus.OK, "ok"),
        ("changes_tools", CallStatus.OK, "ok"),
    ],
)
async def test_misbehavior_is_an_observation(kind, status, text):
    result = await call_once(hostile(kind))
    assert result.status is status
    assert text in str(result.observation)


async def test_changed_tool_list_is_a_fault_of_the_next_start(tmp_path):
    (tmp_path / "folder").mkdir()
    server = hostile("other_tools", cwd=str(tmp_path / "folder"))
    server.load_tools()
    with pytest.raises(EnvironmentFault, match="no longer has the tools that the agent was made with: say is gone"):
        await call_once(server)


def deep_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def doubled_schema(reference: str, keyword: str) -> dict[str, Any]:
    """26 definitions that use the next one twice: 2 to the power of 26 validations."""
    definitions = {
        f"d{n}": {keyword: f"d{n}", "allOf": [{"$ref": reference.format(n + 1)}, {"$ref": reference.format(n + 1)}]}
        for n in range(26)
    }
    definitions["d26"] = {keyword: "d26", "type": "string"}
    return {"type": "object", "properties": {"x": {"$ref": reference.format(0)}}, "$defs": definitions}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (doubled_schema("#/$defs/d{}", "title"), "it has more than 20,000 objects and arrays, references expanded"),
        (doubled_schema("#d{}", "$anchor"), "it has more than 20,000 objects and arrays, references expanded"),
        (doubled_schema("d{}", "$id"), r"a part of it has '\$id'; only its root may"),
        (deep_schema(100), "it is nested more than 128 levels deep"),
        ({"properties": {"x": {"enum": list(range(300_000))}}}, r"it has 2,\d\d\d,\d\d\d bytes; at most 65,536"),
    ],
    ids=["pointers", "anchors", "ids", "depth", "bytes"],
)
def test_schema_that_takes_too_long_to_validate_is_refused(schema, problem):
    with pytest.raises(ConfigError, match=f"the MCP tool 'say' of the server Hostile is malformed: {problem}"):
        SchemaArguments.read("say", "", schema, "Hostile")


def test_recursive_schema_is_validated():
    node = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "id": {"type": "string"}}}
    arguments = SchemaArguments.read("say", "", node)
    assert arguments.check({"left": {"id": "a"}}) == {"left": {"id": "a"}}
    assert "'left.id': 1 is not of type 'string'" in str(arguments.check({"left": {"id": 1}}))


def test_validation_that_doubles_with_each_level_of_the_arguments_is_given_up():
    twice = [{"properties": {"x": {"$ref": "#/$defs/node"}}}] * 2
    schema = {"properties": {"x": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"type": "object", "allOf": twice}}}
    arguments = SchemaArguments.read("say", "", schema)
    nested: dict[str, Any] = {}
    for _ in range(60):
        nested = {"x": nested}
    assert "'say' cannot be checked: that takes more than 50,000 steps" in str(arguments.check(nested))
    assert arguments.check({"x": {"x": {}}}) == {"x": {"x": {}}}  # every call has all steps


def test_patterns_are_shown_and_left_to_the_server():
    slow = "^(a+)+$"
    schema = {
        "properties": {"text": {"type": "string", "pattern": slow}, "pattern": {"type": "integer"}},
        "patternProperties": {slow: {"type": "string"}},
        "additionalProperties": False,
        "unevaluatedProperties": False,
    }
    arguments = SchemaArguments.read("say", "", schema)
    assert arguments.schema["properties"]["text"]["pattern"] == slow
    text = "a" * 40 + "!"
    assert arguments.check({"text": text, text: "x"}) == {"text": text, text: "x"}
    assert "'pattern': 'x' is not of type 'integer'" in str(arguments.check({"pattern": "x"}))
    closed = SchemaArguments.read("say", "", {"properties": {}, "additionalProperties": False})
    assert "'x' was unexpected" in str(closed.check({"x": 1}))


def test_number_of_tools_is_bounded_after_the_selection():
    tools = ["same.name" + "." * n for n in range(MAX_TOOLS + 1)]
    settings: dict[str, Any] = {"include": None, "rename": {}, "prefix": "", "server": "Hostile"}
    with pytest.raises(ConfigError, match="Hostile offers 257 tools; a model may use at most 256: select them by incl"):
        choose_names(tools, exclude=(), **settings)
    assert len(choose_names(tools, exclude=tools[:1], **settings)) == MAX_TOOLS
