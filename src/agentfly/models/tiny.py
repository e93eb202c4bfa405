"""A language model of a million parameters, made on the spot: it has learned to call a tool, and little else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

from agentfly.extras import needed

SEED = 0
STEPS = 1000
"""Enough to copy names nearly always; what to look up is left to be learned from rewards."""
BATCH = 8
_SORTED = 8
"""Batches whose examples are sorted by length among them."""
LEARNING_RATE = 1e-3
SPREAD = 0.08
"""Of the first weights: one over the root of the width. With the usual 0.02, names are copied much later."""
IGNORED = -100
"""The label of a token that the model did not write."""
_FRAME = ("system\nTools: lookup(who, what)", "user\n", "assistant\n", "tool\n")
"""What the template writes around a conversation, for the tokenizer to know the words of."""
Example = tuple[list[int], list[int]]
"""Tokens, and the label of each."""


def version() -> str:
    """Of what makes the model: another recipe is another model."""
    recipe = hashlib.sha256()
    for name in ("tiny.py", "tiny_tokenizer.py", "lookup.py"):
        recipe.update((resources.files("agentfly.models") / name).read_bytes())
    return recipe.hexdigest()[:8]


def build(
    folder: Path, scratch: Path, *, steps: int = STEPS, seed: int = SEED, heads: int = 5, layers: int = 3
) -> None:
    """Make the tokenizer and the model, let it imitate the demonstrations, write both."""
    from agentfly.models.lookup import demonstrations
    from agentfly.models.tiny_tokenizer import tiny_tokenizer

    with _apart(seed):
        shown = list(demonstrations(steps * BATCH, seed))
        tokenizer = tiny_tokenizer(text for each in shown for text in (*_FRAME, *each.texts))
        model = _model(tokenizer, heads, layers)
        _imitate(model, examples(tokenizer, shown), Random(seed))
        _write(folder, model, tokenizer)


def build_new(
    folder: Path, texts: Iterable[str], *, seed: int = SEED, vocabulary: int = 1024, context: int = 8192
) -> None:
    """Write a model of this size that knows nothing, with a tokenizer that knows the words of these texts."""
    from agentfly.models.tiny_tokenizer import tiny_tokenizer

    with _apart(seed):
        tokenizer = tiny_tokenizer(texts, vocabulary, context)
        _write(folder, _model(tokenizer, heads=5, layers=3), tokenizer)


def _write(folder: Path, model: Any, tokenizer: Any) -> None:
    from agentfly.backends.transformers.loading import without_bars

    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _apart(seed: int) -> Iterator[None]:
    """Whatever the caller has set in torch neither changes the model nor is changed."""
    with needed("to build a tiny model", "train"):
        import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with another number of threads, sums come out otherwise in the last digit
    try:
        with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.enable_grad():
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _model(tokenizer: Any, heads: int, layers: int) -> Any:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32 * heads, intermediate_size=16 * (28 * heads // 5),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True,
        max_position_embeddings=tokenizer.model_max_length, initializer_range=SPREAD, **ends,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    return model


def examples(tokenizer: Any, shown: Sequence[Any]) -> list[Example]:
    """Demonstrations as an agent's chain would have recorded them; only what the model says is to be learned."""
    from agentfly.models.lookup import Lookup
    from agentfly.templates import load_template
    from agentfly.types import Message

    template = load_template(None, tokenizer, tools=[Lookup.lookup.schema])

    def example(each: Any) -> Example:
        tokens = template.start([Message("user", each.question)])
        labels = [IGNORED] * len(tokens)
        for said, observed in (*each.calls, (each.answer, None)):
            spoken = [*template.codec.encode(said), template.close_id]
            answer = [] if observed is None else template.extend([Message("tool", observed, name="lookup")]).ids
            tokens += spoken + answer
            labels += spoken + [IGNORED] * len(answer)
        return tokens, labels

    return [example(each) for each in shown]


def _imitate(model: Any, shown: Sequence[Example], random: Random) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(shown) // BATCH)
    for batch in _batches(shown, random):
        length = max(len(tokens) for tokens, _ in batch)
        tokens, labels = (
            torch.tensor([[*row, *[filler] * (length - len(row))] for row in rows])
            for rows, filler in zip(zip(*batch, strict=True), (model.config.pad_token_id, IGNORED), strict=True)
        )
        logits = model(tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _batches(shown: Sequence[Example], random: Random) -> Iterator[Sequence[Example]]:
    """Batches of examples that are about as long as one another: padding is work for nothing."""
    for start in range(0, len(shown), _SORTED * BATCH):
        alike = sorted(shown[start : start + _SORTED * BATCH], key=lambda example: len(example[0]))
        batches = [alike[at : at + BATCH] for at in range(0, len(alike), BATCH)]
        yield from random.sample(batches, len(batches))
