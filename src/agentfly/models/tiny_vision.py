"""Vision-language models of under a million parameters, built and trained in a few minutes; they read digits.

They are a stock Idefics3: a SigLIP tower, a connector that merges 2 × 2 patches, and a Llama. An image of 48 × 48
pixels becomes nine tokens. Each is trained on the demonstrations of one task: `agentfly.models.rooms` or `find_digit`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from agentfly.errors import require_extra
from agentfly.models import find_digit, rooms, tiny
from agentfly.models.tiny import IGNORE_INDEX, Example

SEED = 0
STEPS = 900
"""Enough to read and locate digits almost always; what to look at is left to reinforcement learning."""
BATCH = 16
LEARNING_RATE = 1e-3
_VOCABULARY = 384
_CONNECTOR_STD = 0.05
"""Initial standard deviation of the weights between tower and language model."""
_PATCH = 8
_MERGED = 2
"""Patches per side that the connector merges into one token."""
_IMAGE_TOKENS = (rooms.SIDE // (_PATCH * _MERGED)) ** 2
_SPECIAL_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Those of Idefics3: an image is `<fake_token_around_image><global-img><image>…<fake_token_around_image>`."""

TEMPLATE = tiny.TEMPLATE.replace(
    "~ (message.content or '') }}",
    "}}\n"
    "  {%- if message.content is string %}{{ message.content }}\n"
    "  {%- else %}{% for part in message.content or [] %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}",
)
"""The template of `tiny`, with images in messages."""


def version(task: ModuleType = rooms) -> str:
    """Hash of the sources that determine the model's weights."""
    return tiny.hash_sources(
        "tiny_vision.py", "tiny.py", "rooms.py", *(["find_digit.py"] if task is find_digit else [])
    )


def build(folder: Path, scratch: Path, *, task: ModuleType = rooms, steps: int = STEPS, seed: int = SEED) -> None:
    """Build the processor and the model, train it on demonstrations of a task, and write both to `folder`."""
    with tiny.isolate_torch(seed):
        processor = _build_processor(task)
        model = _build_model(processor.tokenizer)
        processor.save_pretrained(folder)
        model.config.save_pretrained(folder)
        examples = build_examples(folder, steps * BATCH, seed, task)
        tiny.train_on_examples(model, examples, Random(seed), batch_size=BATCH, learning_rate=LEARNING_RATE)
        tiny.save_model(folder, model, processor.tokenizer)


def _build_processor(task: ModuleType) -> Any:
    with require_extra("to build a tiny vision model", "vision"):
        from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    name, parameter = _tool(task)
    texts = [f"system\nTools: {name}({parameter})", "user\n", "assistant\n", "tool\n", *task.TEXTS]
    tokenizer = tiny.build_tokenizer(texts * 4, _VOCABULARY)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL_TOKENS)})
    tokenizer.chat_template = TEMPLATE
    size = {"longest_edge": rooms.SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=_IMAGE_TOKENS, chat_template=TEMPLATE)


def _build_model(tokenizer: Any, width: int = 128, layers: int = 3, tower_width: int = 64) -> Any:
    from transformers import GenerationConfig, Idefics3Config, Idefics3ForConditionalGeneration

    special: dict[str, Any] = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = Idefics3Config(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 352,
            "num_hidden_layers": layers, "num_attention_heads": width // 32, "num_key_value_heads": width // 32,
            "max_position_embeddings": tokenizer.model_max_length, "initializer_range": width**-0.5,
            "tie_word_embeddings": True, **special,
        },
        vision_config={
            "hidden_size": tower_width, "intermediate_size": 2 * tower_width, "num_hidden_layers": 2,
            "num_attention_heads": tower_width // 32, "image_size": rooms.SIDE, "patch_size": _PATCH,
            "initializer_range": tower_width**-0.5,
        },
        scale_factor=_MERGED, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=True,
        **special | {"initializer_range": _CONNECTOR_STD},
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def _tool(task: ModuleType) -> tuple[str, str]:
    """Name of the tool of a task, and of its parameter."""
    function = task.TOOL_SCHEMA["function"]
    (parameter,) = function["parameters"]["properties"]
    return function["name"], parameter


def build_examples(folder: Path, count: int, seed: int, task: ModuleType = rooms) -> list[Example]:
    """Tokenize demonstrations the way a chain records them; only sampled tokens have a label."""
    from agentfly.templates import load_template
    from agentfly.templates.tokenizer import load_tokenizer
    from agentfly.types import Image, Message, ToolCall
    from agentfly.vision.processor import load_image_processor

    image_processor = load_image_processor(str(folder))
    template = load_template(
        None, load_tokenizer(str(folder)), tools=[task.TOOL_SCHEMA], image_processor=image_processor
    )
    tool, parameter = _tool(task)
    # All images have one size, and so the same tokens: one of them stands for all.
    image = Image.of(rooms.draw_digit(0, "red", 0))

    @functools.cache
    def encode(question: str, calls: tuple[int, ...], reply: str) -> tuple[list[int], list[int]]:
        tokens = template.start([Message("user", (image, question))])
        labels = [IGNORE_INDEX] * len(tokens)
        for number, value in enumerate(calls, 1):
            sampled = template.write(Message("assistant", "", (ToolCall(tool, {parameter: value}, str(number)),)))
            observed = template.extend([Message("tool", (image,), name=tool)]).ids
            tokens += sampled + observed
            labels += sampled + [IGNORE_INDEX] * len(observed)
        sampled = template.write(Message("assistant", reply))
        return tokens + sampled, labels + sampled

    examples = []
    for demo in task.demonstrations(count, seed):
        tokens, labels = encode(demo.question, tuple(call[parameter] for call in demo.calls), demo.reply)
        seen = [demo.image, *demo.observations]
        # [images, 3, height, width] from -1 to 1, as the processor computes it
        pixels = np.stack([np.asarray(picture, np.float32).transpose(2, 0, 1) for picture in seen]) / 127.5 - 1
        examples.append(Example(tokens, labels, pixels))
    return examples
