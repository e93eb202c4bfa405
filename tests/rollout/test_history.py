"""Folding: each rewrite seals a segment, all segments train, and each records what the model was shown."""

from typing import Any

import pytest

from agentfly import Task, tool
from agentfly.agents import HFAgent, ReactAgent
from agentfly.errors import ConfigError
from agentfly.rollout.history import Folding, KeepImages, KeepObservations, StepHistory, Summarize, append_user_text
from agentfly.segment import Author
from agentfly.trajectory import StopReason, Trajectory
from agentfly.types import Image, Message
from tests import fakes
from tests.conftest import TOKENIZERS, require_fetched
from tests.fakes import Recording, Server, byte_agent, call, complete_with, texts

PNG = Image(f"data:image/png;base64,{fakes.PNG}")


@tool
async def look(n: int) -> str:
    """Look at something."""
    return f"sight {n}"


LOOKS = [call("look", n=n) for n in range(5)]


async def run_folded(
    script: list[str], folding: Folding | None = None, **options: Any
) -> tuple[HFAgent, Recording, Trajectory]:
    backend = Recording(script)
    agent = byte_agent(backend, tools=[look])
    if folding is not None:
        options["folding"] = folding
    (trajectory,) = await agent.run(options.pop("task", "Look around."), **options)
    return agent, backend, trajectory


def holds(agent: HFAgent, backend: Recording, trajectory: Trajectory, script: list[str]) -> None:
    """Every turn was shown a prefix of its segment, and what it sampled, and only that, is trained there."""
    assert agent.template is not None
    sampled = {}
    for segment in trajectory.segments:
        assert segment.mask.any()
        at = 0
        for span in segment.spans:
            if span.author is Author.MODEL:
                request = backend.requests[span.turn]
                assert list(request.prompt) == segment.tokens.tolist()[:at]
                assert segment.mask[at : at + len(span)].all()
                sampled[span.turn] = agent.template.text(span.ids.tolist())
            else:
                assert not segment.mask[at : at + len(span)].any()
            at += len(span)
    assert sampled == dict(enumerate(script)), "every turn is trained exactly once"


def prompt(agent: HFAgent, backend: Recording, turn: int) -> str:
    assert agent.template is not None
    return agent.template.text(backend.requests[turn].prompt)


async def test_old_observations_are_replaced_and_every_segment_trains() -> None:
    script = [*LOOKS[:4], "done"]
    agent, backend, trajectory = await run_folded(script, KeepObservations(last=2))
    holds(agent, backend, trajectory, script)
    assert len(trajectory.segments) == 3
    assert "sight 0" in prompt(agent, backend, 2)
    last = prompt(agent, backend, 4)
    assert last.count("(left out)") == 2
    assert "sight 1" not in last
    assert "sight 2" in last
    assert "sight 3" in last
    assert [texts(agent, trajectory, n)[0][0] for n in range(3)] == ["task", "history", "history"]


async def test_observations_in_user_messages_are_replaced() -> None:
    script = [f'Thought: look\nAction: look\nInput: {{"n": {n}}}' for n in range(3)] + ["Final Answer: seen"]
    backend = Recording(script)
    agent = ReactAgent("bytes", template="chatml", tools=[look], backend=backend)
    (trajectory,) = await agent.run("Look.", folding=KeepObservations(last=1))
    assert trajectory.prediction == "seen"
    assert agent.template is not None
    last = agent.template.text(backend.requests[3].prompt)
    assert "sight 1" not in last
    assert "Observation: sight 2" in last
    # The history reads as the model wrote it: no call in a form that it never used, nothing said twice.
    assert "<tool_call>" not in last
    assert last.count("Action: look") == 3


async def test_a_summary_is_a_trained_turn_and_opens_the_next_segment() -> None:
    script = [LOOKS[0], LOOKS[1], "I saw 0 and 1.", LOOKS[2], LOOKS[3], "I saw 0 to 3.", "done"]
    agent, backend, trajectory = await run_folded(script, Summarize(over_tokens=760), max_turns=9)
    holds(agent, backend, trajectory, script)
    assert len(trajectory.segments) == 3
    assert trajectory.prediction == "done"
    assert "Sum up what you have done" in prompt(agent, backend, 2)
    fresh = prompt(agent, backend, 3)
    assert "Look around.\n\nSummary of what happened so far:\nI saw 0 and 1.<|im_end|>" in fresh
    assert "sight" not in fresh
    again = prompt(agent, backend, 6)
    assert "I saw 0 to 3." in again
    assert "I saw 0 and 1." not in again


async def test_summary_counts_as_a_turn() -> None:
    script = [LOOKS[0], LOOKS[1], "I saw 0 and 1.", "never"]
    _, backend, trajectory = await run_folded(script, Summarize(over_tokens=760), max_turns=3)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.MAX_TURNS, 3)
    assert len(backend.requests) == 3
    assert trajectory.segments[0].mask.any()


async def test_a_call_in_a_summary_is_not_run() -> None:
    script = [LOOKS[0], LOOKS[1], LOOKS[4], "done"]
    _, _, trajectory = await run_folded(script, Summarize(over_tokens=760))
    assert [len(turn.calls) for turn in trajectory.turns] == [1, 1, 0, 0]


async def test_summarize_requires_token_ids() -> None:
    words = [Message("assistant", "", Message.of({"role": "assistant", "tool_calls": [
        {"id": "a", "function": {"name": "look", "arguments": {"n": 1}}}]}).tool_calls)]  # fmt: skip
    from agentfly.types import Completion, FinishReason

    calling = Completion((), (), (), FinishReason.STOP, message=words[0])
    agent = HFAgent(
        "m",
        tools=[look],
        backend=Server(complete_with(calling, "x")),
    )
    with pytest.raises(ConfigError, match="no token ids"):
        await agent.run("Go.", folding=Summarize(over_tokens=10))


