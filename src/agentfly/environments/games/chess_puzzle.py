"""Chess puzzles: find the winning moves. The rules are python-chess's, which is GPL and therefore an extra.

A row has `fen` and `moves`, the solution in UCI notation. The player makes the last move. With an even number of moves
the first one is the opponent's, as in Lichess's puzzles, and is played before the chain starts. A move is right if it
follows the solution or gives mate. A wrong move loses.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from typing import Any

from agentfly.environments.data import DatasetSource, belongs_to, open_text, sample_tasks, validate_split
from agentfly.environments.games.game import GameEnvironment
from agentfly.errors import ConfigError, DataError, require_extra
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

_ATTACKERS = ("QR", "QN", "QB", "RR", "QRP", "RBN", "QBP", "RRN", "QNP")
_DEFENDERS = ("", "p", "pp", "n", "bp", "rp", "ppp", "npp")
LICHESS = DatasetSource(
    "Lichess's puzzle database",
    "https://database.lichess.org/#puzzles (unpack it with `zstd -d lichess_db_puzzle.csv.zst`)",
    "lichess",
)
_LICHESS_COLUMNS = ("PuzzleId", "FEN", "Moves")


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
            while True:
                # Few pieces, more of them for the side to move, in a legal position without check.
                pieces = [*"K", *random.choice(_ATTACKERS), *"k", *random.choice(_DEFENDERS)]
                board = chess.Board(None)
                for symbol, square in zip(pieces, random.sample(range(64), len(pieces)), strict=True):
                    board.set_piece_at(square, chess.Piece.from_symbol(symbol))
                board.turn = chess.WHITE
                if random.random() < 0.5:
                    board = board.mirror()
                # Checking the split here avoids the search for mates in positions of other splits.
                if not board.is_valid() or board.is_check() or not belongs_to(board.epd(), validate_split(split)):
                    continue
                if (line := find_mate(board, mates[number % len(mates)])) is not None:
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
        return await self.play(move)

    async def _act(self, move: str) -> str:
        chosen = None
        for parse in (self._board.parse_uci, self._board.parse_san):
            if chosen is None and len(move.strip()) <= 10:  # no move is longer
                with suppress(ValueError):
                    chosen = parse(move.strip())
        if not chosen:  # a null move is falsy
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


def find_mate(board: Any, mate: int) -> list[str] | None:
    """The moves to a mate in one or two. None without one, with a faster one, or with several first moves."""
    quick = _mating_moves(board)
    if mate == 1:
        return [quick[0].uci()] if quick else None
    if quick:
        return None
    lines: list[list[str]] = []
    for move in list(board.legal_moves):
        board.push(move)
        line: list[str] = []
        for answer in list(board.legal_moves):
            board.push(answer)
            mates = _mating_moves(board)
            board.pop()
            if not mates:
                line = []
                break
            line = line or [move.uci(), answer.uci(), mates[0].uci()]
        board.pop()
        if line:  # each answer is met by a mate
            lines.append(line)
    return lines[0] if len(lines) == 1 else None


def _mating_moves(board: Any) -> list[Any]:
    moves = []
    for move in board.legal_moves:
        if not board.gives_check(move):
            continue
        board.push(move)
        if board.is_checkmate():
            moves.append(move)
        board.pop()
    return moves


def lichess_tasks(
    split: str = "train", count: int | None = None, *, lowest: int = 0, highest: int = 4000, theme: str = ""
) -> list[dict[str, Any]]:
    """The first `count` puzzles of Lichess's database in a split (None: all).

    lowest, highest: limits of the rating. theme: empty for all. The split of a puzzle is a hash of its position.
    """
    validate_split(split)
    path = LICHESS.file("lichess_db_puzzle.csv")

    puzzles: list[dict[str, Any]] = []
    with open_text(path) as lines:
        for line, row in enumerate(csv.DictReader(lines), 2):
            if len(puzzles) == count:
                break
            try:
                if not all(row.get(name) for name in _LICHESS_COLUMNS):
                    raise DataError(f"a puzzle needs {', '.join(_LICHESS_COLUMNS)}; this row has {row!r:.200}")
                themes = (row.get("Themes") or "").split()
                rated = lowest <= float(row.get("Rating") or 0) <= highest
                if not rated or not belongs_to(row["FEN"], split) or (theme and theme not in themes):
                    continue
                puzzle = make_puzzle_row(row["FEN"], row["Moves"].split(), "Find the best moves.")
            except (DataError, ValueError) as error:
                raise DataError(f"{path}, line {line}: {error}") from error
            rating = row.get("Rating")
            puzzles.append({"id": f"lichess/{row['PuzzleId']}", **puzzle, "rating": rating, "themes": themes})
    return puzzles
