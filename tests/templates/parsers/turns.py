"""Well-formed turns of every format: inputs of the parser tests, and of the fuzzer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GoodTurn:
    parser: str
    text: str
    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    thinking: str = ""
    ids: tuple[str, ...] = ()


PARIS = ("weather", {"city": "Paris"})
ROME = ("weather", {"city": "Rome"})
PROSE = "Is 3 < 4? Yes: [1], {2} and `code`.\n\n  Indented, and a line break at the end.\n"
TAG_IN_STRING = ("write", {"text": 'a </tool_call> and <tool_call> "here"'})

HERMES = [
    GoodTurn("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    GoodTurn("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", [PARIS]),
    GoodTurn("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    GoodTurn(
        "hermes",
        'Before.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\nBetween.\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\nAfter.',
        "Before.\nBetween.\nAfter.",
        [PARIS, ROME],
    ),
    GoodTurn(
        "hermes",
        '<think>\nA <tool_call>{"name": "no"}</tool_call> here is a thought.\n</think>\n\nWell.\n'
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
        "Well.",
        [PARIS],
        'A <tool_call>{"name": "no"}</tool_call> here is a thought.',
    ),
    GoodTurn("hermes", "<think>\n\n</think>\n\n  Hello", "  Hello"),
    GoodTurn("hermes", "<think>Six.\n</think>\n\nIt is 6.", "It is 6.", [], "Six."),
    GoodTurn("hermes", "\n<think>\nSix.\n</think>\n\nIt is 6.", "It is 6.", [], "Six."),
    GoodTurn("hermes", "<think>a</think>b<think>c</think>d", "b\nd", [], "a\nc"),
    GoodTurn(
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"text": "a </tool_call> and <tool_call> \\"here\\""}}</tool_call>',
        "",
        [TAG_IN_STRING],
    ),
    GoodTurn(
        "hermes",
        '<tool_call>{"name": "write", "arguments": {"text": "<think>"}}</tool_call>',
        "",
        [("write", {"text": "<think>"})],
    ),
    GoodTurn(
        "hermes",
        '<tool_call>{"name": "run", "arguments": {"code": "a\n\tb", "face": "\\ud83d\\ude00", '
        '"n": [-1.5e3, null]}}</tool_call>',
        "",
        [("run", {"code": "a\n\tb", "face": "😀", "n": [-1500.0, None]})],
    ),
]

QWEN_XML = [
    GoodTurn(
        "qwen-xml",
        "Looking.\n<tool_call>\n<function=run>\n<parameter=code>\nif a < b:\n    print('x')\n\n</parameter>\n"
        "<parameter=times>\n3\n</parameter>\n"
        '<parameter=flags>\n["-v", {"a": 1}]\n</parameter>\n</function>\n</tool_call>',
        "Looking.",
        [("run", {"code": "if a < b:\n    print('x')\n", "times": "3", "flags": '["-v", {"a": 1}]'})],
    ),
    GoodTurn(
        "qwen-xml",
        "<tool_call><function=run><parameter=cmd>[ -f x ] && {ls}</parameter></function></tool_call>",
        "",
        [("run", {"cmd": "[ -f x ] && {ls}"})],
    ),
    GoodTurn("qwen-xml", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    GoodTurn(
        "qwen-xml", "I look.\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>", "I look.", [PARIS]
    ),
    GoodTurn(
        "qwen-xml",
        "<think>\nHm <function=f></function>\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [PARIS, ROME],
        "Hm <function=f></function>",
    ),
]

LLAMA_JSON = [
    GoodTurn("llama-json", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    GoodTurn("llama-json", '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    GoodTurn("llama-json", '<|python_tag|>{"name": "weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    GoodTurn(
        "llama-json",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; '
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        "",
        [PARIS, ROME],
    ),
    GoodTurn(
        "llama-json",
        'I look.\n\n{"name": "weather", "parameters": {"city": "Paris"}};\n'
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        "I look.",
        [PARIS, ROME],
    ),
    GoodTurn(
        "llama-json",
        '{"name": "write", "parameters": {"text": "x\n{\\"name\\": 1}\n{"}}',
        "",
        [("write", {"text": 'x\n{"name": 1}\n{'})],
    ),
    GoodTurn("llama-json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
    GoodTurn("llama-json", '{"total": 3', '{"total": 3'),
]

LLAMA_PYTHONIC = [
    GoodTurn("llama-pythonic", '[weather(city="Paris")]', "", [PARIS]),
    GoodTurn(
        "llama-pythonic",
        "[weather(city='Paris'), math.add(a=1, b=-2.5, c=[True, None, (1, 2)], d={'k': \"\\d [x(\"}), now()]",
        "",
        [PARIS, ("math.add", {"a": 1, "b": -2.5, "c": [True, None, [1, 2]], "d": {"k": "\\d [x("}}), ("now", {})],
    ),
    GoodTurn("llama-pythonic", 'I look.\n[weather(city="Paris"),\n weather(city="Rome")]\n', "I look.", [PARIS, ROME]),
    GoodTurn("llama-pythonic", '<|python_start|>[weather(city="Paris")]<|python_end|>', "", [PARIS]),
    GoodTurn("llama-pythonic", '<|python_tag|>[weather(city="Paris")]', "", [PARIS]),
    GoodTurn("llama-pythonic", "[1, 2] and [a link](b)", "[1, 2] and [a link](b)"),
    GoodTurn(
        "llama-pythonic",
        "So:\n```python\n[f(x) for x in y]\n```\nDone.",
        "So:\n```python\n[f(x) for x in y]\n```\nDone.",
    ),
]

MISTRAL = [
    GoodTurn("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    GoodTurn(
        "mistral",
        'Well. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abc123def"}, '
        '{"name": "weather", "arguments": {"city": "Rome"}, "id": "abc123deg"}]',
        "Well. ",
        [PARIS, ROME],
        ids=("abc123def", "abc123deg"),
    ),
    GoodTurn(
        "mistral",
        '[THINK]Hm [TOOL_CALLS][/THINK]Well.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        "Well.",
        [PARIS, ROME],
        "Hm [TOOL_CALLS]",
    ),
    GoodTurn(
        "mistral", '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}', "", [PARIS], ids=("abc123def",)
    ),
    GoodTurn(
        "mistral",
        '[TOOL_CALLS][{"name": "write", "arguments": {"text": "[TOOL_CALLS] [ARGS]"}}]',
        "",
        [("write", {"text": "[TOOL_CALLS] [ARGS]"})],
    ),
]

V3_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "%s"}\n```<｜tool▁call▁end｜>'
DEEPSEEK = [
    GoodTurn(
        "deepseek",
        "Well.<｜tool▁calls▁begin｜>" + V3_CALL % "Paris" + "\n" + V3_CALL % "Rome" + "<｜tool▁calls▁end｜>",
        "Well.",
        [PARIS, ROME],
    ),
    GoodTurn(
        "deepseek",
        "<think>\nHm.\n</think>\n\n<｜tool▁calls▁begin｜>" + V3_CALL % "Paris" + "<｜tool▁calls▁end｜>",
        "",
        [PARIS],
        "Hm.",
    ),
    GoodTurn(
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [PARIS, ROME],
    ),
    GoodTurn(
        "deepseek",
        '<｜tool▁call▁begin｜>write<｜tool▁sep｜>{"text": "```json {}```"}<｜tool▁call▁end｜>',
        "",
        [("write", {"text": "```json {}```"})],
    ),
]

GLM = [
    GoodTurn(
        "glm",
        "\n<think>Hm.</think>\nWell.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
        "\n<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        "Well.",
        [PARIS, ROME],
        "Hm.",
    ),
    GoodTurn("glm", "<tool_call>now\n</tool_call>", "", [("now", {})]),
    GoodTurn(
        "glm",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>[1, 2]</arg_value>\n"
        "<arg_key>c</arg_key>\n<arg_value>\n x < y\n</arg_value>\n</tool_call>",
        "",
        [("add", {"a": "1", "b": "[1, 2]", "c": "\n x < y\n"})],
    ),
]

HARMONY = [
    GoodTurn(
        "harmony",
        "<|channel|>analysis<|message|>Hm, to=functions.f<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        "",
        [PARIS],
        "Hm, to=functions.f",
    ),
    GoodTurn("harmony", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}', "", [PARIS]),
    GoodTurn(
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|>\n<|start|>assistant<|channel|>commentary<|message|>First this.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather<|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>'
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}',
        "First this.",
        [PARIS, ROME],
        "Hm.",
    ),
    GoodTurn(
        "harmony",
        "<|channel|>analysis<|message|>A\nB<|end|><|start|>assistant<|channel|>final<|message|>It is {6}.<|return|>",
        "It is {6}.",
        [],
        "A\nB",
    ),
    GoodTurn("harmony", "<|channel|>final<|message|>It is 6.", "It is 6."),
    GoodTurn(
        "harmony",
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        "",
        [("browser.search", {"query": "x"})],
    ),
]

ACTION = """[
    {"tool_name": "weather", "parameters": {"city": "Paris"}},
    {"tool_name": "weather", "parameters": {"city": "Rome"}}
]"""
COMMAND_R = [
    GoodTurn("command-r", f"Plan: I look.\nAction: ```json\n{ACTION}\n```", "Plan: I look.", [PARIS, ROME]),
    GoodTurn(
        "command-r",
        "<|START_THINKING|>Hm <|START_ACTION|>.<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
        "",
        [PARIS],
        "Hm <|START_ACTION|>.",
        ids=("0",),
    ),
    GoodTurn("command-r", "<|START_RESPONSE|>It is 6.<|END_RESPONSE|>", "It is 6."),
    GoodTurn("command-r", "```json\n[1]\n```", "```json\n[1]\n```"),
    GoodTurn("command-r", "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>6<|END_TEXT|>", "6", [], "Hm."),
    GoodTurn(
        "command-r",
        'Action: ```json\n[{"tool_name": "write", "parameters": {"text": "```"}}]\n```',
        "",
        [("write", {"text": "```"})],
    ),
]

GEMMA = [
    GoodTurn(
        "gemma", 'I look.\n```tool_code\nweather(city="Paris")\nweather(city="Rome")\n```', "I look.", [PARIS, ROME]
    ),
    GoodTurn("gemma", '```tool_code\n[weather(city="Paris"), weather(city="Rome")]\n```', "", [PARIS, ROME]),
    GoodTurn("gemma", '```json\n{"name": "weather", "parameters": {"city": "Paris"}}\n```', "", [PARIS]),
    GoodTurn("gemma", '[weather(city="Paris"), weather(city="Rome")]', "", [PARIS, ROME]),
    GoodTurn("gemma", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    GoodTurn("gemma", 'So:\n```json\n{"name": "Bob"}\n```\nDone.', 'So:\n```json\n{"name": "Bob"}\n```\nDone.'),
    GoodTurn("gemma", "```python\n[f(x) for x in y]\n```", "```python\n[f(x) for x in y]\n```"),
]

GEMMA_4 = [
    GoodTurn("gemma-4", '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>', "", [PARIS]),
    GoodTurn("gemma-4", '<|tool_call>call:weather{<|"|>city<|"|>:<|"|>Paris<|"|>}<tool_call|>', "", [PARIS]),
    GoodTurn("gemma-4", "<|tool_call>call:now{}<tool_call|>", "", [("now", {})]),
    GoodTurn(
        "gemma-4",
        '<|tool_call>call:f{a: 1, b:-2.5e3,c:[true,null,None,{d:<|"|>x, y}<|"|>}],e:{},g:[]}<tool_call|>',
        "",
        [("f", {"a": 1, "b": -2500.0, "c": [True, None, None, {"d": "x, y}"}], "e": {}, "g": []})],
    ),
    GoodTurn(
        "gemma-4",
        "<|channel>thought\nHm. <|tool_call>call:no{}<tool_call|>\n<channel|>I look."
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>',
        "I look.",
        [PARIS, ROME],
        "Hm. <|tool_call>call:no{}<tool_call|>",
    ),
]

DSML = [
    GoodTurn(
        "deepseek-dsml",
        '<think>Hm.</think>I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "I look.",
        [PARIS, ("now", {})],
        "Hm.",
    ),
    GoodTurn(
        "deepseek-dsml",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">[1, {"b": null}]'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="c" string="true">{"d": 1}</｜DSML｜parameter>'
        "\n</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls>",
        "",
        [("f", {"a": [1, {"b": None}], "c": '{"d": 1}'})],
    ),
]

KIMI = [
    GoodTurn(
        "kimi-k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>'
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        "I look.",
        [PARIS, ROME],
        ids=("functions.weather:0", "functions.weather:1"),
    ),
    GoodTurn(
        "kimi-k2",
        "<think>Hm.</think><|tool_call_section_begin|>\n<|tool_call_begin|>\nnow\n<|tool_call_argument_begin|>\n{}\n"
        "<|tool_call_end|>\n<|tool_call_section_end|>",
        "",
        [("now", {})],
        "Hm.",
        ids=("now",),
    ),
    GoodTurn(
        "kimi-k3",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>'
        'Paris<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="f" index="2"<|sep|>'
        '<|open|>argument key="a" type="array"<|sep|>[1, null]<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        "I look.",
        [PARIS, ("f", {"a": [1, None]})],
        "Hm.",
    ),
]

MINIMAX = [
    GoodTurn(
        "minimax-m2",
        "<think>Hm.</think>I look.\n<minimax:tool_call>\n"
        '<invoke name="weather">\n<parameter name="city">Paris</parameter>'
        '\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "I look.",
        [PARIS, ("now", {})],
        "Hm.",
    ),
    GoodTurn(
        "minimax-m3",
        '<mm:think>Hm.</mm:think>I look.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">'
        "]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "I look.",
        [PARIS],
        "Hm.",
    ),
    GoodTurn(
        "minimax-m3",
        '</mm:think>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>'
        "]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>"
        "]<]minimax[>[<b>x]<]minimax[>[</b>]<]minimax[>[</item>]<]minimax[>[</a>]<]minimax[>[<c>]<]minimax[>[</c>"
        "]<]minimax[>[</invoke>",
        "",
        [("f", {"a": ["1", {"b": "x"}], "c": ""})],
    ),
]

LFM2 = [
    GoodTurn(
        "lfm2",
        "I look.<|tool_call_start|>[weather(city='Paris'), now()]<|tool_call_end|>",
        "I look.",
        [PARIS, ("now", {})],
    ),
    GoodTurn(
        "lfm2",
        """<|tool_call_start|>[f(a='x\n"y"', b={"k": [1, null, true, False]}, c=-1.5)]<|tool_call_end|>""",
        "",
        [("f", {"a": 'x\n"y"', "b": {"k": [1, None, True, False]}, "c": -1.5})],
    ),
]

JSON_BLOCKS = [
    GoodTurn(
        "nemotron-v2",
        '<think>Hm.</think><TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now"}]</TOOLCALL>',
        "",
        [PARIS, ("now", {})],
        "Hm.",
    ),
    GoodTurn(
        "apriel",
        'I look.\n<tool_calls>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_calls>',
        "I look.",
        [PARIS],
    ),
    GoodTurn(
        "apriel",
        '<tool_calls>\n{"name": "weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_calls>',
        "",
        [PARIS, ROME],
    ),
    GoodTurn(
        "apertus",
        'I look.<|tools_prefix|>[{"weather": {"city": "Paris"}}, {"now": {}}]',
        "I look.",
        [PARIS, ("now", {})],
    ),
    GoodTurn("apertus", '<|tools_prefix|>[{"weather": {"city": "Paris"}}]<|tools_suffix|>', "", [PARIS]),
    GoodTurn(
        "gigachat",
        'I look.<|function_call|>{"name": "weather", "arguments": {"city": "Paris"}}',
        "I look.",
        [PARIS],
    ),
]

MINICPM = [
    GoodTurn(
        "minicpm",
        'I look.\n<function name="weather"><param name="city">Paris</param></function>\n'
        '<function name="now"></function>',
        "I look.",
        [PARIS, ("now", {})],
    ),
    GoodTurn(
        "minicpm",
        '<function name="write"><param name="text"><![CDATA[a < b\nc]]></param></function>',
        "",
        [("write", {"text": "a < b\nc"})],
    ),
]

MUSE = [
    GoodTurn(
        "muse",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=weather<|message|><atem:function_calls>\n"
        '<atem:invoke name="weather">'
        '\n<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
        '<|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n'
        "</atem:function_calls>",
        "",
        [PARIS, ("now", {})],
        "Hm.",
    ),
    GoodTurn("muse", " to=user<|message|>It is 6.", "It is 6."),
]

FUNCTIONARY = [
    GoodTurn(
        "functionary-v3.1",
        'I look.<function=weather>{"city": "Paris"}</function><function=now>{}</function>',
        "I look.",
        [PARIS, ("now", {})],
    ),
    GoodTurn(
        "functionary-v3.2",
        'all\nI look.>>>weather\n{"city": "Paris"}>>>now\n{}',
        "I look.",
        [PARIS, ("now", {})],
    ),
    GoodTurn("functionary-v3.2", '>>>weather\n{"city": "Paris"}', "", [PARIS]),
]

FUNCTION_GEMMA = [
    GoodTurn(
        "functiongemma",
        "I look.<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "I look.",
        [PARIS, ("now", {})],
    ),
    GoodTurn(
        "functiongemma",
        "<start_function_call>call:f{a:1,b:[true,<escape>x, }y<escape>],c:{d:null,e:-2.5}}<end_function_call>",
        "",
        [("f", {"a": 1, "b": [True, "x, }y"], "c": {"d": None, "e": -2.5}})],
    ),
]

PARIS_JSON, ROME_JSON = (f'{{"name": "weather", "arguments": {{"city": "{city}"}}}}' for city in ("Paris", "Rome"))
JSON_LISTS = [
    GoodTurn("granite", f"<|tool_call|>[{PARIS_JSON}, {ROME_JSON}]", "", [PARIS, ROME]),
    GoodTurn("granite", f"I look.\n<tool_call> [{PARIS_JSON}]", "I look.", [PARIS]),
    GoodTurn("granite", "Write <tool_call> or {[}.", "Write <tool_call> or {[}."),
    GoodTurn(
        "phi-4-mini",
        f"I look.<|tool_call|>[{PARIS_JSON}, {ROME_JSON}]<|/tool_call|>",
        "I look.",
        [PARIS, ROME],
    ),
    GoodTurn("phi-4-mini", f"functools[{PARIS_JSON}]", "", [PARIS]),
    GoodTurn("phi-4-mini", "Use functools[0] and [1].", "Use functools[0] and [1]."),
    GoodTurn("xlam", f"[{PARIS_JSON}, {ROME_JSON}]", "", [PARIS, ROME]),
    GoodTurn("xlam", f"<think>Hm.</think>\n[{PARIS_JSON}]", "", [PARIS], "Hm."),
    GoodTurn("xlam", '[{"name": "Bob", "age": 3}]', '[{"name": "Bob", "age": 3}]'),
    GoodTurn("xlam", "[]", "[]"),
    GoodTurn(
        "internlm2",
        'I look.<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Paris"}}<|action_end|>\n'
        f"<|action_start|> <|plugin|>{ROME_JSON}<|action_end|>",
        "I look.",
        [PARIS, ROME],
    ),
]

LLAMA_4 = [
    GoodTurn(
        "llama-4",
        '<|python_start|>I look.<|python_end|>{"name": "weather", "parameters": {"city": "Paris"}}'
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        "I look.",
        [PARIS, ROME],
    ),
    GoodTurn("llama-4", f"<|python_start|>{PARIS_JSON}; {ROME_JSON}<|python_end|>", "", [PARIS, ROME]),
    GoodTurn("llama-4", f"I look.\n{PARIS_JSON}", "I look.", [PARIS]),
    GoodTurn("llama-4", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
]

NAMES = [
    *("plain", "hermes", "qwen-xml", "llama-json", "llama-pythonic", "mistral"),
    *("deepseek", "glm", "harmony", "command-r", "gemma", "gemma-4", "deepseek-dsml", "kimi-k2", "kimi-k3"),
    *("minimax-m2", "minimax-m3", "lfm2", "nemotron-v2", "apertus", "apriel", "gigachat", "minicpm", "muse"),
    *("functionary-v3.1", "functionary-v3.2", "functiongemma", "granite", "phi-4-mini", "internlm2", "llama-4", "xlam"),
]

PLAIN = [GoodTurn(name, PROSE, PROSE) for name in NAMES] + [
    GoodTurn("plain", "<tool_call>{}</tool_call><think>", "<tool_call>{}</tool_call><think>"),
    GoodTurn("plain", "<think>Hm.</think>6", "6", [], "Hm."),
]

GOOD_TURNS = [
    *PLAIN,
    *HERMES,
    *QWEN_XML,
    *LLAMA_JSON,
    *LLAMA_PYTHONIC,
    *MISTRAL,
    *DEEPSEEK,
    *GLM,
    *HARMONY,
    *COMMAND_R,
    *GEMMA,
    *GEMMA_4,
    *DSML,
    *KIMI,
    *MINIMAX,
    *LFM2,
    *JSON_BLOCKS,
    *MINICPM,
    *MUSE,
    *FUNCTIONARY,
    *FUNCTION_GEMMA,
    *JSON_LISTS,
    *LLAMA_4,
]
