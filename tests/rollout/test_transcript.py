"""The transcript, in cases that a whole chain does not reach."""

from agentfly.rollout.history import Transcript
from agentfly.segment import Author
from agentfly.templates import load_template
from agentfly.templates.template import History
from agentfly.templates.tokenizer import ByteTokenizer
from agentfly.types import Message
from tests.fakes import completion_of

ASKED = [Message("user", "Hi")]


def test_closing_token_has_the_author_template_in_both_histories() -> None:
    for history in History:
        template = load_template("chatml", ByteTokenizer(), history=history)
        transcript = Transcript(template)
        transcript.begin(ASKED, Author.TASK, turn=0)
        cut = Message("assistant", "half")
        transcript.add_completion(completion_of(template.codec.encode("half")), cut, cut, turn=0)
        transcript.add([Message("user", "Go on")], Author.USER, turn=1)
        (segment,) = transcript.close()
        authors = [span.author for span in segment.spans]
        assert authors == [Author.TASK, Author.MODEL, Author.TEMPLATE, Author.USER], history
        assert segment.spans[2].ids.tolist() == [template.close_id]
        whole = template.start([*ASKED, cut, Message("user", "Go on")])
        assert segment.tokens.tolist() == whole


def test_pending_messages_are_recorded_without_a_reply() -> None:
    transcript = Transcript(None)
    transcript.begin(ASKED, Author.TASK, turn=0)
    reply = Message("assistant", "Ho")
    transcript.add_completion(completion_of([5], prompt_ids=[1, 2], message=reply), reply, reply, turn=0)
    transcript.add([Message("user", "And?")], Author.USER, turn=1)
    (segment,) = transcript.close()
    assert [(s.author, s.turn, [m.text for m in s.messages]) for s in segment.spans] == [
        (Author.TASK, 0, ["Hi"]),
        (Author.MODEL, 0, ["Ho"]),
        (Author.USER, 1, ["And?"]),
    ]


def test_messages_after_the_end_are_recorded_and_not_shown() -> None:
    template = load_template("chatml", ByteTokenizer())
    transcript = Transcript(template)
    transcript.begin(ASKED, Author.TASK, turn=0)
    length = len(transcript.segment)
    transcript.note([Message("tool", "late", name="f")], Author.TOOL, turn=0)
    transcript.note([], Author.TOOL, turn=0)
    (segment,) = transcript.close()
    assert len(segment) == length
    assert segment.messages[-1].text == "late"
    assert len(segment.spans) == 2
