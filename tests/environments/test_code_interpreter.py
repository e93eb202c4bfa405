"""The code interpreter, in a real sandbox, through agents and their tools."""

import base64
from typing import Any

import pytest

from agentfly import Task, reward
from agentfly.agent import HIDDEN_IMAGE
from agentfly.agents import CodeAgent, HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.environments import CodeInterpreter
from agentfly.rollout import RunResult
from agentfly.sandbox import Limits, SandboxUnavailable, open_sandbox
from agentfly.sft.demonstrations import completion_from_reply
from agentfly.tooling import Context
from agentfly.trajectory import StopReason
from agentfly.types import Message, ToolCall
from tests.conftest import TOKENIZERS, require_fetched
from tests.fakes import PNG, Computed, call


@pytest.fixture(autouse=True)
async def _needs_a_sandbox() -> None:
    try:
        await (await open_sandbox()).close()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")


async def run_chain(
    *calls: str, kind: type[CodeInterpreter] = CodeInterpreter, num_chains: int = 1, **row: Any
) -> RunResult:
    """An agent with all tools of the interpreter makes these calls, one a turn, and is done."""
    agent = HFAgent(tools=[kind], template="chatml", backend=ScriptedBackend([*calls, "Done."]))
    return await agent.run({"question": "Go.", **row}, max_turns=len(calls) + 1, num_chains=num_chains)


def answers(result: RunResult, chain: int = 0) -> list[str]:
    return [message.text for message in result[chain].messages if message.role == "tool"]


def python(code: str) -> str:
    return call("code_interpreter", code=code)


async def test_state_and_files_are_private_to_a_chain() -> None:
    result = await run_chain(
        python("import os\nx = 6\ndef f(n): return 1 if n < 2 else n * f(n - 1)"),
        python("print(x); f(5)"),
        python("open('note.txt', 'w').write('kept'); os.listdir('.')"),
        call("run_shell", command="cat note.txt; echo; pwd"),
        num_chains=2,
    )
    for chain in (0, 1):
        assert answers(result, chain)[1:3] == ["6\n120", "['note.txt']"]
        assert answers(result, chain)[3].splitlines()[0] == "kept"


async def test_error_is_shown_with_its_line_and_the_chain_continues() -> None:
    observations = answers(await run_chain(python("a = 1\nb = a / 0"), python("a")))
    assert "ZeroDivisionError" in observations[0]
    assert "line 2" in observations[0]
    assert observations[1] == "1"


class Tight(CodeInterpreter):
    limits = Limits(seconds=2, memory=128 << 20, processes=16)


async def test_killed_session_is_reported_and_replaced() -> None:
    result = await run_chain(
        python("x = 1\nimport os, signal\nos.kill(1, signal.SIGKILL); os._exit(1)"),
        python("'x' in globals()"),
        python("while True:\n    pass"),
        python("bytearray(1 << 30)"),
        call("read_file", path="data.csv"),
        kind=Tight,
        files={"data.csv": "a,b\n1,2\n"},
    )
    observations = answers(result)
    assert "gone" in observations[0]
    assert observations[1] == "False"
    assert "2 seconds" in observations[2]
    assert "memory" in observations[3].lower()
    assert observations[4] == "a,b\n1,2\n"
    assert result[0].stop is StopReason.ANSWER


async def test_file_tools() -> None:
    observations = answers(
        await run_chain(
            call("write_file", path="src/main.py", content="x = 1\ny = 2\n"),
            call("edit_file", path="src/main.py", old="x = 1", new="x = 3"),
            call("edit_file", path="src/main.py", old="z", new="w"),
            call("read_file", path="src/main.py"),
            call("list_files"),
            call("search_files", pattern="^y ="),
            call("search_files", pattern="nowhere"),
            call("read_file", path="missing.txt"),
            call("read_file", path="../../etc/passwd"),
            python("open('bytes', 'wb').write(b'\\xff\\xfe')"),
            call("read_file", path="bytes"),
        )
    )
    assert observations[0] == "src/main.py written."
    assert observations[2] == "Error: the old text occurs 0 times in src/main.py; it must occur exactly once."
    assert observations[3] == "x = 3\ny = 2\n"
    assert observations[4].splitlines() == ["src/", "src/main.py (12 bytes)"]
    assert observations[5].strip().endswith("src/main.py:2:y = 2")
    assert observations[6] == "No line matches."
    assert observations[7].startswith("Error:")
    assert observations[8].startswith("Error:")
    assert observations[10] == "Error: bytes is not a text file."


