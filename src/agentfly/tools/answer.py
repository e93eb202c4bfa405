"""Tools that give the final answer and end the chain."""

from agentfly.tooling import tool

_MAX_LENGTH = 100_000


@tool(ends_chain=True, max_length=_MAX_LENGTH)
async def answer(answer: str) -> str:
    """Give the final answer. Nothing can be done after it.

    Args:
        answer: The final answer, and nothing else.
    """
    return answer


@tool(ends_chain=True, max_length=_MAX_LENGTH)
async def answer_qa(answer: str) -> str:
    """Give the final answer to the question. Nothing can be done after it.

    Args:
        answer: The answer in as few words as there are: a name, a date, a number, yes or no; no sentence around it.
    """
    return answer


@tool(ends_chain=True, max_length=_MAX_LENGTH)
async def answer_math(answer: str) -> str:
    """Give the final result of the problem. Nothing can be done after it.

    Args:
        answer: The result alone: a number or an expression, in LaTeX or plain; no words, and no unit unless asked for.
    """
    return answer
