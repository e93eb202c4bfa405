"""`agentfly serve` and `agentfly gateway`: a model behind HTTP, by the embedded engine or by vLLM's own server."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from agentfly.errors import BackendFault, ConfigError

STOP_TIMEOUT = 30.0
"""Seconds the server has to stop before it is killed."""
# Not `vllm serve`: it reads the version of the package vllm, and the CPU build has another package name.
_PROGRAM = """
import runpy
from agentfly.backends.parent_death import die_with_parent
die_with_parent()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""


Model = Annotated[str, typer.Argument(help="Local folder, hub name, a model of `agentfly models`, or a run folder.")]
Host = Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 accepts other machines.")]
Port = Annotated[int, typer.Option(min=1, max=65535)]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the fastest here.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="AGENTFLY_API_KEY", help="Key that clients must send; needed unless loopback.")
]


def parse_size(text: str) -> int:
    """Parse a number of bytes, with or without a unit."""
    from pydantic import ByteSize, Field, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a size; write 2GiB, 500MB, or a number of bytes") from None


KVMemory = Annotated[
    int | None,
    typer.Option(
        parser=parse_size, metavar="SIZE", help="KV cache, such as 2GiB; default: half of a GPU's free memory."
    ),
]
Embedded, VLLM = "transformers", "vllm"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Settings of vLLM's server."""

    model: str
    host: str
    port: int
    dtype: str | None = None
    kv_memory: int | None = None
    tool_parser: str | None = None
    updatable: bool = False
    flags: tuple[str, ...] = ()
    """Further flags of `vllm serve`; they override ours."""

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments of the server."""
        from vllm.platforms import current_platform

        from agentfly.backends.engine.kv_cache import default_cache_bytes
        from agentfly.backends.engine.loading import resolve_device, resolve_dtype
        from agentfly.models import resolve

        on_cpu = bool(current_platform.is_cpu())
        device = resolve_device("cpu" if on_cpu else None)
        dtype = str(resolve_dtype(self.dtype, device)).removeprefix("torch.")
        derived = [
            "--model", resolve(self.model), "--served-model-name", self.model, "--host", self.host,
            "--port", str(self.port), "--dtype", dtype, "--logprobs-mode", "processed_logprobs",
            "--enable-prefix-caching",
        ]  # fmt: skip
        if self.tool_parser:
            derived += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser]
        user_flags = {flag.partition("=")[0] for flag in self.flags}
        if on_cpu and "--enforce-eager" not in user_flags:
            derived += ["--enforce-eager"]
        if (on_cpu or self.kv_memory) and "--kv-cache-memory-bytes" not in user_flags:
            derived += ["--kv-cache-memory-bytes", str(self.kv_memory or default_cache_bytes(device))]
        return [*derived, *self.flags]

    @property
    def usage(self) -> str:
        """A line of Python that uses the server."""
        settings = f'{{"base_url": "{self.url}/v1", "prompt_format": "tokens"}}'
        return f'HFAgent("{self.model}", backend="client", backend_config={settings})'


def serve(
    model: Model,
    flags: Annotated[list[str] | None, typer.Argument(help="With vllm, after --: flags of `vllm serve`.")] = None,
    backend: Annotated[str, typer.Option(help="transformers (the embedded engine) or vllm.")] = Embedded,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    dtype: Dtype = None,
    kv_memory: KVMemory = None,
    tool_parser: Annotated[str | None, typer.Option(help="With vllm: its tool-call parser, such as hermes.")] = None,
    updatable: Annotated[
        bool, typer.Option("--updatable", help="With vllm: let every client update the weights.")
    ] = False,
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs until Ctrl-C, with token ids and log-probabilities."""
    folder = find_checkpoint(model)
    if backend == VLLM:
        if api_key is not None:
            raise ConfigError("vLLM takes its key itself: put --api-key after the --")
        extra = parse_extra_flags(flags or ())
        config = ServeConfig(
            folder,
            host,
            port,
            dtype=dtype,
            kv_memory=kv_memory,
            tool_parser=tool_parser,
            updatable=updatable,
            flags=extra,
        )
        raise typer.Exit(run_server(config))
    if backend != Embedded:
        raise ConfigError(f"--backend is {Embedded} or {VLLM}, not {backend!r}")
    if flags or tool_parser or updatable:
        raise ConfigError(f"further flags, --tool-parser and --updatable need --backend {VLLM}")
    settings = {"dtype": dtype, "kv_memory": kv_memory}
    serve_with_engine(folder, host, port, name=model, api_key=api_key, settings=settings, out=None)


