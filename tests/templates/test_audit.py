"""The audit detects the known properties of the families."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentfly.errors import TemplateError
from agentfly.templates import load_template
from agentfly.templates.audit import AuditVerdict, audit
from agentfly.templates.check import CheckMark, check
from agentfly.templates.tokenizer import ByteTokenizer
from tests.templates.families import BY_NAME, CASES, Case, user

E, H, R, C = AuditVerdict.EXACT, AuditVerdict.REWRITTEN, AuditVerdict.REFUSED, AuditVerdict.CORRECTED
CHAT = ("nothing", "user")
ANSWERS = ("tool", "tools", "tool, user", "tools, user")
KNOWN: dict[str, dict[str, AuditVerdict]] = {
    "smollm2": {},
    "qwen2_5": {},
    "qwen3": {kind + suffix: H for kind in ("user", *ANSWERS) for suffix in ("", " after thinking")},
    "qwen3-qwen3_training": {},
    "qwen3-qwen3_instruct_2507": {},
    "llama3_1": {},
    "llama3_2": {"tools": R, "tools, user": R},
    "mistral_nemo": {"nothing": H, "user": R, "tool": H, "tools": H, "tool, user": R, "tools, user": R},
    "gemma2-gemma": dict.fromkeys(ANSWERS, R),
    "gemma3": dict.fromkeys(ANSWERS, R),
    "deepseek_v3": dict.fromkeys(ANSWERS, R),
    "deepseek_v3-deepseekv3": dict.fromkeys(ANSWERS, R) | {"nothing": H, "user": H},
    "gptoss-gptoss": {kind + suffix: H for kind in CHAT for suffix in ("", " after thinking")},
    "command_r_plus": dict.fromkeys(ANSWERS, R),
    "internlm2": {},
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_audit_of_the_families(case: Case) -> None:
    report = case.audit
    assert {row.kind: row.verdict for row in report.rows if row.verdict is not E} == KNOWN[str(case)]
    assert all(bool(row.reason) == (row.verdict is not E) for row in report.rows)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loading_rejects_what_the_audit_rejected(case: Case) -> None:
    expected = KNOWN[str(case)]
    corrected = set(ANSWERS) if case.tokenizer == "deepseek_v3" else set()
    assert set(case.template.rejections) == {kind for kind, verdict in expected.items() if verdict is R} - corrected
    assert set(case.template.rewrites) == {k.removesuffix(" after thinking") for k, v in expected.items() if v is H}


def test_a_correction_counts_only_from_the_second_round_of_calls() -> None:
    right = audit(BY_NAME["deepseek_v3"].template, corrected={"tool": "known"})
    assert {row.kind: row.verdict for row in right.rows}["tool"] is C
    corrected = audit(BY_NAME["mistral_nemo"].template, corrected={"user": "known"})
    assert {row.kind: row.verdict for row in corrected.rows}["user"] is R


def test_rejected_delta_fails_before_sampling() -> None:
    with pytest.raises(TemplateError, match="cannot be extended by user: after system, user the template continues"):
        BY_NAME["mistral_nemo"].template.extend([user("more")])


def test_check_reports_passed_properties_and_notes() -> None:
    report = check(BY_NAME["qwen3"].hf)
    findings = {finding.property: finding for finding in report.findings}
    assert report.ok
    assert findings["start"].mark is CheckMark.GOOD
    assert findings["guard"].mark is CheckMark.GOOD
    assert findings["extend: user"].mark is CheckMark.NOTE
    assert "history differs" in findings["extend: user"].detail
    assert findings["history"].mark is CheckMark.NOTE
    assert "In effect: append" in findings["history"].detail
    assert findings["parser"].detail == "hermes"
    assert findings["end of turn"].detail == "<|im_end|>"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    assert "template qwen3" in console.export_text()


def test_check_reports_tools_that_cannot_be_rendered() -> None:
    findings = {f.property: f for f in check(BY_NAME["gemma3"].hf).findings}
    assert findings["tools"].mark is CheckMark.NOTE
    assert "template='gemma' does" in findings["tools"].detail
    assert findings["extend: tool"].mark is CheckMark.BAD
    assert findings["images"].detail == "shown"


def test_check_distinguishes_corrections_from_rejections() -> None:
    with BY_NAME["deepseek_v3-deepseekv3"].follow() as tokenizer:
        findings = {f.property: f for f in check(tokenizer).findings}
    assert findings["extend: tool"].mark is CheckMark.NOTE
    assert findings["extend: tool"].detail.startswith("corrected: ")


def test_check_of_a_format_by_name() -> None:
    assert check(ByteTokenizer(), "chatml").ok
    assert check("bytes", "chatml").ok
    named = {f.property: f for f in check(BY_NAME["qwen2_5"].hf, "qwen2.5").findings}
    assert named["start"].mark is CheckMark.GOOD


def test_check_fails_a_template_whose_text_becomes_control_tokens() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<|im_end|>' if 'a' in m.content else m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    report = check(tokenizer)
    assert not report.ok
    assert load_template(None, tokenizer).rejections == {}
