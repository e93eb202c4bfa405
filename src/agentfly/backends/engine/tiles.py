"""Which program of the attention kernel attends to which keys for which tokens of a step.

A tile is some consecutive tokens of one sequence. One program per tile and key head keeps a GPU busy only where there
are many tiles: a single sequence behind 16,000 tokens would be read by two of its 132 multiprocessors. So the keys of
long tiles are split into parts of about the same size, as many as the GPU has room for at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentfly.backends.engine.request import Ints

MIN_PART = 256
"""Keys of a part at least: combining smaller ones costs more than they save."""
PART_MULTIPLE = 128
"""A part's keys are a multiple of those that a program looks at in one iteration, but for a tile's last part."""


def tile_tokens(heads: int, key_heads: int, queries: int) -> int:
    """Tokens of a tile of `queries` queries."""
    return max(queries // (heads // key_heads), 1)


class TilePlan(NamedTuple):
    """The parts of all tiles of a step, one after another. [part]"""

    first: Ints
    """The tile's first token in the step."""
    tokens: Ints
    """The tile's number of tokens."""
    begin: Ints
    """First position in the sequence that the part attends to."""
    end: Ints
    """The position behind its last one."""
    row: Ints
    """Where the part leaves its result, if its tile has several."""
    base: Ints
    """The row of the tile's first part."""
    parts: Ints
    """The tile's number of parts."""

    def write(self, buffer: npt.NDArray[np.int32]) -> None:
        """Write the plan into a buffer of a fixed number of parts, [field, part]; the others have no tokens."""
        used = len(self.first)
        buffer[:, :used] = self
        buffer[self._fields.index("tokens"), used:] = 0


def plan_tiles(firsts: Ints, counts: Ints, pasts: Ints, *, tokens_of_tile: int, max_parts: int) -> TilePlan:
    """Cut spans of tokens into tiles, and the keys of long tiles into parts.

    Args:
        firsts: The first token of every span in the step.
        counts: Its number of tokens, all of one sequence.
        pasts: Tokens of the sequence before it.
        tokens_of_tile: Tokens of a tile at most.
        max_parts: There are at most this many parts more than tiles, and at most twice as many of split tiles.
    """
    tiles_of_span = -(-counts // tokens_of_tile)
    span = np.repeat(np.arange(len(counts)), tiles_of_span)  # [tile]
    skipped = (
        np.arange(len(span)) - np.repeat(np.cumsum(tiles_of_span) - tiles_of_span, tiles_of_span)
    ) * tokens_of_tile
    token_count = np.minimum(counts[span] - skipped, tokens_of_tile)
    tile_end = pasts[span] + skipped + token_count
    # As many keys for every part, over all tiles: the longest part determines when the step ends.
    part_keys = max(MIN_PART, -(-int(tile_end.sum()) // max_parts))
    parts = -(-tile_end // part_keys)
    even_keys = -(-tile_end // (parts * PART_MULTIPLE)) * PART_MULTIPLE  # a short last part would save nothing
    parts = -(-tile_end // even_keys)
    is_split = parts > 1
    rows_of_tile = np.where(is_split, parts, 0)
    base = np.cumsum(rows_of_tile) - rows_of_tile
    tile = np.repeat(np.arange(len(span)), parts)  # [part]
    number = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)  # of the part in its tile
    begin = number * even_keys[tile]
    return TilePlan(
        first=(firsts[span] + skipped)[tile],
        tokens=token_count[tile],
        begin=begin,
        end=np.minimum(begin + even_keys[tile], tile_end[tile]),
        row=base[tile] + number,
        base=base[tile],
        parts=parts[tile],
    )
