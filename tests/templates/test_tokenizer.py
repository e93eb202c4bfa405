"""Tokenizers read without transformers, compared with transformers' `AutoTokenizer`."""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from agentfly.errors import ConfigError
from agentfly.templates import load_template
from agentfly.templates.tokenizer import CLASS_TOKENS, ByteTokenizer, FastTokenizer, load_tokenizer, save_tokenizer
from agentfly.types import Message
from tests.conftest import TOKENIZERS, require_fetched
from tests.tokenizers.fetch import NPM_FAMILIES

if TYPE_CHECKING:
    from tests.backends.openai_server import OpenAIServer

FAMILIES = (*NPM_FAMILIES, "smollm2")
TEXTS = (
    "",
    " ",
    "Hello, world!",
    "  two leading spaces, a trailing one ",
    "line\n\n\nbreaks\r\n\tand tabs\u00a0\u3000",
    "def f(x):\n    return x ** 2  # 12345.678\n",
    "I'm sure they'LL say it 's , right ? ! n't",
    "é e\u0301 ﬁ ß İ ١٢٣ 中文字符 日本語 हिन्दी العربية 👩‍👩‍👧 \U00010348",
    "\ufeff\x00\x07 � \ue000",
    "a" * 300,
    "CamelCaseWordsAndHTTPServer2000x",
)


def load_auto(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError:  # it needs code of its own
        return PreTrainedTokenizerFast.from_pretrained(folder)


def assert_equal_to_transformers(folder: Path, *texts: str) -> None:
    assert_equal(FastTokenizer(folder), load_auto(folder), *texts)


def assert_equal(tokenizer: FastTokenizer, auto: Any, *texts: str) -> None:
    assert tokenizer.special_tokens_map == auto.special_tokens_map
    assert tokenizer.chat_template == auto.chat_template
    backend = tokenizer.backend_tokenizer
    named = [tokenizer.special_tokens_map.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")]
    assert named == [auto.bos_token, auto.eos_token, auto.pad_token, auto.unk_token]
    ids = [None if token is None else backend.token_to_id(token) for token in named]
    assert ids == [auto.bos_token_id, auto.eos_token_id, auto.pad_token_id, auto.unk_token_id]
    assert backend.get_vocab() == auto.get_vocab()
    added = backend.get_added_tokens_decoder()
    assert {i: repr(token) for i, token in added.items()} == {i: repr(t) for i, t in auto.added_tokens_decoder.items()}
    assert {i for i, token in added.items() if token.special} >= set(auto.all_special_ids)
    special = "".join(token.content for token in list(added.values())[:300])
    for text in (*TEXTS, *texts, special, f"a {special} b"):
        for with_special in (True, False):
            encoded = backend.encode(text, add_special_tokens=with_special).ids
            assert encoded == auto.encode(text, add_special_tokens=with_special), text
            for skip in (True, False):
                assert backend.decode(encoded, skip_special_tokens=skip) == auto.decode(
                    encoded, skip_special_tokens=skip
                )


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
def test_pinned_tokenizer_equals_auto_tokenizer(family: str) -> None:
    require_fetched(family)
    auto = load_auto(TOKENIZERS / family)
    if auto.encode("a b") == auto.encode("ab"):
        import transformers

        pytest.skip(f"transformers {transformers.__version__} reads the tokenizer of {family} as Llama's: no spaces")
    assert_equal(FastTokenizer(TOKENIZERS / family), auto)


@pytest.mark.integration
def test_class_tokens_are_those_of_transformers() -> None:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for name, tokens in CLASS_TOKENS.items():
        parameters = inspect.signature(tokenizer_class_from_name(name)).parameters.values()  # type: ignore[arg-type]
        declared = {p.name: p.default for p in parameters if p.name.endswith("_token") and p.default is not None}
        assert tokens == declared, name


def write_tokenizer(folder: Path, config: dict[str, Any], sentencepiece: bool = False) -> Path:
    """A small tokenizer with two added tokens, one of them special: byte-level, or like those of Llama 2."""
    if sentencepiece:
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"helowrd", "he", "▁he", "▁w"]
        merges = [("h", "e"), ("▁", "he"), ("▁", "w")]
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    else:
        tokenizer = ByteTokenizer().backend_tokenizer
    tokenizer.add_tokens([AddedToken("<|end|>", special=True), AddedToken("<call>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("model_type", ["llama", "mixtral", None])
@pytest.mark.parametrize("settings", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}])
def test_llama_tokenizer_class_sets_the_handling_of_spaces(
    settings: dict[str, bool], model_type: str | None, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, {"tokenizer_class": "LlamaTokenizer", **settings}, sentencepiece=True)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert_equal_to_transformers(tmp_path, "he he", "<s>he</s> he<|end|>w", " he", "<call> he")


@pytest.mark.integration
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokenizer_class": "GPT2TokenizerFast", "pad_token": "<|new|>"},
        {"eos_token": "<|end|>", "pad_token": {"__type": "AddedToken", "content": "<|pad|>", "lstrip": True}},
        {"eos_token": "<call>", "additional_special_tokens": ["<call>", "<a>"], "add_bos_token": True},
        {"extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<audio>"},
        {"extra_special_tokens": ["<image>"], "bos_token": "<|end|>", "add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": {"259": {"content": "<|end|>", "lstrip": True, "rstrip": True, "special": False}}},
        {"split_special_tokens": True, "clean_up_tokenization_spaces": True},
        {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
    ],
    ids=str,
)
def test_tokenizer_config_equals_auto_tokenizer(config: dict[str, Any], tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    assert_equal_to_transformers(write_tokenizer(tmp_path, config), "x <|end|> y", "<call>", " <a> <image>")


@pytest.mark.integration
def test_older_files_equal_auto_tokenizer(tmp_path: Path) -> None:
    """special_tokens_map.json and added_tokens.json, which newer versions write into the other two."""
    write_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    named = {"eos_token": {"content": "<|end|>", "rstrip": True}, "pad_token": "<|pad|>", "unk_token": "<call>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|pad|>": 261, "<tool>": 262, "<|end|>": 259}))
    assert_equal_to_transformers(tmp_path, "x <|end|> y", "a<|pad|> <tool> b")


