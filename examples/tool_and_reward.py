"""A tool and a reward of your own, for any model that can call tools.

agentfly run examples/tool_and_reward.py --row 0 --tokens        # one chain: who wrote which token
agentfly eval examples/tool_and_reward.py -n 4                   # how good the model is
agentfly train examples/tool_and_reward.py model=Qwen/Qwen2.5-1.5B-Instruct    # needs a GPU
"""

from datetime import date
from random import Random

from agentfly import HFAgent, reward, tool
from agentfly.training import TrainConfig


@tool
def days_between(first: str, second: str) -> str:
    """Count the days from one date to another.

    Args:
        first: A date such as 2026-03-01.
        second: A later date.
    """
    return str((date.fromisoformat(second) - date.fromisoformat(first)).days)


@reward
def right_number(prediction: str, answer: int, trajectory) -> dict[str, float]:
    """1 for the right number; the metric counts the calls it took."""
    last_word = prediction.split()[-1].strip(".") if prediction.split() else ""
    return {"reward": float(last_word == str(answer)), "calls": sum(len(turn.calls) for turn in trajectory.turns)}


def agent(**model) -> HFAgent:
    return HFAgent(**model, tools=[days_between], reward=right_number, system_prompt="Answer with a number.")


def draw_tasks(count: int, seed: int) -> list[dict]:
    random = Random(seed)
    rows = []
    for _ in range(count):
        first, second = sorted(date.fromordinal(random.randrange(730_000, 740_000)) for _ in range(2))
        question = f"How many days are there from {first} to {second}?"
        rows.append({"question": question, "answer": (second - first).days})
    return rows


tasks, eval_tasks = draw_tasks(1000, seed=1), draw_tasks(100, seed=2)
config = TrainConfig(
    model="smollm2-135m",
    max_turns=3,
    sampling={"max_tokens": 64},
    optimizer={"learning_rate": 1e-5},
    steps=50,
)
