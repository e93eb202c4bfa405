"""Tokens of conversations with images against those of the models' own processors."""

import random
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ConfigError, DataError, TemplateError
from agentfly.rollout.history import Transcript
from agentfly.segment import Author, Segment
from agentfly.templates import load_template
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.types import Completion, FinishReason, Image, Message
from agentfly.vision.images import open_image
from agentfly.vision.processor import SUPPORTED, load_image_processor
from tests.vision_models import PLACEHOLDERS, build_vision_model, picture

SIZES = [(28, 28), (56, 56), (57, 200), (1, 1), (13, 7), (100, 190), (64, 48)]


@pytest.fixture(scope="module", params=SUPPORTED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return build_vision_model(family, tmp_path_factory.mktemp(family), weights=False)


def load(folder: Path) -> Template:
    return load_template(None, load_tokenizer(str(folder)), image_processor=load_image_processor(str(folder)))


def render_with_processor(template: Template, messages: list[Message]) -> list[int]:
    """What `apply_chat_template` gives for the whole conversation."""
    assert template.image_processor is not None
    rows: list[dict[str, Any]] = []
    for message in messages:
        blocks = [message.content] if isinstance(message.content, str) else message.content
        content = [
            {"type": "text", "text": block} if isinstance(block, str) else {"type": "image", "image": open_image(block)}
            for block in blocks
        ]
        rows.append({"role": message.role, "content": content})
    out = template.image_processor._processor.apply_chat_template(
        [rows], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    ids: list[int] = out["input_ids"][0].tolist()
    return ids


def test_extended_prompts_equal_the_processor_on_the_whole_conversation(folder: Path) -> None:
    template = load(folder)
    draw = random.Random(0)

    def write(role: Any, images: int) -> Message:
        blocks: list[str | Image] = []
        for _ in range(images):
            blocks += [draw.choice(["look ", "\n", "x"]), picture(*draw.choice(SIZES), seed=draw.randrange(1000))]
        return Message(role, (*blocks, draw.choice(["what?", "\n\nand?", " end"])))

    for _ in range(12):
        messages = [write("user", draw.randint(1, 3))]
        ids = template.start(messages)
        assert ids == render_with_processor(template, messages)
        for role in ("user", "tool"):
            messages += [Message("assistant", "It is red."), write(role, draw.randint(1, 2))]
            ids += template.write(Message("assistant", "It is red."))
            ids = ids[:-1] + template.extend(messages[-1:]).after(None)
            assert ids == render_with_processor(template, messages)


def test_placeholder_in_text_is_never_an_image(folder: Path) -> None:
    template = load(folder)
    assert template.image_processor is not None
    typed = f"see {template.image_processor.placeholder} here"
    image = picture(56, 56)
    messages = [Message("system", typed), Message("user", (typed, image)), Message("assistant", typed)]
    messages.append(Message("user", typed))
    ids = template.start(messages)
    assert ids.count(template.image_processor.token_id) == template.image_processor.encode(image).num_tokens


def test_sampled_placeholder_is_not_an_image_position(folder: Path) -> None:
    template = load(folder)
    assert template.image_processor is not None
    transcript = Transcript(template)
    transcript.begin([Message("user", (picture(56, 56), "what?"))], Author.TASK, turn=0)
    first = transcript.segment.image_positions.tolist()
    sampled = [template.image_processor.token_id] * 3 + [template.close_id]
    completion = Completion(sampled, [-1.0] * 4, [0] * 4, FinishReason.STOP)
    transcript.add_completion(completion, Message("assistant", "x"), Message("assistant", "x"), 0)
    transcript.add([Message("user", ("more", picture(28, 28)))], Author.USER, 1)
    segment = transcript.close()[0]
    images = [template.image_processor.encode(image) for image in segment.images]
    assert len(segment.image_positions) == sum(image.num_tokens for image in images)
    assert segment.image_positions[: len(first)].tolist() == first
    assert not segment.mask[segment.image_positions].any()
    restored = Segment.from_json(segment.to_json())
    assert restored == segment
    assert restored.image_positions.tolist() == segment.image_positions.tolist()


def test_collapsed_prompt_has_one_placeholder_per_image(folder: Path) -> None:
    template = load(folder)
    assert template.image_processor is not None
    images = [picture(56, 56, 1), picture(57, 200, 2), picture(64, 48, 3)]
    transcript = Transcript(template)
    transcript.begin([Message("user", ("a ", images[0], images[1], " b?"))], Author.TASK, turn=0)
    completion = Completion([5, 6, template.close_id], [-1.0] * 3, [0] * 3, FinishReason.STOP)
    transcript.add_completion(completion, Message("assistant", "x"), Message("assistant", "x"), 0)
    transcript.add([Message("user", (images[2], "more"))], Author.TOOL, 1)
    segment = transcript.segment
    collapsed = template.image_processor.collapse(segment.prompt, segment.image_positions, segment.images)
    assert collapsed.count(template.image_processor.token_id) == 3
    pictures = iter(images)
    again: list[int] = []
    for token in collapsed:
        is_image = token == template.image_processor.token_id
        again += template.image_processor.encode(next(pictures)).ids if is_image else [token]
    assert again == segment.prompt.tolist()
    forged = [*segment.prompt, template.image_processor.token_id]
    with pytest.raises(DataError, match="sampled an image placeholder"):
        template.image_processor.collapse(forged, segment.image_positions, segment.images)
    with pytest.raises(DataError, match=r"not those of its image|too few"):
        template.image_processor.collapse(segment.prompt, segment.image_positions[1:], segment.images)


def test_fitted_image_is_not_resized_again(folder: Path) -> None:
    processor = load_image_processor(str(folder))
    for size in SIZES:
        fitted = processor.fit(picture(*size))
        assert processor.fit(fitted) == fitted
        assert processor.encode(fitted).num_tokens == processor.encode(picture(*size)).num_tokens


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3", "both directions"),
        ("llava_onevision", "second image changes the tokens of the first"),
        ("paligemma", "not causal"),
        ("llava", "have not been checked"),
        ("llama", "no vision tower"),
    ],
)
def test_unsupported_family_is_refused_with_the_reason(family: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    with pytest.raises(ConfigError, match=reason):
        load_image_processor(str(tmp_path))


def test_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    build_vision_model("qwen2_5_vl", tmp_path, weights=False)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="has no processor"):
        load_image_processor(str(tmp_path))


def test_old_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_vision_model("qwen2_5_vl", tmp_path, weights=False)
    monkeypatch.setattr("transformers.__version__", "5.16.2")
    with pytest.raises(ConfigError, match=r"need transformers 5\.17 or later, not 5\.16\.2"):
        load_image_processor(str(tmp_path))


def test_broken_image_and_missing_placeholder_raise(tmp_path: Path) -> None:
    build_vision_model("qwen2_5_vl", tmp_path, weights=False)
    processor = load_image_processor(str(tmp_path))
    with pytest.raises(DataError):
        processor.encode(Image("data:image/png;base64,iVBORw0KGgo="))
    with pytest.raises(TemplateError, match="1 images, but the template writes 0 placeholders"):
        processor.expand("no place", [picture(28, 28)])
    assert set(PLACEHOLDERS) == set(SUPPORTED)
