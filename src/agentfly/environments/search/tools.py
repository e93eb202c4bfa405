"""Search tools: the web, Wikipedia, a retrieval server, or any other retriever under a name of your choice.

A retriever is opened on the first search, so a missing API key is reported only when the tool is used. All chains share
the connections, the rate limit and the cache of a retriever.
"""

from __future__ import annotations

import os

from agentfly.environments.search.engines import open_retriever
from agentfly.environments.search.index import Retriever, format_hits
from agentfly.errors import ConfigError
from agentfly.threads import call
from agentfly.tooling import Tool, tool

TOP_K = 3
SERVER = "RETRIEVER_API_URL"
"""Environment variable with the URL of the retrieval server."""


async def _search(source: Retriever | str, query: str, top_k: int) -> str:
    if not query.strip():
        return "Error: the query is empty. Say what to look for."
    retriever = await call(open_retriever, source) if isinstance(source, str) else source
    (hits,) = await call(retriever.search, [query], top_k)
    return format_hits(hits)


def search_tool(source: Retriever | str, name: str = "search", *, top_k: int = TOP_K) -> Tool:
    """Create a search tool for a retriever, an index folder, the URL of a server, or a search engine by name."""

    @tool(name=name)
    async def search(query: str) -> str:
        """Search for passages. Shows the few that fit best, each with its title.

        Args:
            query: What to look for: a name, or a few words that the passage should have.
        """
        return await _search(source, query, top_k)

    return search


@tool
async def google_search(query: str) -> str:
    """Search the web. Shows the titles and excerpts of the best pages.

    Args:
        query: What to look for, in the words that a page about it would have.
    """
    return await _search("serper", query, TOP_K)


@tool
async def wikipedia_search(query: str) -> str:
    """Search Wikipedia. Shows the titles and introductions of the best articles.

    Args:
        query: What to look for: the name of an article, or a few words.
    """
    return await _search("wikipedia", query, TOP_K)


@tool
async def retrieve(query: str) -> str:
    """Search a collection of passages. Shows the few that fit best, each with its title.

    Args:
        query: What to look for: a name, or a few words that the passage should have.
    """
    if not (address := os.environ.get(SERVER)):
        raise ConfigError(f"set {SERVER} to the address of a retrieval server; `agentfly search serve` starts one")
    return await _search(address, query, TOP_K)
