"""AsyncLLM on a thread and an event loop of its own, so that any event loop may ask for tokens.

An engine that dies costs the turns under way; the next turn starts another, from the weights that were in use. After
`RESTARTS` of them in a row it is given up.
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
from pathlib import Path
from typing import Any, TypeVar

from vllm import AsyncEngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from agentfly.backends.base import CLOSED, OnUpdate
from agentfly.backends.parent_death import MARK
from agentfly.backends.weight_files import WeightFiles, WeightFolder, discard
from agentfly.errors import AgentFlyError, BackendFault, ConfigError, describe
from agentfly.threads import compute

RESTARTS = 3
"""Engines that may be started one after the other without one turn sampled."""
_PAUSES = {OnUpdate.CONTINUE: "keep", OnUpdate.FINISH: "wait", OnUpdate.ABORT: "abort"}
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class VLLMTurn:
    """A turn as vLLM samples it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    """vLLM's word for how it ended."""

    def add(self, output: Any, version: int) -> Sequence[int]:
        """Take in what was sampled since the last time; its ids."""
        ids = output.token_ids
        self.ids += ids
        self.logprobs += [each[token].logprob for token, each in zip(ids, output.logprobs or (), strict=True)]
        self.versions += [version] * len(ids)
        if output.finish_reason is not None:
            self.finish = output.finish_reason
            for span in getattr(output, "weight_versions", None) or ():  # it knows better than who hears of it later
                self.versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        return list(ids)


