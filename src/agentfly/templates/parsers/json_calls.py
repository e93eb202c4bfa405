"""Parsers for calls whose arguments are JSON.

Whole calls as JSON objects between markers:

    hermes, apriel, nemotron-v2     <tool_call>{"name": …, "arguments": {…}}</tool_call>, or a list of objects
    gigachat                        <|function_call|>{…}: no end marker, one call per turn
    apertus                         <|tools_prefix|>[{"NAME": {…}}]<|tools_suffix|>: the end marker ends the turn
    command-r                       a list in <|START_ACTION|>…<|END_ACTION|> or in an `Action:` fence
    llama-json                      {"name": …, "parameters": {…}} at the start of a line, several separated by `;`
    llama-4                         the same, one after another, at the start or after <|python_start|>…<|python_end|>
    granite                         <|tool_call|>[{…}, …]: no end marker; Granite 3.1 writes <tool_call>
    phi-4-mini                      <|tool_call|>[{…}, …]<|/tool_call|>, or functools[{…}, …]
    internlm2                       <|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>
    xlam                            [{"name": …, "arguments": {…}}, …] at the start of a line: no markers

Names as text and arguments as JSON:

    mistral                         [TOOL_CALLS]NAME[CALL_ID]id[ARGS]{…}; earlier versions [TOOL_CALLS][{…}, …]
    deepseek                        NAME<｜tool▁sep｜>{…} (V3.1), function<｜tool▁sep｜>NAME and a fence (V3, R1)
    kimi-k2                         functions.NAME:0<|tool_call_argument_begin|>{…}; the head is also the call id
    functionary-v3.1                <function=NAME>{…}</function>
    functionary-v3.2                NAME\\n{…} for each recipient, separated by `>>>`; `all` is the user
"""

from __future__ import annotations

import re
from dataclasses import replace

from agentfly.templates.parsers.calls import JsonCall, add_problem, json_type, parse_json, parse_name, parse_named_call
from agentfly.templates.parsers.turn import BlockBodyParser, BlockParser, CallBlock, join_text, parse_plain
from agentfly.types import Message, Reply, ToolCall

_JSON = JsonCall()
_OBJECT = '{"name": "…", "arguments": {…}}'


def _make_parser(opening: str, closing: str, parse_body: BlockBodyParser, example: str) -> BlockParser:
    block = CallBlock(re.escape(opening), closing, parse_body, f"{opening}{example}{closing}")
    return BlockParser(block, stray=re.escape(closing))


def _parse_sequence(body: str, form: JsonCall, separator: str) -> list[ToolCall]:
    """Parse call objects one after another, each followed by `separator`, a pattern."""
    calls: list[ToolCall] = []
    at = 0
    while not calls or at < len(body):
        value, at, error = parse_json(body, at)
        if error:
            return [*calls, form.invalid_json(body[at:], error)]
        calls.append(form.from_value(value))
        end = re.compile(separator).match(body, at)
        if end is None:
            calls[-1] = add_problem(calls[-1], f"there is more after its JSON: {body[at : at + 40]!r}")
            break
        at = end.end()
    return calls


def _parse_objects(body: str) -> list[ToolCall]:
    """Parse a list of call objects, or call objects one after another."""
    return _parse_sequence(body, _JSON, r"\s*+") if body.lstrip().startswith("{") else _JSON.parse_list(body)


parse_hermes = _make_parser("<tool_call>", "</tool_call>", _JSON.parse, _OBJECT)
parse_apriel = _make_parser("<tool_calls>", "</tool_calls>", _parse_objects, f"[{_OBJECT}]")
parse_nemotron = _make_parser("<TOOLCALL>", "</TOOLCALL>", _parse_objects, f"[{_OBJECT}]")
parse_granite = BlockParser(
    CallBlock(r"<\|tool_call\|>|<tool_call>(?=\s*+\[)", "", _JSON.parse_list, f"<|tool_call|>[{_OBJECT}]")
)
parse_phi4_mini = BlockParser(
    CallBlock(r"<\|tool_call\|>", "<|/tool_call|>", _JSON.parse_list, f"<|tool_call|>[{_OBJECT}]<|/tool_call|>"),
    CallBlock(r"^functools(?=\[)", "", _JSON.parse_list, f"functools[{_OBJECT}]"),
    stray=r"<\|/tool_call\|>",
    hint="<[",
)
parse_xlam = BlockParser(
    CallBlock(
        r'^[ \t]*(?=\[\s*\{\s*"name"\s*:)',
        None,
        lambda body: _JSON.parse_list(body) if '"arguments"' in body else None,
        f"[{_OBJECT}]",
    ),
    hint="[<",
)
parse_gigachat = _make_parser("<|function_call|>", "", _JSON.parse, _OBJECT)

