"""Chess positions with a mate in one or two, found by search among positions with a few pieces."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

_ATTACKERS = ("QR", "QN", "QB", "RR", "QRP", "RBN", "QBP", "RRN", "QNP")
_DEFENDERS = ("", "p", "pp", "n", "bp", "rp", "ppp", "npp")


def draw_puzzle(chess: Any, random: Random, mate: int, wanted: Callable[[Any], bool]) -> tuple[Any, list[str]]:
    """A position that is wanted with a mate in so many moves, and the line that leads to it."""
    while True:
        board = _draw_board(chess, random)
        if board is None or not wanted(board):
            continue
        line = mating_line(board, mate)
        if line is not None:
            return board, line


def _draw_board(chess: Any, random: Random) -> Any | None:
    """White to move, with more pieces than Black; None where they came to stand as no game could have them."""
    pieces = [*"K", *random.choice(_ATTACKERS), *"k", *random.choice(_DEFENDERS)]
    board = chess.Board(None)
    for symbol, square in zip(pieces, random.sample(range(64), len(pieces)), strict=True):
        board.set_piece_at(square, chess.Piece.from_symbol(symbol))
    board.turn = chess.WHITE
    if random.random() < 0.5:
        board = board.mirror()
    return board if board.is_valid() and not board.is_check() else None


def mating_line(board: Any, mate: int) -> list[str] | None:
    """The moves to a mate in one or in two; None where there is none, a quicker one, or more than one way to begin."""
    quick = _mates(board)
    if mate == 1:
        return [quick[0].uci()] if quick else None
    if quick:
        return None
    keys = [line for move in list(board.legal_moves) if (line := _forced(board, move)) is not None]
    return keys[0] if len(keys) == 1 else None


def _forced(board: Any, move: Any) -> list[str] | None:
    """The line, if this move leads to mate whatever the answer."""
    board.push(move)
    line = None
    try:
        for answer in list(board.legal_moves):
            board.push(answer)
            mates = _mates(board)
            board.pop()
            if not mates:
                return None
            line = line or [move.uci(), answer.uci(), mates[0].uci()]
        return line
    finally:
        board.pop()


def _mates(board: Any) -> list[Any]:
    return [move for move in board.legal_moves if board.gives_check(move) and _is_mate(board, move)]


def _is_mate(board: Any, move: Any) -> bool:
    board.push(move)
    mate = board.is_checkmate()
    board.pop()
    return bool(mate)
