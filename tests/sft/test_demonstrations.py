"""Demonstrations are recorded like the model's own chains."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from agentfly import Environment, Task, reward, tool
from agentfly.agents import HFAgent, ReactAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.data import read_tasks
from agentfly.environment import Pool
from agentfly.environments.lookup import Lookup
from agentfly.errors import ConfigError, DataError, TemplateError
from agentfly.models.lookup import draw
from agentfly.segment import Author
from agentfly.sft.demonstrations import completion_from_reply, demonstrate, read_demonstrations, record_conversation
from agentfly.templates import load_template
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import ByteTokenizer
from agentfly.types import Message, ToolCall
from tests.conftest import load_trl_template
from tests.fakes import Server, byte_agent, call, complete_with, texts
from tests.templates.families import CASES, Case, user
from tests.templates.families import call as search


@reward
def correct(prediction: str, answer: str) -> float:
    return float(prediction == answer)


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    drawn = random.Random(seed)
    return [draw(drawn) for _ in range(count)]


async def test_expert_chain_equals_the_chain_of_a_model_with_the_same_replies() -> None:
    (row,) = rows(1)
    agent = byte_agent("unheard", tools=[Lookup.lookup], reward=correct)
    (demonstration,) = (await demonstrate(agent, row)).accepted
    assert demonstration.reward == 1.0
    friend = row["facts"][row["who"]][row["relation"]]
    script = [call("lookup", who=row["who"], what=row["relation"]), call("lookup", who=friend, what=row["attribute"])]
    model = byte_agent([*script, row["answer"]], tools=[Lookup.lookup], reward=correct)
    (chain,) = await model.run(row)
    (demonstrated,), (sampled,) = demonstration.segments, chain.segments
    assert demonstrated.tokens.tolist() == sampled.tokens.tolist()
    assert demonstrated.mask.tolist() == sampled.mask.tolist()
    assert demonstrated.messages == sampled.messages
    assert [span.author for span in demonstrated.spans] == [span.author for span in sampled.spans]
    assert (demonstrated.logprobs == 0).all()
    assert set(demonstrated.weight_versions.tolist()) == {-1}
    assert [call.status for call in demonstration.calls] == [call.status for call in chain.calls]


class Lamp(Environment):
    """Wants to be switched on; its expert knows how, except in the dark."""

    async def reset(self, task: Task) -> None:
        self.on, self.mood = False, task.question

    @tool
    async def switch(self) -> str:
        """Switch it."""
        self.on = not self.on
        return "click"

    async def expert(self) -> ToolCall | str:
        if self.mood == "dark":
            raise RuntimeError("I see nothing")
        if self.mood == "odd":
            return 7  # type: ignore[return-value]
        if self.mood == "made up":
            return ToolCall("light")
        return "done" if self.on or self.mood == "lazy" else ToolCall("switch")


class Far(Lamp):
    """The same in a process of its own."""

    pool = Pool(runtime="process")


class Plain(Lamp):
    """Its expert is a plain function."""

    def expert(self) -> ToolCall | str:
        return "done" if self.on else ToolCall("switch")


class FarPlain(Plain):
    pool = Pool(runtime="process")


@reward
def is_lit(env: Lamp) -> float:
    return float(env.on)


async def test_chains_below_the_threshold_are_dropped_and_counted_with_the_reason() -> None:
    agent = byte_agent("unheard", tools=[Lamp], reward=is_lit)
    demonstrations = await demonstrate(agent, ["bright", "lazy", "dark", "bright"])
    assert [chain.group for chain in demonstrations.accepted] == [0, 3]
    assert [chain.group for chain in demonstrations.rejected] == [1, 2]
    raised, earned = sorted(demonstrations.reasons.items())
    assert raised[0].startswith("RuntimeError: I see nothing")
    assert earned == ("reward 0", 1)
    all_of_them = await demonstrate(agent, ["bright", "lazy"], threshold=0.0)
    assert len(all_of_them.accepted) == 2
    await agent.close()
    assert agent.manager.num_instances == 0


@pytest.mark.integration
@pytest.mark.parametrize("kind", [Plain, Far, FarPlain])
async def test_expert_may_be_a_plain_function_in_another_process(kind: type[Lamp]) -> None:
    agent = byte_agent("unheard", tools=[kind], reward=is_lit)
    demonstrations = await demonstrate(agent, ["bright"])
    await agent.close()
    (chain,) = demonstrations.accepted
    assert chain.prediction == "done"


async def test_hanging_expert_fails_only_its_chain() -> None:
    class Stuck(Lamp):
        async def expert(self) -> ToolCall | str:
            if self.mood == "stuck":
                await asyncio.sleep(60)
            return "done"

    agent = byte_agent("unheard", tools=[Stuck])
    demonstrations = await demonstrate(agent, ["bright", "stuck"], chain_seconds=1.0)
    await agent.close()
    assert [chain.group for chain in demonstrations.accepted] == [0]
    assert demonstrations.reasons == {"the chain took longer than 1 s": 1}


async def test_invalid_expert_action_is_reported() -> None:
    agent = byte_agent("unheard", tools=[Lamp], reward=is_lit)
    with pytest.raises(ConfigError, match=r"Lamp.expert returned 7; it must return a ToolCall or the final answer"):
        await demonstrate(agent, ["bright", "odd"])
    with pytest.raises(ConfigError, match="it calls 'light', which is not a tool of the agent; there are switch"):
        await demonstrate(agent, "made up")
    await agent.close()


async def test_no_expert_or_two_experts_are_rejected() -> None:
    class Blind(Environment):
        @tool
        def look(self) -> str:
            """Look."""
            return ""

    with pytest.raises(ConfigError, match=r"acts in Blind, which has no expert; give an environment a method `expert`"):
        await demonstrate(byte_agent("x", tools=[Blind]), "?")
    with pytest.raises(ConfigError, match="acts in no environment, which has no expert"):
        await demonstrate(byte_agent("x"), "?")
    with pytest.raises(ConfigError, match="Blind has no expert"):
        Blind().expert()
    with pytest.raises(ConfigError, match="Lamp, Lookup all have experts"):
        await demonstrate(byte_agent("x", tools=[Lamp, Lookup]), "?")
    with pytest.raises(ConfigError, match="server renders its prompts"):
        await demonstrate(HFAgent("m", tools=[Lamp], backend=Server(complete_with("x"))), "?")


async def test_cancelling_releases_every_environment() -> None:
    waiting = asyncio.Event()

    class Slow(Lamp):
        async def expert(self) -> ToolCall | str:
            waiting.set()
            await asyncio.sleep(60)
            return "done"

    agent = byte_agent("unheard", tools=[Slow], reward=is_lit)
    running = asyncio.create_task(demonstrate(agent, ["a", "b", "c"]))
    await waiting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sum(pool.leased for pool in agent.manager.pool_metrics()) == 0
    await agent.close()


async def test_format_of_a_custom_agent_is_rendered_as_text_or_rejected() -> None:
    class Spoken(Lamp):
        async def expert(self) -> ToolCall | str:
            return "Thought: so\nFinal Answer: done" if self.on else "Thought: on\nAction: switch\nInput: {}"

    def react(kind: type[Lamp]) -> ReactAgent:
        return ReactAgent(template="chatml", backend=ScriptedBackend("x"), tools=[kind], reward=is_lit)

    (chain,) = (await demonstrate(react(Spoken), "bright")).accepted
    assert chain.prediction == "done"
    with pytest.raises(ConfigError, match="ReactAgent with template 'chatml' does not read"):
        await demonstrate(react(Lamp), "bright")


# ── files ──

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Light?"},
    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "switch", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "name": "switch", "content": "click"},
    {"role": "assistant", "content": "It is on."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Any time."},
]


def file_of(tmp_path: Path, *conversations: Any) -> Path:
    path = tmp_path / "demos.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation}) + "\n" for conversation in conversations))
    return path


def test_conversation_of_a_file_is_rendered_by_the_agents_template(tmp_path: Path) -> None:
    agent = byte_agent("unheard", tools=[Lamp], system_prompt="Be bright.")
    (chain,) = read_demonstrations(agent, file_of(tmp_path, TALK))
    assert chain.task.question == "Light?"
    assert chain.prediction == "Any time."
    parts = texts(agent, chain)
    assert [author for author, _ in parts] == ["task", "model", "tool", "model", "user", "model"]
    assert "Be bright." in parts[0][1]
    assert parts[1][1] == call("switch") + "<|im_end|>"
    assert "click" in parts[2][1]
    assert parts[3][1] == "It is on.<|im_end|>"
    assert chain.segments[0].mask.sum() == sum(
        len(span) for span in chain.segments[0].spans if span.author is Author.MODEL
    )


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        (TALK[:1], "must begin with the question and end with a reply"),
        (TALK[:1], "ends with one of user; a column with the reply is taken if it is renamed to 'completion'"),
        (TALK[1:], "must begin with the question"),
        (TALK[:3], "end with a reply"),
        ([*TALK[:2], TALK[3]], "two replies follow one another"),
        ([TALK[0], {"role": "assistant", "tool_calls": [{"function": {"name": "lamp"}}]}, TALK[3]], "two replies"),
        (
            [TALK[0], {"role": "assistant", "tool_calls": [{"function": {"name": "lamp"}}]}, *TALK[2:]],
            "it calls 'lamp', which is not a tool of the agent; there are switch",
        ),
        (
            [
                TALK[0],
                {"role": "assistant", "tool_calls": [{"function": {"name": "switch", "arguments": "{"}}]},
                *TALK[2:],
            ],
            "a call of 'switch' cannot be read: its arguments are not JSON",
        ),
        ([TALK[0], {"role": "assistant", "content": "I <|im_end|> am"}], "ends turns before its end"),
    ],
)
def test_unusable_conversation_is_rejected_with_its_position(tmp_path: Path, talk: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"demos.jsonl, row 1: .*{message}"):
        read_demonstrations(byte_agent("unheard", tools=[Lamp]), file_of(tmp_path, TALK, talk))


@tool
def press(times: int, label: str | None = None) -> str:
    """Press."""
    return "ok"


@tool(name="find")
def find_text(query: str, options: dict[str, Any] | None = None, **more: Any) -> str:
    """Find."""
    return "ok"


def test_null_arguments_of_arrow_are_dropped(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")

    def conversation(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        calls = [{"function": {"name": name, "arguments": arguments}}]
        return {"messages": [TALK[0], {"role": "assistant", "content": "", "tool_calls": calls}, *TALK[2:4]]}

    path = tmp_path / "demos.parquet"
    rows = [conversation("press", {"times": 7, "label": "a"}), conversation("find", {"query": "x"})]
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    (read, _) = read_tasks(path)
    assert read.messages[1].tool_calls[0].arguments == {"times": 7, "label": "a", "query": None}
    agent = byte_agent("unheard", tools=[press, find_text])
    first, second = read_demonstrations(agent, path)
    assert texts(agent, first)[1][1] == call("press", times=7, label="a") + "<|im_end|>"
    # `find` takes any further arguments, null too
    assert texts(agent, second)[1][1] == call("find", times=None, label=None, query="x") + "<|im_end|>"
    assert first.segments[0].messages[1].tool_calls[0].arguments == {"times": 7, "label": "a"}


def test_null_of_a_required_argument_is_refused(tmp_path: Path) -> None:
    calls = [{"function": {"name": "press", "arguments": {"times": None, "query": None}}}]
    path = file_of(tmp_path, [TALK[0], {"role": "assistant", "tool_calls": calls}, *TALK[2:]])
    error = "row 0: without its null arguments, a call is incomplete: the arguments of 'press' .* 'times' is missing"
    with pytest.raises(DataError, match=error):
        read_demonstrations(byte_agent("unheard", tools=[press]), path)


def schema(name: str, **properties: str) -> dict[str, Any]:
    types = {argument: {"type": kind} for argument, kind in properties.items()}
    parameters = {"type": "object", "properties": types, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Use {name}.", "parameters": parameters}}


def demonstration(name: str, arguments: dict[str, Any], tools: Any) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": arguments}}]
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": calls}, *TALK[2:4]]
    return {"messages": talk, "tools": tools}


@pytest.mark.parametrize(
    "kind",
    ["jsonl", "parquet", "text in parquet", "list of text", pytest.param("saved", marks=pytest.mark.integration)],
)
def test_demonstration_is_rendered_with_the_tools_of_its_row(tmp_path: Path, kind: str) -> None:
    press, find = schema("press", times="integer"), schema("find", query="string")
    encoders = {"text in parquet": json.dumps, "list of text": lambda schemas: [*map(json.dumps, schemas)]}
    encode = encoders.get(kind, list)
    rows = [
        demonstration("press", {"times": 7}, encode([press])),
        demonstration("find", {"query": "x"}, encode([find, press])),
        demonstration("switch", {}, None),
    ]
    is_jsonl = kind in ("jsonl", "list of text")
    path = tmp_path / f"demos.{'jsonl' if is_jsonl else 'parquet'}"
    if is_jsonl:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "saved":
        path = tmp_path / "saved"
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(path)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    agent = byte_agent("unheard", tools=[Lamp], system_prompt="Be bright.")
    pressed, found_text, switched = read_demonstrations(agent, path)
    prompts = [texts(agent, chain)[0][1] for chain in (pressed, found_text, switched)]
    tool_names = [[name for name in ("press", "find", "switch") if f'"{name}"' in prompt] for prompt in prompts]
    assert tool_names == [["press"], ["press", "find"], ["switch"]]
    template = load_template("chatml", ByteTokenizer(), tools=[press])
    messages = [Message("system", "Be bright."), Message("user", "Light?")]
    assert pressed.segments[0].spans[0].ids.tolist() == template.start(messages)
    assert texts(agent, pressed)[1][1] == call("press", times=7) + "<|im_end|>"
    assert texts(agent, found_text)[1][1] == call("find", query="x") + "<|im_end|>"


@pytest.mark.parametrize(
    ("name", "arguments", "tools", "message"),
    [
        ("switch", {}, [schema("dim")], "it calls 'switch', which is not a tool of the row; there are dim"),
        ("switch", {}, [], "it calls 'switch', which is not a tool of the row; there are none"),
        ("press", {"times": None}, [schema("press", times="integer")], "a call is incomplete: .*'times' is missing"),
        ("press", {}, "[oops", "the column 'tools' is not JSON"),
        ("press", {}, {"press": 1}, "the column 'tools' must be a list of schemas"),
        ("press", {}, [{"function": {}}], "which is not the schema of a function"),
    ],
)
def test_call_that_does_not_fit_the_tools_of_its_row_is_refused(
    tmp_path: Path, name: str, arguments: dict[str, Any], tools: Any, message: str
) -> None:
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps(demonstration(name, arguments, tools)))
    with pytest.raises(DataError, match=f"row 0: .*{message}"):
        read_demonstrations(byte_agent("unheard", tools=[Lamp]), path)


def test_tools_of_a_row_are_refused_where_the_system_prompt_describes_tools(tmp_path: Path) -> None:
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps(demonstration("dim", {}, [schema("dim")])))
    agent = ReactAgent(template="chatml", backend=ScriptedBackend("x"), tools=[Lamp])
    with pytest.raises(DataError, match="row 0: the column 'tools' lists dim, and the agent has switch"):
        read_demonstrations(agent, path)


def test_prompt_completion_and_sharegpt_are_demonstrations(tmp_path: Path) -> None:
    look = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
    turns = [("human", "Sky?"), ("function_call", '{"name": "look", "arguments": {}}'), ("observation", "blue")]
    conversation = [{"from": author, "value": text} for author, text in (*turns, ("gpt", "Blue."))]
    trl, sharegpt = tmp_path / "trl.jsonl", tmp_path / "sharegpt.jsonl"
    chat = {"prompt": [TALK[0]], "completion": TALK[1:4]}
    trl.write_text(json.dumps({"prompt": "The sky is", "completion": " blue."}) + "\n" + json.dumps(chat))
    sharegpt.write_text(json.dumps({"conversations": conversation, "tools": json.dumps([look])}))
    agent = byte_agent("unheard", tools=[Lamp])
    plain, chatted = read_demonstrations(agent, trl)
    (looked,) = read_demonstrations(agent, sharegpt)
    assert (plain.task.question, plain.prediction) == ("The sky is", "blue.")
    assert [author for author, _ in texts(agent, chatted)] == ["task", "model", "tool", "model"]
    assert texts(agent, looked)[1][1] == call("look") + "<|im_end|>"


# ── every family of templates ──

CALLS = [case for case in CASES if case.tools and case.trl != "qwen3_instruct_2507"]
TURNS = {
    "call": Message("assistant", "", (search(1, q='a "b" é\n<x>'),)),
    "calls": Message("assistant", "", (search(1, q="a"), search(2, q="z"))),
    "text and call": Message("assistant", "Let me see.", (search(1),)),
    "answer": Message("assistant", "It is 42.\n\nReally."),
}
REFUSED = {
    ("llama3_2", "calls"): "only supports single tool-calls",
    ("llama3_2", "text and call"): "does not write all of a reply: 'Let me see.' is lost",
    ("mistral_nemo", "text and call"): "does not write all of a reply: 'Let me see.' is lost",
    ("gptoss-gptoss", "calls"): "does not write all of a reply: of 2 calls 1",
}
"""What a chat format cannot say."""


def agent_of(template: Template) -> HFAgent:
    """An agent that prompts by this template, and searches."""

    @tool(name="search")
    def look(q: str) -> str:
        """Look something up."""
        return q

    agent = HFAgent(template="chatml", backend=ScriptedBackend("x"), tools=[look])
    agent.template = template
    return agent


@pytest.mark.integration
@pytest.mark.parametrize("kind", TURNS)
@pytest.mark.parametrize("case", CALLS, ids=str)
def test_rendered_turn_is_parsed_by_the_agent(case: Case, kind: str) -> None:
    agent, template, turn = agent_of(case.template), case.template, TURNS[kind]
    if reason := REFUSED.get((str(case), kind)):
        with pytest.raises((TemplateError, ConfigError), match=reason):
            completion_from_reply(agent, turn)
        return
    ids = list(completion_from_reply(agent, turn).token_ids)
    prompt, whole = case.render([user("u")]), case.render([user("u"), turn], open_turn=False)
    text = template.codec.decode(ids)
    assert whole.startswith(prompt + text)
    assert whole[len(prompt + text) :].strip() == ""
    assert ids[-1] in template.stop_ids
    read = template.parse(ids)
    assert [(call.name, call.arguments) for call in read.calls] == [(c.name, c.arguments) for c in turn.tool_calls]
    assert turn.text in f"{read.message.thinking}{read.message.text}"


@pytest.mark.parametrize("name", ["chatml", "qwen2.5"])
def test_named_templates_parse_the_calls_they_render(name: str) -> None:
    agent = HFAgent(template=name, backend=ScriptedBackend("x"), tools=[Lamp])
    chain = record_conversation(agent, Task.of(TALK))
    assert agent.template is not None
    spans = [span for span in chain.segments[0].spans if span.author is Author.MODEL]
    (read,) = agent.template.parse(spans[0].ids.tolist()).calls
    assert (read.name, read.arguments) == ("switch", {})


@pytest.mark.integration
def test_typed_arguments_round_trip_in_an_untyped_format() -> None:
    @tool
    def resize(width: int, tags: list[str], title: str) -> str:
        """Resize."""
        return "ok"

    tokenizer = ByteTokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(["<|user|>", "<|observation|>", "<|assistant|>"])
    tokenizer.chat_template = load_trl_template("glm4moe")
    agent = HFAgent(template="chatml", backend=ScriptedBackend("x"), tools=[resize])
    agent.template = load_template(None, tokenizer, tools=agent.schemas)
    turn = Message("assistant", "", (ToolCall("resize", {"width": 3, "tags": ["a"], "title": "[1]"}),))
    ids = list(completion_from_reply(agent, turn).token_ids)
    assert agent.template.parse(ids).calls[0].arguments == {"width": "3", "tags": '["a"]', "title": "[1]"}
