"""How the turns of a template of no known family end: found by rendering one."""

from __future__ import annotations

from agentfly.encoding.codec import Codec
from agentfly.encoding.rendering import Renderer, special_tokens
from agentfly.encoding.tokenizer import ChatTokenizer
from agentfly.errors import TemplateError
from agentfly.types import Message

_MARK = "zQendQz"


def closing_tokens(tokenizer: ChatTokenizer, source: str) -> tuple[str, ...]:
    """The control tokens that end an assistant turn in this template; empty when none can be seen."""
    codec = Codec(tokenizer)
    renderer = Renderer(source, name="the tokenizer's own", variables=special_tokens(tokenizer))
    turn = [Message("user", "u"), Message("assistant", _MARK)]
    for messages in (turn, [*turn, Message("user", "v")]):
        try:
            text = renderer.render(messages, open_turn=False)
        except TemplateError:
            continue
        for piece in codec.pieces(text[text.rfind(_MARK) + len(_MARK) :]):
            if isinstance(piece, int):
                return tuple(token for token, token_id in codec.control.items() if token_id == piece)
    return ()
