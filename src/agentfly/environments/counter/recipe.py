"""A counter to set to a number: four chains of a scripted agent, some of which make mistakes.

    agentfly run counter
    agentfly run counter -n 1 --tokens

No model is needed: the script below plays one, through a real tokenizer and a real chat template. Tools, environment,
rewards and the tokens with their authors are what a trained model would go through.
"""

import json
import re

from agentfly import Environment, Task, reward, tool
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn
from agentfly.tools import calculate


class Counter(Environment):
    """A counter with a button; each chain has its own."""

    async def reset(self, task: Task) -> None:
        self.shown = task.columns["shows"]

    @tool
    async def press(self, times: int) -> str:
        """Press the button the given number of times.

        Args:
            times: Number of presses; each adds one.
        """
        self.shown += times
        return f"The counter shows {self.shown}."


@reward
def reached(env: Counter, target: int) -> float:
    """1 if the counter shows the target, else 0."""
    return float(env.shown == target)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script(turn: ScriptedTurn) -> str:
    """Plays a model that computes the difference, and in some chains guesses it or calls a tool that does not exist."""
    shows, target = map(int, re.findall(r"shows (\d+). Make it show (\d+)", turn.prompt)[-1])
    careless = turn.chain.endswith(("/1", "/3"))
    if turn.turn == 0:
        if careless:
            return "That is about ten more.\n" + call("press", times=10)
        return "First the difference.\n" + call("calculate", expression=f"{target} - {shows}")
    if turn.turn == 1:
        if careless and turn.chain.endswith("/3"):
            return "Let me see it.\n" + call("look")
        return (
            f"So {target - shows} times.\n" + call("press", times=target - shows) if not careless else "That should do."
        )
    return "Done: the counter shows what you asked for."


tasks = [
    {"question": "The counter shows 5. Make it show 12.", "shows": 5, "target": 12},
    {"question": "The counter shows 30. Make it show 40.", "shows": 30, "target": 40},
]
options = {"max_turns": 4, "num_chains": 4, "seed": 0}
agent = HFAgent(
    tools=[calculate, Counter.press],
    reward=reached,
    template="chatml",
    backend=ScriptedBackend(script, latency=1.2, chunk=6),
)
requires = ()
