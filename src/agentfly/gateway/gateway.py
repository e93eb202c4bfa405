"""`Gateway`: any backend behind the OpenAI and Anthropic APIs, with a recorded chain per API key.

The server runs in a thread with an event loop of its own, so that a client that blocks the caller's loop cannot stop
the server it waits for. Sessions and their recorders belong to that loop.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentfly.backends.base import Backend, PromptFormat
from agentfly.errors import BackendFault, ConfigError, describe, require_extra
from agentfly.gateway.chat import ApiError
from agentfly.gateway.http_server import digest_key, equals_key, format_url, open_listener, require_key
from agentfly.gateway.session import GatewaySession, LoadTemplate, TemplateCache
from agentfly.rollout.config import ChainSettings
from agentfly.rollout.limits import ChainLimits
from agentfly.threads import call

T = TypeVar("T")
MAX_CHAINS = 4096
"""Maximum number of chains of clients with the gateway's own key."""
_START_SECONDS = 60.0


class Gateway:
    """Serves a backend over HTTP. Use it as an async context manager, or call `start` and `close`."""

    def __init__(
        self,
        backend: Backend,
        load_template: LoadTemplate,
        *,
        model: str = "model",
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        record: bool = True,
        limits: ChainLimits | None = None,
    ) -> None:
        """
        Args:
            backend: Samples the turns; it must take token ids.
            load_template: Returns the model's template for the tools of a request; `agent.load_template`.
            model: The name that /models lists; requests may name any.
            host: Address to listen on.
            port: 0: any free port.
            api_key: The gateway's own key, for clients without a session: the header x-agentfly-chain names their
                chain, and they choose their sampling. "" accepts any key, also as the name of a chain, and needs a
                loopback address; None accepts only the keys of `open_session`.
            record: Whether the chains of clients with that key are recorded.
            limits: Limits of those chains; None: a thousand turns.
        """
        if backend.prompt_format is not PromptFormat.TOKENS:
            raise ConfigError("a gateway records token ids: use a backend that takes them (prompt_format='tokens')")
        if api_key is not None:
            require_key(host, api_key)
        self.backend = backend
        self.templates = TemplateCache(load_template)
        self.model = model
        self.host = host
        self.port = port
        self.record = record
        self.sessions: dict[str, GatewaySession] = {}
        """The chains of clients with the gateway's own key, by name."""
        self._finished: Counter[str] = Counter()
        """Sums of the counts of chains that have ended."""
        self._settings = ChainSettings(limits=limits or ChainLimits(max_turns=1000))
        self._key = api_key
        self._keys: dict[bytes, GatewaySession] = {}
        """Sessions by the digest of their key."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._server: Any = None
        self._ready = threading.Event()
        self._start_lock = threading.Lock()
        self._failure = ""

    @property
    def takes_any_key(self) -> bool:
        """Whether requests need no key."""
        return self._key == ""

    @property
    def url(self) -> str:
        """Address of the server, without /v1."""
        return format_url("127.0.0.1" if self.host == "0.0.0.0" else self.host, self.port)

    @property
    def base_url(self) -> str:
        """Address for clients of OpenAI's APIs; those of Anthropic take it too, with or without /v1."""
        return f"{self.url}/v1"

    # ── sessions ──

    async def open_session(
        self, settings: ChainSettings, *, name: str = "", position: tuple[int, int] = (0, 0), attempt: int = 0
    ) -> tuple[str, GatewaySession]:
        """Open a chain; returns its key and the session. Close it with `close_session`."""

        async def open_in_loop() -> GatewaySession:
            return GatewaySession(self.backend, self.templates, settings, name=name, position=position, attempt=attempt)

        session = await self._run(open_in_loop())
        key = f"sk-chain-{secrets.token_urlsafe(32)}"
        self._keys[digest_key(key)] = session
        return key, session

    async def close_session(self, key: str) -> None:
        """End a chain: its key is not valid any more, and its running requests are cancelled."""
        session = self._keys.pop(digest_key(key))
        await self._run(session.close())
        assert session.recorder is not None
        self._finished += session.recorder.counts

    def authenticate(self, key: bytes) -> GatewaySession | None:
        """The session of a chain's key; None for the gateway's own. Raises ApiError 401 for an unknown key."""
        session = self._keys.get(digest_key(key))
        if session is None and (self._key is None or (self._key and not equals_key(key, self._key))):
            raise ApiError("the API key is not valid here", 401, "invalid_api_key")
        return session

    def get_session(self, key: bytes, chain: str) -> GatewaySession:
        """The session of a chain of clients with the gateway's own key; its first request creates it."""
        if not self.record:
            chain = ""
        elif not chain and key and self.takes_any_key:
            # A digest: the chains are saved, and the key may be a secret of another service.
            chain = f"key-{digest_key(key).hex()[:12]}"
        if chain not in self.sessions:
            if len(self.sessions) >= MAX_CHAINS:
                raise ApiError(f"there are {MAX_CHAINS} chains already; start another gateway", 429, "too_many_chains")
            self.sessions[chain] = GatewaySession(
                self.backend, self.templates, self._settings, name=chain, record=self.record, client_sampling=True
            )
        return self.sessions[chain]

    def metrics(self) -> dict[str, float]:
        """Turns, segments, and the fraction of follow-up turns that continued the recorded tokens."""
        sessions = [*self._keys.values(), *self.sessions.values()]
        recorders = [session.recorder for session in sessions if session.recorder is not None]
        total = sum((recorder.counts for recorder in recorders), self._finished)
        return {
            "chains": float(total["chains"]),
            "turns": float(total["turns"]),
            "segments": float(total["segments"]),
            "continued": total["continued"] / total["follow_ups"] if total["follow_ups"] else 1.0,
        }

    # ── the server ──

    async def start(self) -> Gateway:
        """Listen. Raises ConfigError if the address is not available. May be called again."""
        await call(self._start)
        return self

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is not None:
                return
            with require_extra("serving", "gateway"):
                from agentfly.gateway.server import GatewayApp, make_server
            listener = open_listener(self.host, self.port)
            self.port = listener.getsockname()[1]

            def serve() -> None:
                async def main() -> None:
                    self._loop = asyncio.get_running_loop()
                    self._server = make_server(GatewayApp(self), self._ready.set)
                    await self._server.serve(sockets=[listener])

                try:
                    asyncio.run(main())
                except BaseException as error:
                    self._failure = describe(error)
                finally:
                    listener.close()
                    self._ready.set()

            self._thread = threading.Thread(target=serve, name="agentfly-gateway", daemon=True)
            self._thread.start()
            if not self._ready.wait(_START_SECONDS) or self._failure:
                raise BackendFault(f"the gateway did not start: {self._failure or 'no answer'}")

    async def close(self) -> None:
        """Stop the server; running requests are cancelled. The backend stays open."""
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return
        for session in [*self._keys.values(), *self.sessions.values()]:
            await self._run(session.close())
        self._server.should_exit = True
        await call(thread.join)
        self._ready.clear()

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the gateway's event loop."""
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def __aenter__(self) -> Gateway:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
