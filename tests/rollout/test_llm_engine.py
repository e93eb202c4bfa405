"""Agents with the signatures of the original AgentFly: run, recorded token by token, and trained."""

import asyncio
import json
import re
from itertools import compress
from pathlib import Path
from typing import Any, Dict, List  # noqa: UP035  (the README of the original has them)

import numpy as np
import pytest

from agentfly import reward, tool
from agentfly.agents import BaseAgent, HFAgent
from agentfly.environments.lookup import Lookup
from agentfly.errors import ConfigError
from agentfly.models.lookup import draw
from agentfly.rollout import KeepObservations
from agentfly.rollout.llm_engine import SampledText
from agentfly.runs import RunDirectory
from agentfly.training.config import TrainConfig
from agentfly.training.plan import TrainPlan
from agentfly.training.trainer import Trainer
from agentfly.trajectory import CallStatus, StopReason
from agentfly.types import Message, Task
from tests.fakes import Recording, Server, byte_agent, call, complete_with, random_from, texts


@tool
async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


# The class is that of the original's README, with a body of `parse`.
class CustomizedAgent(BaseAgent):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    async def generate_async(self, messages_list: List[List[Dict]], **args):  # noqa: UP006
        return await self.llm_engine.generate_async(messages_list, **args)

    def parse(self, responses: List[str], tools):  # noqa: UP006
        messages = []
        for response in responses:
            functions = []
            for text in CALL.findall(response):
                try:
                    call = json.loads(text)
                    functions.append({"name": call["name"], "arguments": json.dumps(call["arguments"])})
                except (ValueError, KeyError, TypeError):
                    functions.append({"name": "lookup", "arguments": text})
            tool_calls = [{"id": str(i), "type": "function", "function": f} for i, f in enumerate(functions)]
            content = [{"type": "text", "text": response.partition("<tool_call>")[0].removesuffix("<|im_end|>")}]
            messages.append({"role": "assistant", "content": content, "tool_calls": tool_calls})
        return messages


SCRIPT = [call("add", a=1, b=2), "three"]


def make_agent(agent_class: type[BaseAgent], script: Any = SCRIPT, **settings: Any) -> Any:
    backend = script if isinstance(script, (Recording, Server)) else Recording(script)
    template = None if isinstance(backend, Server) else "chatml"
    return agent_class(model_name_or_path="bytes", template=template, tools=[add], backend=backend, **settings)


async def test_agent_of_the_original_readme_is_recorded_like_a_prebuilt_agent() -> None:
    agent = make_agent(CustomizedAgent)
    (chain,) = await agent.run("1+2?")
    (expected,) = await make_agent(HFAgent).run("1+2?")
    assert (chain.stop, chain.prediction) == (StopReason.ANSWER, "three")
    assert [message.role for message in chain.messages] == ["user", "assistant", "tool", "assistant"]
    assert chain.messages[2].text == "3"
    assert texts(agent, chain) == texts(agent, expected)
    (segment,), (expected_segment,) = chain.segments, expected.segments
    assert np.array_equal(segment.tokens, expected_segment.tokens)
    assert np.array_equal(segment.mask, expected_segment.mask)
    assert np.array_equal(segment.logprobs, expected_segment.logprobs, equal_nan=True)


async def test_reply_may_be_the_content_of_the_message_that_parse_returns() -> None:
    class Verbatim(CustomizedAgent):
        def parse(self, responses, tools):
            messages = super().parse(responses, tools)
            return [{**message, "content": text} for message, text in zip(messages, responses, strict=True)]

    (chain,) = await make_agent(Verbatim).run("1+2?")
    assert (chain.stop, chain.prediction) == (StopReason.ANSWER, "three")
    assert [message.text for message in chain.messages] == ["1+2?", SCRIPT[0], "3", "three"]


async def test_prompt_is_the_recorded_buffer_whatever_the_text_was_decoded_to() -> None:
    agent = make_agent(CustomizedAgent, Recording(["ü" + SCRIPT[0], "three"]))
    (chain,) = await agent.run("1+2?")
    first, second = agent.backend.requests
    prompt = list(second.prompt)
    assert prompt[: len(first.prompt)] == list(first.prompt)
    assert chain.segments[0].tokens.tolist()[: len(prompt)] == prompt


async def test_chains_that_run_together_sample_their_own_turns() -> None:
    backend = Recording(lambda turn: f"{turn.chain} {turn.turn}", latency=lambda _: random_from(_.chain).random() / 100)
    agent = make_agent(CustomizedAgent, backend, on_no_call={"then": "continue", "limit": 2})
    result = await agent.run(["a", "b"], num_chains=4, max_turns=2)
    assert [chain.prediction for chain in result] == [f"{group}/{number} 1" for group in (0, 1) for number in range(4)]


