"""Judge: a model that scores answers, with a cache of its judgments.

The cache key is everything that a judgment depends on: server, model, messages, schema and sampling.
Judgments are cached in memory while the instance lives, which all chains of a run share, and in a file if one is named.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, TypeVar

import pydantic

from agentfly.environments.model_server import ModelServer
from agentfly.errors import ConfigError
from agentfly.threads import call

M = TypeVar("M", bound=pydantic.BaseModel)
URL_VARIABLE, MODEL_VARIABLE, CACHE_VARIABLE = "AGENTFLY_JUDGE_URL", "AGENTFLY_JUDGE_MODEL", "AGENTFLY_JUDGE_CACHE"

MAX_CACHED = 100_000
"""Judgments in memory; the oldest is evicted."""


class Judge(ModelServer):
    """A model that scores answers for rewards. Environment variables name its server and model, or a subclass does."""

    base_url: ClassVar[str] = ""
    """Empty: the value of AGENTFLY_JUDGE_URL."""
    model: ClassVar[str | None] = None
    """None: the value of AGENTFLY_JUDGE_MODEL, or if it is not set, the only model that the server serves."""
    cache_file: ClassVar[Path | None] = None
    """SQLite file for judgments. None: the value of AGENTFLY_JUDGE_CACHE, or if it is not set, no file."""

    async def start(self) -> None:
        self._judgments: dict[str, asyncio.Task[str]] = {}
        """Judgments that are requested or made, by cache key."""
        path = self.cache_file or os.environ.get(CACHE_VARIABLE)
        self._cache = await call(_JudgmentCache, Path(path)) if path else None
        await super().start()

    async def close(self) -> None:
        pending = [each for each in getattr(self, "_judgments", {}).values() if not each.done()]
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await super().close()

    def server_url(self) -> str:
        if url := self.base_url or os.environ.get(URL_VARIABLE):
            return url
        raise ConfigError(
            f"no judge is named: set {URL_VARIABLE} to a server's address, with /v1, or base_url on a subclass of Judge"
        )

    def model_name(self) -> str | None:
        return self.model or os.environ.get(MODEL_VARIABLE)

    async def evaluate(self, messages: Sequence[Mapping[str, str]], schema: type[M]) -> M:
        """Return the model's answer as the schema's type, from the cache if it was requested before."""
        parts = [self._client.base_url, self._client.model, messages, schema.model_json_schema(), asdict(self.sampling)]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        if key not in self._judgments:
            if len(self._judgments) >= MAX_CACHED:
                self._judgments.pop(next(iter(self._judgments)))
            self._judgments[key] = asyncio.create_task(self._request(key, messages, schema))
        try:
            answer = await asyncio.shield(self._judgments[key])  # a cancelled chain does not cancel it for the others
        except Exception:
            self._judgments.pop(key, None)
            raise
        return schema.model_validate_json(answer)

    async def _request(self, key: str, messages: Sequence[Mapping[str, str]], schema: type[M]) -> str:
        if self._cache is not None and (cached := await call(self._cache.get, key)) is not None:
            return str(cached)
        answer = (await self.chat(messages, schema=schema)).model_dump_json()
        if self._cache is not None:
            await call(self._cache.put, key, answer)
        return answer


class _JudgmentCache:
    """Judgments in an SQLite file, which several processes may share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._connect() as database, database:
                database.execute("create table if not exists judgements (asked text primary key, answer text not null)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{path} cannot keep judgments: {error}; name another file in {CACHE_VARIABLE}"
            ) from error

    def get(self, key: str) -> str | None:
        with self._connect() as database:
            row = database.execute("select answer from judgements where asked = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, answer: str) -> None:
        with self._connect() as database, database:
            database.execute("insert or replace into judgements values (?, ?)", (key, answer))

    def _connect(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self._path, timeout=30))
