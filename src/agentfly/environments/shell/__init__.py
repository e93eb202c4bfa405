"""Shell: things to find or change in a tree of files, after InterCode-Bash."""

from agentfly.environments.shell.official import nl2bash_tasks
from agentfly.environments.shell.world import Shell

__all__ = ["Shell", "nl2bash_tasks"]
