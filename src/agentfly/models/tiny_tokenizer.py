"""The tokenizer of the tiny model: few tokens, and a name is the same tokens wherever it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 448
CONTEXT = 2048
"""Most tokens of a conversation."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CALL = ("<tool_call>", "</tool_call>")
_CUT = re.compile("|".join(_CALL))
_PIECES = Regex(r"[A-Z]|(?<=[A-Z])[a-z]| ?[a-z]+|\d|(?: ?[^\sA-Za-z\d])+|\s+")
"""A capital, the letter after it and a digit are a token each, and take no space before them: a name is the same few
tokens wherever it stands, and common ones. Rare tokens are learned to be copied much later."""

TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{ messages[0].content ~ ('\\n' if tools else '') }}{% endif %}
  {%- if tools %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
      {%- set function = tool.function %}
      {{- ' ' ~ function.name ~ '(' ~ function.parameters.properties | join(', ') ~ ')' }}
    {%- endfor %}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
  {{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
  {%- for call in message.tool_calls or [] %}
    {{- '<tool_call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
    {{- call.function.arguments | tojson ~ '}</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""ChatML with Hermes calls. Of a tool only the name and its parameters are shown: a schema is longer than the rest."""


def tiny_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY, context: int = CONTEXT) -> Any:
    """A byte-level BPE tokenizer, trained on these texts, with its chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_CALL),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in _CUT.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _CALL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=TEMPLATE, model_max_length=context
    )