async def test_server_that_renders_the_prompt() -> None:
    agent = make_agent(CustomizedAgent, Server(complete_with(*SCRIPT)))
    (chain,) = await agent.run("1+2?")
    assert (chain.stop, chain.prediction, chain.messages[2].text) == (StopReason.ANSWER, "three", "3")


async def test_replies_carry_their_completion_and_both_signatures_can_be_mixed() -> None:
    replies: list[SampledText] = []

    class Engine(BaseAgent):
        async def generate_async(self, messages_list: Any) -> Any:  # type: ignore[override]
            replies.extend(await self.llm_engine.generate_async(messages_list, temperature=0.5, max_tokens=3))
            return replies[-1:]

    agent = make_agent(Engine, Recording("three"))
    (chain,) = await agent.run("1+2?", sampling={"max_tokens": 50})
    assert replies == ["thr"]
    assert replies[0].completion.token_ids == chain.segments[0].tokens[chain.segments[0].mask].tolist()
    sampling = agent.backend.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 3)


class Forgetful(CustomizedAgent):
    """Shows the model the question, the last result and a reminder, once there are two results."""

    async def generate_async(self, messages_list: Any, **args: Any) -> Any:
        (messages,) = messages_list
        if len(messages) > 3:
            messages[1:-1] = []
            messages.append({"role": "user", "content": "Now answer."})
        return await super().generate_async(messages_list, **args)


@pytest.mark.parametrize("server", [False, True])
async def test_history_that_the_agent_changes_begins_a_segment(server: bool) -> None:
    words = [call("add", a=1, b=2), call("add", a=3, b=4), "seven"]
    agent = make_agent(Forgetful, Server(complete_with(*words)) if server else words)
    (chain,) = await agent.run("1+2+4?")
    assert (chain.prediction, chain.failures) == ("seven", ())
    if server:
        assert [message.text for message in agent.backend.requests[2].messages] == ["1+2+4?", "7", "Now answer."]
        return
    sampled = [[text for author, text in texts(agent, chain, n) if author == "model"] for n in (0, 1)]
    assert sampled == [[f"{words[0]}<|im_end|>", f"{words[1]}<|im_end|>"], ["seven<|im_end|>"]]
    prompt = texts(agent, chain, 1)[0]
    assert prompt[0] == "history"
    assert "Now answer." in prompt[1]
    assert words[0] not in prompt[1]
    assert list(agent.backend.requests[2].prompt) == chain.segments[1].spans[0].ids.tolist()


async def test_changed_history_without_room_for_a_reply_fails_the_chain_with_the_reason() -> None:
    class Verbose(CustomizedAgent):
        async def generate_async(self, messages_list: Any, **args: Any) -> Any:
            return await super().generate_async([[{"role": "user", "content": "x" * 900}]], **args)

    (chain,) = await make_agent(Verbose).run("1+2?", context_length=900)
    assert chain.stop is StopReason.AGENT_FAULT
    assert "leaves no room for a reply" in chain.failures[0].message


async def test_several_replies_of_a_turn_have_seeds_of_their_own() -> None:
    class Best(CustomizedAgent):
        async def generate_async(self, messages_list: Any, **args: Any) -> Any:
            sampled = await asyncio.gather(*(self.llm_engine.generate_async(messages_list, **args) for _ in range(3)))
            return max(sampled)

    agent = make_agent(Best, Recording(lambda turn: str(turn.random.random())))
    (chain,) = await agent.run("Hi", seed=1)
    seeds = [request.sampling.seed for request in agent.backend.requests]
    assert len(set(seeds)) == 3
    (again,) = await make_agent(Best, Recording(lambda turn: str(turn.random.random()))).run("Hi", seed=1)
    assert chain.prediction == again.prediction


# ── what is refused ──


async def cut(agent: BaseAgent, messages_list: Any, args: Any) -> Any:
    return [reply.strip() for reply in await agent.llm_engine.generate_async(messages_list, **args)]


async def duplicate(agent: BaseAgent, messages_list: Any, args: Any) -> Any:
    return await agent.llm_engine.generate_async(messages_list * 2, **args)


async def change_tools(agent: BaseAgent, messages_list: Any, args: Any) -> Any:
    return await agent.llm_engine.generate_async(messages_list, **{**args, "tools": []})


async def misspell(agent: BaseAgent, messages_list: Any, args: Any) -> Any:
    return await agent.llm_engine.generate_async(messages_list, max_token=5)


