"""Chess puzzles: find the winning moves. The rules are python-chess's, which is GPL and therefore an extra.

A row has `fen` and `moves`, the solution in UCI notation. The player makes the last move; with an even number of moves
the first one is the opponent's, as in Lichess's puzzles, and is played before the chain starts. A move is right if it
follows the solution or gives mate. A wrong move loses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from agentfly.environments.data import validate_split
from agentfly.environments.games.game import GameEnvironment
from agentfly.environments.task_sampling import belongs_to, sample_tasks
from agentfly.errors import ConfigError, DataError
from agentfly.extras import require_extra
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

_ATTACKERS = ("QR", "QN", "QB", "RR", "QRP", "RBN", "QBP", "RRN", "QNP")
_DEFENDERS = ("", "p", "pp", "n", "bp", "rp", "ppp", "npp")


def import_chess() -> Any:
    """python-chess; ConfigError if it is not installed."""
    with require_extra("a chess puzzle", "chess"):
        import chess

    return chess


class ChessPuzzle(GameEnvironment):
    """A chess puzzle: find the winning moves (extra `chess`)."""

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, mates: Sequence[int] = (1, 2)
    ) -> list[dict[str, Any]]:
        """Positions with a mate in one or two, round-robin over `mates`. A mate in two has a unique first move."""
        if not mates or not set(mates) <= {1, 2}:
            raise ConfigError(f"generated puzzles are mates in 1 or 2, not {mates!r:.80}")
        chess = import_chess()

        def draw(random: Random, number: int) -> tuple[str, dict[str, Any]]:
            # Checking the split first avoids the search for mates in positions of other splits.
            mate = mates[number % len(mates)]
            board, line = draw_puzzle(
                chess, random, mate, accept=lambda board: belongs_to(board.epd(), validate_split(split))
            )
            return board.epd(), make_puzzle_row(board.fen(), line, f"Mate in {(len(line) + 1) // 2}.")

        return sample_tasks("chess", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Set up the puzzle in the columns `fen` and `moves`."""
        self.begin()
        self._board, self._line = set_up_board(task.columns.get("fen"), task.columns.get("moves"))

    @tool
    async def chess_move(self, move: str) -> dict[str, Any]:
        """Make a move. A right one is answered by the opponent; a wrong one loses.

        Args:
            move: A move such as "e2e4" or "Nf3".
        """
        return await self.play(self._play, move)

    async def _play(self, move: str) -> str:
        chosen = self._parse_move(move.strip())
        if chosen is None:
            return f"Error: {move!r:.20} is not a legal move here. The legal moves are {self._list_legal_moves()}."
        self._board.push(chosen)
        self.won = self._board.is_checkmate() or (chosen.uci() == self._line[0] and len(self._line) == 1)
        self.over = self.won or chosen.uci() != self._line[0]
        self.score = float(self.won)
        if self.over:
            return "The puzzle is solved." if self.won else "That was not the move. The puzzle is lost."
        answer, self._line = self._board.parse_uci(self._line[1]), self._line[2:]
        reply = f"The opponent plays {self._board.san(answer)}."
        self._board.push(answer)
        return f"{reply}\n{self._board}"

    def _parse_move(self, move: str) -> Any:
        """The legal move in UCI or SAN notation; None if it is neither."""
        if len(move) > 10:  # longer than any move
            return None
        for parse in (self._board.parse_uci, self._board.parse_san):
            try:
                found = parse(move)
            except ValueError:
                continue
            return found or None  # a null move is falsy
        return None

    def _list_legal_moves(self) -> str:
        return ", ".join(f"{move.uci()} ({self._board.san(move)})" for move in self._board.legal_moves)

    @tool
    async def chess_get_state(self) -> str:
        """Show the board, the position in FEN, and whose move it is."""
        return render_board(self._board)

    @tool
    async def chess_get_legal_moves(self) -> str:
        """List every legal move, each as "e2e4" and as "e4"."""
        return self._list_legal_moves() or "There is none."

    def expert(self) -> ToolCall | str:
        """The next move of the solution."""
        return "Done." if self.over else ToolCall("chess_move", {"move": self._line[0]})


def render_board(board: Any) -> str:
    """The board as text, with White's pieces in uppercase."""
    return f"{board}\n{'White' if board.turn else 'Black'} to move. FEN: {board.fen()}"


def make_puzzle_row(fen: str, moves: Sequence[str], aim: str) -> dict[str, Any]:
    """The columns of a puzzle without its id."""
    board, _ = set_up_board(fen, list(moves))
    return {"question": f"Solve the chess puzzle. {aim}\n{render_board(board)}", "fen": fen, "moves": list(moves)}


def set_up_board(fen: Any, moves: Any) -> tuple[Any, list[str]]:
    """The board before the player's first move, and the remaining solution. Raises DataError for illegal moves."""
    chess = import_chess()
    line = moves.split() if isinstance(moves, str) else moves
    if not isinstance(fen, str) or not isinstance(line, list | tuple) or not line:
        raise DataError(f"a puzzle has the columns 'fen' and 'moves', not {fen!r:.80} and {moves!r:.80}")
    try:
        board = chess.Board(fen)
        for move in line:
            board.push(board.parse_uci(move))
        board = chess.Board(fen)
        if len(line) % 2 == 0:
            board.push(board.parse_uci(line[0]))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"this is not a puzzle: fen {fen!r:.90}, moves {line!r:.80}: {error}") from error
    return board, [str(move) for move in line[1 - len(line) % 2 :]]


def draw_puzzle(chess: Any, random: Random, mate: int, *, accept: Callable[[Any], bool]) -> tuple[Any, list[str]]:
    """An accepted position with a mate in `mate` moves, and its solution."""
    while True:
        board = _draw_board(chess, random)
        if board is None or not accept(board):
            continue
        line = find_mate(board, mate)
        if line is not None:
            return board, line


def _draw_board(chess: Any, random: Random) -> Any | None:
    """A random position in which the side to move has more pieces; None if it is illegal or in check."""
    pieces = [*"K", *random.choice(_ATTACKERS), *"k", *random.choice(_DEFENDERS)]
    board = chess.Board(None)
    for symbol, square in zip(pieces, random.sample(range(64), len(pieces)), strict=True):
        board.set_piece_at(square, chess.Piece.from_symbol(symbol))
    board.turn = chess.WHITE
    if random.random() < 0.5:
        board = board.mirror()
    return board if board.is_valid() and not board.is_check() else None


def find_mate(board: Any, mate: int) -> list[str] | None:
    """The moves to a mate in one or two; None without one, with a faster one, or with several first moves."""
    quick = _mating_moves(board)
    if mate == 1:
        return [quick[0].uci()] if quick else None
    if quick:
        return None
    keys = [line for move in list(board.legal_moves) if (line := _forced_mate(board, move)) is not None]
    return keys[0] if len(keys) == 1 else None


def _forced_mate(board: Any, move: Any) -> list[str] | None:
    """The solution if this move forces mate in two."""
    board.push(move)
    line = None
    try:
        for answer in list(board.legal_moves):
            board.push(answer)
            mates = _mating_moves(board)
            board.pop()
            if not mates:
                return None
            line = line or [move.uci(), answer.uci(), mates[0].uci()]
        return line
    finally:
        board.pop()


def _mating_moves(board: Any) -> list[Any]:
    found = []
    for move in board.legal_moves:
        if not board.gives_check(move):
            continue
        board.push(move)
        if board.is_checkmate():
            found.append(move)
        board.pop()
    return found
