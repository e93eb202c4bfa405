"""ReAct: thought, action, input, observation, and a final answer."""

from __future__ import annotations

import json
import re

from agentfly.agents.prompted import PromptedAgent, split_thinking
from agentfly.rollout.policy import Reaction
from agentfly.types import Message, Reply, ToolCall

_FORM = "Action: <tool>\nInput: <arguments as a JSON object>"
_ACTION = re.compile(r"^[ \t]*Action:[ \t]*(.*)$", re.MULTILINE)
_INPUT = re.compile(r"^[ \t]*(?:Action )?Input:[ \t]*", re.MULTILINE)
_FINAL = re.compile(r"^[ \t]*Final Answer:[ \t]*", re.MULTILINE)
_THOUGHT = re.compile(r"^[ \t]*Thought:[ \t]*", re.MULTILINE)
_INVENTED = re.compile(r"^[ \t]*Observation:", re.MULTILINE)


class ReactAgent(PromptedAgent):
    """Reads `Thought:`, `Action:`, `Input:` and `Final Answer:` out of the model's text. One action a turn."""

    default_system_prompt = (
        "Solve the task step by step with these tools:\n{tools}\n\n"
        f"In each turn, write\nThought: <what to do next>\n{_FORM}\n"
        "and stop: the observation comes in the next turn. When you know the answer, write\n"
        "Thought: <why>\nFinal Answer: <the answer>"
    )
    default_on_no_call = Reaction(nudge=f"Write either\n{_FORM}\nor\nFinal Answer: <the answer>", limit=2)
    observation_form = "Observation: {observation}"

    def parse(self, text: str) -> Reply:
        """The first action or final answer; what the model invents after an action is not read."""
        thinking, said = split_thinking(text)
        action, final = _ACTION.search(said), _FINAL.search(said)
        first = min([m.start() for m in (action, final) if m], default=len(said))
        thought = "\n".join(filter(None, (thinking, _thought(said, first))))
        if final and final.start() == first:
            return Reply(Message("assistant", text, thinking=thought), answer=said[final.end() :].strip())
        if not action:
            return Reply(Message("assistant", text, thinking=thought))
        return Reply(Message("assistant", text, (self._call(action[1].strip(), said[action.end() :]),), thought))

    def _call(self, name: str, rest: str) -> ToolCall:
        given = _INPUT.search(rest)
        if given is None:
            takes = next((t.arguments.schema["properties"] for t in self.toolbox if t.name == name), None)
            return ToolCall(name, problem="" if takes == {} else "there is no 'Input:' line after the action")
        said = rest[given.end() :].lstrip()
        raw = _INVENTED.split(said, maxsplit=1)[0].strip()
        try:
            arguments, _ = json.JSONDecoder(strict=False).raw_decode(said)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f"its input is not a JSON object: {error}", raw=raw)
        if not isinstance(arguments, dict):
            return ToolCall(name, problem="its input is not a JSON object", raw=raw)
        return ToolCall(name, arguments)


def _thought(text: str, until: int) -> str:
    start = _THOUGHT.search(text, 0, until)
    return text[start.end() : until].strip() if start else ""
