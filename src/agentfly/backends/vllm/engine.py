"""vLLM's AsyncLLM in its own thread and event loop, so that requests may come from any event loop.

When the engine dies, the running requests fail, and the next request starts a new engine with the weights in use. After
`MAX_RESTARTS` restarts without a finished request, requests fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from agentfly.backends.base import CLOSED, OnUpdate
from agentfly.backends.parent_death import PARENT_VARIABLE
from agentfly.backends.vllm.shared_weights import EXTENSION, SharedWeights
from agentfly.backends.weight_files import WeightFiles, WeightFolder
from agentfly.errors import AgentFlyError, BackendFault, ConfigError, describe
from agentfly.threads import compute

MAX_RESTARTS = 3
_PAUSE_MODES = {OnUpdate.CONTINUE: "keep", OnUpdate.FINISH: "wait", OnUpdate.ABORT: "abort"}
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class VLLMTurn:
    """The tokens of a request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    """vLLM's finish reason."""
    prompt_ids: list[int] = field(default_factory=list)
    """The prompt as the model got it, images expanded to their tokens."""

    def add(self, output: Any, version: int) -> Sequence[int]:
        """Append the tokens of an output, and return their ids."""
        ids = output.token_ids
        self.ids += ids
        self.logprobs += [entry[token].logprob for token, entry in zip(ids, output.logprobs or (), strict=True)]
        self.versions += [version] * len(ids)
        if output.finish_reason is not None:
            self.finish = output.finish_reason
            # `version` is the current one here; vLLM reports the one each token was sampled with.
            for span in getattr(output, "weight_versions", None) or ():
                self.versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        return list(ids)


