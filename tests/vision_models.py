"""Small vision-language models with random weights, written to folders as their publishers would.

Chains of them with images, and the log-probabilities of a chain by the model's own forward pass with pixels.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Pillow
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from agentfly.backends.base import Backend, Request
from agentfly.models.tiny import build_tokenizer
from agentfly.rollout.history import Transcript
from agentfly.segment import Author, Segment
from agentfly.templates import load_template
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.types import Completion, FinishReason, Image, Message, Sampling
from agentfly.vision.processor import MIN_TRANSFORMERS, load_image_processor

needs_vision = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < MIN_TRANSFORMERS,
    reason=f"images need a newer transformers than {transformers.__version__}",
)
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl")
PLACEHOLDERS = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "internvl": "<IMG_CONTEXT>\n",
}
_TOKENS = {
    "qwen": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "glm4v": ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)],
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def picture(width: int, height: int, seed: int = 0) -> Image:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, format="PNG")
    return Image.of(buffer.getvalue())


def build_vision_model(family: str, folder: Path, *, weights: bool = True, **text: Any) -> Path:
    """Write a model, its tokenizer and its processor.

    weights: False writes a configuration without a model. text: other settings of the language model.
    """
    tokenizer = build_tokenizer(["What is it? It is red. Look here and there, 0 1 2 3 4 5 6 7 8 9."], 320)
    kind = "qwen" if family.startswith("qwen") else "idefics3" if family == "smolvlm" else family
    tokenizer.add_special_tokens({"additional_special_tokens": _TOKENS[kind]})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", PLACEHOLDERS[family])
    ids = dict(zip(_TOKENS[kind], tokenizer.convert_tokens_to_ids(_TOKENS[kind]), strict=True))
    tokenizer.save_pretrained(folder)
    if family == "internvl":
        names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        settings_file = folder / "tokenizer_config.json"
        settings = json.loads(settings_file.read_text())
        settings["extra_special_tokens"] = {**names, "video_token": "<video>"}
        settings_file.write_text(json.dumps(settings))
    settings, extra = _processor_settings(family)
    image_processor = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[family]["pil"])(**settings)
    image_processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(extra))
    if not weights:
        (folder / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}}))
        return folder
    torch.manual_seed(0)
    config = _config(family, ids, len(tokenizer), text)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that attention and images matter
    model.save_pretrained(folder)
    return folder


def _processor_settings(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if family in ("smolvlm", "idefics3"):
        return {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}, {"image_seq_len": 4}
    if family == "internvl":
        size = {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 4}
        return size, {"image_seq_length": 4}
    return {"patch_size": 16} if family == "qwen3_vl" else {}, {}


def _config(family: str, ids: dict[str, int], vocabulary: int, changes: dict[str, Any]) -> Any:
    text: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": True, **changes,
    }  # fmt: skip
    tied: bool = text["tie_word_embeddings"]
    if family.startswith("qwen"):
        special = {
            "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
        }  # fmt: skip
        unit = text["hidden_size"] // text["num_attention_heads"] // 16
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2 * unit, 3 * unit, 3 * unit]}
        vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
        if family == "qwen3_vl":
            rope = {**rope, "mrope_section": [4 * unit, 2 * unit, 2 * unit], "mrope_interleaved": True}
            vision |= {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
            vision |= {"out_hidden_size": text["hidden_size"]}
            return transformers.Qwen3VLConfig(
                text_config={**text, "head_dim": 16 * unit, "rope_parameters": rope}, vision_config=vision,
                tie_word_embeddings=tied, **special,
            )  # fmt: skip
        vision |= {"out_hidden_size": text["hidden_size"], "window_size": 112, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=vision, tie_word_embeddings=tied, **special
        )
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    }  # fmt: skip
    if family == "internvl":
        return transformers.InternVLConfig(
            text_config={"model_type": "qwen2", **text},
            vision_config={**vision, "image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=ids["<IMG_CONTEXT>"], image_seq_length=4, tie_word_embeddings=tied,
        )  # fmt: skip
    cls = transformers.SmolVLMConfig if family == "smolvlm" else transformers.Idefics3Config
    return cls(
        text_config={"model_type": "llama", **text}, vision_config={**vision, "image_size": 32, "patch_size": 8},
        scale_factor=2, image_token_id=ids["<image>"], tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip


# ── chains ──


def open_template(folder: Path) -> Template:
    return load_template(None, load_tokenizer(str(folder)), image_processor=load_image_processor(str(folder)))


async def sample_turn(backend: Backend, template: Template, transcript: Transcript, name: str) -> None:
    segment = transcript.segment
    turn = sum(message.role == "assistant" for message in transcript.messages)
    completion = await backend.generate(
        Request(
            segment.prompt,
            Sampling(max_tokens=8, seed=turn + 10 * int(name)),
            stop_ids=template.stop_ids,
            images=segment.images,
            image_positions=segment.image_positions,
            chain=name,
            turn=turn,
        )
    )
    transcript.add_completion(completion, Message("assistant", "x"), Message("assistant", "x"), turn)


async def sample_chain(backend: Backend, template: Template, number: int) -> Segment:
    """A chain of three turns with an image in the question and in each tool result; chains 0 and 4 share an image."""
    assert template.image_processor is not None
    fit = template.image_processor.fit  # as agents do
    transcript = Transcript(template)
    first = fit(picture(112, 84, seed=number % 4))
    transcript.begin([Message("user", ("What? ", first, " Look."))], Author.TASK, turn=0)
    for turn in range(3):
        await sample_turn(backend, template, transcript, str(number))
        if turn < 2:
            observed = fit(picture(56 + 28 * (number % 2), 56, seed=100 + number % 3))
            transcript.add([Message("user", ("zoomed: ", observed, "\nand now?"))], Author.TOOL, turn)
    return transcript.close()[0]


def make_segments(template: Template) -> list[Segment]:
    """Two chains of two turns with images, one without, and one whose last image comes after the last sampled token."""
    random = np.random.default_rng(0)

    def run(images: int, turns: int, trailing: bool = False) -> Segment:
        transcript = Transcript(template)
        pictures = [picture(112, 84, seed) for seed in range(images)]
        transcript.begin([Message("user", ("What? ", *pictures, " Look."))], Author.TASK, turn=0)
        for turn in range(turns):
            sampled = [*random.integers(10, 250, 5).tolist(), template.close_id]
            completion = Completion(sampled, [-1.0] * 6, [0] * 6, FinishReason.STOP)
            transcript.add_completion(completion, Message("assistant", "x"), Message("assistant", "x"), turn)
            if turn < turns - 1 or trailing:
                zoomed = picture(56 + 28 * images, 56, 100 + turn)
                transcript.add([Message("user", ("zoomed: ", zoomed, "and?"))], Author.TOOL, turn)
        return transcript.close()[0]

    return [run(1, 2), run(2, 2), run(0, 1), run(1, 1, trailing=True)]


def score_with_pixels(model: Any, template: Template, segment: Segment) -> torch.Tensor:
    """Log-probabilities of the sampled tokens by the model's own forward pass with pixels."""
    assert template.image_processor is not None
    sampled = np.flatnonzero(segment.mask)
    length = int(sampled[-1]) + 1
    positions = segment.image_positions[segment.image_positions < length].astype(np.int64)
    images: list[Any] = []
    while sum(image.num_tokens for image in images) < len(positions):
        images.append(template.image_processor.encode(segment.images[len(images)]))
    ids = torch.from_numpy(segment.tokens[:length].astype(np.int64))[None]
    inputs: dict[str, Any] = {}
    for name in images[0].inputs if images else ():
        tiled = model.config.model_type in ("idefics3", "smolvlm")  # [batch, tiles of all images, …]
        inputs[name] = torch.cat([image.inputs[name] for image in images], 1 if tiled else 0)
    if "image_grid_thw" in inputs:
        kinds = torch.zeros_like(ids, dtype=torch.int)
        kinds[0, positions] = 1
        inputs["mm_token_type_ids"] = kinds
    moved = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    logits = model(input_ids=ids.to(model.device), use_cache=False, **moved).logits[0]
    logprobs = logits.float().log_softmax(-1)
    sampled_logprobs: torch.Tensor = logprobs[sampled - 1, segment.tokens[sampled].astype(np.int64)]
    return sampled_logprobs
