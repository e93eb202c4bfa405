"""A model that judges: what it was asked before it is not asked again.

Judgements are kept by everything that they depend on: the server, the model, every word of the question, the schema and
the sampling. They are kept while the instance lives, which all chains of a run share; where a file is named, in it too.
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
ADDRESS, MODEL, FILE = "AGENTFLY_JUDGE_URL", "AGENTFLY_JUDGE_MODEL", "AGENTFLY_JUDGE_CACHE"

KEPT = 100_000
"""Judgements in memory; beyond them the oldest goes."""


class Judge(ModelServer):
    """A model that judges for rewards. The environment names its server and model, or a subclass does."""

    base_url: ClassVar[str] = ""
    """Empty: what AGENTFLY_JUDGE_URL says."""
    model: ClassVar[str | None] = None
    """None: what AGENTFLY_JUDGE_MODEL says; and where it says nothing, the one model that the server has."""
    kept_in: ClassVar[Path | None] = None
    """A file for judgements; None: what AGENTFLY_JUDGE_CACHE says, and where it says nothing, none."""

    async def start(self) -> None:
        self._asking: dict[str, asyncio.Task[str]] = {}
        """Judgements under way or made, by what was asked."""
        path = self.kept_in or os.environ.get(FILE)
        self._file = await call(_File, Path(path)) if path else None
        await super().start()

    async def close(self) -> None:
        under_way = [each for each in getattr(self, "_asking", {}).values() if not each.done()]
        for each in under_way:
            each.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await super().close()

    def address(self) -> str:
        if found := self.base_url or os.environ.get(ADDRESS):
            return found
        raise ConfigError(
            f"no judge is named: set {ADDRESS} to a server's address, with /v1, or base_url on a subclass of Judge"
        )

    def wanted(self) -> str | None:
        return self.model or os.environ.get(MODEL)

    async def judged(self, asked: Sequence[Mapping[str, str]], schema: type[M]) -> M:
        """What the model answers, asked for as JSON of the schema; a question that was there before is not sent."""
        said = [self._client.base_url, self._client.model, asked, schema.model_json_schema(), asdict(self.sampling)]
        key = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        if key not in self._asking:
            if len(self._asking) >= KEPT:
                self._asking.pop(next(iter(self._asking)))
            self._asking[key] = asyncio.create_task(self._judgement(key, asked, schema))
        try:
            answer = await asyncio.shield(self._asking[key])  # one chain's going away is nothing to the others
        except Exception:
            self._asking.pop(key, None)
            raise
        return schema.model_validate_json(answer)

    async def _judgement(self, key: str, asked: Sequence[Mapping[str, str]], schema: type[M]) -> str:
        kept = await call(self._file.find, key) if self._file is not None else None
        if kept is not None:
            return str(kept)
        answer = (await self.chat(asked, schema=schema)).model_dump_json()
        if self._file is not None:
            await call(self._file.keep, key, answer)
        return answer


class _File:
    """Judgements on disk, which processes may share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as disk, disk:
                disk.execute("create table if not exists judgements (asked text primary key, answer text not null)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path} cannot keep judgements: {error}; name another file in {FILE}") from error

    def find(self, key: str) -> str | None:
        with self._open() as disk:
            row = disk.execute("select answer from judgements where asked = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, answer: str) -> None:
        with self._open() as disk, disk:
            disk.execute("insert or replace into judgements values (?, ?)", (key, answer))

    def _open(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self._path, timeout=30))
