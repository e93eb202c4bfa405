"""`load_template`: names, the tokenizer's own template, and errors that say what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentfly.errors import ConfigError
from agentfly.templates import PARSERS, load_template, names, register_template
from agentfly.templates.chat_format import FORMATS
from agentfly.templates.template import History
from agentfly.templates.tokenizer import ByteTokenizer
from agentfly.types import Message
from tests.templates.families import BY_NAME, CASES, TOOL, Case, user

READS = {
    "smollm2": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "llama3_1": "llama-json",
    "llama3_2": "llama-json",
    "mistral_nemo": "mistral",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "deepseek_v3": "deepseek",
    "gptoss": "harmony",
    "command_r_plus": "command-r",
    "internlm2": "hermes",
}
ENDS = {
    "llama3_1": {"<|eot_id|>"},
    "llama3_2": {"<|eot_id|>", "<|eom_id|>"},
    "mistral_nemo": {"</s>"},
    "gemma2": {"<end_of_turn>"},
    "gemma3": {"<end_of_turn>"},
    "deepseek_v3": {"<｜end▁of▁sentence｜>"},
    "gptoss": {"<|return|>", "<|call|>"},
    "command_r_plus": {"<|END_OF_TURN_TOKEN|>"},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_family_is_detected_from_the_tokenizer(case: Case) -> None:
    template = case.template
    assert template.parser is PARSERS[READS[case.tokenizer]]
    stops = {token for token, i in template.codec.control.items() if i in template.stop_ids}
    assert stops == ENDS.get(case.tokenizer, {"<|im_end|>"})
    assert template.close_id in template.stop_ids


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("qwen2.5", "qwen2_5"),
        ("Qwen-2.5", "qwen2_5"),
        ("qwen3", "qwen3"),
        ("llama-3", "llama3_2"),
        ("llama3.2", "llama3_2"),
        ("mistral", "mistral_nemo"),
        ("gemma", "gemma3"),
        ("gemma-2", "gemma2"),
        ("deepseek", "deepseek_v3"),
        ("command-r", "command_r_plus"),
        ("smollm2", "smollm2"),
        ("chatml", "internlm2"),
        ("chatml", "qwen3"),
    ],
)
def test_a_name_is_a_family(name: str, tokenizer: str) -> None:
    case = next(case for case in CASES if case.tokenizer == tokenizer)
    template = load_template(name, case.hf)
    assert template.stop_ids
    assert template.start([user("u")])
    assert template.name in names()


def test_gpt_oss_by_name_uses_the_tokenizers_template() -> None:
    with BY_NAME["gptoss-gptoss"].follow() as tokenizer:
        assert load_template("gpt-oss", tokenizer).source == tokenizer.chat_template


def test_an_unknown_name_lists_the_names_and_the_close_ones() -> None:
    words = r"no template 'qwen25'; did you mean 'qwen2.5'.*There are apertus, chatml, .*smollm2"
    with pytest.raises(ConfigError, match=words):
        load_template("qwen25", ByteTokenizer())


def test_family_whose_tokens_the_tokenizer_lacks_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"lacks: <start_of_turn>, <end_of_turn>. .* it could use .*chatml"):
        load_template("gemma", ByteTokenizer())


def test_tokenizer_without_template_error_lists_fitting_names() -> None:
    with pytest.raises(ConfigError, match=r"has no chat template. By its special tokens it could use .*chatml"):
        load_template(None, ByteTokenizer())
    with pytest.raises(ConfigError, match="has no chat template"):
        load_template("qwen3", BY_NAME["gptoss-gptoss"].hf) if False else load_template(
            None, BY_NAME["gemma2-gemma"].hf
        )


@pytest.mark.parametrize("name", ["smollm2", "llama3_1", "gemma3", "deepseek_v3", "command_r_plus", "internlm2"])
def test_tools_that_the_template_does_not_render_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="does not show the tools to the model"):
        load_template(None, BY_NAME[name].hf, tools=[TOOL])


def test_template_for_tools_is_preferred_if_it_works() -> None:
    tokenizer = ByteTokenizer()
    chat = FORMATS["chatml"].jinja()
    tokenizer.chat_template = {"default": replace(FORMATS["chatml"], tools="").jinja(), "tool_use": chat}
    assert load_template(None, tokenizer, tools=[TOOL]).source == chat
    assert load_template(None, tokenizer).source != chat
    tokenizer.chat_template = {"default": chat, "tool_use": "{{ tools[0].parameter_definitions.items() }}<|im_end|>"}
    assert load_template(None, tokenizer, tools=[TOOL]).source == chat


def test_closing_tokens_of_unknown_family_are_detected() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(["<|bot|>", "<|done|>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}<|bot|>{{ m.content }}<|done|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
    )
    template = load_template(None, tokenizer)
    assert template.stop_ids == {template.codec.control["<|done|>"]}
    assert template.codec.decode(template.extend([user("u")]).ids) == "[u]<|bot|>"


def test_template_that_never_closes_a_turn_is_rejected() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="none of the tokens that end its turns"):
        load_template(None, tokenizer)


def test_variables_reach_the_template_and_unknown_ones_are_errors() -> None:
    tokenizer = BY_NAME["qwen3"].hf
    off = load_template(None, tokenizer, variables={"enable_thinking": False})
    assert off.render([user("u")]).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match=r"reads no variable 'enable_thinkin'; it reads .*enable_thinking"):
        load_template(None, tokenizer, variables={"enable_thinkin": False})


def test_history_is_one_of_two_words() -> None:
    assert load_template("chatml", ByteTokenizer(), history="template").history is History.TEMPLATE
    with pytest.raises(ConfigError, match="'append' or 'template'"):
        load_template("chatml", ByteTokenizer(), history="keep")


def test_registered_format_is_found_by_name() -> None:
    registered = register_template(replace(FORMATS["chatml"], name="test-of-register", default_system="Mine."))
    template = load_template("test-of-register", ByteTokenizer())
    assert template.source == registered.jinja()
    assert "Mine." in template.render([Message("user", "u")])
    for taken in ("test-of-register", "chatml", "qwen3-coder"):
        with pytest.raises(ConfigError, match="exists already"):
            register_template(replace(FORMATS["chatml"], name=taken))