def gateway(
    model: Model,
    out: Annotated[Path, typer.Option(help="File for the recorded chains, as JSON lines.")] = Path("chains.jsonl"),
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    dtype: Dtype = None,
    kv_memory: KVMemory = None,
) -> None:
    """Serve a model and record what clients do as chains, until Ctrl-C; the header x-agentfly-chain names a chain."""
    settings = {"dtype": dtype, "kv_memory": kv_memory}
    serve_with_engine(find_checkpoint(model), host, port, name=model, api_key=api_key, settings=settings, out=out)


def find_checkpoint(model: str) -> str:
    """The newest model of a run folder; any other name as it is."""
    checkpoints = Path(model).expanduser() / "checkpoints"
    if not checkpoints.is_dir():
        return model
    models = [folder for folder in checkpoints.glob("step-*/model") if folder.is_dir()]
    if not models:
        raise ConfigError(f"the run {model!r} has no checkpoint yet")
    return str(max(models, key=lambda folder: int(folder.parent.name.removeprefix("step-"))))


def serve_with_engine(
    folder: str,
    host: str,
    port: int,
    *,
    name: str,
    api_key: str | None,
    settings: Mapping[str, Any],
    out: Path | None,
) -> None:
    """Serve with the embedded engine until SIGINT or SIGTERM.

    settings: of the engine; None is its default. out: record the chains and save them here.
    """
    from agentfly.agents import HFAgent
    from agentfly.data import save_trajectories
    from agentfly.gateway import Gateway

    if out is not None and out.exists():
        raise ConfigError(f"{out} exists; name another file with --out")
    agent = HFAgent(folder, backend=Embedded, backend_config=settings)
    server = Gateway(
        agent.backend,
        agent.load_template,
        model=name,
        host=host,
        port=port,
        api_key=api_key or "",
        record=out is not None,
    )

    async def run(signals: SignalFlag) -> None:
        try:
            async with server:
                client = f'{{"base_url": "{server.base_url}", "prompt_format": "tokens"}}'
                usage = f'HFAgent("{folder}", backend="client", backend_config={client})'
                print(f"agentfly: {name} is served at {server.base_url}; use it with\n  {usage}", flush=True)
                while not signals.received:  # noqa: ASYNC110  (a handler sets it)
                    await asyncio.sleep(0.1)
                print("agentfly: stopping the server", flush=True)
        finally:
            await agent.close()

    with SignalFlag() as signals:
        asyncio.run(run(signals))
    if out is not None:
        chains = [session.to_trajectory() for session in server.sessions.values()]
        chains = [chain for chain in chains if chain.turns]
        save_trajectories(out, chains)
        print(f"agentfly: {len(chains)} chains are in {out}", flush=True)


def run_server(config: ServeConfig) -> int:
    """Serve with vLLM until SIGINT, SIGTERM or the server's own end; return its exit code."""
    from agentfly.backends.parent_death import PARENT_VARIABLE

    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "serving needs vllm, in an environment of its own: pip install 'agentfly-rl[vllm]'; "
            "`make vllm` builds one for CPUs"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"{config.host}:{config.port} is not available ({error.strerror}); choose another --port"
            ) from error
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "VLLM_NO_USAGE_STATS": "1"}
    if config.updatable:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    command = [sys.executable, "-c", _PROGRAM, *config.arguments]
    # In its own session, Ctrl-C in the terminal reaches the server only through us.
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            with SignalFlag() as signals:
                return _watch(config, process, signals)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()  # its child processes end with it


def _watch(config: ServeConfig, process: subprocess.Popen[bytes], signals: SignalFlag) -> int:
    """Print the address when the server is ready; return when it ends or a signal arrives."""
    import httpx

    ready = False
    while (code := process.poll()) is None:
        if signals.received:
            print("agentfly: stopping the server", flush=True)
            return 0
        if not ready:
            health = httpx.stream("GET", f"{config.url}/health", timeout=2, trust_env=False)
            with contextlib.suppress(httpx.HTTPError), health as response:
                ready = response.is_success
            if ready:
                print(
                    f"agentfly: {config.model} is served at {config.url}/v1; use it with\n  {config.usage}", flush=True
                )
        time.sleep(0.2)
    if not ready:
        raise BackendFault(f"vLLM ended with exit code {code} before it was ready; its output is above")
    return code


class SignalFlag:
    """Records SIGINT and SIGTERM instead of raising an exception."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> SignalFlag:
        def record(_: int, __: FrameType | None) -> None:
            self.received = True

        self._before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def parse_extra_flags(extra: Sequence[str]) -> tuple[str, ...]:
    """Return the flags after `--`; raises ConfigError for flags that `agentfly serve` sets itself."""
    replacements = {"--port": "--port", "--host": "--host", "--logprobs-mode": "nothing else", "--dtype": "--dtype"}
    for flag in extra:
        if (name := flag.partition("=")[0]) in replacements:
            raise ConfigError(f"{name} goes before the --, as {replacements[name]}")
    return tuple(extra)
