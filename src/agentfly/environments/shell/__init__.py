"""Shell: find or change something in a file tree, after InterCode-Bash."""

from agentfly.environments.shell.environment import Shell
from agentfly.environments.shell.tasks import nl2bash_tasks

__all__ = ["Shell", "nl2bash_tasks"]
