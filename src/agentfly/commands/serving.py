"""`agentfly serve`: vLLM's OpenAI-compatible server, started the way training needs it, and ended with this process."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import httpx

from agentfly.backends.orphans import MARK
from agentfly.errors import BackendFault, ConfigError
from agentfly.models import resolve

PATIENCE = 30.0
"""Seconds that the server has to end by itself."""
# Not `vllm serve`: it asks for the version of the package vllm, which the build for CPUs does not call itself.
_PROGRAM = """
import runpy
from agentfly.backends.orphans import die_with_parent
die_with_parent()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, and where."""

    model: str
    host: str
    port: int
    dtype: str | None = None
    tool_parser: str | None = None
    updatable: bool = False
    flags: tuple[str, ...] = ()
    """Further flags of `vllm serve`, which go before ours."""

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"

    @property
    def arguments(self) -> list[str]:
        """What the server is called with."""
        ours = [
            "--model", resolve(self.model), "--served-model-name", self.model, "--host", self.host,
            "--port", str(self.port), "--dtype", self._dtype(), "--logprobs-mode", "processed_logprobs",
            "--enable-prefix-caching",
        ]  # fmt: skip
        if self.tool_parser:
            ours += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser]
        given = {flag.partition("=")[0] for flag in self.flags}
        if _on_cpu():
            ours += [] if "--enforce-eager" in given else ["--enforce-eager"]
            ours += [] if "--kv-cache-memory-bytes" in given else ["--kv-cache-memory-bytes", str(_memory())]
        return [*ours, *self.flags]

    def _dtype(self) -> str:
        from agentfly.backends.transformers.loading import device_of, dtype_of

        return str(dtype_of(self.dtype, device_of("cpu" if _on_cpu() else None))).removeprefix("torch.")

    @property
    def usage(self) -> str:
        """How to use it, in one line."""
        settings = f'{{"base_url": "{self.url}/v1", "speaks": "tokens"}}'
        return f'HFAgent("{self.model}", backend="client", backend_config={settings})'


def serve(served: Served) -> int:
    """Serve until a signal ends it, or it ends by itself; its exit code."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "serving needs vllm, in an environment of its own: pip install 'agentfly[vllm]'; on a CPU, `make vllm` does"
        )
    _refuse_taken(served)
    environment = {**os.environ, MARK: str(os.getpid()), "VLLM_NO_USAGE_STATS": "1"}
    if served.updatable:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    command = [sys.executable, "-c", _PROGRAM, *served.arguments]
    # A session of its own: a Ctrl-C in the terminal reaches it once, through us.
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            with _Signals() as asked:
                return _watch(served, process, asked)
        finally:
            _end(process)


def _watch(served: Served, process: subprocess.Popen[bytes], asked: _Signals) -> int:
    ready = False
    while (code := process.poll()) is None:
        if asked.to_end:
            print("agentfly: ending the server", flush=True)
            return 0
        if not ready and (ready := _answers(served)):
            print(f"agentfly: {served.model} is served at {served.url}/v1; use it with\n  {served.usage}", flush=True)
        time.sleep(0.2)
    if not ready:
        raise BackendFault(f"vLLM ended with exit code {code} before it served anything; its own words are above")
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the server end by itself, and after a while in any case; with it goes all that it started."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()


class _Signals:
    """Ctrl-C and SIGTERM, noted instead of raised in the middle of something."""

    def __init__(self) -> None:
        self.to_end = False

    def __enter__(self) -> _Signals:
        self._before = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, _: int, __: FrameType | None) -> None:
        self.to_end = True


def _answers(served: Served) -> bool:
    try:
        with httpx.stream("GET", f"{served.url}/health", timeout=2, trust_env=False) as response:
            return response.is_success
    except httpx.HTTPError:
        return False


def _refuse_taken(served: Served) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((served.host, served.port))
        except OSError as error:
            raise ConfigError(
                f"{served.host}:{served.port} cannot be had ({error.strerror}); --port another"
            ) from error


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _memory() -> int:
    from agentfly.backends.transformers.loading import device_of
    from agentfly.backends.transformers.memory import memory_of

    return memory_of(None, device_of("cpu"))


def flags_of(extra: Sequence[str]) -> tuple[str, ...]:
    """The flags behind `--`, none of which may be one that `agentfly serve` sets itself."""
    own = {"--port": "--port", "--host": "--host", "--logprobs-mode": "nothing else", "--dtype": "--dtype"}
    for flag in extra:
        if (name := flag.partition("=")[0]) in own:
            raise ConfigError(f"{name} goes before the --, as {own[name]}")
    return tuple(extra)
