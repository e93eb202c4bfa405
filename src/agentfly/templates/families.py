"""Model families: what is known of a family beyond its chat template (how its turns end, which parser it needs)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from agentfly.templates.chat_format import ChatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    needs: tuple[str, ...]
    """Special tokens of the format: the tokenizer must have them, and a template of the family writes them."""
    close: tuple[str, ...]
    """Special tokens that may end an assistant turn."""
    tokens: tuple[str, ...] = ()
    """Added tokens that the tokenizer must have, whether or not the template writes them."""
    stop: tuple[str, ...] = ()
    """The tokens of `close` that end sampling; empty: all of them."""
    parser: str = "plain"
    """The parser that is tried first on the calls that the template writes (see `choose_parser`)."""
    writes_calls: bool = True
    """False: some templates of the family write no calls; `parser` is used for those without a check."""
    image: str = ""
    """The image placeholder for templates that render text only; empty: unknown."""
    format: ChatFormat | None = None
    """The built-in chat format; None: the tokenizer's own template is used."""
    corrected: Mapping[str, str] = field(default_factory=dict)
    """Kinds of delta that the template renders incorrectly from the second round of calls on, and how."""
    aliases: tuple[str, ...] = ()

    @classmethod
    def from_format(cls, format: ChatFormat, **fields: object) -> Family:
        """The family of a built-in format; `close`, `parser` and `image` default to the format's."""
        defaults: dict[str, object] = {
            "needs": format.close[:1],
            "close": format.close,
            "parser": format.parser,
            "image": format.image,
        }
        return cls(name=format.name, format=format, **{**defaults, **fields})  # type: ignore[arg-type]

    def matches(self, source: str, tokens: Set[str]) -> bool:
        """Whether a template source, on a tokenizer with these added tokens, belongs to this family."""
        default_system = self.format.default_system if self.format else None
        has_tokens = {*self.needs, *self.tokens} <= tokens
        return has_tokens and all(token in source for token in self.needs) and (default_system or "") in source

    def image_placeholder(self, tokens: Set[str]) -> str:
        """`image` if the tokenizer has its tokens, else ""."""
        return self.image if set(re.findall(r"<[^<>]+>|\[[^\[\]]+\]", self.image)) <= tokens else ""