async def change_late(agent: BaseAgent, messages_list: Any, args: Any) -> Any:
    await agent.llm_engine.generate_async(messages_list, **args)
    return await agent.llm_engine.generate_async([[{"role": "user", "content": "Ho"}]], **args)


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (cut, "must return a list with the reply of llm_engine, unchanged"),
        (duplicate, "one conversation in a list"),
        (change_tools, "pass others to its constructor"),
        (misspell, "Did you mean 'max_tokens'"),
        (change_late, "change it before the first reply"),
    ],
)
async def test_generate_that_cannot_be_recorded_is_refused(generate: Any, message: str) -> None:
    class Agent(CustomizedAgent):
        async def generate_async(self, messages_list: Any, **args: Any) -> Any:
            return await generate(self, messages_list, args)

    with pytest.raises(ConfigError, match=message):
        await make_agent(Agent, " three ").run("1+2?")


@pytest.mark.parametrize(
    ("parsed", "message"),
    [
        ("text", "one message per response"),
        ([], "one message per response"),
        (["text"], "one message per response"),
        ([{"content": "x", "loss": False}], "every sampled token is trained"),
    ],
)
async def test_parse_that_returns_no_message_is_refused(parsed: Any, message: str) -> None:
    class Agent(CustomizedAgent):
        def parse(self, responses: Any, tools: Any) -> Any:
            return parsed

    with pytest.raises(ConfigError, match=message):
        await make_agent(Agent).run("1+2?")


@pytest.mark.parametrize(
    ("parsed", "prediction"),
    [
        ([Message("assistant", "a message")], "a message"),
        ([{"content": "ends", "status": "terminal"}], "ends"),
        ([{"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}], ""),
    ],
)
async def test_parse_may_return_a_message_or_a_dict(parsed: Any, prediction: str) -> None:
    class Agent(CustomizedAgent):
        def parse(self, responses: Any) -> Any:  # without tools
            assert responses[0].completion.token_ids
            return parsed

    (chain,) = await make_agent(Agent).run("1+2?", max_turns=1)
    assert (chain.prediction, chain.failures) == (prediction, ())


async def test_folding_and_changed_history_exclude_each_other() -> None:
    agent = make_agent(Forgetful, [call("add", a=1, b=2), call("add", a=3, b=4), "seven"])
    with pytest.raises(ConfigError, match="exclude each other"):
        await agent.run("1+2?", folding=KeepObservations(last=9))


def test_method_with_unknown_parameters_is_refused_when_the_agent_is_made() -> None:
    class Agent(BaseAgent):
        def parse(self, responses, toolset):  # type: ignore[no-untyped-def, override]
            return []

    with pytest.raises(ConfigError, match=r"parse\(responses, toolset\) is called with a batch, and by name tools"):
        make_agent(Agent)


async def test_llm_engine_outside_of_a_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"use agent\.run"):
        await byte_agent("x").llm_engine.generate_async([[{"role": "user", "content": "Hi"}]])


# ── training ──


@reward
def exact_answer(prediction: str, answer: str) -> float:
    return float(prediction.strip() == answer)


@pytest.mark.timeout(900)  # the tiny model may have to be prepared
def test_agent_of_the_original_is_trained_like_a_prebuilt_agent(tmp_path: Path) -> None:
    def train(agent_class: type[BaseAgent], folder: Path) -> RunDirectory:
        config = TrainConfig(
            model="tiny",
            backend={"backend": "transformers", "dtype": "float32"},
            tasks_per_step=4,
            num_chains=4,
            max_turns=4,
            sampling={"max_tokens": 32},
            optimizer={"learning_rate": 5e-4},
            steps=2,
            loggers=(),
        )
        tasks = [Task.of(draw(random_from(number))) for number in range(16)]
        plan = TrainPlan(lambda **model: agent_class(**model, tools=[Lookup], reward=exact_answer), tasks, config)
        asyncio.run(Trainer.create(plan, folder).run())
        return RunDirectory(folder)

    custom, expected = (
        train(agent_class, tmp_path / agent_class.__name__) for agent_class in (CustomizedAgent, HFAgent)
    )
    chains, expected_chains = (
        [stored.trajectory for stored in directory.trajectories(1)] for directory in (custom, expected)
    )
    # The two agents answer an invalid call in different words.
    valid = [all(call.status is CallStatus.OK for call in chain.calls) for chain in expected_chains]
    assert sum(valid) > 4
    for chain, expected_chain in compress(zip(chains, expected_chains, strict=True), valid):
        assert chain.reward == expected_chain.reward
        tokens, expected_tokens = (
            [segment.tokens.tolist() for segment in trajectory.segments] for trajectory in (chain, expected_chain)
        )
        assert tokens == expected_tokens
    assert all(record.metrics["policy/grad_norm"] > 0 for record in custom.records() if record.metrics)
