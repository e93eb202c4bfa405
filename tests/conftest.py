"""Shared fixtures: real tokenizers of model families, and a server on loopback."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import quick
from tests.quick import pytest_addoption, pytest_configure, pytest_ignore_collect  # noqa: F401

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tests.backends.openai_server import OpenAIServer

TOKENIZERS = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers"
TOGETHER = {
    "tokenizers": ("templates", "sft/test_demonstrations.py", "rollout/test_streaming.py"),
    "fork server": (
        *("training/test_loop.py", "training/test_sharded.py", "training/test_async.py", "test_plugins.py"),
        *(f"cli/test_{name}.py" for name in ("app", "env", "evaluate", "signals", "train")),
    ),
    "container engine": ("resources/runtimes/container",),
}
"""What files and folders share; one worker runs all of them, so that it is loaded or started once."""
LONGEST_FIRST = (
    "templates",
    "training/test_loop.py",
    "training/test_sharded.py",
    "conformance/test_prebuilt.py",
    "resources/runtimes/container",
    "environments/code_judge/test_environment.py",
    "test_recipes.py",
    "conformance/test_check.py",
    "environments/scienceworld/test_jvm.py",
    "environments/scienceworld/test_environment.py",
    "sandbox/test_leftovers.py",
    "test_linear_time.py",
)
"""Files and folders that take 20 seconds or more. They run first, so that all workers end at the same time."""

if find_spec("hypothesis"):  # the environment of `make vllm` is without it
    from hypothesis import settings

    # The same examples in every run, and no limit on the time of one: a busy machine fails no test.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick.pytest_collection_modifyitems(config, items)
    first = [quick.TESTS / name for name in LONGEST_FIRST]

    @cache
    def order(file: Path) -> int:
        return next((number for number, path in enumerate(first) if file.is_relative_to(path)), len(first))

    items.sort(key=lambda item: order(item.path))


def pytest_collection_finish() -> None:
    """Keep what was imported, millions of objects, out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, keep the files together that share something expensive."""
    from xdist.scheduler import LoadFileScheduling

    class SharingScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            paths = [file, *map(str, Path(file).parents)]
            shared = (
                name for name, members in TOGETHER.items() if any(f"tests/{member}" in paths for member in members)
            )
            return next(shared, file)

    return SharingScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionstart() -> None:
    """Restore the default SIGINT action for the processes that tests interrupt.

    A shell starts background jobs with SIGINT ignored, child processes inherit that, and our commands respect it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def _load(name: str) -> PreTrainedTokenizerFast:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(TOKENIZERS / name)


def load_family(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a family, loaded once a session; skip the test where it was not fetched."""
    require_fetched(name)
    return _load(name)


def load_trl_template(name: str) -> str:
    """Return a chat template that TRL ships, say `gptoss`; skip the test where it was not fetched."""
    return load_chat_template("trl_chat_templates", name)


def load_chat_template(folder: str, name: str) -> str:
    """Return a chat template out of a fetched folder of templates; skip the test where it was not fetched."""
    require_fetched(folder)
    return (TOKENIZERS / folder / f"{name}.jinja").read_text()


@pytest.fixture(name="load_family", scope="session")
def load_family_fixture() -> Callable[[str], PreTrainedTokenizerFast]:
    return load_family


@pytest.fixture(name="load_trl_template", scope="session")
def load_trl_template_fixture() -> Callable[[str], str]:
    return load_trl_template


def require_fetched(name: str) -> None:
    """Skip the test where the files of a tokenizer were not fetched."""
    if not (TOKENIZERS / name / "source.txt").is_file():
        pytest.skip(f"no tokenizer files of {name}: python tests/tokenizers/fetch.py {name}")


@pytest.fixture(scope="module")
def running() -> Iterator[OpenAIServer]:
    """A server that a module's tests share."""
    from tests.backends.openai_server import OpenAIServer

    server = OpenAIServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def openai_server(running: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> OpenAIServer:
    """The server as if it had just been started, and nothing in this process's surroundings that changes the way."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    running.reset()
    return running


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of twenty thousand parameters that knows nothing, with the tokenizer and the template of `tiny`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from agentfly.models.lookup import demonstrations
    from agentfly.models.tiny import build_tokenizer

    path = tmp_path_factory.mktemp("small-model")
    tokenizer = build_tokenizer(text for chain in demonstrations(300) for text in chain.texts)
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path
