"""Shell: things to find or change in a tree of files, after InterCode-Bash."""

from agentfly.environments.shell.environment import Shell
from agentfly.environments.shell.official import nl2bash_tasks

__all__ = ["Shell", "nl2bash_tasks"]
