"""A treasure hunt, played by a script."""

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn
from agentfly.environments import TreasureHunt

CALL = '<tool_call>\n{"name": "dig", "arguments": {"place": %d}}\n</tool_call>'


def script(turn: ScriptedTurn) -> str:
    return CALL % (3 if turn.turn == 0 else 5)


requires = ("train",)
tasks = [{"question": "Dig it up.", "first": 0, "treasure": 5}]
options = {"max_turns": 4}
agent = HFAgent(
    tools=[TreasureHunt],
    reward="treasure_found",
    template="chatml",
    backend=ScriptedBackend(script),
)