@pytest.mark.parametrize("history", [0, 1, 2])
async def test_every_step_is_a_segment_of_its_own_with_a_bounded_history(history: int) -> None:
    script = [*LOOKS[:4], "done"]
    agent, backend, trajectory = await run_folded(script, StepHistory(history), strategy="step")
    holds(agent, backend, trajectory, script)
    assert len(trajectory.segments) == len(trajectory.turns) == 5
    last = prompt(agent, backend, 4)
    assert [n for n in range(4) if f"sight {n}" in last] == list(range(4 - max(history, 1), 4))
    assert last.count("<|im_start|>assistant") == history + 1
    assert "Look around." in last


async def test_step_history_of_0_appends_the_observation_to_the_question() -> None:
    agent, backend, _ = await run_folded([LOOKS[0], LOOKS[1], "done"], StepHistory(0), strategy="step")
    for turn in (1, 2):
        assert f"<|im_start|>user\nLook around.\n\nsight {turn - 1}<|im_end|>" in prompt(agent, backend, turn)


async def test_initial_conversation_is_kept_as_a_whole() -> None:
    task = [
        {"role": "user", "content": "Example question"},
        {"role": "assistant", "content": "Example answer"},
        {"role": "user", "content": "Real question"},
    ]
    for folding in (StepHistory(0), StepHistory(1), Summarize(over_tokens=850), KeepObservations(last=1)):
        script = [LOOKS[0], LOOKS[1], "a summary" if isinstance(folding, Summarize) else LOOKS[2], "done", "done"]
        agent, backend, trajectory = await run_folded(script, folding, task=task)
        assert len(trajectory.segments) > 1, folding
        last = prompt(agent, backend, len(backend.requests) - 1)
        assert "Example question" in last
        assert "Example answer" in last
        assert "Real question" in last


def conversation(*contents: Any) -> list[Message]:
    return [Message("user" if n % 2 else "assistant", content) for n, content in enumerate(contents)]


def test_only_the_last_images_are_kept() -> None:
    opening = [Message("user", (PNG, "What is it?"))]
    since = conversation("look", ("first", PNG), "look", (PNG, "second", PNG))
    assert KeepImages(last=3).fold(opening, since[:2], None) is None
    out = KeepImages(last=1).fold(opening, since, None)
    assert out is not None
    assert sum(len(m.images) for m in out) == 1
    assert out[-1].content == ("(earlier image left out)", "second", PNG)
    assert out[0].content == ("(earlier image left out)", "What is it?")
    assert KeepImages(last=1).fold([out[0]], out[1:], None) is None
    none = KeepImages(last=0).fold(opening, since, None)
    assert none is not None
    assert not any(m.images for m in none)


@pytest.mark.integration
async def test_the_model_is_shown_only_the_last_screenshot() -> None:
    require_fetched("qwen2_5")

    @tool
    async def shoot() -> dict[str, Any]:
        """Take a screenshot."""
        return {"observation": "", "image": PNG}

    backend = Recording([call("shoot")] * 3 + ["done"])
    agent = HFAgent(str(TOKENIZERS / "qwen2_5"), template="qwen2.5", tools=[shoot], backend=backend)
    (trajectory,) = await agent.run("Shoot.", folding=KeepImages(last=1))
    assert [len(request.images) for request in backend.requests] == [0, 1, 1, 1]
    assert len(trajectory.segments) == 3
    assert all(segment.mask.any() for segment in trajectory.segments)
    assert agent.template is not None
    pad = agent.template.codec.control["<|image_pad|>"]
    assert [list(request.prompt).count(pad) for request in backend.requests] == [0, 1, 1, 1]


def test_short_history_is_unchanged() -> None:
    since = conversation("look", "sight")
    assert KeepObservations(last=1).fold([Message("user", "q")], since, None) is None
    assert StepHistory(1).fold([Message("user", "q")], [], None) is None
    assert Summarize(5).fold([Message("user", "q")], since, None) is None
    assert Summarize(5).summary_request(since, 5) is None


def test_text_is_appended_to_the_last_user_message() -> None:
    question, answer = Message("user", "q"), Message("tool", "a", name="f")
    assert append_user_text([question], ["more", "yet"]) == [Message("user", "q\n\nmore\n\nyet")]
    assert append_user_text([answer], ["more"]) == [answer, Message("user", "more")]
    assert append_user_text([], ["more"]) == [Message("user", "more")]
    assert append_user_text([answer], []) == [answer]
    assert append_user_text([Message("user", (PNG, "q"))], ["more"]) == [Message("user", (PNG, "q", "\n\n", "more"))]


@pytest.mark.parametrize("rule", [KeepImages, KeepObservations, StepHistory])
def test_negative_number_is_rejected(rule: Any) -> None:
    with pytest.raises(ConfigError, match="a whole number of at least 0"):
        rule(-1)


def test_custom_folding_rule_needs_two_methods() -> None:
    class Forget:
        def summary_request(self, later: Any, tokens: int) -> str | None:
            return None

        def fold(self, opening: Any, since: Any, summary: str | None) -> list[Message] | None:
            return [*opening]

    script = [LOOKS[0], "done"]
    backend = Recording(script)
    agent = byte_agent(backend, tools=[look])
    (trajectory,) = agent.run_sync(Task((Message("user", "Look."),)), folding=Forget())
    holds(agent, backend, trajectory, script)
    assert backend.requests[0].prompt == backend.requests[1].prompt
