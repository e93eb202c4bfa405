"""A language model of a million parameters, built and trained in about two minutes; it can call one tool."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentfly.errors import require_extra

SEED = 0
STEPS = 1000
"""Enough to copy names almost always; which lookups to make is left to reinforcement learning."""
BATCH = 8
_SORT_WINDOW = 8
"""Number of batches whose examples are sorted by length together."""
LEARNING_RATE = 1e-3
INIT_STD = 0.08
"""1 / sqrt(hidden size). With the usual 0.02, the model learns to copy names much later."""
IGNORE_INDEX = -100
"""Label of tokens that the model did not sample."""
VOCABULARY = 448
CONTEXT = 2048
"""Maximum number of tokens of a conversation."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CALL_TAGS = ("<tool_call>", "</tool_call>")
_TEMPLATE_TEXTS = ("system\nTools: lookup(who, what)", "user\n", "assistant\n", "tool\n")
"""Text that the template adds around messages; the tokenizer is trained on it too."""
_PIECES = Regex(r"[A-Z]|(?<=[A-Z])[a-z]| ?[a-z]+|\d|(?: ?[^\sA-Za-z\d])+|\s+")
"""A capital, the letter after it, and a digit are one token each, without a leading space: a name is the same few
frequent tokens in every context. Copying rare tokens is learned much later."""

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
"""ChatML with Hermes calls. Tools are listed by name and parameter names only: schemas would dominate the prompt."""


class Example(NamedTuple):
    """A conversation to imitate."""

    tokens: list[int]
    labels: list[int]
    """The sampled tokens, and `IGNORE_INDEX` for all others; as long as `tokens`."""
    images: Any = None
    """Pixels of its images as an array [images, channels, height, width]; None for a model of text."""


def version() -> str:
    """Hash of the sources that determine the model's weights."""
    return hash_sources("tiny.py", "lookup.py")


def hash_sources(*names: str) -> str:
    """Hash of modules of this package, as the version of a model that they build."""
    digest = hashlib.sha256()
    for name in names:
        digest.update((resources.files("agentfly.models") / name).read_bytes())
    return digest.hexdigest()[:8]


def build(
    folder: Path, scratch: Path, *, steps: int = STEPS, seed: int = SEED, heads: int = 5, layers: int = 3
) -> None:
    """Build the tokenizer and the model, train it on demonstrations, and write both to `folder`."""
    from agentfly.models.lookup import demonstrations

    with isolate_torch(seed):
        demos = list(demonstrations(steps * BATCH, seed))
        tokenizer = build_tokenizer(text for demo in demos for text in (*_TEMPLATE_TEXTS, *demo.texts))
        model = _build_model(tokenizer, heads, layers)
        train_on_examples(model, build_examples(tokenizer, demos), Random(seed))
        save_model(folder, model, tokenizer)


def build_new(
    folder: Path, texts: Iterable[str], *, seed: int = SEED, vocabulary: int = VOCABULARY, context: int = 8192
) -> None:
    """Write an untrained model of this size, with a tokenizer trained on `texts`."""
    with isolate_torch(seed):
        tokenizer = build_tokenizer(texts, vocabulary, context)
        save_model(folder, _build_model(tokenizer, heads=5, layers=3), tokenizer)


def build_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY, context: int = CONTEXT) -> Any:
    """Train a byte-level BPE tokenizer on `texts`; it includes the chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_CALL_TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tags = re.compile("|".join(_CALL_TAGS))
    tokenizer.train_from_iterator((piece for text in texts for piece in tags.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _CALL_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=TEMPLATE, model_max_length=context
    )


def build_examples(tokenizer: Any, demos: Sequence[Any]) -> list[Example]:
    """Tokenize demonstrations the way a chain records them; only sampled tokens have a label."""
    from agentfly.models.lookup import TOOL_SCHEMA
    from agentfly.templates import load_template
    from agentfly.types import Message

    template = load_template(None, tokenizer, tools=[TOOL_SCHEMA])
    examples = []
    for demo in demos:
        tokens = template.start([Message("user", demo.question)])
        labels = [IGNORE_INDEX] * len(tokens)
        for reply, observation in (*demo.calls, (demo.answer, None)):
            sampled = [*template.codec.encode(reply), template.close_id]
            observed = [] if observation is None else template.extend([Message("tool", observation, name="lookup")]).ids
            tokens += sampled + observed
            labels += sampled + [IGNORE_INDEX] * len(observed)
        examples.append(Example(tokens, labels))
    return examples


@contextmanager
def isolate_torch(seed: int) -> Iterator[None]:
    """Seed torch inside the block, independent of the caller's settings, which are restored."""
    with require_extra("to build a tiny model", "train"):
        import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # another number of threads changes the order of sums, and so the last digits
    try:
        with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.enable_grad():
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _build_model(tokenizer: Any, heads: int, layers: int) -> Any:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32 * heads, intermediate_size=16 * (28 * heads // 5),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True,
        max_position_embeddings=tokenizer.model_max_length, initializer_range=INIT_STD, **special,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def train_on_examples(
    model: Any,
    examples: Sequence[Example],
    random: Random,
    *,
    batch_size: int = BATCH,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """One epoch of supervised learning, with a learning rate that falls linearly to a tenth."""
    import torch
    from rich.console import Console

    from agentfly.runs.progress import ProgressSteps

    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(examples) // batch_size)
    window = _SORT_WINDOW * batch_size
    with ProgressSteps(Console(stderr=True), "training the tiny model", len(examples) // batch_size) as progress:
        for start in range(0, len(examples), window):
            # Batches of similar length need little padding.
            by_length = sorted(examples[start : start + window], key=lambda example: len(example.tokens))
            batches = [by_length[at : at + batch_size] for at in range(0, len(by_length), batch_size)]
            for batch in random.sample(batches, len(batches)):
                tokens = _pad([example.tokens for example in batch], model.config.get_text_config().pad_token_id)
                labels = _pad([example.labels for example in batch], IGNORE_INDEX)
                inputs = {"input_ids": tokens}
                if batch[0].images is not None:
                    # [batch, images, channels, height, width]; images of zeros are padding.
                    inputs["pixel_values"] = torch.nn.utils.rnn.pad_sequence(
                        [torch.from_numpy(example.images) for example in batch], batch_first=True
                    )
                logits = model(**inputs, use_cache=False).logits[:, :-1]  # [batch, length - 1, vocab]
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX
                )
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                progress.advance(f"loss {loss.item():.2f}")


def _pad(rows: Sequence[Sequence[int]], padding: int) -> Any:
    """The rows as a tensor [rows, longest]."""
    import torch

    length = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (length - len(row))] for row in rows])


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    from agentfly.models.huggingface import hide_progress_bars

    with hide_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