async def test_figures_are_returned_as_images() -> None:
    plot = (
        "import base64, sys, types\n"
        f"png = base64.b64decode('{PNG}')\n"
        "class Figure:\n    def savefig(self, to, **_): to.write(png)\n"
        "fake = types.ModuleType('matplotlib.pyplot')\n"
        "fake.get_fignums = lambda: [1, 2]\nfake.figure = lambda n: Figure()\nfake.close = lambda *_: None\n"
        "sys.modules['matplotlib'] = types.ModuleType('matplotlib')\nsys.modules['matplotlib.pyplot'] = fake\n"
    )
    environment = CodeInterpreter()
    await environment.start()
    await environment.reset(Task.of("?"))
    worlds = {CodeInterpreter: environment}
    result = await CodeInterpreter.run_python.run({"code": plot}, context=Context(Task.of("?")), environments=worlds)
    await environment.close()
    images = Message("tool", result.observation).images
    assert [base64.b64decode(image.url.partition(",")[2])[:4] for image in images] == [b"\x89PNG"] * 2
    note = "(an image, which cannot be shown here)"
    assert answers(await run_chain(python(plot))) == [f"(no output)\n{note}\n{note}"]  # ChatML has no pictures


@pytest.mark.parametrize(
    ("family", "template"),
    [("qwen2_5", None), ("llama3_2", None), ("smollm2", "smollm2")],
)
async def test_model_that_cannot_see_goes_on_after_a_figure(family: str, template: str | None) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'agentfly-rl[train]'")
    require_fetched(family)
    code = (
        "import matplotlib\nmatplotlib.use('Agg')\nfrom matplotlib import pyplot\npyplot.plot([1, 2])\nprint('drawn')"
    )
    replies = [
        Message("assistant", "", (ToolCall(CodeInterpreter.run_python.name, {"code": code}, "call00001"),)),
        Message("assistant", "Up."),
    ]
    backend = Computed(lambda request: completion_from_reply(agent, replies[request.turn]))  # takes no images
    agent = HFAgent(str(TOKENIZERS / family), template=template, tools=[CodeInterpreter.run_python], backend=backend)
    (chain,) = await agent.run("Draw a line.", num_chains=1)
    await agent.close()
    assert (chain.stop, chain.prediction, chain.failures) == (StopReason.ANSWER, "Up.", ())
    assert agent.template is not None
    prompt = agent.template.codec.decode(list(backend.requests[1].prompt))
    assert prompt.count(HIDDEN_IMAGE) == 1
    assert backend.requests[1].images == ()


async def test_reward_gets_the_session_of_the_chain() -> None:
    @reward
    async def wrote(env: CodeInterpreter, content: str) -> float:
        return float(await env.read_file("answer.txt") == content)

    script = ["```python\nopen('answer.txt', 'w').write(str(6 * 7))\n```", "It is in the file."]
    agent = CodeAgent(
        tools=[CodeInterpreter.run_python], reward=wrote, template="chatml", backend=ScriptedBackend(script)
    )
    result = await agent.run([{"question": "?", "content": "42"}, {"question": "?", "content": "43"}])
    assert result.rewards == [1.0, 0.0]


def test_successive_runs_have_their_own_sandbox() -> None:
    agent = HFAgent(tools=["code_interpreter"], template="chatml", backend=ScriptedBackend([python("6 * 7"), "Done."]))
    for _ in range(2):
        assert answers(agent.run_sync("Go.")) == ["42"]


async def test_invalid_files_column_is_rejected() -> None:
    result = await run_chain(python("1"), files=["a.txt"])
    assert result[0].stop is StopReason.ENVIRONMENT_FAULT
    assert "must map paths to text or bytes" in result[0].failures[0].message
