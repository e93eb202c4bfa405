"""Lichess's puzzle database: millions of positions from real games with their winning moves."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from agentfly.environments.data import Source, open_text, validate_split
from agentfly.environments.games.chess_puzzle import make_puzzle_row
from agentfly.environments.task_sampling import belongs_to
from agentfly.errors import DataError

SOURCE = Source(
    "Lichess's puzzle database",
    "https://database.lichess.org/#puzzles (unpack it with `zstd -d lichess_db_puzzle.csv.zst`)",
    "lichess",
)
_NEEDED = ("PuzzleId", "FEN", "Moves")


def lichess_tasks(
    split: str = "train", count: int | None = None, *, lowest: int = 0, highest: int = 4000, theme: str = ""
) -> list[dict[str, Any]]:
    """The first `count` puzzles of a split (None: all) with a rating from `lowest` to `highest` and this theme.

    The split of a puzzle is a hash of its position.
    """
    validate_split(split)
    path = SOURCE.file("lichess_db_puzzle.csv")

    def accept(row: Mapping[str, str]) -> bool:
        rated = lowest <= float(row.get("Rating") or 0) <= highest
        return rated and belongs_to(row["FEN"], split) and (not theme or theme in (row.get("Themes") or "").split())

    with open_text(path) as lines:
        return list(islice(read_puzzles(lines, str(path), accept), count))


def read_puzzles(
    lines: Iterable[str], place: str, accept: Callable[[Mapping[str, str]], bool] = lambda _: True
) -> Iterator[dict[str, Any]]:
    """Tasks from the accepted rows of Lichess's CSV, which starts with a header."""
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            if not all(row.get(name) for name in _NEEDED):
                raise DataError(f"a puzzle needs {', '.join(_NEEDED)}; this row has {row!r:.200}")
            if not accept(row):
                continue
            puzzle = make_puzzle_row(row["FEN"], row["Moves"].split(), "Find the best moves.")
        except (DataError, ValueError) as error:
            raise DataError(f"{place}, line {number}: {error}") from error
        more = {"rating": row.get("Rating"), "themes": (row.get("Themes") or "").split()}
        yield {"id": f"lichess/{row['PuzzleId']}", **puzzle, **more}
