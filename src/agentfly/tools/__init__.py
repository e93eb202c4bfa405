"""The prebuilt tools."""

from agentfly.tools.answer import answer
from agentfly.tools.calculate import calculate, calculator
from agentfly.tools.search import google_search, retrieve, search_tool, wikipedia_search

__all__ = [
    "answer",
    "calculate",
    "calculator",
    "google_search",
    "retrieve",
    "search_tool",
    "wikipedia_search",
]
