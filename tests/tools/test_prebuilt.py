"""The prebuilt tools."""

import pytest

from agentfly.tooling import Tool
from agentfly.tools import answer, answer_math, answer_qa, calculate, calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(2 + 3) * 4 ** 2", "80"),
        ("2^10", "1024"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333333"),
        ("987654321987654 / 2", "493827160993827"),
        ("sqrt(2)", "1.4142135623731"),
        ("round(2.567, 2) + round(2.5) + max(1, 2)", "6.57"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("2 ** -1", "0.5"),
        (" pi ", "3.14159265358979"),
        ("10 ** 40", "1" + "0" * 40),
    ],
)
async def test_calculate_evaluates_expressions(expression: str, result: str) -> None:
    assert await calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 +",
        "1 / 0",
        "sqrt(-1)",
        "(-8) ** (1/3)",
        "x + 1",
        "'a' * 3",
        "True + 1",
        "__import__('os').system('true')",
        "(1).__class__",
        "[1, 2]",
        "lambda: 1",
        "abs(x=1)",
        "max()",
        "1 if 1 else 2",
        "10 ** 10 ** 10",
        "2 ** 100000",
        "round(1, -1000000000)",
        "9" * 5000,
        "(10 ** 3000) * (10 ** 3000)",
        "exp(1000)",
        "(" * 500 + "1" + ")" * 500,
        "-" * 20_000 + "1",
        "1\0",
        "*".join(["(2 ** 9999)"] * 800),
        "lcm(" + ",".join(f"2 ** 9999 + {n}" for n in range(500)) + ")",
        "1+" * 500_000 + "1",
        "9" * 4000 + "*" + "9" * 4000,
    ],
    ids=lambda text: text[:24],
)
async def test_calculate_explains_invalid_expressions(expression: str) -> None:
    """Some of these would take for ever if they were tried; the test's time limit would end it."""
    observation = await calculate(expression)
    assert observation.startswith("Error: ")
    assert len(observation) < 1000


def test_the_calculator_has_two_names() -> None:
    assert calculator is calculate
    assert calculate.schema["function"]["parameters"]["required"] == ["expression"]
    assert (
        "Numbers, the operators"
        in calculate.schema["function"]["parameters"]["properties"]["expression"]["description"]
    )


@pytest.mark.parametrize("answer_tool", [answer, answer_math, answer_qa], ids=lambda answer_tool: answer_tool.name)
async def test_the_answer_ends_the_chain(answer_tool: Tool) -> None:
    assert answer_tool.ends_chain
    assert answer_tool.schema["function"]["parameters"]["properties"]["answer"]["description"]
    assert await answer_tool("42") == "42"
