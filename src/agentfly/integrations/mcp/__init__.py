"""The Model Context Protocol, with the official `mcp` package (extra `mcp`), in both directions.

`MCPServer` makes a server's tools the actions of an environment. `MCPApp` offers AgentFly environments and tools to MCP
clients; `agentfly mcp serve` runs it.
"""

from agentfly.errors import require_extra

with require_extra("agentfly.integrations.mcp", "mcp"):
    import mcp as _mcp  # noqa: F401

from agentfly.integrations.mcp.environment import MCPServer, mcp_server
from agentfly.integrations.mcp.server import MCPApp

__all__ = ["MCPApp", "MCPServer", "mcp_server"]
