"""reasoning-gym's questions with the real package, and answers that its scorers must not receive."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.games.reasoning_gym import EVALUATED, ReasoningGym, is_safe_expression, score_answer
from agentfly.errors import ConfigError, DataError
from agentfly.rewards import reasoning_gym_score
from tests.environments.games.playing import answers, count_demonstrations
from tests.fakes import call


@pytest.mark.parametrize(
    "text",
    ["1 + 2*(3 - 4)/5", "[[0, 1], [1, 0]]", "['A', 'B']", "x**2/2 + 3*x + C", "exp(2*x)*sin(x)", "ABCD", "0 1\n1 0",
     "_ Q\nQ _", "", "-7"],
)  # fmt: skip
def test_plain_expressions_are_safe(text: str) -> None:
    assert is_safe_expression(text)


@pytest.mark.parametrize(
    "text",
    ["__import__('os').system('ls')", "().__class__", "open('f')", "[print][0]('x')", "(lambda: 1)()", "9**9**9**9",
     "9**9999999", "'x'*10**9", "[0]*10**9", "[x for x in y]", "exp(exp(exp(9)))", "2**exp(9)", "5!", "9**9**9**07",
     "f(1)", "sin(x=1)", "x.y", "a if b else c", "(" * 5000, "x := 3", "eval('1')"],
)  # fmt: skip
def test_other_expressions_are_unsafe(text: str) -> None:
    assert not is_safe_expression(text)


reasoning_gym = pytest.importorskip(
    "reasoning_gym", reason="reasoning-gym is in the extra 'reasoning-gym', which is not installed"
)


async def test_expert_answers_every_question_in_one_turn() -> None:
    rows = ReasoningGym.draw_tasks("train", 24)
    assert await count_demonstrations(ReasoningGym, json.loads(json.dumps(rows)), reasoning_gym_score) == 24
    reply = f"I think that it is\n<answer>{rows[0]['answer']}</answer>"
    agent = HFAgent(reward=reasoning_gym_score, template="chatml", backend="scripted", backend_config={"script": reply})
    (chain,) = await agent.run(rows[0])
    assert chain.reward == 1.0


async def test_wrong_lazy_and_endless_answers_earn_nothing() -> None:
    (row,) = ReasoningGym.draw_tasks("train", 1, datasets=["chain_sum"])
    for reply in ("I do not know.", "1" * 1_000_000):
        _, chain = await answers(ReasoningGym, row, call("answer", answer=reply), reward=reasoning_gym_score)
        assert chain.reward < 0.05


def test_scorers_never_receive_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for name in sorted(EVALUATED - {"intermediate_integration"}):
        (row,) = ReasoningGym.draw_tasks("test", 1, datasets=[name])
        assert score_answer(row, "print('evaluated')") == 0.0
        assert score_answer(row, row["answer"]) == 1.0
    assert "evaluated" not in capsys.readouterr().out


def test_all_scorers_that_evaluate_are_known() -> None:
    from reasoning_gym.factory import DATASETS

    sources = {name: inspect.getsource(kind.score_answer) for name, (kind, _) in DATASETS.items()}
    evaluating = {name for name, source in sources.items() if re.search(r"\b(eval|exec|parse_expr|sympify)\(", source)}
    assert evaluating - EVALUATED <= {"number_sorting"}  # which evaluates its own answer


def test_splits_are_fixed_and_share_no_question() -> None:
    rows = {split: ReasoningGym.draw_tasks(split, 20) for split in ("train", "validation", "test")}
    assert ReasoningGym.draw_tasks("train", 8) == rows["train"][:8]
    assert len({row["question"] for those in rows.values() for row in those}) == 60


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(DataError, match=r"no dataset 'dance'; it has .*chain_sum"):
        ReasoningGym.draw_tasks("train", 1, datasets=["dance"])
    with pytest.raises(ConfigError, match="chain_sum cannot generate a question"):
        ReasoningGym.draw_tasks("train", 1, datasets=["chain_sum"], settings={"min_terms": -1})
    with pytest.raises(ConfigError, match="'rush_hour' gives its own answers less than 1"):
        ReasoningGym.draw_tasks("train", 1, datasets=["rush_hour"])
    with pytest.raises(DataError, match="generates a different question"):
        score_answer({"dataset": "chain_sum", "seed": 1, "answer": "no such"}, "3")
