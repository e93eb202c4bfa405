"""SQL: questions that are answered by a query, after InterCode and Spider."""

from agentfly.environments.sql.official import spider_tasks
from agentfly.environments.sql.world import SQL

__all__ = ["SQL", "spider_tasks"]
