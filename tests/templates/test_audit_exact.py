"""The audit reports exact only where appending gives the full rendering's tokens on random conversations."""

from __future__ import annotations

import re
from functools import cache

import pytest

from agentfly.templates import PARSERS, audit
from agentfly.templates.audit import Audit, AuditVerdict
from agentfly.templates.check import CheckMark, check
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import ByteTokenizer
from tests.conftest import load_chat_template, load_trl_template
from tests.templates.conversations import disagreements, draw_conversation, is_appended_exactly
from tests.templates.families import CASES, Case

CLOSE = {
    "glm4moe": ("<|user|>", "<|observation|>"),
    "GLM-4.6": ("<|user|>", "<|observation|>"),
    "glm4moe_training": ("<|user|>", "<|observation|>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma4_v2": ("<turn|>", "<|tool_response>"),
    "gemma4_v5": ("<turn|>", "<|tool_response>"),
    "qwen3_5_nothink": ("<|im_end|>",),
    "nemotron_3_nano": ("<|im_end|>",),
    "lfm2_2_5": ("<|im_end|>",),
    "openbmb-MiniCPM5-1B": ("<|im_end|>",),
    "Bielik-11B-v3.0-Instruct": ("<|im_end|>",),
}
"""Templates whose tokenizers are not fetched, over a tokenizer of bytes, with the tokens that end their turns."""
LLAMA_CPP = ("GLM-4.6", "openbmb-MiniCPM5-1B", "Bielik-11B-v3.0-Instruct")


def tokenizer_for(source: str) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(sorted(set(re.findall(r"<\|?[a-z_]+\|?>", source))))
    tokenizer.chat_template = source
    return tokenizer


@cache
def _template(name: str) -> Template:
    source = load_chat_template("llama_cpp_templates", name) if name in LLAMA_CPP else load_trl_template(name)
    return Template(tokenizer_for(source), source, close=CLOSE[name], parser=PARSERS["plain"], name=name)


@cache
def _audit(name: str) -> Audit:
    return audit(_template(name))


def _verdicts(audited: Audit) -> dict[str, AuditVerdict]:
    return {row.kind: row.verdict for row in audited.rows}


def _check_exact(template: Template, audited: Audit, count: int) -> None:
    verdicts = _verdicts(audited)
    exact = {kind for kind, verdict in verdicts.items() if verdict is AuditVerdict.EXACT}
    # A template that shows no thinking has no rows for it.
    exact |= {f"{kind} after thinking" for kind in exact if f"{kind} after thinking" not in verdicts}
    different, compared = disagreements(template, sorted(exact), count)
    assert compared == count or not {"user", "tool"} & exact
    assert not different, f"{len(different)} of {compared} differ, such as {different[0]}"


@pytest.mark.parametrize("name", CLOSE)
def test_exact_kinds_agree_with_full_renderings(name: str) -> None:
    _check_exact(_template(name), _audit(name), 60)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_kinds_of_families_agree_with_full_renderings(case: Case) -> None:
    _check_exact(case.template, case.audit, 20)


@pytest.mark.parametrize("name", ["glm4moe", "GLM-4.6"])
def test_glm_drops_thinking_at_the_next_user_message(name: str) -> None:
    verdicts = _verdicts(_audit(name))
    assert verdicts["user"] is verdicts["tool"] is verdicts["tool after thinking"] is AuditVerdict.EXACT
    for kind in ("user", "tool, user", "tools, user"):
        assert verdicts[f"{kind} after thinking"] is AuditVerdict.REWRITTEN
    assert any(is_appended_exactly(_template(name), draw_conversation(seed)) is False for seed in range(20))


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5"])
def test_gemma_4_drops_thinking_before_a_tool_result_and_a_user_message(name: str) -> None:
    assert _verdicts(_audit(name))["tool, user after thinking"] is AuditVerdict.REWRITTEN


def test_text_next_to_calls_that_the_template_moves_is_not_exact() -> None:
    row = next(row for row in _audit("gemma4").rows if row.kind == "tool")
    assert row.verdict is AuditVerdict.REWRITTEN
    assert "text next to calls" in row.reason


def test_check_notes_that_glm_has_two_history_policies() -> None:
    findings = {f.property: f for f in check(tokenizer_for(load_trl_template("glm4moe")), "glm-4").findings}
    assert findings["extend: user after thinking"].mark is CheckMark.NOTE
    assert findings["history"].mark is CheckMark.NOTE
    assert "differ after user" in findings["history"].detail
