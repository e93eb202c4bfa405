"""Built-in and custom formats compiled to Jinja: the tokens of the original templates, and rejected definitions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agentfly.errors import ConfigError, TemplateError
from agentfly.templates import ChatFormat, load_template
from agentfly.templates.chat_format import FORMATS
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import ByteTokenizer
from agentfly.types import Image, Message
from tests.templates.families import BY_NAME, TODAY, TOOL, Case, answer, call, delta_of, texts, user

quick = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
SAME = [("smollm2", "smollm2"), ("qwen2.5", "qwen2_5"), ("llama-3", "llama3_1"), ("gemma", "gemma3")]
same = pytest.mark.parametrize(("name", "case"), [(name, BY_NAME[case]) for name, case in SAME], ids=lambda x: str(x))


def load_builtin(name: str, case: Case) -> Template:
    key = (name, str(case))
    if key not in _LOADED:
        _LOADED[key] = load_template(name, case.hf, tools=[TOOL] if case.tools else (), today=TODAY)
    return _LOADED[key]


_LOADED: dict[tuple[str, str], Template] = {}


@pytest.mark.integration
@same
@quick
@given(contents=st.lists(texts, min_size=5, max_size=5), system=st.none() | texts, turns=st.sampled_from([1, 3, 5]))
def test_start_equals_the_tokenizers_own_template(
    name: str, case: Case, contents: list[str], system: str | None, turns: int
) -> None:
    assume(not case.spells_control_token(*contents))
    messages = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(contents[:turns])]
    if system is not None:
        messages.insert(0, Message("system", system))
    assert load_builtin(name, case).start(messages) == case.encode(case.render(messages))


@pytest.mark.integration
@same
@quick
@given(contents=st.lists(texts, min_size=3, max_size=3))
def test_extend_equals_the_tokenizers_own_template(name: str, case: Case, contents: list[str]) -> None:
    for kind in ("nothing", "user"):
        _, delta = delta_of(kind, contents)
        assert load_builtin(name, case).extend(delta) == case.template.extend(delta)


@pytest.mark.integration
@quick
@given(
    contents=st.lists(texts, min_size=6, max_size=6),
    arguments=st.dictionaries(texts, texts | st.integers(), max_size=2),
)
def test_qwen_with_tools_equals_the_tokenizers_own(contents: list[str], arguments: dict[str, object]) -> None:
    case = BY_NAME["qwen2_5"]
    template = load_builtin("qwen2.5", case)
    assume(not case.spells_control_token(*contents))
    calls = (call(1, **{"q": 1} | arguments), call(2))
    messages = [
        user(contents[0]),
        Message("assistant", contents[1], calls),
        answer(contents[2], 1),
        answer(contents[3], 2),
        user(contents[4]),
    ]
    assert template.start(messages) == case.encode(case.render(messages))
    for kind in ("tool", "tools", "tool, user", "tools, user"):
        _, delta = delta_of(kind, contents)
        assert template.extend(delta) == case.template.extend(delta)


@pytest.mark.integration
def test_image_position_in_gemma_equals_its_own_template() -> None:
    case = BY_NAME["gemma3"]
    messages = [Message("system", " s "), Message("user", (" look ", Image("data:,"), " here"))]
    assert load_builtin("gemma", case).start(messages) == case.encode(case.render(messages))


def test_chatml_on_bytes_renders_and_parses_calls() -> None:
    template = load_template("chatml", ByteTokenizer(), tools=[TOOL])
    assert template.rejections == {}
    assert template.rewrites == {}
    prompt = template.render([user("q")])
    assert prompt.startswith("<|im_start|>system\n# Tools\n\nYou may call")
    assert '"name": "search"' in prompt
    turn = Message("assistant", "Let me see.", (call(1, q="é\n"), call(2, q=3)))
    rendered = template.render([user("q"), turn], open_turn=False)
    turn_text = rendered.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    reply = template.parse([*template.codec.encode(turn_text), template.close_id])
    assert [(c.name, dict(c.arguments)) for c in reply.calls] == [("search", {"q": "é\n"}), ("search", {"q": 3})]
    assert reply.message.text.strip() == "Let me see."
    answers = template.codec.decode(template.extend([answer("one", 1), answer("two", 2)]).ids)
    assert answers == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.integration
@pytest.mark.parametrize(("name", "case"), [("gemma", "gemma3"), ("llama-3", "llama3_2"), ("smollm2", "smollm2")])
def test_families_without_tools_get_them_by_name(name: str, case: str) -> None:
    template = load_template(name, BY_NAME[case].hf, tools=[TOOL])
    assert template.rejections == {}
    rendered = template.render([user("q"), Message("assistant", "", (call(1, q="a"),))], open_turn=False)
    opening = template.render([user("q")])
    turn_ids = template.codec.encode(
        rendered.removeprefix(opening).split(template.codec.decode([template.close_id]))[0]
    )
    assert [(c.name, dict(c.arguments)) for c in template.parse(turn_ids).calls] == [("search", {"q": "a"})]
    assert "r42" in template.codec.decode(template.extend([answer("r42")]).ids)


def test_earlier_thinking_is_rendered_if_the_format_defines_it() -> None:
    format = replace(FORMATS["chatml"], name="t", thinking="<think>{thinking}</think>\n")
    text = load(format).render([user("q"), Message("assistant", "a", thinking="hm")], open_turn=False)
    assert text.endswith("<|im_start|>assistant\n<think>hm</think>\na<|im_end|>\n")
    assert "hm" not in load(FORMATS["chatml"]).render(
        [user("q"), Message("assistant", "a", thinking="hm")], open_turn=False
    )


def test_text_that_looks_like_jinja_or_quotes_is_unchanged() -> None:
    odd = 'a "b" \\n {{ c }} {% d %} \' <<user>> {#'
    format = replace(FORMATS["chatml"], name="t", default_system=odd, user=f"{odd}{{content}}<|im_end|>")
    assert load(format).render([user("{{ x }}")]).count(odd) == 2


def load(format: ChatFormat) -> Template:
    from agentfly.templates import PARSERS

    return Template(ByteTokenizer(), format.jinja(), close=format.close, parser=PARSERS[format.parser])


BAD = [
    ({"user": "<|im_start|>user\n"}, r"user must hold \{content\} once, and has it 0 times"),
    ({"user": "{content}{content}"}, "2 times"),
    ({"user": "{content}{text}"}, r"user knows no \{text\}; it may hold \{content\}"),
    ({"assistant": "<|im_start|>assistant\n{content}"}, "close .* must end a turn"),
    ({"close": ()}, "close .* must end a turn"),
    ({"opening": "<|im_start|>bot\n"}, "opening .* must begin like assistant"),
    ({"call": ""}, "call or tool"),
    ({"call": "{name}"}, r"call must hold \{arguments\}"),
    ({"tool_group": "<|im_start|>user"}, r"tool_group must hold \{answers\}"),
    ({"tools": "# Tools"}, r"tools must hold \{tools\}"),
    ({"system": "", "system_in_user": True}, "system_in_user needs system"),
    ({"trim": ("bot",)}, "are not roles"),
    ({"parser": "hermse"}, "parser 'hermse' is none of .*hermes"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_invalid_format_is_rejected_at_construction(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(FORMATS["chatml"], name="mine", **change)  # type: ignore[arg-type]


def test_content_without_a_form_is_rejected() -> None:
    bare = ChatFormat(
        name="bare",
        user="<|im_start|>{content}<|im_end|>",
        assistant="<|endoftext|>{content}<|im_end|>",
        opening="<|endoftext|>",
        close=("<|im_end|>",),
    )
    template = load(bare)
    assert template.codec.decode(template.start([user("a")])) == "<|im_start|>a<|im_end|><|endoftext|>"
    for messages, lacks in [
        ([Message("system", "s"), user("u")], "system turn"),
        ([user("u"), Message("system", "s")], "later system"),
        ([user("u"), Message("assistant", "", (call(),))], "way to write a call"),
        ([user("u"), answer("r")], "way to show a tool's answer"),
    ]:
        with pytest.raises(TemplateError, match=lacks):
            template.render(messages)
