"""The work every side is given: N chains of T turns, T-1 calls of `add(a, b)`, then an answer.

Every number has four digits, and the tokenizer writes a digit as a token, so that a prompt's length tells its
turn and a fixed place in it tells its case. The fake model therefore answers any prompt with one lookup,
whoever sends it, and a side whose prompts are a token off finds no answer at all.

Standard library only: it is imported in the peers' environments too.
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
    """What a chain adds at a turn. For a tool that must know: `a % 1000` is the turn, `b % 1000` the case."""
    return 1000 * (1 + turn % 7) + turn, 1000 + chain % CASES


def expected(chain: int, turns: int) -> int:
    """The sum that a chain of so many turns ends with."""
    return sum(numbers(chain, turns - 2))


def words(chain: int, turn: int, turns: int) -> str:
    """What the model says, without the token that closes its turn."""
    if turn == turns - 1:
        return f"The last sum is {expected(chain, turns)}."
    a, b = numbers(chain, turn)
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def observation(answer: str) -> str:
    """A tool's answer as ChatML, from the close of the model's turn to the opening of its next."""
    return f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


class Reply(NamedTuple):
    """One turn of the fake model, and whose it is."""

    ids: list[int]
    logprobs: list[float]
    chain: int
    turn: int


class FakeModel:
    """A reply to every prompt of the workload, encoded beforehand."""

    def __init__(
        self,
        chains: int,
        turns: int,
        encode: Callable[[str], list[int]],
        start: Callable[[str], Sequence[int]],
    ) -> None:
        """`start` renders the first prompt the way the side that asks does."""
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
