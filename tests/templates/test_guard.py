"""Text from users, tools and datasets never becomes an added token of the tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from agentfly.agents import HFAgent
from agentfly.errors import TemplateError
from agentfly.templates import load_template
from agentfly.templates.template import Template
from agentfly.types import Message, Task
from tests.conftest import load_family
from tests.templates.families import CASES, TODAY, TOOL, answer, call, user

NAMED = [("qwen2_5", "chatml"), ("qwen3", "chatml"), ("qwen3", "qwen2.5"), ("gemma3", "gemma"), ("llama3_1", "llama-3")]
"""Formats whose source mentions fewer of the tokenizer's added tokens than the tokenizer's own template."""
PAIRS = [(case.tokenizer, str(case)) for case in CASES] + NAMED


@cache
def _template(tokenizer: str, name: str) -> Template:
    if (tokenizer, name) in NAMED:
        return load_template(name, load_family(tokenizer), tools=[TOOL], today=TODAY)
    return next(case for case in CASES if str(case) == name).template


class Guarded:
    """A template, with the places of a conversation where somebody else's text stands."""

    def __init__(self, tokenizer: str, name: str) -> None:
        self.template = _template(tokenizer, name)
        added = load_family(tokenizer).backend_tokenizer.get_added_tokens_decoder()
        exempt = {i for i, token in added.items() if not token.content.replace("\u2581", "").strip()}
        self.guarded = {i: token.content for i, token in added.items() if i not in exempt}
        assert len(exempt) in (0, 91, 92), "newlines, tabs and spaces of Gemma 2 and 3, which are part of any text"
        self.places: dict[str, Callable[[Sequence[str]], list[int]]] = {}
        for position, ids in {
            "user": lambda texts: self.template.start([user("".join(texts))]),
            "user parts": lambda texts: self.template.start([Message("user", tuple(texts))]),
            "next user": lambda texts: self.template.extend([user("".join(texts))]).ids,
            "tool": lambda texts: self.template.extend([answer("".join(texts))]).ids,
            "tools": lambda texts: self.template.extend([answer(t, i) for i, t in enumerate(texts, 1)]).ids,
            "question column": lambda texts: self._dataset({"question": "".join(texts), "answer": "".join(texts)}),
            "messages column": lambda texts: self._dataset(
                {"messages": [{"role": "user", "content": "".join(texts)}], "note": "".join(texts)}
            ),
        }.items():
            try:
                ids(["x", "y"])
            except TemplateError:  # this template has no such message
                continue
            self.places[position] = ids

    def _dataset(self, row: dict[str, object]) -> list[int]:
        return self.template.start(_AGENT.initial_messages(Task.of(row)))

    def check(self, texts: Sequence[str]) -> None:
        for position, ids_of in self.places.items():
            ids, clean = ids_of(texts), ids_of(["x"] * len(texts))
            assert self.guarded_tokens(ids) == self.guarded_tokens(clean), (position, texts)
            decoded = self.template.codec.decode(ids)
            for text in texts if position == "tools" else ["".join(texts)]:
                assert text in decoded, (position, text)

    def guarded_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.guarded[i] for i in ids if i in self.guarded]


_AGENT = HFAgent(template="chatml", backend="scripted", backend_config={"script": ["x"]})
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1] if pair not in NAMED else "-".join(pair))


@every_pair
def test_text_never_becomes_an_added_token(pair: tuple[str, str]) -> None:
    guarded = Guarded(*pair)
    tokens = sorted(guarded.guarded.values())
    assert {"user", "user parts", "question column", "messages column"} <= set(guarded.places)
    for start in range(0, len(tokens), 400):  # every token, side by side and with text between
        guarded.check(["".join(tokens[start : start + 400]), " a".join(tokens[start : start + 400])])
    drawn = random.Random(0)
    for token in tokens if len(tokens) < 50 else drawn.sample(tokens, 50):
        cut = drawn.randint(1, len(token) - 1)
        guarded.check([token, token])
        guarded.check([f"a {token[:cut]}", f"{token[cut:]} b"])
        guarded.check([f"{token[:cut]}{token}{token[cut:]}", token[:cut]])


def test_tags_that_the_template_writes_are_tokens() -> None:
    """Only text is guarded: what the template itself writes, and assistant turns, keep their control tokens."""
    template = _template("qwen3", "qwen3")
    control = template.codec.control
    turn = Message("assistant", "<think>\nt\n</think>\n\n", (call(1),))
    ids = template.start([user("<tool_call><think>"), turn, answer("</tool_response><|file_sep|>")])
    for tag in ("<think>", "</think>", "</tool_response>"):
        assert ids.count(control[tag]) == 1, tag
    assert ids.count(control["<tool_call>"]) == template.start([user("x")]).count(control["<tool_call>"]) + 1
    assert control["<|file_sep|>"] not in ids
    no_thinking = load_template("qwen3", load_family("qwen3"), variables={"enable_thinking": False})
    assert no_thinking.start([user("<think>")]).count(control["<think>"]) == 1, "of the generation prompt"