# ChatML: Qwen, Hugging Face and many others. Calls are Hermes JSON.
CHATML = ChatFormat(
    name="chatml",
    system="<|im_start|>system\n{content}<|im_end|>\n",
    user="<|im_start|>user\n{content}<|im_end|>\n",
    assistant="<|im_start|>assistant\n{content}<|im_end|>\n",
    opening="<|im_start|>assistant\n",
    close=("<|im_end|>",),
    tools="# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
    tool="\n<tool_response>\n{content}\n</tool_response>",
    tool_group="<|im_start|>user{answers}<|im_end|>\n",
    parser="hermes",
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

SMOLLM2 = replace(
    CHATML,
    name="smollm2",
    default_system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
)

_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN2_5 = replace(
    CHATML,
    name="qwen2.5",
    default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    image=_QWEN_IMAGE,
)

# Llama 3: the chat format with tools in the system turn. The templates from 3.1 on print a date, put the tools into the
# first user turn and write tool results as JSON strings; for those the tokenizer's own template is used.
_LLAMA_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA_3 = ChatFormat(
    name="llama-3",
    begin="<|begin_of_text|>",
    system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
    user="<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>",
    assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{content}<|eot_id|>",
    opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
    close=("<|eot_id|>", "<|eom_id|>"),
    trim=("system", "user", "assistant"),
    tools="You can call these functions:{tools}\n\n"
    'To call one, answer with nothing but JSON: {"name": function name, "parameters": its arguments}.',
    call='{"name": "{name}", "parameters": {arguments}}',
    tool="<|start_header_id|>ipython<|end_header_id|>\n\n{content}<|eot_id|>",
    parser="llama-json",
)

# Gemma 2 and 3: the system text is part of the first user turn; calls have no markers of their own.
GEMMA = ChatFormat(
    name="gemma",
    begin="<bos>",
    system="{content}\n\n",
    system_in_user=True,
    user="<start_of_turn>user\n{content}<end_of_turn>\n",
    assistant="<start_of_turn>model\n{content}<end_of_turn>\n",
    opening="<start_of_turn>model\n",
    close=("<end_of_turn>",),
    trim=("user", "assistant"),
    tools="You can call these functions:{tools}\n\n"
    'To call one, write a block of JSON:\n```json\n{"name": function name, "parameters": its arguments}\n```',
    call='```json\n{"name": "{name}", "parameters": {arguments}}\n```',
    tool="```tool_output\n{content}\n```\n",
    tool_group="<start_of_turn>user\n{answers}<end_of_turn>\n",
    image="<start_of_image>",
    parser="gemma",
)

_DEEPSEEK_CORRECTION = (
    "from its second round on the template forgets <｜tool▁calls▁begin｜> and <｜tool▁outputs▁begin｜>"
)

_ALL = (
    # The first templates of LFM2 render tools and tool results, but no calls.
    Family(
        name="lfm2",
        needs=_CHATML_TOKENS,
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        close=("<|im_end|>",),
        parser="lfm2",
        writes_calls=False,
        aliases=("lfm2.5", "lfm2-vl"),
    ),
    # Gemma 4 and Apertus end a turn with calls by the token that opens the tool results.
    Family(
        name="gemma-4",
        needs=("<|turn>", "<turn|>", "<|tool_response>"),
        close=("<turn|>", "<|tool_response>"),
        parser="gemma-4",
        aliases=("gemma4",),
    ),
    Family(
        name="apertus",
        needs=("<|assistant_start|>", "<|assistant_end|>", "<|tools_suffix|>"),
        close=("<|assistant_end|>", "<|tools_suffix|>"),
        parser="apertus",
    ),
    # Kimi K3 closes nested elements before the end of a message.
    Family(
        name="kimi-k3",
        needs=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        close=("<|end_of_msg|>",),
        parser="kimi-k3",
    ),
    Family.from_format(QWEN2_5, needs=_CHATML_TOKENS, aliases=("qwen2.5-vl", "qwen2.5-instruct", "qwen-2.5")),
    # The template of Qwen 3 renders the thinking of a turn depending on what follows it.
    Family(
        name="qwen3",
        needs=(*_CHATML_TOKENS, "<think>"),
        close=("<|im_end|>",),
        parser="hermes",
        image=_QWEN_IMAGE,
        aliases=("qwen-3", "qwen3-instruct", "qwen3-coder", "qwen3-vl", "qwq"),
    ),
    Family.from_format(LLAMA_3, needs=("<|begin_of_text|>", *_LLAMA_TOKENS), aliases=("llama3",)),
    Family(
        name="llama-3.1",
        needs=_LLAMA_TOKENS,
        close=LLAMA_3.close,
        parser="llama-json",
        image="<|image|>",
        aliases=("llama3.1", "llama-3.2", "llama3.2", "llama-3.3", "llama3.3"),
    ),
    # Mistral has no role tokens, moves the system text to the last user turn and requires call ids of nine characters.
    Family(
        name="mistral",
        needs=("[INST]", "[/INST]"),
        close=("</s>",),
        parser="mistral",
        image="[IMG]",
        aliases=("mistral-nemo", "mistral-small", "ministral", "mixtral", "pixtral"),
    ),
    Family.from_format(
        GEMMA,
        needs=("<start_of_turn>", "<end_of_turn>"),
        aliases=("gemma2", "gemma-2", "gemma3", "gemma-3"),
    ),
    Family(
        name="deepseek",
        needs=("<｜User｜>", "<｜Assistant｜>"),
        close=("<｜end▁of▁sentence｜>",),
        parser="deepseek",
        corrected=dict.fromkeys(("tool", "tools", "tool, user", "tools, user"), _DEEPSEEK_CORRECTION),
        aliases=("deepseek-v3", "deepseek-r1", "deepseek-v3.1"),
    ),
    # A gpt-oss turn is several messages on channels: <|end|> ends a message, <|return|> and <|call|> end the turn.
    Family(
        name="gpt-oss",
        needs=("<|channel|>", "<|message|>", "<|start|>"),
        close=("<|return|>", "<|call|>", "<|end|>"),
        stop=("<|return|>", "<|call|>"),
        parser="harmony",
        aliases=("gptoss", "harmony"),
    ),
    Family(
        name="command-r",
        needs=("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        close=("<|END_OF_TURN_TOKEN|>",),
        parser="command-r",
        aliases=("command-r-plus", "command-a", "cohere"),
    ),
    # No token ends a GLM turn; the model stops by opening the turn of the role that comes next.
    Family(
        name="glm-4",
        needs=("<|user|>", "<|observation|>"),
        close=("<|user|>", "<|observation|>", "<|endoftext|>"),
        parser="glm",
        image="<|begin_of_image|><|image|><|end_of_image|>",
        aliases=("glm", "glm4", "glm-4.5"),
    ),
    Family.from_format(SMOLLM2, needs=_CHATML_TOKENS, aliases=("smollm", "smollm2-instruct")),
    Family.from_format(CHATML, needs=_CHATML_TOKENS, aliases=("hermes", "hermes-2")),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""By name, in the order in which they are matched against an unknown template: the more specific first."""
UNKNOWN = Family(name="no known family", needs=(), close=())