class VLLMEngine:
    """A vLLM engine. Its methods may be called from any event loop."""

    reports_versions = hasattr(AsyncLLM, "update_weight_version")
    """Whether this version of vLLM reports which weights sampled which token."""

    def __init__(self, arguments: Mapping[str, Any], weight_folder: WeightFolder) -> None:
        """Start the engine, which takes up to a minute; return when it accepts requests."""
        self.version = 0
        self._arguments = dict(arguments)
        self._weight_folder = weight_folder
        self._llm: AsyncLLM | None = None
        self._request_ids = itertools.count()
        self._running: dict[asyncio.Task[Any], str] = {}
        """Running requests, each with the message of its fault if the engine cancelled it."""
        self._restarts = 0
        self._sleep_level = 0
        """0: awake."""
        self._shared_only = False
        """Whether the weights in use came from a GPU and are in no file."""
        self._closed = False
        self._close_lock = threading.RLock()
        """Orders calls and `stop`: a call that was accepted reaches the loop before the stop does."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agentfly-vllm", daemon=True)
        self._thread.start()

        async def start() -> Any:
            self._update_lock = asyncio.Lock()
            self._llm = await self._start()
            return self._llm.vllm_config

        try:
            self.config = self._submit(start).result()
        except BaseException:
            self.stop()
            raise

    async def sample(
        self, prompt: dict[str, Any], params: SamplingParams, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> VLLMTurn:
        """Sample one turn; `on_tokens` is called in the caller's event loop. prompt: a `TokensPrompt` of vLLM."""
        loop = asyncio.get_running_loop()
        outputs = asyncio.Queue[Sequence[int] | None]()

        def put(ids: Sequence[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(outputs.put_nowait, ids)

        future = self._call(self._sample, prompt, params, None if on_tokens is None else put)
        future.add_done_callback(lambda _: outputs.put_nowait(None))
        try:
            while (ids := await outputs.get()) is not None:
                if on_tokens is not None:
                    on_tokens(ids)
            return await future
        finally:
            future.cancel()

    async def update(self, weights: Iterable[tuple[str, Any]], version: int, on_update: OnUpdate) -> None:
        """Change the weights. An update that has begun completes even if the caller is cancelled."""
        await asyncio.shield(self._call(self._update, weights, version, on_update))

    async def sleep(self, level: int, on_update: OnUpdate) -> None:
        """Free the GPU memory. Level 1 moves the weights to host memory, level 2 discards them."""
        await asyncio.shield(self._call(self._sleep, level, on_update))

    async def wake_up(self) -> None:
        """Allocate the GPU memory again."""
        await asyncio.shield(self._call(self._wake_up))

    def stop(self) -> None:
        """Stop the engine; running requests raise BackendFault."""
        with self._close_lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)

    async def close(self) -> None:
        """Stop, and wait until all processes have ended."""
        self.stop()
        while self._thread.is_alive():  # several callers, in several loops, may wait for the thread
            await asyncio.to_thread(self._thread.join, 1.0)

    def _call(self, function: Callable[..., Awaitable[T]], *args: Any) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._submit(function, *args))

    def _submit(self, function: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        """Run a coroutine function in the engine's loop."""

        async def run() -> T:
            try:
                return await function(*args)
            except asyncio.CancelledError as error:
                if not self._closed:
                    raise
                raise BackendFault(CLOSED) from error  # cancelled by `_run`, not by the caller

        with self._close_lock:
            if self._closed or not self._thread.is_alive():  # a forked process has no thread
                raise BackendFault(CLOSED)
            return asyncio.run_coroutine_threadsafe(run(), self._loop)

    # ── in the engine's thread ──

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(asyncio.sleep(0))  # start the calls submitted last, so that they can fail
            self._cancel_running(CLOSED)
            self._shut_down()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._weight_folder.close()

    async def _start(self) -> AsyncLLM:
        """Start an engine with the weights in use."""
        model = self._weight_folder.model
        try:
            with _mark_children():
                arguments = {"worker_extension_cls": EXTENSION, **self._arguments}
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **arguments))
        except (OSError, TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
            message = " ".join(describe(error).split())[:500]
            raise ConfigError(f"vLLM does not take {model!r} with these settings: {message}") from error
        except Exception as error:
            raise BackendFault(f"vLLM does not start ({describe(error)}); its own error is on stderr") from error
        if self._weight_folder.adapter is not None:
            await llm.add_lora(self._lora_request())
        if self.reports_versions:
            await llm.update_weight_version(str(self.version))
        return llm

    def _lora_request(self) -> LoRARequest | None:
        folder = self._weight_folder.adapter
        return LoRARequest("adapter", 1, str(folder)) if folder is not None else None

    async def _ensure_alive(self) -> AsyncLLM:
        """Return the engine; restart it if it is dead. The caller holds the update lock."""
        if self._llm is not None and not self._llm.errored:
            return self._llm
        if self._closed:
            raise BackendFault(CLOSED)
        self._shut_down()
        if self._shared_only:
            raise BackendFault(
                f"vLLM's engine died, and with it the weights of version {self.version}, which came from the learner's "
                "GPU and are in no file: resume the run from its last checkpoint"
            )
        if self._restarts >= MAX_RESTARTS:
            raise BackendFault(f"vLLM's engine died {self._restarts + 1} times in a row; its own error is on stderr")
        self._restarts += 1
        _LOG.warning("vLLM's engine died; starting a new one with the weights of version %s", self.version)
        self._llm = await self._start()
        self._sleep_level = 0
        return self._llm

    def _shut_down(self) -> None:
        llm = self._llm
        self._llm = None
        if llm is not None:
            llm.shutdown()

    def _cancel_running(self, message: str) -> None:
        for task in self._running:
            self._running[task] = message
            task.cancel()

    async def _sample(
        self, prompt: dict[str, Any], params: SamplingParams, on_tokens: Callable[[Sequence[int]], None] | None
    ) -> VLLMTurn:
        task = asyncio.current_task()
        assert task is not None
        llm = self._llm
        if llm is None or llm.errored:
            async with self._update_lock:
                llm = await self._ensure_alive()
        self._running[task] = ""
        turn = VLLMTurn()
        request_id = f"turn-{next(self._request_ids)}"
        try:
            stream = llm.generate(prompt, params, request_id, lora_request=self._lora_request())
            async with contextlib.aclosing(stream):
                async for output in stream:
                    ids = turn.add(output.outputs[0], self.version)
                    turn.prompt_ids = output.prompt_token_ids or turn.prompt_ids
                    if on_tokens is not None and ids:
                        on_tokens(ids)
        except EngineDeadError as error:
            raise BackendFault(self._running[task] or "vLLM's engine died; its own error is on stderr") from error
        except asyncio.CancelledError as error:
            if not self._running[task]:
                raise
            raise BackendFault(self._running[task]) from error
        except AgentFlyError:
            raise
        except Exception as error:
            raise BackendFault(f"vLLM could not sample: {describe(error)}") from error
        finally:
            del self._running[task]
        self._restarts = 0
        return turn

    async def _update(self, weights: Iterable[tuple[str, Any]], version: int, on_update: OnUpdate) -> None:
        async with self._update_lock:
            llm = await self._ensure_alive()
            prepared = await compute(self._prepare, weights)
            try:
                if self._sleep_level:  # the KV cache is allocated last: loading needs memory of its own
                    torch.cuda.empty_cache()  # what the learner's allocator keeps is vLLM's memory now
                    await llm.wake_up(["weights"])
                    await self._load(llm, self._complete(prepared), version)
                    self.version = version  # before requests run again
                    await llm.wake_up(["kv_cache"])
                    self._sleep_level = 0
                else:
                    await llm.pause_generation(mode=_PAUSE_MODES[on_update], clear_cache=True)
                    await self._load(llm, prepared, version)
                    self.version = version
                    await llm.resume_generation()
            except Exception as error:
                prepared.release()
                message = f"vLLM did not take the weights of version {version}: {describe(error)}"
                self._cancel_running(message)
                self._shut_down()  # its weights may be inconsistent; the next request restarts it with the last ones
                raise BackendFault(message) from error
            self._shared_only = isinstance(prepared, SharedWeights)
            if isinstance(prepared, SharedWeights):
                prepared.release()
            else:
                self._weight_folder.commit(prepared)

    def _prepare(self, weights: Iterable[tuple[str, Any]]) -> SharedWeights | WeightFiles:
        """Share weights on a GPU with the workers; write others to files, also for an adapter or a given folder."""
        tensors = self._weight_folder.iterate(weights)
        first = next(tensors, None)
        if first is None:
            return WeightFiles(None, None)
        model_config = self.config.model_config
        if first[1].is_cuda and self._weight_folder.parent is None and not self._arguments.get("enable_lora"):
            return SharedWeights.share(chain([first], tensors), model_config.dtype)
        # On a CPU, vLLM keeps a packed copy of an output head that is shared with the embeddings.
        if ".lora_" not in first[0] and current_platform.is_cpu() and model_config.hf_text_config.tie_word_embeddings:
            raise ConfigError(
                "vLLM on a CPU keeps its packed copy of an output head that the model shares with its embeddings, "
                "so it would sample with a head of the old weights; use backend='transformers' here, or a GPU"
            )
        return self._weight_folder.write(chain([first], tensors))

    def _complete(self, weights: SharedWeights | WeightFiles) -> SharedWeights | WeightFiles:
        """The weights to load after a sleep: if it discarded them and these are none of the model's, those in use."""
        if isinstance(weights, SharedWeights) or weights.model is not None or self._sleep_level < 2:
            return weights
        if self._shared_only:
            raise ConfigError("the weights were discarded, and no file has them: send all with update_weights()")
        return WeightFiles(Path(self._weight_folder.model), weights.adapter or self._weight_folder.adapter)

    async def _load(self, llm: AsyncLLM, weights: SharedWeights | WeightFiles, version: int) -> None:
        if isinstance(weights, SharedWeights):
            await llm.collective_rpc("load_shared_weights", args=(weights.handles,))
        else:
            if weights.model is not None:
                await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights.model)})
            if weights.adapter is not None:
                await llm.add_lora(LoRARequest("adapter", 1, str(weights.adapter), load_inplace=True))
        if self.reports_versions:
            await llm.update_weight_version(str(version))

    async def _sleep(self, level: int, on_update: OnUpdate) -> None:
        async with self._update_lock:
            llm = await self._ensure_alive()
            if self._sleep_level:
                raise ConfigError("the engine already sleeps")
            await llm.sleep(level, mode=_PAUSE_MODES[on_update])
            self._sleep_level = level

    async def _wake_up(self) -> None:
        async with self._update_lock:
            llm = await self._ensure_alive()
            torch.cuda.empty_cache()
            if self._sleep_level == 2:
                in_use = self._complete(WeightFiles(None, None))
                await llm.wake_up(["weights"])
                await self._load(llm, in_use, self.version)
                await llm.wake_up(["kv_cache"])
            elif self._sleep_level:
                await llm.wake_up()
            self._sleep_level = 0


@contextlib.contextmanager
def _mark_children() -> Iterator[None]:
    """Set the variable that makes processes started inside the block end with this process."""
    previous_owner = os.environ.get(PARENT_VARIABLE)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[PARENT_VARIABLE]
        if previous_owner is not None:
            os.environ[PARENT_VARIABLE] = previous_owner
