"""`@tool` and its toolbox; `schema` derives what the model reads about a function from its parameters."""

from agentfly.tooling.toolbox import MAX_LENGTH, TOOLS, Context, Tool, Toolbox, ToolLike, ToolResult, cut_middle, tool

__all__ = ["MAX_LENGTH", "TOOLS", "Context", "Tool", "ToolLike", "ToolResult", "Toolbox", "cut_middle", "tool"]
