"""Messages, calls, tasks, images, sampling settings and completions: the accepted forms."""

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import BackendFault, ConfigError, DataError
from agentfly.types import Completion, FinishReason, Image, Message, Sampling, Task, ToolCall

try:
    from PIL import Image as Picture
except ModuleNotFoundError:  # pillow is not in the core
    Picture = None

needs_pillow = pytest.mark.skipif(Picture is None, reason="needs pillow")


def png() -> bytes:
    buffer = io.BytesIO()
    Picture.new("RGB", (2, 1), "red").save(buffer, "PNG")
    return buffer.getvalue()


def pixels(image: Image) -> Any:
    return Picture.open(io.BytesIO(base64.b64decode(image.url.partition(",")[2])))


@needs_pillow
def test_image_is_accepted_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(png())
    for source in (png(), path, str(path), Picture.new("RGB", (2, 1), "red")):
        image = Image.of(source)
        assert image.url.startswith("data:image/png;base64,")
        assert pixels(image).convert("RGB").getpixel((0, 0)) == (255, 0, 0)
        assert Image.of(image) is image
        assert Image.of({"url": image.url}) == Image.of(image.url) == image
    assert Image.of("https://example.org/a.png").url == "https://example.org/a.png"
    assert Image.of("file:///a.png").url == "file:///a.png"


@needs_pillow
@pytest.mark.parametrize("kind", ["JPEG", "GIF", "WEBP"])
def test_media_type_is_detected_from_the_bytes(kind: str) -> None:
    buffer = io.BytesIO()
    Picture.new("RGB", (2, 1)).save(buffer, kind)
    assert Image.of(buffer.getvalue()).url.startswith(f"data:image/{kind.lower()};base64,")


@pytest.mark.parametrize(
    "source",
    [
        "nowhere.png",
        "x" * 5000,
        "nul\0byte",
        b"text",
        7,
        None,
        {"url": None},
        *([Picture.new("F", (1, 1))] if Picture else []),
        ["a.png"],
    ],
    ids=lambda source: f"{type(source).__name__} {source!s:.8}",
)
def test_invalid_image_is_rejected(source: object) -> None:
    with pytest.raises(DataError, match="image"):
        Image.of(source)


def test_file_that_is_not_an_image_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("not a picture")
    with pytest.raises(DataError, match="image"):
        Image.of(tmp_path / "a.png")


def test_a_message_reads_the_openai_form_and_writes_it_back() -> None:
    picture = "data:image/png;base64,AA=="
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for written in (
        {"role": "user", "content": "héllo\u2028"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": picture}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"},
    ):
        assert Message.of(written).to_dict() == written
        assert Message.of(Message.of(written)) == Message.of(written)


def test_message_accepts_common_forms() -> None:
    content = ["a", {"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}, "c"]
    message = Message.of({"role": "user", "content": content})
    assert message.content == ("a", "b", Image("https://x/y.png"), "c")
    assert (message.text, message.images) == ("abc", (Image("https://x/y.png"),))
    assert Message.of({"role": "assistant", "content": None}).content == ""
    assert Message.of({"role": "user", "content": ["a", "b"]}).content == "ab"
    assert Message.of({"role": "assistant", "thinking": "hm"}).thinking == "hm"


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("hello", "a message is a str"),
        ({"content": "hello"}, "role None"),
        ({"role": "robot", "content": "x"}, "'robot'; roles are system, user, assistant, tool"),
        ({"role": "user", "content": 7}, "content is a int"),
        ({"role": "user", "content": b"x"}, "content is a bytes"),
        ({"role": "user", "content": [{"type": "sound"}]}, "sound"),
        ({"role": "user", "content": [{"type": "image"}]}, "'image'"),
        ({"role": "user", "content": [{"type": "text", "text": 7}]}, "7"),
        ({"role": "assistant", "tool_calls": "add"}, "'tool_calls' must be a list"),
        ({"role": "assistant", "tool_calls": ["add"]}, "'add' is not a tool call"),
        ({"role": "assistant", "tool_calls": [{"function": "add"}]}, "is not a tool call"),
    ],
)
def test_bad_message_error_names_the_problem(written: Any, names: str) -> None:
    with pytest.raises(DataError, match=names):
        Message.of(written)