_APERTUS_END = "<|tools_suffix|>"


def _parse_apertus_list(body: str) -> list[ToolCall]:
    body, _, suffix = body.partition(_APERTUS_END)
    values, end, error = parse_json(body)
    if error:
        return [ToolCall("", problem=f"it is not JSON: {error}")]
    if not isinstance(values, list) or not values:
        return [ToolCall("", problem=f"it is {json_type(values)}, not a list of calls")]
    calls: list[ToolCall] = []
    for value in values:
        if not isinstance(value, dict) or len(value) != 1:
            calls.append(ToolCall("", problem="it is not an object with the name of the function as its only key"))
            continue
        ((name, arguments),) = value.items()
        if not name or not isinstance(arguments, dict):
            problem = f"its arguments are {json_type(arguments)}, not a JSON object"
            calls.append(ToolCall(name, problem=problem))
        else:
            calls.append(ToolCall(name, arguments))
    if surplus := (body[end:] + suffix).strip():
        calls[-1] = add_problem(calls[-1], f"there is more after its list: {surplus[:40]!r}")
    return calls


parse_apertus = _make_parser("<|tools_prefix|>", "", _parse_apertus_list, f'[{{"NAME": {{…}}}}]{_APERTUS_END}')

_COMMAND_R = JsonCall(name="tool_name", arguments=("parameters",), id="tool_call_id")
_COMMAND_R_LIST = '[{"tool_name": "…", "parameters": {…}}]'
parse_command_r = BlockParser(
    CallBlock(
        r"<\|START_ACTION\|>",
        "<|END_ACTION|>",
        _COMMAND_R.parse_list,
        example=f"<|START_ACTION|>{_COMMAND_R_LIST}<|END_ACTION|>",
    ),
    CallBlock(
        r"Action:[ \t]*\n?```json", "```", _COMMAND_R.parse_list, example=f"Action: ```json\n{_COMMAND_R_LIST}\n```"
    ),
    thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
    stray=r"<\|END_ACTION\|>",
    frame=r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
    hint="<`",
)

LLAMA_EXAMPLE = '{"name": "…", "parameters": {…}}'
LLAMA_OBJECT = r'^[ \t]*(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)'
"""An object at the start of a line whose first key is the name. Other JSON is content."""
_LLAMA = JsonCall(arguments=("parameters", "arguments"))


def _parse_llama_objects(body: str) -> list[ToolCall]:
    """Parse call objects separated by `;`."""
    return _parse_sequence(body.rstrip().removesuffix(";"), _LLAMA, r"\s*(?:;|\Z)")


def parse_llama_if_call(body: str) -> list[ToolCall] | None:
    """Parse call objects if the text has the keys of one."""
    return _parse_llama_objects(body) if '"parameters"' in body or '"arguments"' in body else None


parse_llama_json = BlockParser(
    CallBlock(r"<\|python_tag\|>", "", _parse_llama_objects, LLAMA_EXAMPLE),
    CallBlock(LLAMA_OBJECT, "", parse_llama_if_call, LLAMA_EXAMPLE),
    hint="{<",
)

_LLAMA4_END = "<|python_end|>"


def _parse_llama4_objects(body: str) -> list[ToolCall] | None:
    """Parse call objects one after another, separated by nothing or by `;`."""
    if '"parameters"' not in body and '"arguments"' not in body:
        return None
    body = body.rstrip().removesuffix(_LLAMA4_END).rstrip().removesuffix(";")
    return _parse_sequence(body, _LLAMA, r"[;\s]*+")


parse_llama4 = BlockParser(
    CallBlock(
        r'(?:^[ \t]*|<\|python_(?:start|end)\|>\s*+)(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)',
        "",
        _parse_llama4_objects,
        LLAMA_EXAMPLE,
    ),
    frame=r"<\|python_(?:start|end)\|>",
    hint="{<",
)
_INTERNLM2_END = "<|action_end|>"
parse_internlm2 = BlockParser(
    CallBlock(
        r"<\|action_start\|>\s*+<\|plugin\|>",
        _INTERNLM2_END,
        _LLAMA.parse,
        f"<|action_start|><|plugin|>\n{LLAMA_EXAMPLE}{_INTERNLM2_END}",
    ),
    stray=re.escape(_INTERNLM2_END),
)

_MISTRAL_HEAD = re.compile(r'([^\[\]{}"]*)(?:\[CALL_ID\]([^\[\]{}"]*))?\[ARGS\]')
_MISTRAL = JsonCall(id="id")


