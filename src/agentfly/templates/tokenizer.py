"""Loading of tokenizers: from a local folder, from the Hugging Face hub, or the built-in `bytes`.

`tokenizer.json` and the files beside it are read with `tokenizers`; the result equals that of transformers'
`AutoTokenizer`, which need not be installed. (Where a file disagrees with what transformers hard-codes for its
`tokenizer_class`, say a split pattern, the file is followed.) Only a folder without `tokenizer.json` is converted by
transformers.
"""

from __future__ import annotations

import json
import logging
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from agentfly.errors import ConfigError, require_extra
from agentfly.vision.images import PROCESSOR_FILES

BYTES = "bytes"
"""The name of the tokenizer that needs no files: one token per byte, and ChatML's special tokens."""

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", *PROCESSOR_FILES,
)  # fmt: skip
_VOCABULARIES = ("*.model", "*.tiktoken", "tekken.json", "vocab.*", "merges.txt")
"""Files that transformers can convert."""

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END = "<|endoftext|>"
CLASS_TOKENS: dict[str, dict[str, str]] = {
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>", "sep_token": "<SEP>",
        "pad_token": "<PAD>", "cls_token": "<CLS>", "mask_token": "<MASK_TOKEN>",
    },
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "Qwen3_5Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
}  # fmt: skip
"""Special tokens that a `tokenizer_class` of transformers has where `tokenizer_config.json` does not name them."""

_MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MISTRAL_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that templates use."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...
    @property
    def special_tokens_map(self) -> dict[str, Any]: ...

    chat_template: Any

    def save_pretrained(self, folder: Any, /) -> Any: ...


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> ChatTokenizer:
    """Load the tokenizer of a local folder or of a model on the hub; `bytes` needs no files.

    If the hub is out of reach, its cache is used. Raises ConfigError if there is no tokenizer, or if only transformers
    can read it and it is not installed.
    """
    if name == BYTES:
        return ByteTokenizer()
    folder = Path(name).expanduser()
    is_local = folder.is_dir()
    try:
        if not is_local:
            folder = download_files(name)
        if (folder / "tokenizer.json").is_file():
            return FastTokenizer(folder)
        if is_local and not any(file for pattern in _VOCABULARIES for file in folder.glob(pattern)):
            raise OSError(f"{folder} has no tokenizer.json")
        return _convert(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer for {name!r}: it is neither a local folder with tokenizer.json nor a model that the hub "
            f"provided ({' '.join(str(error).split())[:200]}). Download the model once and pass its folder, or use "
            f"{BYTES!r} with the scripted backend."
        ) from error


