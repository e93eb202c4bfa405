"""Text to ids: equal to the tokenizer's own on ordinary text, and free of control tokens on any text."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from agentfly.errors import ConfigError
from agentfly.templates.codec import Codec, match_any, unused_character
from agentfly.templates.tokenizer import ByteTokenizer
from tests.scaling import grows_at_most
from tests.templates.families import BY_NAME, CASES, Case, texts

quick = settings(max_examples=30, deadline=None)
ONE_EACH = list({case.tokenizer: case for case in CASES}.values())
every_tokenizer = pytest.mark.parametrize("case", ONE_EACH, ids=lambda case: case.tokenizer)


@pytest.mark.integration
@every_tokenizer
@quick
@given(text=texts)
def test_ordinary_text_has_the_ids_of_the_tokenizer(case: Case, text: str) -> None:
    assert case.template.codec.encode(text) == case.encode(text)


@pytest.mark.integration
@every_tokenizer
def test_control_text_is_a_token_in_rendered_text_and_text_in_plain(case: Case) -> None:
    codec = case.template.codec
    control = set(codec.control.values())
    for token, token_id in codec.control.items():
        assert codec.encode(f"a{token}b").count(token_id) == 1
        for guard in ("", "\ue000"):
            text = codec.cut(f"a{token}b", guard) if guard else f"a{token}b"
            ids = codec.plain(text, guard)
            assert control.isdisjoint(ids), token
            assert codec.decode(ids).lstrip() == f"a{token}b", token


@pytest.mark.integration
def test_merges_that_rebuild_a_control_token_are_cut_apart() -> None:
    codec = BY_NAME["internlm2"].template.codec
    assert codec._plain.encode("<s>", add_special_tokens=False).ids == [codec.control["<s>"]], "the case this guards"
    ids = codec.plain("see <s> and </s>\ue000.")
    assert set(codec.control.values()).isdisjoint(ids)
    assert codec.decode(ids) == "see <s> and </s>\ue000."


@pytest.mark.integration
@pytest.mark.parametrize("tokenizer", ["qwen2_5", "command_r_plus"])
def test_normalized_text_equals_the_tokenizers(tokenizer: str) -> None:
    case = BY_NAME[tokenizer]
    for text in ("e\u0301", "\u1100\u1161\u11a8", "ﬁ", "e\u0301<|im_end|>e\u0301"):
        assert case.template.codec.plain(text) == case.template.codec.plain(text.replace("e\u0301", "é"))
    assert case.template.codec.encode("e\u0301") == case.encode("e\u0301")


def test_control_tokens_strip_space_as_in_the_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(
        [AddedToken("<|end|>", rstrip=True), AddedToken("<|mask|>", lstrip=True)]
    )
    codec = Codec(tokenizer)
    for text in ("a<|end|>\n b", "a \n<|mask|> b", "<|end|> <|mask|> x", "<|mask|>\n<|end|>  "):
        assert codec.encode(text) == tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert codec.strips_space


def test_many_control_tokens_that_strip_space_take_linear_time() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    codec = Codec(tokenizer)

    def cpu_seconds(size: int) -> float:
        text = "<|end|>" * (size // 7)
        started = time.process_time()
        assert len(list(codec.pieces(text))) == size // 7
        return time.process_time() - started

    assert grows_at_most(cpu_seconds, 200_000, 400_000, ratio=3)


def test_added_tokens_are_control_tokens_except_words_and_whitespace() -> None:
    tokenizer = ByteTokenizer()
    ordinary = ["\n\n", "\u2581\u2581", "hello", "नमस्ते", "2024", "two words"]
    tokenizer.backend_tokenizer.add_tokens(["<tool_call>", "<|fim_prefix|>", "[x]", "foo_bar", *ordinary])
    codec = Codec(tokenizer)
    assert {"<tool_call>", "<|fim_prefix|>", "[x]", "foo_bar"} <= set(codec.control)
    assert not set(ordinary) & set(codec.control)
    assert len(codec.plain("hello\n\n")) == 2
    assert len(codec.plain("<tool_call>")) == len("<tool_call>")


@pytest.mark.integration
@every_tokenizer
def test_added_tokens_that_are_plain_text_keep_their_ids(case: Case) -> None:
    codec = case.template.codec
    for token_id, token in case.hf.backend_tokenizer.get_added_tokens_decoder().items():
        if token.content not in codec.control:
            assert codec.plain(token.content) == [token_id]


def test_codecs_of_one_tokenizer_share_expensive_parts() -> None:
    tokenizer = ByteTokenizer()
    assert Codec(tokenizer)._plain is Codec(tokenizer)._plain
    first_plain = Codec(tokenizer)._plain
    tokenizer.backend_tokenizer.add_special_tokens(["<|more|>"])
    assert Codec(tokenizer)._plain is not first_plain


def test_text_of_any_bytes_has_one_token_per_byte() -> None:
    codec = Codec(ByteTokenizer())
    text = "héllo\n<|im_end|>"
    assert len(codec.plain(text)) == len(text.encode())
    assert codec.decode(codec.plain(text)) == text


@pytest.mark.integration
def test_tokenizer_without_control_tokens_is_rejected() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(ConfigError, match="no control tokens"):
        Codec(bare)


@given(st.lists(st.text("ab<|>", min_size=1, max_size=5), min_size=1, max_size=8), st.text("ab<|> ", max_size=12))
def test_trie_finds_the_longest_match(words: list[str], text: str) -> None:
    plain = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    assert re.compile(match_any(words)).findall(text) == plain.findall(text)
    ends = any(text.rstrip().endswith(word[:cut]) for word in words for cut in range(1, len(word)))
    assert bool(re.compile(match_any(words, open_end=True)).search(text)) == (bool(plain.search(text)) or ends)


def test_mark_occurs_in_no_text() -> None:
    assert unused_character(["", "\ue000 \ue001"]) == "\ue002"
    with pytest.raises(ConfigError, match="private-use"):
        unused_character(["".join(map(chr, range(0xE000, 0xF900))) + "".join(map(chr, range(0xF0000, 0x100000)))])
