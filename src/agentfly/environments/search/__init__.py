"""Searching: indexes, engines, a generated encyclopaedia, and a world to search in."""

from agentfly.environments.search.encyclopaedia import Encyclopaedia
from agentfly.environments.search.environment import Search
from agentfly.environments.search.opening import open_retriever
from agentfly.environments.search.passages import Hit, Passage, Retriever, read_corpus

__all__ = [
    "Encyclopaedia",
    "Hit",
    "Passage",
    "Retriever",
    "Search",
    "open_retriever",
    "read_corpus",
]