class VLLMEngine:
    """A vLLM engine at work."""

    stamps = hasattr(AsyncLLM, "update_weight_version")
    """Whether this vLLM tells which weights sampled which token."""

    def __init__(self, arguments: Mapping[str, Any], handover: WeightFolder) -> None:
        """Returns when the engine takes requests, which is the better part of a minute."""
        self._arguments, self._handover = dict(arguments), handover
        self._llm: AsyncLLM | None = None
        self._numbers = itertools.count()
        self._turns: dict[asyncio.Task[Any], str] = {}
        """The turns under way, and why they end, where that was decided here."""
        self._starts = self.version = 0
        self._level = 0
        """How deep it sleeps; 0 is awake."""
        self._closed = False
        self._closing = threading.RLock()
        """So that whatever is asked before the end reaches the loop before the end does."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agentfly-vllm", daemon=True)
        self._thread.start()
        try:
            self.config = self._submit(self._first).result()
        except BaseException:
            self.stop()
            raise

    async def sample(
        self, prompt: list[int], params: SamplingParams, hear: Callable[[Sequence[int]], None] | None
    ) -> VLLMTurn:
        """Sample one turn; `hear` is called, here, with what was sampled since the last time."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Sequence[int] | None]()

        def tell(ids: Sequence[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(news.put_nowait, ids)

        asked = self._ask(self._sample, prompt, params, None if hear is None else tell)
        asked.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (ids := await news.get()) is not None:
                if hear is not None:
                    hear(ids)
            return await asked
        finally:
            asked.cancel()

    async def update(self, weights: Iterable[tuple[str, Any]], version: int, then: OnUpdate) -> None:
        """Change the weights. Once begun it is seen through, whether or not anybody still waits."""
        await asyncio.shield(self._ask(self._update, weights, version, then))

    async def sleep(self, level: int, then: OnUpdate) -> None:
        """Give the GPU's memory back: the weights go to the host's memory (1), or nowhere (2)."""
        await asyncio.shield(self._ask(self._sleep, level, then))

    async def wake_up(self) -> None:
        """Take the memory again; what was asked for meanwhile is sampled."""
        await asyncio.shield(self._ask(self._wake_up))

    def stop(self) -> None:
        """Have everything end. Whoever still waits is told."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)

    async def close(self) -> None:
        """Stop, and wait until no process is left."""
        self.stop()
        while self._thread.is_alive():  # a thread may be waited for by many, in any loop
            await asyncio.to_thread(self._thread.join, 1.0)

    def _ask(self, what: Callable[..., Awaitable[T]], *args: Any) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._submit(what, *args))

    def _submit(self, what: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        async def run() -> T:
            try:
                return await what(*args)
            except asyncio.CancelledError as error:
                if not self._closed:
                    raise
                raise BackendFault(CLOSED) from error  # whoever asked was not cancelled: the engine was

        with self._closing:
            if self._closed or not self._thread.is_alive():  # closed, or in a fork, which has no thread
                raise BackendFault(CLOSED)
            return asyncio.run_coroutine_threadsafe(run(), self._loop)

    # ── in the thread ──

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(asyncio.sleep(0))  # what was asked last has begun, and can be told
            self._end_turns(CLOSED)
            self._shut_down()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._handover.close()

    async def _first(self) -> Any:
        self._updating = asyncio.Lock()
        self._llm = await self._start()
        return self._llm.vllm_config

    async def _start(self) -> AsyncLLM:
        """An engine with the weights in use."""
        try:
            with _mark_children():
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=self._handover.model, **self._arguments))
        except (OSError, TypeError, ValueError) as error:  # pydantic's are ValueErrors
            said = " ".join(describe(error).split())[:500]
            raise ConfigError(f"vLLM does not take {self._handover.model!r} with these settings: {said}") from error
        except Exception as error:
            raise BackendFault(f"vLLM does not start ({describe(error)}); its own words are on stderr") from error
        if self._handover.adapter is not None:
            await llm.add_lora(self._adapter())
        if self.stamps:
            await llm.update_weight_version(str(self.version))
        return llm

    def _adapter(self) -> LoRARequest | None:
        folder = self._handover.adapter
        return LoRARequest("adapter", 1, str(folder)) if folder is not None else None

    async def _alive(self) -> AsyncLLM:
        """The engine, if need be another one."""
        async with self._updating:
            return await self._restart_if_dead()

    async def _restart_if_dead(self) -> AsyncLLM:
        if self._llm is not None and not self._llm.errored:
            return self._llm
        if self._closed:
            raise BackendFault(CLOSED)
        self._shut_down()
        if self._starts >= RESTARTS:
            raise BackendFault(f"vLLM's engine ended {self._starts + 1} times in a row; its own words are on stderr")
        self._starts += 1
        _LOG.warning("vLLM's engine is gone; another is started, with the weights of version %s", self.version)
        self._llm = await self._start()
        self._level = 0
        return self._llm

    def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    def _end_turns(self, why: str) -> None:
        for task in self._turns:
            self._turns[task] = why
            task.cancel()

    async def _sample(
        self, prompt: list[int], params: SamplingParams, tell: Callable[[Sequence[int]], None] | None
    ) -> VLLMTurn:
        this = asyncio.current_task()
        assert this is not None
        llm = self._llm if self._llm is not None and not self._llm.errored else await self._alive()
        self._turns[this] = ""
        said, name = VLLMTurn(), f"turn-{next(self._numbers)}"
        try:
            stream = llm.generate({"prompt_token_ids": prompt}, params, name, lora_request=self._adapter())
            async with contextlib.aclosing(stream):
                async for output in stream:
                    fresh = said.add(output.outputs[0], self.version)
                    if tell is not None and fresh:
                        tell(fresh)
        except EngineDeadError as error:
            raise BackendFault(self._turns[this] or "vLLM's engine died; its own words are on stderr") from error
        except asyncio.CancelledError as error:
            if not self._turns[this]:
                raise
            raise BackendFault(self._turns[this]) from error
        except AgentFlyError:
            raise
        except Exception as error:
            raise BackendFault(f"vLLM could not sample: {describe(error)}") from error
        finally:
            del self._turns[this]
        self._starts = 0
        return said

    async def _update(self, weights: Iterable[tuple[str, Any]], version: int, then: OnUpdate) -> None:
        async with self._updating:
            llm = await self._restart_if_dead()
            if self._level:
                raise ConfigError("the engine sleeps; call wake_up() before update_weights()")
            handed = await compute(self._handover.write, weights)
            if handed.model is not None and _keeps_its_head(self.config):
                discard(handed)
                raise ConfigError(
                    "vLLM on a CPU goes on with the head it has packed where a model shares it with its embeddings, so "
                    "it would sample with a head of the old weights; use backend='transformers' here, or a GPU"
                )
            try:
                await llm.pause_generation(mode=_PAUSES[then], clear_cache=True)
                await self._take(llm, handed, version)
                self.version = version
                await llm.resume_generation()
            except Exception as error:
                discard(handed)
                why = f"vLLM did not take the weights of version {version}: {describe(error)}"
                self._end_turns(why)
                self._shut_down()  # its weights may be of no version; the next turn has those of the last one
                raise BackendFault(why) from error
            self._handover.keep(handed)

    async def _take(self, llm: AsyncLLM, handed: WeightFiles, version: int) -> None:
        if handed.model is not None:
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(handed.model)})
        if handed.adapter is not None:
            await llm.add_lora(LoRARequest("adapter", 1, str(handed.adapter), load_inplace=True))
        if self.stamps:
            await llm.update_weight_version(str(version))

    async def _sleep(self, level: int, then: OnUpdate) -> None:
        async with self._updating:
            llm = await self._restart_if_dead()
            if self._level:
                raise ConfigError("the engine sleeps already")
            await llm.sleep(level, mode=_PAUSES[then])
            self._level = level

    async def _wake_up(self) -> None:
        async with self._updating:
            llm = await self._restart_if_dead()
            if self._level == 2:
                await llm.wake_up(["weights"])
                await self._take(llm, WeightFiles(Path(self._handover.model), self._handover.adapter), self.version)
                await llm.wake_up(["kv_cache"])
            elif self._level:
                await llm.wake_up()
            self._level = 0


@contextlib.contextmanager
def _mark_children() -> Iterator[None]:
    """Processes that are started meanwhile know whose they are."""
    before = os.environ.get(MARK)
    os.environ[MARK] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[MARK]
        if before is not None:
            os.environ[MARK] = before


def _keeps_its_head(config: Any) -> bool:
    return current_platform.is_cpu() and bool(config.model_config.hf_text_config.tie_word_embeddings)
