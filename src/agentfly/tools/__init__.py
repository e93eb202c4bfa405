"""The prebuilt tools."""

from agentfly.tools.answer import answer, answer_math, answer_qa
from agentfly.tools.calculate import calculate, calculator
from agentfly.tools.search import google_search, retrieve, search_tool, wikipedia_search

__all__ = [
    "answer",
    "answer_math",
    "answer_qa",
    "calculate",
    "calculator",
    "google_search",
    "retrieve",
    "search_tool",
    "wikipedia_search",
]
