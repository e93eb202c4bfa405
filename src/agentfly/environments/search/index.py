"""Indexes on disk: built from a corpus, kept in a folder, loaded in a moment.

passages.jsonl, passages.npy    the passages, and where each begins
bm25/                           words, where it has them
vectors.npy                     meanings, where it has them
index.json                      what it is; written last, so that a folder without it is no index
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agentfly.environments.search.bm25 import BM25Index
from agentfly.environments.search.dense import DenseIndex, encoder
from agentfly.environments.search.passages import Hit, Passage, PassageFile
from agentfly.errors import ConfigError, DataError

KINDS = ("bm25", "dense", "hybrid")
DEPTH = 50
"""Passages of each ranking that a hybrid looks at, at least."""
SMOOTHING = 60
"""How little the first ranks count more than the next ones, in reciprocal rank fusion."""


class HybridIndex:
    """Two rankings made one: a passage is worth the reciprocals of its ranks, added up."""

    def __init__(self, words: BM25Index, meanings: DenseIndex) -> None:
        self.passages = words.passages
        self._rankings = (words, meanings)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        both = [each.ranked(queries, max(k, DEPTH)) for each in self._rankings]
        return [self._fused(rankings, k) for rankings in zip(*both, strict=True)]

    def _fused(self, rankings: Iterable[Sequence[tuple[int, float]]], k: int) -> list[Hit]:
        worth: dict[int, float] = {}
        for ranking in rankings:
            for rank, (at, _) in enumerate(ranking, 1):
                worth[at] = worth.get(at, 0.0) + 1 / (SMOOTHING + rank)
        best = sorted(worth, key=lambda at: (-worth[at], at))[:k]
        return [Hit(self.passages[at], worth[at]) for at in best]


Index = BM25Index | DenseIndex | HybridIndex


def build(
    passages: Iterable[Passage],
    folder: Path,
    kind: str = "bm25",
    model: str = "minilm",
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Index:
    """Index passages, and write all that is needed to search them to a folder that is not there, or empty."""
    if kind not in KINDS:
        raise ConfigError(f"an index is one of {', '.join(KINDS)}, not {kind!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already; name a folder that is not, or is empty")
    encode = encoder(model) if kind != "bm25" else None  # what is missing is told before the work begins
    folder.mkdir(parents=True, exist_ok=True)
    try:
        count = PassageFile.write(folder, passages)
        if not count:
            raise DataError("the corpus has no passages")
        there = PassageFile(folder)
        progress(f"{count} passages")
        if kind != "dense":
            BM25Index(there).save(folder)
            progress("words indexed")
        if encode is not None:
            DenseIndex.of(there, encode, progress).save(folder)
        about = {"format": 1, "kind": kind, "model": model if encode else None, "passages": count}
        (folder / "index.json").write_text(json.dumps(about) + "\n")
    except BaseException:
        shutil.rmtree(folder)
        raise
    return load(folder)


def about(folder: Path) -> dict[str, Any]:
    """What an index says about itself."""
    path = folder / "index.json"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no index; `agentfly search build CORPUS --out {folder}` makes one")
    said: dict[str, Any] = json.loads(path.read_text())
    if said.get("format") != 1 or said.get("kind") not in KINDS:
        raise ConfigError(f"{path} describes an index that this version cannot read; build it anew")
    return said


def load(folder: Path) -> Index:
    """The index in a folder. Its large parts are mapped, not read."""
    said = about(folder)
    passages = PassageFile(folder)
    words = BM25Index.load(folder, passages) if said["kind"] != "dense" else None
    meanings = DenseIndex.load(folder, passages, encoder(said["model"])) if said["kind"] != "bm25" else None
    if words is not None and meanings is not None:
        return HybridIndex(words, meanings)
    found = words if words is not None else meanings
    assert found is not None
    return found