@pytest.mark.integration
def test_template_files_take_precedence(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": "config", "tokenizer_class": "PreTrainedTokenizerFast"})
    assert_equal_to_transformers(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert_equal_to_transformers(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert_equal_to_transformers(tmp_path)
    assert FastTokenizer(tmp_path).chat_template == {"default": "file", "tool_use": "tools"}


def test_template_of_a_processor_is_the_last_resort(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "vision"}))
    assert FastTokenizer(tmp_path).chat_template == "vision"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("model_config", "flag", "warns"),
    [
        ({"model_type": "mistral", "transformers_version": "4.57.1"}, True, False),
        ({"model_type": "mistral", "transformers_version": "4.57.1"}, None, True),
        ({"model_type": "mistral", "transformers_version": "5.0.0"}, True, False),
        ({"model_type": "qwen3", "transformers_version": "4.57.1"}, True, False),
        ({"model_type": "mistral"}, True, False),
    ],
)
def test_split_pattern_of_mistral_is_corrected_on_request(
    model_config: dict[str, str], flag: bool | None, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_fetched("mistral_nemo")
    (tmp_path / "tokenizer.json").symlink_to(TOKENIZERS / "mistral_nemo" / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **({} if flag is None else {"fix_mistral_regex": flag})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps(model_config))
    with caplog.at_level(logging.WARNING):
        assert_equal_to_transformers(tmp_path, "CamelCaseWords'RE split", "¡Hola/\n")
    assert ("fix_mistral_regex" in caplog.text) == warns


@pytest.mark.integration
def test_saved_files_load_the_same(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    write_tokenizer(source, {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "config.json").write_text("{}")
    FastTokenizer(source).save_pretrained(tmp_path / "saved")
    assert_equal_to_transformers(tmp_path / "saved")
    assert FastTokenizer(tmp_path / "saved").chat_template == {"tool_use": "tools"}
    assert not (tmp_path / "saved" / "config.json").exists()  # that of the model, which is saved with the weights


# Where it comes from.


@pytest.mark.integration
@pytest.mark.parametrize("file_name", ["nowhere", "config", "file", "several", "processor"])
def test_saved_chat_template_replaces_the_tokenizers_own(file_name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source, out = tmp_path / "source", tmp_path / "out"
    for folder in (source, out):
        folder.mkdir()
    ByteTokenizer().save_pretrained(source)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    original = "{{ 'own' }}"
    if file_name == "config":
        config["chat_template"] = original
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    if file_name in ("file", "several"):
        (source / "chat_template.jinja").write_text(original)
    if file_name == "several":
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tools' }}")
    if file_name == "processor":
        (source / "chat_template.json").write_text(json.dumps({"chat_template": original}))
    trained = load_template("chatml", FastTokenizer(source))
    save_tokenizer(FastTokenizer(source), out, trained.source)

    messages = [Message("user", "Hi é"), Message("assistant", "Hello"), Message("user", "?")]
    expected = trained.start(messages)
    assert load_template(None, FastTokenizer(out)).start(messages) == expected
    plain = [{"role": message.role, "content": message.text} for message in messages]
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_missing_tokenizer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"no tokenizer for '\./nowhere'"):
        load_tokenizer("./nowhere")
    assert load_tokenizer("bytes").chat_template is None


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer for .* has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_file_is_named(file: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {})
    (tmp_path / file).write_text("{")
    with pytest.raises(ConfigError, match=file):
        load_tokenizer(str(tmp_path))


def test_hub_cache_is_used_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    write_tokenizer(snapshot, {"chat_template": "main"})
    (repository / "refs/main").write_text("0" * 40)
    assert load_tokenizer("org/name").chat_template == "main"
    with pytest.raises(ConfigError, match="no tokenizer for 'org/other'"):
        load_tokenizer("org/other")


# Without transformers.

BLOCKED = "import sys; sys.modules['transformers'] = None\n"


def run_without_transformers(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("vocabulary", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_folder_to_convert_error_names_the_extra(vocabulary: str, tmp_path: Path) -> None:
    (tmp_path / vocabulary).write_text("{}")
    run = run_without_transformers(
        "from agentfly.templates.tokenizer import load_tokenizer\nload_tokenizer(sys.argv[1])", str(tmp_path)
    )
    for words in ("ConfigError", "no tokenizer.json", "needs transformers", "pip install 'agentfly-rl[train]'"):
        assert words in run.stderr


@pytest.mark.integration
def test_folder_to_convert_uses_transformers(tmp_path: Path) -> None:
    """A GPT-2 vocabulary and its merges, as old repositories have them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<|endoftext|>", *letters, "he"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.backend_tokenizer.encode("he", add_special_tokens=False).ids == [vocabulary["he"]]
    assert tokenizer.special_tokens_map["eos_token"] == "<|endoftext|>"


AGENT = """
import agentfly
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend

folder, url = sys.argv[1:]
scripted = HFAgent(folder, template="chatml", backend=ScriptedBackend("done")).run_sync("Hi")
settings = {"base_url": url, "context_length": 1000}
client = HFAgent(folder, template="chatml", backend="client", backend_config=settings).run_sync("Hi")
assert [chain.stop.value for chain in (*scripted, *client)] == ["answer", "answer"], (scripted, client)
"""


@pytest.mark.integration
def test_agents_run_without_transformers(openai_server: OpenAIServer, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"eos_token": "<|im_end|>"})
    end = ByteTokenizer().backend_tokenizer.token_to_id("<|im_end|>")
    from tests.backends.openai_server import completion, says

    openai_server.answers("/completions", says(completion([65, end], [-0.5, -0.25])))
    run = run_without_transformers(AGENT, str(tmp_path), openai_server.url)
    assert run.returncode == 0, run.stderr
    assert len(openai_server.bodies("/completions")) == 1


@pytest.mark.integration
def test_agents_import_no_transformers(openai_server: OpenAIServer, tmp_path: Path) -> None:
    """Also where it is installed."""
    write_tokenizer(tmp_path, {"eos_token": "<|im_end|>"})
    end = ByteTokenizer().backend_tokenizer.token_to_id("<|im_end|>")
    from tests.backends.openai_server import completion, says

    openai_server.answers("/completions", says(completion([65, end], [-0.5, -0.25])))
    code = f"import sys{AGENT}\nassert not {{'transformers', 'torch'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path), openai_server.url], check=True)
