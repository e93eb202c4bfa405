"""Agents that call the model by HTTP under `agent.run`: rewards, environments, failures, processes."""

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agentfly import Environment, Task, reward, tool
from agentfly.agents import ExternalAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.errors import BackendFault, ConfigError, DataError
from agentfly.evaluation import evaluate
from agentfly.rollout.events import ReplyReceived
from agentfly.trajectory import FailureKind, StopReason, TrainingTreatment
from tests.fakes import call

pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'agentfly-rl[gateway]'")


class Counter(Environment):
    async def reset(self, task: Task) -> None:
        self.shown = 0

    @tool
    async def press(self, times: int) -> str:
        """Press the button."""
        self.shown += times
        return str(self.shown)


@reward
def reached(env: Counter, target: int) -> float:
    return float(env.shown == target)


PRESS = {
    "type": "function",
    "function": {
        "name": "press",
        "description": "Press the button.",
        "parameters": {"type": "object", "properties": {"times": {"type": "integer"}}},
    },
}


async def ask(base_url: str, api_key: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """One turn of the model."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=60) as client:
        body = {"messages": messages, **fields}
        answer = await client.post(f"{base_url}/chat/completions", json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]  # type: ignore[no-any-return]


async def press_buttons(base_url: str, api_key: str, question: str, env: Counter) -> str:
    """A small agent loop, as a user would write it."""
    import json

    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        message = await ask(base_url, api_key, messages, tools=[PRESS])
        messages.append(message)
        for tool_call in message.get("tool_calls", ()):
            observation = await env.press(**json.loads(tool_call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": observation})
        if not message.get("tool_calls"):
            return str(message["content"])


def make_agent(script: Any, program: Any, **settings: Any) -> ExternalAgent:
    return ExternalAgent("bytes", template="chatml", backend=ScriptedBackend(script), program=program, **settings)


async def test_chains_run_concurrently_with_an_environment_each() -> None:
    agent = make_agent([call("press", times=3), call("press", times=4), "It shows 7."], press_buttons, reward=reached)
    rows = [{"question": "Make it show 7.", "target": target} for target in (7, 8)]
    events: list[Any] = []
    result = await agent.run(rows, num_chains=8, observer=events.append, sampling={"max_tokens": 100}, seed=1)
    assert result.rewards == [1.0] * 8 + [0.0] * 8
    for chain in result:
        assert (chain.stop, chain.prediction, len(chain.turns)) == (StopReason.ANSWER, "It shows 7.", 3)
        assert (len(chain.segments), chain.untrainable) == (1, None)
        assert [span.turn for span in chain.segments[0].spans] == [0, 0, 1, 1, 2, 2]
    assert len([event for event in events if isinstance(event, ReplyReceived)]) == 48
    assert agent.gateway.metrics() == {"chains": 16.0, "turns": 48.0, "segments": 16.0, "continued": 1.0}
    await agent.close()


async def test_a_plain_function_may_return_its_reward() -> None:
    def program(base_url: str, api_key: str, task: Task, answer: str) -> dict[str, Any]:
        with httpx.Client(headers={"x-api-key": api_key}, timeout=60) as client:
            body = {"messages": [{"role": "user", "content": task.question}], "max_tokens": 50}
            reply = client.post(f"{base_url}/messages", json=body).json()["content"][0]["text"]
        return {"prediction": reply, "reward": float(reply == answer), "length": len(reply)}

    agent = make_agent("four", program)
    (chain,) = await agent.run({"question": "2 + 2?", "answer": "four"})
    assert (chain.reward, chain.prediction) == (1.0, "four")
    assert chain.score is not None
    assert chain.score.metrics == {"length": 4}
    await agent.close()


async def test_failures_are_typed() -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]

    async def crash(base_url: str, api_key: str) -> None:
        await ask(base_url, api_key, messages)
        raise KeyError("lost")

    async def forever(base_url: str, api_key: str) -> None:
        while True:
            await ask(base_url, api_key, messages)

    async def hang(base_url: str, api_key: str) -> None:
        await asyncio.get_running_loop().create_future()

    def fail(turn: Any) -> str:
        raise BackendFault("out of memory")

    for program, script, options, stop in (
        (crash, "x", {}, StopReason.AGENT_FAULT),
        (forever, "x", {}, StopReason.MAX_TURNS),
        (forever, "xxxx", {"max_chain_tokens": 7}, StopReason.MAX_TOKENS),
        (hang, "x", {"chain_seconds": 0.5}, StopReason.TIMEOUT),
        (forever, fail, {}, StopReason.BACKEND_FAULT),
    ):
        agent = make_agent(script, program)
        (chain,) = await agent.run("Hi", max_turns=3, **options)  # type: ignore[arg-type]
        assert chain.stop is stop
        kinds = {failure.kind for failure in chain.failures}
        if stop in (StopReason.TIMEOUT, StopReason.BACKEND_FAULT):
            assert stop.failure in kinds
        else:
            assert kinds == {FailureKind.AGENT}
        if stop is StopReason.AGENT_FAULT:
            assert "lost" in chain.failures[0].message
            assert (chain.treatment, len(chain.turns)) == (TrainingTreatment.MASK, 1)
        assert chain.attempts == (2 if stop is StopReason.BACKEND_FAULT else 1)
        await agent.close()


PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"model": os.environ["AGENTFLY_MODEL"], "messages": task["messages"]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
text = answer["choices"][0]["message"]["content"]
if task["crash"] == "killed":  # in the middle of its second turn
    body = json.dumps({"messages": task["messages"], "stream": True}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).readline()
    os.kill(os.getpid(), 9)
if task["crash"]:
    sys.exit("no idea")
print(json.dumps({"prediction": text + "!", "reward": 0.5}))
"""


@pytest.mark.integration
async def test_a_process_is_a_chain() -> None:
    agent = make_agent("hello", [sys.executable, "-S", "-c", PROGRAM], columns=["crash"])
    rows = [{"question": "Hi", "crash": crash} for crash in (False, True, "killed")]
    good, bad, killed = await agent.run(rows)
    assert (good.prediction, good.reward) == ("hello!", 0.5)
    assert bad.stop is StopReason.AGENT_FAULT
    assert bad.failures[0].kind is FailureKind.AGENT
    assert "no idea" in bad.failures[0].message
    assert len(bad.turns) == 1
    assert killed.stop is StopReason.AGENT_FAULT
    messages = [failure.message for failure in killed.failures if failure.kind is FailureKind.AGENT]
    assert any("killed by signal 9" in message for message in messages)
    assert killed.treatment is TrainingTreatment.MASK
    await agent.close()


LINGERING = """
import os, subprocess, sys, time
task = json.loads(sys.stdin.readline())
code = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1] + '/' + sys.argv[2], 'w')); time.sleep(300)"
for name, settings in (("child", {}), ("session", {"start_new_session": True})):
    subprocess.Popen([sys.executable, "-S", "-c", code, task["folder"], name], **settings)
while len(os.listdir(task["folder"])) < 2:
    time.sleep(0.01)
if task["hangs"]:
    time.sleep(300)
print("done")
"""


async def wait_for_end(pid: int) -> None:
    """A killed process is listed until its parent has waited for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreaper")
@pytest.mark.parametrize("hangs", [False, True])
async def test_descendants_of_a_process_end_with_its_chain(tmp_path: Path, hangs: bool) -> None:
    """They keep the output open, and one of them has left the session of the program."""
    agent = make_agent("x", [sys.executable, "-S", "-c", "import json" + LINGERING], columns=["folder", "hangs"])
    started = time.monotonic()
    limit = 3.0 if hangs else 60.0
    row = {"question": "Hi", "folder": str(tmp_path), "hangs": hangs}
    (chain,) = await agent.run(row, chain_seconds=limit)
    assert time.monotonic() - started < 30
    assert (chain.stop, chain.prediction) == ((StopReason.TIMEOUT, "") if hangs else (StopReason.ANSWER, "done"))
    pids = [int((tmp_path / name).read_text()) for name in ("child", "session")]
    for pid in pids:
        await wait_for_end(pid)
    await agent.close()


@pytest.mark.integration
async def test_a_process_that_stops_its_guardian_ends_with_its_chain(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
os.kill(os.getppid(), signal.SIGSTOP)
time.sleep(300)
"""
    pid_file = tmp_path / "pid"
    agent = make_agent("x", [sys.executable, "-S", "-c", program, str(pid_file)])
    (chain,) = await agent.run("Hi", chain_seconds=2)
    assert chain.stop is StopReason.TIMEOUT
    if pid_file.exists():  # on a busy machine, the time may be over before the program has begun
        await wait_for_end(int(pid_file.read_text()))
    await agent.close()


@pytest.mark.integration
async def test_a_process_reads_only_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-one")
    monkeypatch.setenv("HF_TOKEN", "secret-two")
    program = """
import json, os, sys
print(json.dumps({"prediction": json.dumps([json.loads(sys.stdin.readline()), dict(os.environ)])}))
"""
    agent = make_agent("x", [sys.executable, "-S", "-c", program], columns=["level"], env={"SEARCH_KEY": "public"})
    rows = [{"question": "2 + 2?", "answer": "four", "level": 3, "id": "a"}]
    (chain,) = await agent.run(rows)
    row, variables = json.loads(chain.prediction)
    assert row == {
        "id": "a",
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "question": "2 + 2?",
        "level": 3,
    }
    assert "secret" not in chain.prediction
    assert (variables["SEARCH_KEY"], variables["PATH"]) == ("public", os.environ["PATH"])
    await agent.close()


@pytest.mark.integration
async def test_stderr_in_a_failure_has_no_control_characters_and_is_bounded() -> None:
    program = r"import sys; sys.stderr.write('x' * 9999 + '\x1b[2J\x9b31mno\x07 idea\n'); sys.exit(3)"
    agent = make_agent("x", [sys.executable, "-S", "-c", program])
    (chain,) = await agent.run("Hi")
    message = chain.failures[0].message
    assert "exit code 3" in message
    assert " idea" in message
    assert all(character.isprintable() or character in "\n\t" for character in message.replace("\ufffd", ""))
    assert len(message) < 2200
    await agent.close()


@pytest.mark.integration
async def test_a_program_that_does_not_exist_is_named() -> None:
    agent = make_agent("x", ["/no/such/program"])
    (chain,) = await agent.run("Hi")
    assert "/no/such/program cannot be started" in chain.failures[0].message
    await agent.close()


async def test_reward_of_a_program_whose_prompt_had_no_room_for_a_reply_does_not_count() -> None:
    async def program(base_url: str, api_key: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": "x" * 200}]}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=60) as client:
            response = await client.post(f"{base_url}/chat/completions", json=body)
        return {"prediction": "none", "reward": float(response.is_success)}

    (chain,) = await make_agent("x", program).run("Hi", context_length=100)
    assert (chain.stop, chain.turns, chain.reward) == (StopReason.CONTEXT_LIMIT, (), None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "high", {"a": 1}])
async def test_a_bad_reward_of_a_program_fails_its_own_chain(value: object) -> None:
    async def program(value: object) -> dict[str, Any]:
        return {"prediction": "x", "reward": value}

    agent = make_agent("x", program)
    bad, good = await agent.run([{"question": "Hi", "value": value}, {"question": "Hi", "value": 0.5}])
    assert (good.reward, bad.reward) == (0.5, None)
    assert [failure.kind for failure in bad.failures] == [FailureKind.REWARD]
    assert "the program returned" in bad.failures[0].message
    assert (bad.stop, bad.treatment) == (StopReason.ANSWER, TrainingTreatment.MASK)
    await agent.close()


async def test_a_bad_reward_of_a_program_keeps_the_treatment_of_a_failed_chain() -> None:
    async def program(base_url: str, api_key: str, messages: list[Any]) -> dict[str, Any]:
        await ask(base_url, api_key, messages, max_tokens=2)
        return {"prediction": "x", "reward": float("nan")}

    agent = make_agent("a reply", program)
    (chain,) = await agent.run("Hi", failures={"truncation": "drop_group", "reward": "mask"})
    assert (chain.stop, chain.treatment) == (StopReason.TRUNCATED, TrainingTreatment.DROP_GROUP)
    await agent.close()


async def test_async_program_that_blocks_the_loop_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def call_without_await() -> str:
        time.sleep(0.25)  # noqa: ASYNC251  (as a client without async does)
        return "x"

    agent = make_agent("x", call_without_await)
    (chain,) = await agent.run("Hi")
    assert chain.prediction == "x"
    assert "program 'call_without_await' blocked the event loop for 0." in caplog.text
    await agent.close()


async def test_a_metric_that_is_no_number_is_stored_as_none() -> None:
    async def program(value: float) -> dict[str, Any]:
        return {"prediction": "x", "reward": 1, "loss": value}

    agent = make_agent("x", program)
    nan, number = await agent.run([{"question": "Hi", "value": value} for value in (float("nan"), 0.5)])
    assert (nan.reward, number.reward) == (1, 1)
    assert nan.score is not None
    assert number.score is not None
    assert (nan.score.metrics, number.score.metrics) == ({"loss": None}, {"loss": 0.5})
    await agent.close()


async def test_metrics_of_a_program_are_kept_beside_the_agent_s_reward() -> None:
    async def program(base_url: str) -> dict[str, Any]:
        return {"prediction": "x", "searches": 3}

    @reward
    def constant(prediction: str) -> dict[str, float]:
        return {"reward": 0.5, "length": len(prediction)}

    agent = make_agent("x", program, reward=constant)
    (chain,) = await agent.run("Hi")
    assert chain.score is not None
    assert (chain.reward, chain.score.metrics) == (0.5, {"searches": 3, "length": 1})
    await agent.close()


async def test_a_reward_of_the_program_beside_one_of_the_agent_fails_the_chain() -> None:
    """Not the run: the last line of a process may be what the model wrote."""

    async def program(value: object) -> dict[str, Any]:
        return {"prediction": "x", "reward": value}

    @reward
    def constant(prediction: str) -> float:
        return 0.5

    agent = make_agent("x", program, reward=constant)
    bad, good = await agent.run([{"question": "Hi", "value": value} for value in (1, None)])
    assert (good.reward, bad.reward) == (0.5, None)
    assert "keep one" in bad.failures[0].message
    await agent.close()


async def test_external_agent_is_evaluated() -> None:
    agent = make_agent([call("press", times=7), "It shows 7."], press_buttons, reward=reached)
    rows = [{"question": "Make it show 7.", "target": target} for target in (7, 7, 7, 8)]
    result = await evaluate(agent, rows, chains=2)
    assert result.reward.mean == 0.75
    await agent.close()


async def test_settings_without_effect_are_refused() -> None:
    async def program(target: int) -> None: ...

    with pytest.raises(ConfigError, match="takes no 'tools'"):
        ExternalAgent("bytes", program=program, tools=[], template="chatml", backend=ScriptedBackend("x"))  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="words of a command line"):
        make_agent("x", "python agent.py")
    for settings, problem in (
        ({"columns": ["target"]}, "are for a process"),
        ({"env": {"A": "b"}}, "are for a process"),
        ({"program": ["x"], "columns": ["messages"]}, "always reads"),
        ({"program": ["x"], "columns": "target"}, "list of column names"),
        ({"program": ["x"], "env": {"OPENAI_API_KEY": "k"}}, "set for every chain"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_agent("x", **{"program": program, **settings})
    for row, problem in (({}, "lacks"), ({"target": {1, 2}}, "as JSON")):
        agent = make_agent("x", ["x"], columns=["target"])
        with pytest.raises(DataError, match=problem):
            await agent.run({"question": "Hi", **row})
        await agent.close()
    agent = make_agent("x", program)
    with pytest.raises(ConfigError, match="asks for 'target'"):
        await agent.run("Hi")
    with pytest.raises(ConfigError, match="keeps its own history"):
        await agent.run({"question": "Hi", "target": 1}, strategy="step")
    await agent.close()
