"""Giving the final answer as a call."""

from agentfly.tooling import tool


@tool(ends_chain=True, max_length=100_000)
async def answer(answer: str) -> str:
    """Give the final answer. Nothing can be done after it.

    Args:
        answer: The final answer, and nothing else.
    """
    return answer
