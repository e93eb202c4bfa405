"""Chess puzzles: generated, from Lichess, and the observations of the tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.environments.games.chess_puzzle import ChessPuzzle, lichess_tasks
from agentfly.errors import ConfigError, DataError
from agentfly.types import Task
from tests.environments.games.playing import answers, count_demonstrations, reset_env, winning
from tests.fakes import call

chess = pytest.importorskip("chess", reason="python-chess (GPL) is in the extra 'chess', which is not installed")

BACK_RANK = {"question": "Mate.", "fen": "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1", "moves": ["a1a8"]}
HEADER = "PuzzleId,FEN,Moves,Rating,RatingDeviation,Popularity,NbPlays,Themes,GameUrl,OpeningTags\n"


async def test_expert_solves_sampled_puzzles() -> None:
    rows = ChessPuzzle.draw_tasks("train", 8)
    assert [len(row["moves"]) for row in rows] == [1, 3] * 4
    assert await count_demonstrations(ChessPuzzle, rows) == 8


def test_mate_in_two_is_forced_and_has_one_first_move() -> None:
    def mates(board: chess.Board, moves: int) -> list[chess.Move]:
        return [move for move in list(board.legal_moves) if _leads_to_mate(board, move, moves)]

    def _leads_to_mate(board: chess.Board, move: chess.Move, moves: int) -> bool:
        board.push(move)
        try:
            if board.is_checkmate():
                return True
            if moves == 1 or not list(board.legal_moves):
                return False
            return all(_has_mate_after(board, answer, moves) for answer in list(board.legal_moves))
        finally:
            board.pop()

    def _has_mate_after(board: chess.Board, answer: chess.Move, moves: int) -> bool:
        board.push(answer)
        mate = bool(mates(board, moves - 1))
        board.pop()
        return mate

    for row in ChessPuzzle.draw_tasks("test", 2, mates=[2]):
        board = chess.Board(row["fen"])
        assert not mates(board, 1)
        assert [move.uci() for move in mates(board, 2)] == [row["moves"][0]]


async def test_any_mate_is_right_and_any_other_move_is_wrong() -> None:
    two_mates = {"question": "?", "fen": "6k1/5ppp/8/8/8/8/5PPP/RQ4K1 w - - 0 1", "moves": ["a1a8"]}
    for move, earned in (("a1a8", 1.0), ("Ra8#", 1.0), ("Qb8#", 1.0), ("a1a7", 0.0)):
        observations, chain = await answers(ChessPuzzle, two_mates, call("chess_move", move=move))
        assert chain.reward == earned
        assert observations == ["The puzzle is solved." if earned else "That was not the move. The puzzle is lost."]


async def test_doing_nothing_and_claiming_earn_nothing() -> None:
    _, chain = await answers(ChessPuzzle, BACK_RANK, call("chess_get_state"), "Checkmate! The puzzle is solved.")
    assert chain.reward == 0.0


async def test_invalid_moves_are_answered() -> None:
    strange = ["", "0000", "e9e9", "Ra9", "a1a8" * 250_000, 7]
    observations, chain = await answers(
        ChessPuzzle,
        BACK_RANK,
        *(call("chess_move", move=move) for move in strange),
        call("chess_move", move="a1a8"),
    )
    assert all(observation.startswith("Error") and len(observation) < 1000 for observation in observations[:6])
    assert "a1a8 (Ra8#)" in observations[0]
    assert chain.reward == 1.0


async def test_the_tools_show_the_board() -> None:
    env = await reset_env(ChessPuzzle, BACK_RANK)
    assert await env.chess_get_state() == (
        ". . . . . . k .\n. . . . . p p p\n. . . . . . . .\n. . . . . . . .\n"
        ". . . . . . . .\n. . . . . . . .\n. . . . . P P P\nR . . . . . K .\n"
        "White to move. FEN: 6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
    )
    assert "g2g4 (g4)" in await env.chess_get_legal_moves()


async def test_reset_clears_the_previous_chain() -> None:
    first, second = ChessPuzzle.draw_tasks("train", 2)
    used, fresh = await reset_env(ChessPuzzle, first), await reset_env(ChessPuzzle, second)
    await winning(used)
    await used.reset(Task.of(second))
    assert (used.won, used.over, used.moves) == (False, False, 0)
    assert await used.chess_get_state() == await fresh.chess_get_state()
    assert await winning(used) == await winning(fresh)


def test_splits_share_no_position() -> None:
    fens = {split: {row["fen"] for row in ChessPuzzle.draw_tasks(split, 15, mates=[1])}
            for split in ("train", "validation", "test")}  # fmt: skip
    assert len(fens["train"] | fens["validation"] | fens["test"]) == 45
    with pytest.raises(ConfigError, match=r"mates in 1 or 2, not \[9\]"):
        ChessPuzzle.draw_tasks("train", 1, mates=[9])


async def test_lichess_puzzles_begin_with_the_opponents_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    file = tmp_path / "lichess" / "lichess_db_puzzle.csv"
    with pytest.raises(DataError, match=r"database\.lichess\.org"):
        lichess_tasks("train")
    file.parent.mkdir()
    moves = "6k1/5ppp/8/8/8/8/5PPP/R5K1 b - - 0 1,h7h6 a1a8"
    file.write_text(HEADER + f"abc12,{moves},900,75,90,500,mateIn1 short,https://lichess.org/x,\n")
    splits = {split: lichess_tasks(split, lowest=800, theme="mateIn1") for split in ("train", "validation", "test")}
    ((row,),) = [rows for rows in splits.values() if rows]
    assert row["id"] == "lichess/abc12"
    assert "White to move" in row["question"]
    env = await reset_env(ChessPuzzle, row)
    assert [call.arguments["move"] for call in await winning(env)] == ["a1a8"]
    assert not [*lichess_tasks("train", lowest=1000), *lichess_tasks("train", theme="endgame")]


@pytest.mark.parametrize("line", ["a,,e2e4,1", "a,nonsense,e2e4,900", "a,6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1,a1h8,9"])
def test_malformed_rows_are_reported(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFLY_DATA", str(tmp_path))
    (tmp_path / "lichess").mkdir()
    (tmp_path / "lichess" / "lichess_db_puzzle.csv").write_text("PuzzleId,FEN,Moves,Rating\n" + line)
    with pytest.raises(DataError, match=r"lichess_db_puzzle\.csv, line 2"):
        [lichess_tasks(split) for split in ("train", "validation", "test")]


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"fen": 7, "moves": ["a1a8"]},
        {"fen": BACK_RANK["fen"], "moves": []},
        {"fen": BACK_RANK["fen"], "moves": [7]},
        {"fen": "8/8", "moves": "a1a8"},
    ],
)
async def test_malformed_puzzle_is_rejected(columns: dict[str, object]) -> None:
    with pytest.raises(DataError, match="puzzle"):
        await reset_env(ChessPuzzle, {"question": "?", **columns})
