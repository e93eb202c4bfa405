"""Search: passage indexes, search engines, a retrieval server, generated questions and the environment."""

from agentfly.environments.search.engines import open_retriever
from agentfly.environments.search.environment import Search
from agentfly.environments.search.index import Hit, Passage, Retriever, read_corpus
from agentfly.environments.search.tasks import Encyclopedia, hotpotqa_tasks, two_wiki_passages, two_wiki_tasks

__all__ = [
    "Encyclopedia", "Hit", "Passage", "Retriever", "Search", "hotpotqa_tasks", "open_retriever", "read_corpus",
    "two_wiki_passages", "two_wiki_tasks",
]  # fmt: skip
