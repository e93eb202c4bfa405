"""Tool-call and reasoning parsers by name: each turns the text of one assistant turn into a `Reply`.

The text is decoded with its special tokens, without the token that closed the turn. If the prompt already opened the
model's thinking, the text begins with that opening marker. A parser never raises and never loses text; what it cannot
parse it reports to the model (`ToolCall.problem`, `Reply.problems`) together with the correct form.
"""

from __future__ import annotations

from agentfly.templates.parsers import gemma, harmony, json_calls, pythonic, turn, xml_calls
from agentfly.templates.template import TurnParser

PARSERS: dict[str, TurnParser] = {
    "plain": turn.parse_plain,
    "hermes": json_calls.parse_hermes,
    "qwen-xml": xml_calls.parse_qwen_xml,
    "llama-json": json_calls.parse_llama_json,
    "llama-pythonic": pythonic.parse_llama_pythonic,
    "mistral": json_calls.parse_mistral,
    "deepseek": json_calls.parse_deepseek,
    "glm": xml_calls.parse_glm,
    "harmony": harmony.parse_harmony,
    "command-r": json_calls.parse_command_r,
    "gemma": gemma.parse_gemma,
    "gemma-4": gemma.parse_gemma4,
    "deepseek-dsml": xml_calls.parse_deepseek_dsml,
    "kimi-k2": json_calls.parse_kimi_k2,
    "kimi-k3": xml_calls.parse_kimi_k3,
    "minimax-m2": xml_calls.parse_minimax_m2,
    "minimax-m3": xml_calls.parse_minimax_m3,
    "lfm2": pythonic.parse_lfm2,
    "nemotron-v2": json_calls.parse_nemotron,
    "apertus": json_calls.parse_apertus,
    "apriel": json_calls.parse_apriel,
    "gigachat": json_calls.parse_gigachat,
    "minicpm": xml_calls.parse_minicpm,
    "muse": xml_calls.parse_muse,
    "functionary-v3.1": json_calls.parse_functionary_v31,
    "functionary-v3.2": json_calls.parse_functionary_v32,
    "functiongemma": gemma.parse_functiongemma,
    "granite": json_calls.parse_granite,
    "phi-4-mini": json_calls.parse_phi4_mini,
    "internlm2": json_calls.parse_internlm2,
    "llama-4": json_calls.parse_llama4,
    "xlam": json_calls.parse_xlam,
}
"""By name, in the order in which they are tried on a template whose call syntax is unknown."""
