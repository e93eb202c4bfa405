"""The `agentfly` command line, one module per command group: parse arguments first, import heavy modules after."""

from agentfly.cli.app import main

__all__ = ["main"]
