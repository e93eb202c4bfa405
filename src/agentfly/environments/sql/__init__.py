"""SQL: questions that a query answers, after InterCode and Spider."""

from agentfly.environments.sql.environment import SQL
from agentfly.environments.sql.tasks import spider_tasks

__all__ = ["SQL", "spider_tasks"]
