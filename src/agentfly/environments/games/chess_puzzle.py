"""Chess puzzles: find the moves that win. The rules are python-chess's, which is GPL and therefore in an extra.

A row has `fen` and `moves`, the line in UCI. The player always has the last move, so an even number of moves begins
with one of the opponent's, as in Lichess's puzzles; it is played before the chain begins. A move is right if it is that
of the line, or if it is mate. A wrong one loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from agentfly.environments.data import checked_split
from agentfly.environments.drawing import belongs_to, drawn
from agentfly.environments.games.chess_drawing import draw_puzzle
from agentfly.environments.games.game import Game
from agentfly.errors import ConfigError, DataError
from agentfly.extras import needed
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall


def chess_library() -> Any:
    """python-chess, if it is there."""
    with needed("a chess puzzle", "chess"):
        import chess

    return chess


class ChessPuzzle(Game):
    """A chess puzzle: find the moves that win (extra `chess`)."""

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, mates: Sequence[int] = (1, 2)
    ) -> list[dict[str, Any]]:
        """Positions with a mate in one or two moves, in turn. Of a mate in two, only one first move leads to it."""
        if not mates or not set(mates) <= {1, 2}:
            raise ConfigError(f"puzzles that are drawn are mates in 1 or 2, not {mates!r:.80}")
        chess = chess_library()

        def draw(random: Random, number: int) -> tuple[str, dict[str, Any]]:
            # what is of another split is not searched for mates
            board, line = draw_puzzle(
                chess, random, mates[number % len(mates)], lambda board: belongs_to(board.epd(), checked_split(split))
            )
            return board.epd(), puzzle_row(board.fen(), line, f"Mate in {(len(line) + 1) // 2}.")

        return drawn("chess", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Set up the puzzle of the columns `fen` and `moves`."""
        self.begin()
        self._board, self._line = begun(task.columns.get("fen"), task.columns.get("moves"))

    @tool
    async def chess_move(self, move: str) -> dict[str, Any]:
        """Make a move. A right one is answered by the opponent; a wrong one loses.

        Args:
            move: A move such as "e2e4" or "Nf3".
        """
        return await self.played(self._play, move)

    async def _play(self, move: str) -> str:
        chosen = self._read(move.strip())
        if chosen is None:
            return f"Error: {move!r:.20} is no legal move here. The legal moves are {self._legal()}."
        self._board.push(chosen)
        self.won = self._board.is_checkmate() or (chosen.uci() == self._line[0] and len(self._line) == 1)
        self.over = self.won or chosen.uci() != self._line[0]
        self.score = float(self.won)
        if self.over:
            return "The puzzle is solved." if self.won else "That was not the move. The puzzle is lost."
        answer, self._line = self._board.parse_uci(self._line[1]), self._line[2:]
        said = f"The opponent plays {self._board.san(answer)}."
        self._board.push(answer)
        return f"{said}\n{self._board}"

    def _read(self, move: str) -> Any:
        if len(move) > 10:  # no move is written in more
            return None
        for read in (self._board.parse_uci, self._board.parse_san):
            try:
                found = read(move)
            except ValueError:
                continue
            return found or None  # a null move is none
        return None

    def _legal(self) -> str:
        return ", ".join(f"{move.uci()} ({self._board.san(move)})" for move in self._board.legal_moves)

    @tool
    async def chess_get_state(self) -> str:
        """Show the board, the position in FEN, and whose move it is."""
        return shown(self._board)

    @tool
    async def chess_get_legal_moves(self) -> str:
        """List every legal move, each as "e2e4" and as "e4"."""
        return self._legal() or "There is none."

    def expert(self) -> ToolCall | str:
        """The next move of the line."""
        return "Done." if self.over else ToolCall("chess_move", {"move": self._line[0]})


def shown(board: Any) -> str:
    """A board as the model reads it: White's pieces are capitals."""
    return f"{board}\n{'White' if board.turn else 'Black'} to move. FEN: {board.fen()}"


def puzzle_row(fen: str, moves: Sequence[str], aim: str) -> dict[str, Any]:
    """The columns of a puzzle, but its id."""
    board, _ = begun(fen, list(moves))
    return {"question": f"Solve the chess puzzle. {aim}\n{shown(board)}", "fen": fen, "moves": list(moves)}


def begun(fen: Any, moves: Any) -> tuple[Any, list[str]]:
    """The board before the player's first move, and the line from there; every move of it is legal."""
    chess = chess_library()
    line = moves.split() if isinstance(moves, str) else moves
    if not isinstance(fen, str) or not isinstance(line, list | tuple) or not line:
        raise DataError(f"a puzzle has a column 'fen' and a line of 'moves', not {fen!r:.80} and {moves!r:.80}")
    try:
        board = chess.Board(fen)
        for move in line:
            board.push(board.parse_uci(move))
        board = chess.Board(fen)
        if len(line) % 2 == 0:
            board.push(board.parse_uci(line[0]))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"this is no puzzle: fen {fen!r:.90}, moves {line!r:.80}: {error}") from error
    return board, [str(move) for move in line[1 - len(line) % 2 :]]
