"""SQL: questions that are answered by a query, after InterCode and Spider."""

from agentfly.environments.sql.environment import SQL
from agentfly.environments.sql.official import spider_tasks

__all__ = ["SQL", "spider_tasks"]
