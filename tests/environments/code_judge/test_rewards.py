"""The rewards for code, from a reply to a score, in a real sandbox."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.environments import CodeJudge
from agentfly.environments.code_judge.environment import extract_code
from agentfly.errors import DataError
from agentfly.rewards import output_match, unit_tests
from agentfly.sandbox import SandboxUnavailable

pytestmark = pytest.mark.asyncio(loop_scope="session")
TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(5) == 25"]
ECHO = "```python\nprint(input())\n```"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def judge() -> AsyncIterator[CodeJudge]:
    judge = CodeJudge()
    try:
        await judge.start()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    yield judge


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("x = 1", "x = 1"),
        ("First:\n```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```Python3 title=a.py\nx = 1\n```", "x = 1\n"),
        ("It is\n```py\nx = 1", "x = 1"),
        ("1. So:\n   ```python\n   x = '```'\n   ```", "   x = '```'\n"),
        ("", ""),
    ],
)
async def test_extract_code(reply: str, code: str) -> None:
    assert extract_code(reply) == code


async def test_unit_tests_is_the_fraction_that_passes(judge: CodeJudge) -> None:
    answer = "Sure!\n```python\ndef double(x):\n    return x * 2\n```"
    assert await unit_tests(answer, TESTS, judge) == {
        "reward": pytest.approx(2 / 3),
        "passed": 2,
        "total": 3,
        "all_passed": 0.0,
        "wrong": ["assert double(5) == 25: AssertionError"],
    }
    assert (await unit_tests(answer, "def check(f):\n    assert f(1) == two", judge, "two = 2", "double"))[
        "reward"
    ] == 1.0
    assert (await unit_tests("I cannot do that.", TESTS, judge))["reward"] == 0.0


@pytest.mark.parametrize(
    ("match", "printed", "expected", "earned"),
    [
        ("words", "1  2\n\n3", "1 2 3\n", 1.0),
        ("words", "1 2", "1 3", 0.0),
        ("words", "1 2 3", "1 2", 0.0),
        ("exact", "1 2", "1 2\n", 1.0),
        ("exact", "1  2", "1 2\n", 0.0),
        ("numbers", "x 0.333333349", "x 0.33333333", 1.0),
        ("numbers", "x 0.3334", "x 0.3333", 0.0),
        ("numbers", "nan", "1", 0.0),
        ("numbers", "1_0", "10", 0.0),
        ("numbers", "yes", "no", 0.0),
    ],
)
async def test_output_is_matched_as_declared(
    judge: CodeJudge, match: str, printed: str, expected: str, earned: float
) -> None:
    program = f"```python\nprint({printed!r})\n```"
    assert (await output_match(program, [{"expected": expected}], judge, match))["reward"] == earned


async def test_output_match_is_the_fraction_of_cases(judge: CodeJudge) -> None:
    cases = [{"stdin": "a", "expected": "a"}, {"stdin": "b", "expected": "c"}, {"stdin": "", "expected": ""}]
    scored = await output_match(ECHO, cases, judge)
    assert scored["reward"] == pytest.approx(1 / 3)
    assert scored["wrong"][0] == "cases[1]: it printed 'b\\n'"
    assert "EOFError" in scored["wrong"][1]


@pytest.mark.parametrize("cases", [[], "a", None, [{"stdin": "a"}], [{"expected": 3}], ["a"]])
async def test_invalid_cases_are_a_data_error(judge: CodeJudge, cases: Any) -> None:
    with pytest.raises(DataError, match="cases"):
        await output_match(ECHO, cases, judge)
    with pytest.raises(DataError, match="match is one of exact, words, numbers, not 'fuzzy'"):
        await output_match(ECHO, [{"expected": ""}], judge, "fuzzy")


async def test_agent_finds_rewards_by_name(judge: CodeJudge) -> None:
    """`judge` is asked for, so that the test is skipped where no sandbox works."""
    script = ScriptedBackend(["```python\ndef double(x):\n    return x * 2\n```"])
    agent = HFAgent(reward="unit_tests", template="chatml", backend=script)
    result = await agent.run([{"question": "?", "tests": TESTS[:2]}, {"question": "?", "tests": "assert ("}])
    assert result[0].score is not None
    assert result[0].score.total == 1.0
    assert result[0].score.metrics["passed"] == 2
    assert result[1].score is None
    assert "tests, line 1 is not valid Python" in str(result[1].failures)
