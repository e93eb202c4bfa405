"""ReAct: thought, action, input, observation, and a final answer."""

from __future__ import annotations

import re

from agentfly.agents.prompted import PromptedAgent, split_thinking
from agentfly.rollout.limits import RecoveryRule
from agentfly.templates.parsers.calls import parse_json
from agentfly.types import Message, Reply, ToolCall

_FORM = "Action: <tool>\nInput: <arguments as a JSON object>"
_ACTION = re.compile(r"^[ \t]*Action:[ \t]*(.*)$", re.MULTILINE)
_INPUT = re.compile(r"^[ \t]*(?:Action )?Input:[ \t]*", re.MULTILINE)
_FINAL = re.compile(r"^[ \t]*Final Answer:[ \t]*", re.MULTILINE)
_THOUGHT = re.compile(r"^[ \t]*Thought:[ \t]*", re.MULTILINE)
_INVENTED = re.compile(r"^[ \t]*Observation:", re.MULTILINE)


class ReactAgent(PromptedAgent):
    """Parses `Thought:`, `Action:`, `Input:` and `Final Answer:`. One action per turn."""

    default_system_prompt = (
        "Solve the task step by step with these tools:\n{tools}\n\n"
        f"In each turn, write\nThought: <what to do next>\n{_FORM}\n"
        "and stop: the observation comes in the next turn. When you know the answer, write\n"
        "Thought: <why>\nFinal Answer: <the answer>"
    )
    default_on_no_call = RecoveryRule(nudge=f"Write either\n{_FORM}\nor\nFinal Answer: <the answer>", limit=2)
    observation_form = "Observation: {observation}"

    def parse(self, text: str) -> Reply:
        """Parse the first action or final answer; text after an action (an invented observation) is ignored."""
        thinking, content = split_thinking(text)
        action, final = _ACTION.search(content), _FINAL.search(content)
        first = min([m.start() for m in (action, final) if m], default=len(content))
        start = _THOUGHT.search(content, 0, first)
        thought = "\n".join(filter(None, (thinking, content[start.end() : first].strip() if start else "")))
        if final and final.start() == first:
            return Reply(Message("assistant", text, thinking=thought), answer=content[final.end() :].strip())
        if not action:
            return Reply(Message("assistant", text, thinking=thought))
        return Reply(
            Message("assistant", text, (self._parse_call(action[1].strip(), content[action.end() :]),), thought)
        )

    def _parse_call(self, name: str, rest: str) -> ToolCall:
        given = _INPUT.search(rest)
        if given is None:
            takes = next((t.arguments.schema["properties"] for t in self.toolbox if t.name == name), None)
            return ToolCall(name, problem="" if takes == {} else "there is no 'Input:' line after the action")
        source = rest[given.end() :].lstrip()
        raw = _INVENTED.split(source, maxsplit=1)[0].strip()
        arguments, _, wrong = parse_json(source)
        if wrong:
            return ToolCall(name, problem=f"its input is not a JSON object: {wrong}", raw=raw)
        if not isinstance(arguments, dict):
            return ToolCall(name, problem="its input is not a JSON object", raw=raw)
        return ToolCall(name, arguments)
