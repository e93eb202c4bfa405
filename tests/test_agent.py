"""Running an agent: forms of input, options, events, `run_sync`; and settings that are rejected at the start."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from agentfly import Environment, Task, evaluate, reward, tool, train
from agentfly.agents import BaseAgent, HFAgent
from agentfly.backends.base import Request
from agentfly.backends.scripted import ScriptedBackend
from agentfly.errors import AgentFlyError, BackendFault, ConfigError, DataError
from agentfly.rollout.config import parse_tasks
from agentfly.rollout.events import (
    ChainEnded,
    ChainScored,
    ChainStarted,
    Event,
    ReplyReceived,
    TokensSampled,
    ToolCalled,
    ToolReturned,
)
from agentfly.rollout.history import KeepImages, StepHistory
from agentfly.rollout.limits import RecoveryRule
from agentfly.sft.demonstrations import demonstrate
from agentfly.trajectory import StopReason
from agentfly.types import Completion, Message, Reply, Sampling
from tests.fakes import Computed, Recording, Server, byte_agent, call, complete_with, texts


@tool
async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@reward
def one(prediction: str) -> float:
    return 1.0


# ── what can be run ──

CONVERSATION = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("messages", "prompts"),
    [
        ("Hi", ["Hi"]),
        (CONVERSATION, ["Hi"]),
        ([Message("user", "Hi")], ["Hi"]),
        ({"question": "Hi", "answer": 1}, ["Hi"]),
        ({"messages": CONVERSATION, "answer": 1}, ["Hi"]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([CONVERSATION, CONVERSATION], ["Hi", "Hi"]),
        ([{"question": "Hi"}, {"messages": CONVERSATION}], ["Hi", "Hi"]),
        ([Task((Message("user", "Hi"),))], ["Hi"]),
        ((q for q in ("Hi", "Ho")), ["Hi", "Ho"]),
        ([{"question": "Hi", "role": "spy"}], ["Hi"]),
    ],
)
def test_tasks_are_parsed_from_every_accepted_form(messages: Any, prompts: list[str]) -> None:
    assert [task.question for task in parse_tasks(messages)] == prompts


def test_rows_keep_their_own_ids_and_others_are_numbered() -> None:
    assert [t.id for t in parse_tasks([{"question": "a", "id": "x"}, {"question": "b"}])] == ["x", "1"]


@pytest.mark.parametrize("messages", [[], (), 5, None, {"answer": 1}, [{"role": "king", "content": "x"}], [[]]])
def test_invalid_task_is_rejected(messages: Any) -> None:
    with pytest.raises(ConfigError):
        parse_tasks(messages)


def endless_rows() -> Iterator[dict[str, str]]:
    while True:
        yield {"question": "Hi", "answer": "1"}


def test_endless_tasks_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("agentfly.rollout.config.MAX_ITERATED_TASKS", 1000)
    agent = byte_agent("1", reward=one)
    for run in (
        lambda: agent.run_sync(endless_rows()),
        lambda: asyncio.run(evaluate(agent, endless_rows())),
        lambda: asyncio.run(demonstrate(agent_with_expert(), endless_rows())),
        lambda: train(lambda **model: agent, endless_rows(), run=tmp_path),
        lambda: train(lambda **model: agent, ["Hi"], eval_tasks=endless_rows(), run=tmp_path),
    ):
        with pytest.raises(ConfigError, match=r"a generator that goes on after 1,000 of them.*itertools\.islice"):
            run()
    assert len(parse_tasks(["Hi"] * 1001)) == 1001
    assert len(parse_tasks(row for row in ["Hi"] * 1000)) == 1000


async def test_prompt_that_ends_with_a_reply_is_refused() -> None:
    answered = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    agent = byte_agent("1", reward=one)
    for run in (agent.run, partial(evaluate, agent), partial(demonstrate, agent_with_expert())):
        with pytest.raises(DataError, match=r"task '1': its messages end with a reply of the assistant"):
            await run(["Hi", answered])


def agent_with_expert() -> BaseAgent:
    class Expert(Environment):
        @tool
        def look(self) -> str:
            """Look."""
            return "nothing"

        def expert(self) -> str:
            return "done"

    return byte_agent("1", tools=[Expert])


SCHEMA = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("column", [[SCHEMA], json.dumps([SCHEMA]), [SCHEMA["function"]], [json.dumps(SCHEMA)]])
async def test_column_of_tools_that_the_agent_lacks_is_refused(column: Any) -> None:
    with pytest.raises(ConfigError, match=r"task '0': the column 'tools' lists search, and the agent has no tools\."):
        await byte_agent("1").run([{"question": "Hi", "tools": column}])


async def test_column_of_tools_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    @tool(name="search")
    def look() -> str:
        """Look."""
        return ""

    agent = byte_agent("1", tools=[look])
    for _ in range(2):
        await agent.run([{"question": "Hi", "tools": [SCHEMA]}])
    assert [record.getMessage() for record in caplog.records] == [
        "the column 'tools' of the tasks has no effect: the model is shown the tools of the agent"
    ]


async def test_other_columns_named_tools_are_data(caplog: pytest.LogCaptureFixture) -> None:
    def count(tools: list[Any]) -> float:
        return float(len(tools))

    result = await byte_agent("1", reward=count).run([{"question": "Hi", "tools": [SCHEMA]}])
    assert result.rewards == [1.0]
    for value in ("hammer", ["hammer", "saw"], None, 3):
        await byte_agent("1").run([{"question": "Hi", "tools": value}])
    assert not caplog.records


async def test_empty_dataset_is_rejected_before_the_run() -> None:
    with pytest.raises(ConfigError, match="nothing to run"):
        await byte_agent("x").run([])


# ── options ──


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurent_chains": 2}, "max_concurrent_chains"),
        ({"max_turn": 2}, "max_turns"),
        ({"temperature": 0.5}, "sampling={'temperature'"),
        ({"sampling": {"temprature": 0.5}}, "'temperature'"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turns": None}, "max_turns"),
        ({"num_chains": 0}, "num_chains"),
        ({"max_concurrent_chains": 0}, "max_concurrent_chains"),
        ({"chain_seconds": 0}, "chain_seconds"),
        ({"context_length": -5}, "context_length"),
        ({"max_chain_tokens": "many"}, "max_chain_tokens"),
        ({"strategy": "tree"}, "'chain' and 'step'"),
        ({"strategy": "step", "folding": KeepImages()}, "remove one"),
        ({"folding": "summarise"}, "not a folding rule"),
        ({"failures": {"timeout": "forget"}}, "drop_group"),
        ({"failures": {"tmeout": "mask"}}, "tmeout"),
        ({"failures": {"retries": -1}}, "retries"),
        ({"failures": "mask"}, "not a failure policy"),
        ({"num_chains": "2"}, "num_chains must be a whole number"),
        ({"num_chains": 10**20}, "set max_concurrent_chains"),
        ({"max_turns": 1.5}, "max_turns must be a whole number"),
        ({"sampling": 3}, "a Sampling or a mapping of its fields"),
        ({"observer": 3}, "observer must be a function"),
        ({"seed": "a"}, "seed must be a whole number"),
        ({"folding": KeepImages}, "not a folding rule"),
    ],
)
async def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    backend = Recording("x")
    with pytest.raises(ConfigError) as refused:
        await byte_agent(backend).run("Go.", **options)
    assert message in str(refused.value)
    assert backend.requests == []


async def test_sampling_reaches_the_backend_as_given() -> None:
    backend = Recording("x")
    sampling = Sampling(temperature=0.3, top_p=0.9, top_k=5, min_p=0.1, max_tokens=50, stop=("END",))
    await byte_agent(backend).run("Go.", sampling=sampling)
    assert backend.requests[0].sampling == sampling


def test_step_is_a_folding_rule_and_may_be_set() -> None:
    from agentfly.rollout.config import parse_settings

    assert parse_settings(3, {"strategy": "step"}).folding == StepHistory()
    assert parse_settings(3, {"strategy": "step", "folding": StepHistory(0)}).folding == StepHistory(0)


# ── construction ──


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": one, "reward_fn": one}, "two names"),
        ({"on_no_call": "stop"}, "not a recovery rule"),
        ({"on_no_call": {"then": "continue", "nudges": "x"}}, "nudges"),
        ({"on_no_call": RecoveryRule, "tools": []}, "not a recovery rule"),
        ({"on_invalid_call": {"limit": 0}}, "at least 1"),
        ({"on_tool_error": {"then": "end", "nudge": "x"}}, "cannot have a nudge"),
        ({"backend": "scriptd"}, "scripted"),
        ({"backend": "scripted", "backend_config": {"script": "x", "latncy": 1}}, "latncy"),
        ({"backend": "scripted", "backend_config": {"backend": "client"}}, "disagree"),
        ({"backend": ScriptedBackend("x"), "backend_config": {"slots": 1}}, "backend_config"),
        ({"template": "chatml2"}, "chatml"),
        ({"template": None}, "template"),
        ({"template_config": {"history": "rewrite"}}, "append"),
        ({"template_config": {"enable_thinkin": True}}, "enable_thinkin"),
    ],
)
def test_invalid_arguments_are_rejected_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentFlyError) as refused:
        HFAgent("bytes", **{"template": "chatml", "backend": ScriptedBackend("x"), **settings})
    assert message in str(refused.value)


def test_a_server_that_renders_takes_no_template() -> None:
    with pytest.raises(ConfigError, match="template="):
        HFAgent("m", template="chatml", backend=Server(complete_with("x")))


def test_a_backend_by_name_takes_its_settings() -> None:
    agent = HFAgent("bytes", template="chatml", backend_config={"backend": "scripted", "script": "hello"})
    assert agent.run_sync("Hi")[0].prediction == "hello"


async def test_system_prompts_of_agent_and_task_are_joined() -> None:
    backend = Recording("x")
    agent = byte_agent(backend, system_prompt="Be brief. Tools: {tools}", tools=[add])
    await agent.run([[{"role": "system", "content": "Be kind."}, *CONVERSATION], CONVERSATION])
    both, prompt_of_agent = (agent.template.text(request.prompt) for request in backend.requests)  # type: ignore[union-attr]
    assert "Be brief. Tools: - add: Add two integers." in both
    assert "\n\nBe kind." in both
    assert "Be brief." in prompt_of_agent


# ── custom agents ──


class Shouting(BaseAgent):
    """Calls are words in capitals."""

    def parse(self, text: str) -> Reply:
        if not text.isupper():
            return Reply(Message("assistant", text), answer=f"<{text}>")
        name, *numbers = text.lower().split()
        from agentfly.types import ToolCall

        calls = (ToolCall(name, dict(zip("ab", map(int, numbers), strict=False))),)
        return Reply(Message("assistant", text, calls))


@pytest.mark.parametrize("server", [False, True])
async def test_custom_parse_gets_tokens_and_server_messages(server: bool) -> None:
    words = ["ADD 1 2", "three"]
    backend = Server(complete_with(*words)) if server else ScriptedBackend(words)
    agent = Shouting("bytes", template=None if server else "chatml", tools=[add], backend=backend)
    (trajectory,) = await agent.run("1+2?")
    assert (trajectory.stop, trajectory.prediction) == (StopReason.ANSWER, "<three>")
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]


async def test_custom_generate_may_sample_repeatedly_and_its_result_is_recorded() -> None:
    class Best(HFAgent):
        async def generate_async(self, request: Request) -> Completion:
            drawn = [await self.backend.generate(request) for _ in range(3)]
            return max(drawn, key=lambda completion: len(completion.token_ids))

    words = iter(["a", "long", "mid"])
    agent = Best("bytes", template="chatml", backend=ScriptedBackend(lambda turn: next(words)))
    (trajectory,) = await agent.run("Go.")
    assert trajectory.prediction == "long"
    assert texts(agent, trajectory)[-1] == ("model", "long<|im_end|>")


async def test_reply_has_at_most_1024_tokens_by_default() -> None:
    backend = Recording("a" * 2000)
    (whole,) = await byte_agent(backend).run("Go.")
    assert [request.sampling.max_tokens for request in backend.requests] == [1024]
    assert whole.sampled_tokens == 2001  # a script is not cut by a default that is for models
    (cut,) = await byte_agent(Recording("a" * 2000)).run("Go.", sampling={"max_tokens": 1024})
    assert cut.stop is StopReason.TRUNCATED
    assert cut.sampled_tokens == 1024
    (cut,) = await byte_agent(Recording("a" * 2000, context_length=500)).run("Go.")
    assert cut.stop is StopReason.CONTEXT_LIMIT


# ── chains without a score ──


def fail(prediction: str) -> float:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "2 of 2 chains have no reward: the agent has no reward="),
        ({"reward": lambda prediction: None}, "2 of 2 chains have no reward: reward '<lambda>' returned None"),
        ({"reward": fail}, "2 of 2 chains have no reward: reward 'fail' failed: ValueError: no"),
        ({"reward": one}, ""),
    ],
)
async def test_result_says_why_rewards_are_none(settings: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    result = await byte_agent("Hi", **settings).run("Hi", num_chains=2)
    assert result.unscored_reason.startswith(reason)
    assert reason in repr(result)
    warned = [record.message for record in caplog.records if "have no reward" in record.message]
    assert warned == ([result.unscored_reason] if settings and reason else [])


async def test_reason_of_a_failed_chain_is_its_failure() -> None:
    agent = byte_agent("Hi", reward=one)
    agent.backend = Computed(lambda request: (_ for _ in ()).throw(BackendFault("no power")))
    result = await agent.run(["Hi", "Ho"])
    assert repr(result) == "<RunResult of 2 chains: 2 of 2 chains have no reward: no power>"


async def test_repaired_attempt_is_no_reason() -> None:
    attempts = iter([BackendFault("no power"), None])

    class Flaky(Recording):
        async def generate(self, request: Request) -> Completion:
            if (fault := next(attempts)) is not None:
                raise fault
            return await super().generate(request)

    result = await byte_agent(Flaky("Hi")).run("Hi")
    assert result[0].attempts == 2
    assert repr(result) == "<RunResult of 1 chain: 1 of 1 chains have no reward: the agent has no reward=>"
    assert repr(result[0]) == "<Trajectory 0/0: answer after 1 turn>"


# ── events ──


async def collect(agent: BaseAgent, *args: Any, **options: Any) -> list[Event]:
    return [event async for event in agent.stream(*args, **options)]


async def test_events_form_a_complete_sequence_for_every_chain_and_the_stream_ends() -> None:
    script = [call("add", a=1, b=2) + "\n" + call("sub"), "three"]
    agent = byte_agent(
        ScriptedBackend(script, latency=lambda r: 0.001 * int(r.chain[0]), chunk=40), tools=[add], reward=one
    )
    events = await asyncio.wait_for(collect(agent, ["a", "b", "c"], num_chains=2), 60)
    by_chain: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_chain[event.chain_id].append(event)
    assert len(by_chain) == 6
    for chain in by_chain.values():
        kinds = [kind for kind, _ in groupby(type(event) for event in chain)]
        assert kinds == [
            ChainStarted, TokensSampled, ReplyReceived, ToolCalled, ToolReturned,
            TokensSampled, ReplyReceived, ChainScored, ChainEnded,
        ]  # fmt: skip
        assert sum(isinstance(event, TokensSampled) for event in chain) > 2
        assert (
            sum(isinstance(event, ToolCalled) for event in chain) == 1
        )  # the unknown tool is not called, only answered
        assert sum(isinstance(event, ToolReturned) for event in chain) == 2
    assert len(agent.trajectories) == 6
    last = events[-1]
    assert isinstance(last, ChainEnded)
    assert last.trajectory.reward == 1.0


async def test_token_events_have_ids_and_text_without_broken_characters() -> None:
    agent = byte_agent(ScriptedBackend("né😀!", chunk=1))
    tokens = [event for event in await collect(agent, "Go.") if isinstance(event, TokensSampled)]
    (trajectory,) = agent.trajectories
    assert [i for event in tokens for i in event.ids] == trajectory.segments[0].spans[-1].ids.tolist()
    assert tokens[-1].text == "né😀!"
    assert tokens[0].text == "n"


async def test_observing_does_not_change_the_record() -> None:
    script = [call("add", a=1, b=2), "three"]
    plain = await byte_agent(ScriptedBackend(script, chunk=3), tools=[add]).run("Go.", seed=1)
    watched = byte_agent(ScriptedBackend(script, chunk=3), tools=[add])
    await collect(watched, "Go.", seed=1)
    assert watched.trajectories[0].segments == plain[0].segments


@pytest.mark.parametrize(
    "kind", [ChainStarted, TokensSampled, ReplyReceived, ToolCalled, ToolReturned, ChainScored, ChainEnded]
)
async def test_an_observer_that_raises_fails_the_run_with_its_own_error(kind: type[Event]) -> None:
    class Odd(Exception):
        pass

    def observer(event: Event) -> None:
        if isinstance(event, kind):
            raise Odd(kind.__name__)

    agent = byte_agent(ScriptedBackend([call("add", a=1, b=2), "3"], latency=0.001), tools=[add], reward=one)
    with pytest.raises(Odd, match=kind.__name__):
        await agent.run(["a", "b"], observer=observer)
    assert len(asyncio.all_tasks()) == 1


async def test_stream_notifies_the_other_observer_and_raises_the_runs_error() -> None:
    seen: list[Event] = []
    agent = byte_agent("x")
    events = await collect(agent, "Go.", observer=seen.append)
    assert events == seen
    with pytest.raises(ConfigError):
        await collect(agent, "Go.", max_turns=0)


async def test_a_stream_abandoned_early_stops_the_run() -> None:
    agent = byte_agent(ScriptedBackend("x", latency=30))
    stream = agent.stream(["a", "b"])
    assert isinstance(await anext(stream), ChainStarted)
    await stream.aclose()  # type: ignore[attr-defined]
    assert len(asyncio.all_tasks()) == 1


# ── the sync door ──


def test_run_sync_works_without_a_loop_and_again() -> None:
    agent = byte_agent(ScriptedBackend([call("add", a=1, b=2), "3"], slots=1), tools=[add])
    for _ in range(2):
        assert [t.prediction for t in agent.run_sync("Go.", num_chains=3)] == ["3"] * 3


async def test_run_sync_works_inside_a_running_loop_and_raises_its_errors() -> None:
    agent = byte_agent("x")
    assert agent.run_sync("Go.").rewards == [None]
    with pytest.raises(DataError):
        agent.run_sync([{"role": "king", "content": "x"}])


class Needy(Environment):
    def __init__(self, size: int) -> None:
        self.size = size

    @tool
    async def look(self) -> str:
        """Look."""
        return "x"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": "calculate"}, "a list of tools"),
        ({"tools": [Needy]}, "Needy() requires size"),
        ({"system_prompt": 3}, "system_prompt is text"),
        ({"backend": None}, "name a model (`agentfly models` lists"),
        ({"backend": "scripted", "backend_config": {}}, "missing 1 required positional argument: 'script'"),
        ({"backend": "scripted", "backend_config": {"scrpt": "x"}}, "unexpected keyword argument 'scrpt'"),
    ],
)
def test_unusable_agent_is_rejected_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        HFAgent(**{"template": "chatml", "backend": ScriptedBackend("x"), **settings})
    assert message in str(refused.value)


async def test_prebuilt_tools_are_found_by_name() -> None:
    agent = byte_agent([call("calculate", expression="6 * 7"), "It is 42."], tools=["calculate"])
    assert [m.text for m in (await agent.run("?"))[0].messages if m.role == "tool"] == ["42"]


async def test_invalid_unicode_is_rejected_before_the_run() -> None:
    with pytest.raises(DataError, match="half of a surrogate pair at character 1"):
        await byte_agent("x").run(["fine", "a\ud800"])


async def test_message_with_calls_needs_no_content_and_developer_is_system() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "user", "content": "Go on."},
    ]
    trajectory = (await byte_agent("x").run(messages))[0]
    assert [m.role for m in trajectory.task.messages] == ["system", "assistant", "user"]


# ── mistakes that are answered when the agent or its class is made ──


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("generation_config", "sampling={…}"),
        ("top_p", "sampling={'top_p': …}"),
        ("max_new_tokens", "sampling={'max_tokens': …}"),
        ("max_prompt_length", "context_length=…"),
    ],
)
async def test_option_of_another_library_is_answered_with_ours(option: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"a run has no option '{option}'; write {meant}"):
        await byte_agent("1").run("Hi", **{option: {}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model", "HFAgent takes no 'model'; write model_name_or_path="),
        ("tool", "write tools="),
        ("reward_function", "write reward="),
        ("max_turns", r"it is an option of a run: agent.run\(…, max_turns=…\)"),
        ("generation_config", r"agent.run\(…, sampling={…}\)"),
        ("temperature", r"agent.run\(…, sampling={'temperature': …}\)"),
        ("max_new_tokens", r"agent.run\(…, sampling={'max_tokens': …}\)"),
        ("max_response_length", r"agent.run\(…, sampling={'max_tokens': …}\)"),
        ("max_prompt_length", r"agent.run\(…, context_length=…\)"),
        ("max_model_len", r"agent.run\(…, context_length=…\)"),
        ("num_generations", r"agent.run\(…, num_chains=…\)"),
        ("nonsense", "it takes model_name_or_path, tools, reward"),
    ],
)
def test_unknown_argument_is_answered_with_the_right_name(argument: str, message: str) -> None:
    arguments: dict[str, Any] = {argument: "x"}
    with pytest.raises(ConfigError, match=message):
        HFAgent(**arguments)


async def test_plain_function_is_a_reward_and_a_tool_has_another_name() -> None:
    def half(prediction: str) -> float:
        return 0.5

    agent = byte_agent("-", tools=["calculator"], reward=half)
    assert [tool.name for tool in agent.tools] == ["calculate"]
    assert (await agent.run("Hi")).rewards == [0.5]
    assert agent.template is not None
    assert agent.template.start([{"role": "user", "content": "Hi"}]) == agent.template.start([Message("user", "Hi")])
