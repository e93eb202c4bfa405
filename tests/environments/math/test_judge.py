"""The judge of mathematics: real math-verify in real processes, with honest and hostile answers."""

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentfly.environments.math import MathJudge, environment, math_tasks
from agentfly.errors import ConfigError, DataError, EnvironmentFault

HAS_DATA = (Path(os.environ.get("AGENTFLY_DATA", "/nowhere")) / "math").is_dir()


class Hasty(MathJudge):
    """Enough for any answer, and the hostile ones are over soon."""

    seconds = 0.5
    max_concurrent = 2


@pytest.fixture
async def the_judge() -> AsyncIterator[MathJudge]:
    if importlib.util.find_spec("math_verify") is None:
        pytest.skip("math-verify is in the extra 'math', which is not installed")
    judge = Hasty()
    await judge.start()
    yield judge
    await judge.close()


RIGHT = [
    ("42", "42"), ("42.", "42"), ("The answer is 42", "42"), (r"So it is \boxed{42}.", "42"), ("42.0", "42"),
    ("It costs $1,080.", "1080"), ("1080 dollars", "1080"), ("x = 5", "5"), ("5", "x=5"), ("36", r"\$36"),
    ("14/3", r"\frac{14}{3}"), (r"$\dfrac{1}{2}$", "0.5"), ("50%", "50"),
    (r"\boxed{7}, so \boxed{42}", "42"), (r"\boxed{\boxed{42}}", "42"),
    ("-9639936", "-9639936"), ("90", r"90^\circ"),
    ("6 - 5i", "6 - 5i"), ("Evelyn", r"\text{Evelyn}"), (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
    ("x^2 + 2x", "x(x+2)"), ("7, 5, 3", "3,5,7"), ("[3, 5)", "[3,5)"), ("75037560682824", "75037560682824"),
]  # fmt: skip
WRONG = [
    ("43", "42"), ("", "42"), ("   ", "42"), ("I do not know.", "42"), ("4.6667", r"\frac{14}{3}"), ("9", "-9"),
    ("75037560682825", "75037560682824"), ("4 2", "42"), ("The answer is 42. No, the answer is 43.", "42"),
    ("Evelny", r"\text{Evelyn}"),
]  # fmt: skip
UNDONE = [
    ("927 * 763 - 165", "707136"), (r"\boxed{927*763-165}", "707136"), (r"\lcm(57366, 64454)", "1848734082"),
    (r"\gcd(12, 18)", "6"), (r"7^{5} \mod 13", "11"), (r"\sum_{i=1}^{100} i^2", "338350"), ("5!", "120"),
    ("84/2", "42"), (r"\frac{84}{2}", "42"), ("181 453", "634"), (r"\boxed{(181)(453)}", "634"),
    (r"\boxed{0=42}", "42"), ("2^10", "1024"), ("1024 = 2^10", "1024"), ("x = 2 * 5", "10"), ("10 = 2 * 5", "10"),
    ("1 <= x <= 10", "10"), ("x >= 10", "10"), ("x = 10, x = 5", "5"),
]  # fmt: skip
"""What the judge could work out, and the model should have."""
DONE = [
    (r"\frac{7}{8}", "0.875"), ("7/8", "0.875"), (r"4.2 \times 10^3", "4200"), (r"3\frac{1}{2}", "3.5"),
    ("$18.00", "18"), (r"\boxed{3.5\text{ cm}}", "3.5"), (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"x(x+2)", "x^2 + 2x"), ("-7/8", "-0.875"),
    ("25 * 4 = 100", "100"), ("The answer is 48 / 2 = 24.", "24"), ("f(2) = 10", "10"), ("$P(A) = 1/2$", "0.5"),
    (r"\boxed{x = 5 \cdot 2 = 10}", "10"), ("5 * 2 * 1 = **10**", "10"),
]  # fmt: skip
MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
NOTATION = [
    *((answer, "1000000") for answer in (
        "10^6", "1e6", "1.0E6", "1e+6", r"1\,000\,000", r"$1\,000\,000$", r"\boxed{10^{6}}", r"\boxed{1e6}",
        "1 000 000",
        "The answer is 10^6.", "The answer is 1e6.", r"1\;000\;000", r"1{,}000{,}000",
    )),
    ("1000000", r"1\,000\,000"), ("10^6", "1e6"), ("10^-3", "0.001"), ("1e-3", "0.001"), (r"-1\,000", "-1000"),
    ("sqrt(2)", r"\sqrt{2}"), ("√2", r"\sqrt{2}"), ("The answer is sqrt(2).", r"\sqrt{2}"), (r"\sqrt{2}", "sqrt(2)"),
    ("2*sqrt(3)", r"2\sqrt{3}"), ("(1 + √5)/2", r"\frac{1+\sqrt{5}}{2}"), ("sqrt(1+sqrt(2))", r"\sqrt{1+\sqrt{2}}"),
    ("2*pi", r"2\pi"), ("ln(2)", r"\ln 2"),
    (MATRIX, MATRIX), (f"{MATRIX}.", MATRIX), (f"The answer is {MATRIX}.", MATRIX),
    (f"The product is\n{MATRIX}", MATRIX),
    (MATRIX.replace(" ", "\n"), MATRIX), (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", MATRIX),
    (r"x \le 2", r"x \le 2"), ("The answer is x <= 2.", r"x \le 2"), (r"x \le 2", r"(-\infty, 2]"),
    ("2 >= x", r"x \le 2"),
    (r"3 \le x \le 4", "[3, 4]"), (r"\boxed{10\%}", "10"), ("The answer is tan.", r"\text{tan}"), ("3 or 5", "3, 5"),
]  # fmt: skip
"""Right, in notations that math-verify alone does not read."""
NEAR = [
    *((answer, "1000000") for answer in ("10^5", "1e5", "1e-6", r"1\,000\,00", r"1\,000\,001", "6", "10", "1 000 001")),
    *((answer, "1000") for answer in ("10^{1+2}", "10*10*10", r"10^1 \cdot 10^2", "1 0 0 0", r"10\,00")),
    *((answer, "1000") for answer in ("10^3 10^4", "1e3 or 1e4")),
    *((answer, "42") for answer in (r"4\,2", "The answer is 42 43.", "The answer is 42 or 43.", "4.2*10")),
    ("0", r"1\,000\,000"), ("sqrt(4)", "2"), ("√25", "5"), ("sqrt(3)", r"\sqrt{2}"), ("-sqrt(2)", r"\sqrt{2}"),
    ("sqrt(45", r"3\sqrt{5}"), ("pi", "3.14159"),
    (f"2{MATRIX}", MATRIX), (f"{MATRIX}^2", MATRIX), (MATRIX.replace("4", "5"), MATRIX), ("1, 2, 3, 4", MATRIX),
    (f"{MATRIX} or {MATRIX.replace('4', '5')}", MATRIX), (f"It is not {MATRIX}", MATRIX),
    ("x < 2", r"x \le 2"), ("x >= 2", r"x \le 2"), ("2", r"x \le 2"), ("x < 2", r"(-\infty, 2]"),
    ("3 < x < 4", "(3, 4)"),
    ("3 < x < 4", "[3, 4]"), ("x >= 5 or x <= 0", r"x \geq 5"), ("0.01", "10"), ("The answer is -3 or 3.", "-3"),
]  # fmt: skip
"""Wrong, in the same notations."""
MARKDOWN = [
    *((answer, "10") for answer in (
        "**Answer: 10**", "Answer: **10**", "**10**", "`10`", "__Answer: 10__", "*10*", "_10_", "***10***", "**_10_**",
        "**10.**", "**The answer is 10**.", "The answer is: **10**", "Answer: `10`.", "Answer = `10`", "```10```",
        "**Answer:** 10", "Answer: **x = 10**", "Answer: **10**!", "The answer is 10!", "Answer: 10,", "10;", "“10”",
        "**Answer: $10$.**", "The answer is **$10$**.", r"**\(10\)**", r"**\boxed{10}**", r"\boxed{**10**}",
        r"`\boxed{10}`",
    )),
    ("**-3/4**", r"-\frac{3}{4}"), ("`sqrt(2)`", r"\sqrt{2}"), ("**(3, 4)**", "(3, 4)"), ("**1e6**", "1000000"),
    ("**5 * 10^3**", "5000"), ("**6 - 5i**", "6 - 5i"), ("**n!**", "n!"), ("**x_1 + x_2**", "x_1 + x_2"),
]  # fmt: skip
"""Right, in Markdown or with punctuation after it."""
UNMARKED = [
    ("**9**", "10"), ("**-10**", "10"), ("-**10**", "10"), ("2**10", "10"), ("2**5**10", "10"),
    ("**5** or **10**", "10"), ("10**1", "10"), ("2*5", "10"), ("**2 * 5**", "10"), ("**5!**", "120"), ("x**2", "x2"),
]  # fmt: skip
"""Wrong, though the marks are those of Markdown."""
SEVERAL = [
    r"\boxed{41, 42, 43}", r"\boxed{42} \boxed{43}", r"\boxed{42} and \boxed{",
    r"\boxed{42 or 43}", r"\boxed{[0, 100]}", r"\boxed{42 \pm 1}",
    "41 42 43", "42 43", r"\boxed{x}", r"\boxed{\text{any number}}", r"\boxed{\mathbb{R}}", r"\boxed{nan}",
    r"\boxed{\infty}", r"\boxed{40 < x < 44}", r"\boxed{x \in \mathbb{R}}", r"\boxed{answer}",
]  # fmt: skip
HOSTILE = [
    "9**9**9**9", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{9!!!!!}", "1" * 1_000_000,
    "(" * 100_000, r"\boxed{" + "{" * 900 + "}" * 900 + "}", r"\boxed{" + r"\frac{1}{" * 200 + "1" + "}" * 201,
    "\x00\ud800", "$" * 5000, "\\" * 5000, r"\a" * 99 + "$", '{"given": "42"}\n',
]  # fmt: skip


async def test_equal_answers_are_right_and_others_wrong(the_judge: MathJudge) -> None:
    assert [pair for pair in RIGHT if not await the_judge.equal(*pair)] == []
    assert [pair for pair in WRONG if await the_judge.equal(*pair)] == []


async def test_number_must_be_fully_computed(the_judge: MathJudge) -> None:
    assert [pair for pair in DONE if not await the_judge.equal(*pair)] == []
    assert [pair for pair in UNDONE if await the_judge.equal(*pair)] == []


async def test_common_notations_are_parsed_exactly(the_judge: MathJudge) -> None:
    assert [pair for pair in NOTATION if not await the_judge.equal(*pair)] == []
    assert [pair for pair in NEAR if await the_judge.equal(*pair)] == []


async def test_markdown_around_an_answer_is_ignored(the_judge: MathJudge) -> None:
    assert [pair for pair in MARKDOWN if not await the_judge.equal(*pair)] == []
    assert [pair for pair in UNMARKED if await the_judge.equal(*pair)] == []


async def test_several_answers_are_wrong(the_judge: MathJudge) -> None:
    assert [answer for answer in SEVERAL if await the_judge.equal(answer, "42")] == []


async def test_hostile_answers_are_wrong_and_block_no_others(the_judge: MathJudge) -> None:
    judged = await asyncio.gather(*(the_judge.equal(answer, "42") for answer in HOSTILE))
    assert not any(judged)
    assert await the_judge.equal("42", 42)


async def test_code_in_an_answer_is_not_run(the_judge: MathJudge, tmp_path: Path) -> None:
    code = f"__import__('os').system('touch {tmp_path}/there')"
    for answer in (code, rf"\boxed{{{code}}}", f"${code}$", f"<answer>{code}</answer>"):
        assert not await the_judge.equal(answer, "0")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("right", ["", "  ", None, True, ["42"], "hello world", "1/0"])
async def test_invalid_right_answer_is_a_data_error(the_judge: MathJudge, right: object) -> None:
    with pytest.raises(DataError, match="right answer"):
        await the_judge.equal("42", right)  # type: ignore[arg-type]


async def test_nothing_is_left_after_closing(the_judge: MathJudge) -> None:
    await asyncio.gather(*(the_judge.equal("1", "1") for _ in range(4)))
    processes = [idle.process for idle in the_judge._idle]
    assert 1 <= len(processes) <= 2
    await the_judge.close()
    assert all(process.poll() is not None for process in processes)


async def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    judge = MathJudge()
    with pytest.raises(ConfigError, match=r"math_verify.*agentfly-rl\[math\]"):
        await judge.start()
    await judge.close()


async def test_worker_that_does_not_start_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ImportError")
    monkeypatch.setattr(environment, "_INSIDE", broken)
    monkeypatch.setattr(environment, "find_spec", lambda name: name)
    judge = MathJudge()
    await judge.start()
    with pytest.raises(EnvironmentFault, match="does not start"):
        await judge.equal("1", "1")
    await judge.close()


@pytest.mark.skipif(not HAS_DATA, reason="AGENTFLY_DATA names no folder with the folder math")
async def test_every_answer_of_math_equals_itself(the_judge: MathJudge) -> None:
    answers = [row["answer"] for row in math_tasks("test")]
    for sentence in (r"So we get $\boxed{%s}$.", "The answer is $%s$."):
        equal = [await the_judge.equal(sentence % answer, answer) for answer in answers[::4]]
        assert all(equal)