def test_a_call_takes_its_arguments_as_an_object_or_as_text() -> None:
    whole = ToolCall("add", {"a": 1}, "c1")
    for arguments in ({"a": 1}, '{"a": 1}'):
        assert ToolCall.of({"id": "c1", "function": {"name": "add", "arguments": arguments}}) == whole
    assert ToolCall.of({"name": "add", "arguments": " "}).arguments == {}
    assert ToolCall.of({"name": "add"}).arguments == {}
    broken = ToolCall.of({"name": "add", "arguments": '{"a": '})
    assert (broken.name, broken.arguments, broken.raw) == ("add", {}, '{"a": ')
    assert "not JSON" in broken.problem
    assert "not a JSON object" in ToolCall.of({"name": "add", "arguments": "[1]"}).problem


def test_a_task_is_a_question_a_conversation_or_a_row() -> None:
    assert Task.of("Why?").messages == (Message("user", "Why?"),)
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert [m.role for m in Task.of(conversation).messages] == ["system", "user"]
    row = {"messages": conversation, "target": 7, "context": "c", "reward": 1, "id": 12}
    task = Task.of(row)
    assert task.question == "Why?"
    assert task.columns == {"target": 7, "context": "c", "reward": 1, "id": 12}
    assert (task.id, Task.of(row, id="given").id) == ("12", "given")
    assert Task.of(task) is task
    assert Task.of({"question": "Why?", "x": None}).columns == {"question": "Why?", "x": None}


def test_images_of_a_row_precede_its_question() -> None:
    urls = ["https://x/a.png", "https://x/b.png"]
    assert Task.of({"question": "Q", "images": urls}).messages[0].content == (*map(Image, urls), "Q")
    assert Task.of({"question": "Q", "image": urls[0]}).messages[0].content == (Image(urls[0]), "Q")
    with pytest.raises(DataError, match="'images' must be a list"):
        Task.of({"question": "Q", "images": urls[0]})


@pytest.mark.parametrize(
    "value", [7, None, "", " ", [], {}, {"question": ""}, {"messages": []}, {"messages": "Q"}, {"question": 7}, b"Q"]
)
def test_invalid_task_is_rejected(value: object) -> None:
    with pytest.raises(DataError):
        Task.of(value)


@pytest.mark.parametrize("question", [None, 5, "", " ", ["Q"]])
def test_question_that_is_not_text_is_named_with_its_value(question: object) -> None:
    with pytest.raises(DataError, match=r"'question' must be non-empty text, not ") as caught:
        Task.of({"question": question})
    assert repr(question) in str(caught.value)


def test_row_without_a_question_error_lists_its_columns() -> None:
    with pytest.raises(DataError, match="it has 'query', 'target'"):
        Task.of({"query": "Q", "target": 1})


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 0.5},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"max_tokens": float("inf")},
        {"stop": ("",)},
        {"stop": (7,)},
    ],
    ids=str,
)
def test_sampling_setting_out_of_range_is_rejected_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        Sampling(**field)


def test_sampling_of_a_turn_differs_in_limit_and_seed_only() -> None:
    sampling = Sampling(0.7, top_p=0.9, top_k=5, stop=("END",), max_tokens=9, seed=1)
    assert sampling.for_turn(4, None) == replace(sampling, max_tokens=4, seed=None)
    assert (sampling.max_tokens, sampling.seed) == (9, 1)


def test_one_stop_string_or_a_list_of_them_is_kept_as_a_tuple() -> None:
    assert Sampling(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(Sampling(stop=["a"])) == hash(Sampling(stop=("a",)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (([1, 2], [-1.0], [0, 0]), "2 tokens, 1 log-probabilities and 2 weight versions"),
        (([1], [-1.0], []), "0 weight versions"),
        (([1], [float("nan")], [0]), "not finite"),
        (([1], [float("-inf")], [0]), "not finite"),
        (([], [], []), "needs sampled tokens"),
    ],
)
def test_invalid_completion_is_a_backend_fault(fields: Any, message: str) -> None:
    with pytest.raises(BackendFault, match=message):
        Completion(*fields, FinishReason.STOP)


def test_a_completion_may_be_empty_only_with_a_reason() -> None:
    assert Completion([], [], [], FinishReason.ABORTED).message is None
    assert Completion([], [], [], FinishReason.STOP, message=Message("assistant", "x")).message is not None