def _parse_mistral_call(body: str) -> list[ToolCall]:
    if head := _MISTRAL_HEAD.match(body):
        return [parse_named_call(head[1], body[head.end() :], (head[2] or "").strip())]
    if body.lstrip()[:1] in ("[", "{"):
        return _MISTRAL.parse_list(body)
    name, _ = parse_name(body.partition("{")[0])
    return [ToolCall(name, problem="it has no [ARGS]")]


# No marker closes a call: it ends at the next [TOOL_CALLS] or at the end of the turn.
parse_mistral = BlockParser(
    CallBlock(
        r"\[TOOL_CALLS\]",
        "",
        _parse_mistral_call,
        example='[TOOL_CALLS][{"name": "…", "arguments": {…}}] or [TOOL_CALLS]NAME[ARGS]{…}',
    ),
    thinking=("[THINK]", "[/THINK]"),
    stray=r"\[ARGS\]|\[CALL_ID\]",
    hint="[",
)

_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"


def _parse_deepseek_call(body: str) -> list[ToolCall]:
    head, separator, call_text = body.partition(_DEEPSEEK_SEPARATOR)
    if not separator:
        return [ToolCall(parse_name(head)[0], problem=f"it has no {_DEEPSEEK_SEPARATOR}")]
    name, fence, arguments = call_text.partition("```json")
    if not fence or "{" in name:
        return [parse_named_call(head, call_text)]
    call = parse_named_call(name, arguments.rstrip().removesuffix("```"))
    if head.strip() != "function":
        call = add_problem(call, f"before {_DEEPSEEK_SEPARATOR} stands {head.strip()[:40]!r}, not 'function'")
    return [call]


parse_deepseek = BlockParser(
    CallBlock(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>",
        _DEEPSEEK_END,
        _parse_deepseek_call,
        example=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME{_DEEPSEEK_SEPARATOR}{{…}}{_DEEPSEEK_END}<｜tool▁calls▁end｜>",
    ),
    stray=f"{_DEEPSEEK_END}|<｜tool▁calls▁begin｜>|{_DEEPSEEK_SEPARATOR}",
    frame="<｜tool▁calls▁end｜>",
)

_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_END = "<|tool_call_end|>"
_KIMI_SECTION = r"<\|tool_calls?_section_begin\|>"


def _parse_kimi_call(body: str) -> list[ToolCall]:
    head, mark, arguments = body.partition(_KIMI_ARGUMENTS)
    call_id = head.strip()
    name, colon, number = call_id.removeprefix("functions.").rpartition(":")
    if not colon or not number.isdigit():
        name = call_id.removeprefix("functions.")
    if not mark:
        return [ToolCall(parse_name(name)[0], problem=f"it has no {_KIMI_ARGUMENTS}")]
    return [parse_named_call(name, arguments, call_id)]


parse_kimi_k2 = BlockParser(
    CallBlock(
        rf"(?:{_KIMI_SECTION}\s*+)?<\|tool_call_begin\|>",
        _KIMI_END,
        _parse_kimi_call,
        example=f"<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0{_KIMI_ARGUMENTS}{{…}}{_KIMI_END}",
    ),
    stray="|".join([re.escape(_KIMI_END), re.escape(_KIMI_ARGUMENTS), _KIMI_SECTION]),
    frame=r"<\|tool_calls?_section_end\|>",
)


def _parse_functionary_call(body: str) -> list[ToolCall]:
    name, _, arguments = body.partition(">")
    return [parse_named_call(name, arguments)]


parse_functionary_v31 = BlockParser(
    CallBlock("<function=", "</function>", _parse_functionary_call, "<function=NAME>{…}</function>"),
    stray="</function>",
)

_RECIPIENT = re.compile(r"(?:\A(?:>>>)?|>>>)([\w.-]{1,128}+)\n")


def parse_functionary_v32(text: str) -> Reply:
    """Parse the parts of one turn, each with its recipient. The prompt ends with the first `>>>`."""
    recipients = list(_RECIPIENT.finditer(text))
    if not recipients or recipients[0].start() > 0:
        return parse_plain(text)
    content: list[str] = []
    calls: list[ToolCall] = []
    ends = [recipient.start() for recipient in recipients[1:]] + [len(text)]
    for recipient, end in zip(recipients, ends, strict=True):
        body = text[recipient.end() : end]
        if recipient[1] == "all":
            content.append(body)
            continue
        call = parse_named_call(recipient[1], body)
        if call.problem:
            example = "write NAME, a line break, and the arguments as a JSON object"
            call = replace(add_problem(call, example), raw=body)
        calls.append(call)
    return Reply(Message("assistant", join_text(content), tuple(calls)))
