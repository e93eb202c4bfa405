"""The workload of all frameworks: N chains of T turns, with T-1 calls of `add(a, b)` and then an answer.

Every number has four digits, and every digit is one token, so the length of a prompt identifies its turn and a fixed
position in it identifies its case. The fake model therefore answers any prompt with one lookup, and has no answer for a
prompt that is off by a token.

Standard library only: it is also imported in the environments of the other frameworks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

CASES = 1000
"""Chains beyond this many repeat the texts of earlier ones."""

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "additionalProperties": False,
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "type": "object",
        },
    },
}


def question(chain: int) -> str:
    return f"Case {1000 + chain % CASES}: add the pairs one after another, then tell the last sum."


def numbers(chain: int, turn: int) -> tuple[int, int]:
    """The numbers that a chain adds in a turn. `a % 1000` is the turn, `b % 1000` the case."""
    return 1000 * (1 + turn % 7) + turn, 1000 + chain % CASES


def last_sum(chain: int, turns: int) -> int:
    """The last sum of a chain."""
    return sum(numbers(chain, turns - 2))


def words(chain: int, turn: int, turns: int) -> str:
    """The reply of the model, without the end-of-turn token."""
    if turn == turns - 1:
        return f"The last sum is {last_sum(chain, turns)}."
    a, b = numbers(chain, turn)
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def observation(answer: str) -> str:
    """A tool result in ChatML, from the end of one model turn to the start of the next."""
    return f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


class Reply(NamedTuple):
    """One turn of the fake model, with its chain and turn."""

    ids: list[int]
    logprobs: list[float]
    chain: int
    turn: int


class FakeModel:
    """Precomputed replies to all prompts of the workload."""

    def __init__(
        self,
        chains: int,
        turns: int,
        encode: Callable[[str], list[int]],
        start: Callable[[str], Sequence[int]],
    ) -> None:
        """start: renders the first prompt in the framework's way."""
        first, last = start(question(0)), start(question(CASES - 1))
        self._case = next(i for i, (x, y) in enumerate(zip(first, last, strict=True)) if x != y)
        self._replies: dict[tuple[int, ...], Reply] = {}
        for chain in range(min(chains, CASES)):
            digits, length = encode(f"{chain:03}"), len(first)
            for turn in range(turns):
                ids = encode(words(chain, turn, turns) + "<|im_end|>")
                self._replies[(*digits, length)] = Reply(ids, [-0.25] * len(ids), chain, turn)
                length += len(ids) + len(encode(observation(str(sum(numbers(chain, turn))))))

    def reply(self, prompt: Sequence[int]) -> Reply:
        at = self._case
        return self._replies[prompt[at], prompt[at + 1], prompt[at + 2], len(prompt)]