def download_files(name: str) -> Path:
    """Download the files of the tokenizer and the processor from the hub; return the folder in the hub cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class HiddenBar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": True})  # type: ignore[no-untyped-call]

    try:
        patterns = [*_FILES, "config.json"]
        return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=HiddenBar))
    except Exception as error:  # OSError, ValueError, or one of the HTTP client, which depends on the hub's version
        raise OSError(str(error)) from error


def _convert(name: str) -> ChatTokenizer:
    """Convert a tokenizer without tokenizer.json (SentencePiece, tiktoken, Tekken) with transformers."""
    # A tokenizer does not need torch, so its absence is not worth a warning.
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())
    with require_extra(
        f"converting the tokenizer of {name!r}, which has no tokenizer.json,",
        "train",
        "save it once with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(folder)) and pass that "
        "folder",
    ):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        loaded: ChatTokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ValueError:  # it needs remote code, which is never run
        loaded = PreTrainedTokenizerFast.from_pretrained(name)
    if not hasattr(loaded, "backend_tokenizer"):
        raise ConfigError(f"the tokenizer of {name!r} is a {type(loaded).__name__}, which has no fast version")
    return loaded


def save_tokenizer(tokenizer: ChatTokenizer, folder: Path, chat_template: str | None = None) -> None:
    """Write the files of a tokenizer.

    chat_template: Jinja source to write in place of the tokenizer's own, so that a model is prompted as it was trained
    wherever its folder is loaded; None keeps the tokenizer's own.
    """
    tokenizer.save_pretrained(folder)
    templates = tokenizer.chat_template
    if chat_template is None or chat_template in (templates.values() if isinstance(templates, dict) else (templates,)):
        return
    # This package and transformers 5 read files first, other programs the entry in `tokenizer_config.json`.
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        if "chat_template" in (config := _read_json(folder / name)):
            text = json.dumps({**config, "chat_template": chat_template}, ensure_ascii=False, indent=2)
            (folder / name).write_text(text, encoding="utf-8")


class FastTokenizer:
    """A tokenizer read from `tokenizer.json`, with the special tokens and chat templates of the files beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = _read_json(folder / "tokenizer_config.json")
        model_config = _read_json(folder / "config.json")
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise ConfigError(f"{folder / 'tokenizer.json'} could not be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
        model_class = str(config.get("tokenizer_class") or model_config.get("tokenizer_class")).removesuffix("Fast")
        if model_class == "LlamaTokenizer":
            # Files of Llama 3 and many other families name this class too, and are right as they are.
            is_byte_level = "ByteLevel" in f"{tokenizer.pre_tokenizer} {tokenizer.decoder}"
            if model_config.get("model_type", "llama") == "llama" and not is_byte_level:
                _set_llama_pipeline(tokenizer, config)
            else:
                model_class = ""
        self.special_tokens_map = _add_special_tokens(tokenizer, folder, config, CLASS_TOKENS.get(model_class, {}))
        _fix_mistral_split(tokenizer, folder, config, model_config)
        self.backend_tokenizer: Tokenizer = tokenizer
        self.chat_template: Any = _read_chat_template(folder, config)

    def save_pretrained(self, folder: Path | str, /) -> None:
        """Copy the files of the tokenizer, and those of the image processor beside it, to another folder."""
        for pattern in _FILES:
            for file in self._folder.glob(pattern):
                target = Path(folder) / file.relative_to(self._folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by name. Files take precedence over the entry in `tokenizer_config.json`."""
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (default := folder / "chat_template.jinja").is_file():
        files["default"] = default
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    entry = config.get("chat_template")
    if isinstance(entry, list):
        entry = {template["name"]: template["template"] for template in entry}
    if entry is None:  # processors of vision models keep theirs here
        entry = _read_json(folder / "chat_template.json").get("chat_template")
    return templates["default"] if templates.keys() == {"default"} else templates or entry


def _add_special_tokens(
    tokenizer: Tokenizer, folder: Path, config: dict[str, Any], class_tokens: dict[str, str]
) -> dict[str, str]:
    """Add tokens that only the files beside tokenizer.json declare. Returns the named special tokens.

    class_tokens: named tokens that the tokenizer's class declares.
    """
    added_tokens = tokenizer.get_added_tokens_decoder()
    named = {**class_tokens, **{key: config[key] for key in _NAMES if key in config}}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    # Such as `image_token`: passed to chat templates like the standard names.
    named |= {k: v for k, v in config.items() if k.endswith("_token") and k not in _NAMES and isinstance(v, str)}
    if "added_tokens_decoder" in config:
        declared = {int(index): AddedToken(**token) for index, token in config["added_tokens_decoder"].items()}
    else:  # the older layout
        for key, value in _read_json(folder / "special_tokens_map.json").items():
            if key in ("extra_special_tokens", "additional_special_tokens"):
                extra = value or extra
            else:
                named[key] = value
        special = {_content(token) for token in (*named.values(), *extra)}
        added = _read_json(folder / "added_tokens.json")
        declared = {i: AddedToken(t, normalized=t not in special, special=t in special) for t, i in added.items()}
        declared |= added_tokens
    if isinstance(extra, dict):
        named |= extra
        extra = []
    named = {key: value for key, value in named.items() if value is not None}
    names = {_content(value) for value in named.values()}

    present = {token.content for token in added_tokens.values()}
    missing: list[AddedToken] = []
    for index, token in sorted(declared.items()):
        is_named = token.content in names
        if repr(token) != repr(added_tokens.get(index)) or (is_named and not token.special):
            token.special = token.special or is_named
            missing.append(token)
            present.add(token.content)
    for value in (*named.values(), *extra):
        if _content(value) not in present:
            flags = {k: v for k, v in value.items() if k != "__type"} if isinstance(value, dict) else {"content": value}
            missing.append(AddedToken(**{**flags, "special": True}))
            present.add(_content(value))
    if missing:
        tokenizer.add_tokens(missing)
    return {key: _content(value) for key, value in named.items()}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _set_llama_pipeline(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Set what transformers' LlamaTokenizer sets: older files put a space after every special token."""
    add_prefix_space = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy", False) else "first") if add_prefix_space else "never"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)


def _fix_mistral_split(
    tokenizer: Tokenizer, folder: Path, config: dict[str, Any], model_config: dict[str, Any]
) -> None:
    """Correct the split pattern of Mistral tokenizers saved by transformers 4, if the configuration asks for it."""
    version = str(model_config.get("transformers_version", ""))
    is_mistral = model_config.get("model_type") in (None, *_MISTRAL_TYPES) if version else bool(model_config)
    before_5 = not version or int(version.partition(".")[0]) < 5
    if tokenizer.pre_tokenizer is None or tokenizer.get_vocab_size() <= 100_000 or not (is_mistral and before_5):
        return
    if not config.get("fix_mistral_regex"):
        logging.getLogger(__name__).warning(
            "the tokenizer in %s may split words wrongly, as Mistral tokenizers saved by transformers 4 do; if so, set "
            '"fix_mistral_regex": true in its tokenizer_config.json',
            folder,
        )
        return
    split = pre_tokenizers.Split(pattern=Regex(_MISTRAL_SPLIT), behavior="isolated")
    current = tokenizer.pre_tokenizer
    if isinstance(current, pre_tokenizers.Sequence):
        current[0] = split
        return
    if isinstance(current, pre_tokenizers.Metaspace):
        current = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, current])


class ByteTokenizer:
    """One token per byte, built without files."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        self.backend_tokenizer = tokenizer
        self.special_tokens_map = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        self.chat_template: Any = None

    def save_pretrained(self, folder: Path | str, /) -> None:
        """Write `tokenizer.json`."""
        self.backend_tokenizer.save(str(Path(folder) / "tokenizer.json"))
