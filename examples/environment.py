"""An environment of your own, with an expert to imitate first: a safe whose code is found by feedback.

    agentfly env check examples/environment.py:Safe
    agentfly sft examples/environment.py --model new --expert 400 --threshold 0 --steps 120 --batch-size 16 \
        --learning-rate 1e-3 --out warm
    agentfly train examples/environment.py model=warm

Both commands run on a laptop CPU. The expert is careless on purpose, so that RL has something to
add: one run went from 0.48 to 0.75 of 200 held-out safes.
"""

import zlib
from random import Random

from agentfly import Environment, HFAgent, Task, reward, tool
from agentfly.errors import DataError
from agentfly.training import TrainConfig
from agentfly.types import ToolCall

GUESSES = 4


class Safe(Environment):
    """A safe with a code from 0 to 9. Every guess is answered with "higher" or "lower"; there are four guesses."""

    scored_by = "opened"

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict]:
        """Tasks of a split; the seed determines them."""
        if split not in ("train", "validation", "test"):
            raise DataError(f"there is no split {split!r}; there are train, validation and test")
        random = Random(zlib.crc32(f"{split} {seed}".encode()))
        rows = []
        for number in range(count):
            question = f"Open safe {random.randrange(10_000)}."
            rows.append({"id": f"{split}-{seed}-{number}", "question": question, "code": random.randrange(10)})
        return rows

    async def reset(self, task: Task) -> None:
        self.code: int = task.columns["code"]
        self.lowest, self.highest = 0, 9
        self.guesses = 0
        self.is_open = False

    @tool
    async def guess(self, number: int) -> dict:
        """Try a number.

        Args:
            number: From 0 to 9.
        """
        self.guesses += 1
        self.is_open = number == self.code
        if number < self.code:
            self.lowest = max(self.lowest, number + 1)
        elif number > self.code:
            self.highest = min(self.highest, number - 1)
        text = "open" if self.is_open else "higher" if number < self.code else "lower"
        return {"observation": text, "ends_chain": self.is_open or self.guesses == GUESSES}

    def expert(self) -> ToolCall:
        """Any number that is still possible: the middle one would be better."""
        possible = range(self.lowest, self.highest + 1)
        choice = zlib.crc32(f"{self.code} {self.guesses}".encode()) % len(possible)
        return ToolCall("guess", {"number": possible[choice]})


@reward
def opened(env: Safe) -> float:
    """1 if the safe is open."""
    return float(env.is_open)


def agent(**model) -> HFAgent:
    return HFAgent(**model, tools=[Safe], reward=opened)


tasks, eval_tasks = Safe.draw_tasks("train", 1000), Safe.draw_tasks("validation", 200)
config = TrainConfig(
    model="tiny",
    tasks_per_step=16,
    num_chains=8,
    max_turns=GUESSES,
    sampling={"max_tokens": 32},
    optimizer={"learning_rate": 3e-4},
    steps=40,
    evaluation={"every": 20},
)
