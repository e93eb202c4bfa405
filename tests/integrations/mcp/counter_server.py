"""An MCP server written with the official package: a counter per process, and tools that return all there is."""

import base64
import io
import sys
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("counter", instructions="Count.")
count = 0


class Point(BaseModel):
    x: int
    y: int


@server.tool()
def add(times: int) -> str:
    """Add to the counter."""
    global count
    count += times
    return f"The counter shows {count}."


@server.tool()
def clear(start: int = 0) -> str:
    """Set the counter."""
    global count
    count = start
    return "cleared"


@server.tool(name="close")
def close_it() -> str:
    """A name that an environment uses for something else."""
    return "closed, says the server"


@server.tool()
def divide(by: int) -> float:
    """Divide the counter."""
    if by == 0:
        raise ToolError("division by zero")
    return count / by


@server.tool()
def point(x: int) -> Point:
    """A point on the diagonal."""
    return Point(x=x, y=x)


@server.tool()
def picture(color: str) -> Image:
    """A picture of one color."""
    import PIL.Image

    buffer = io.BytesIO()
    PIL.Image.new("RGB", (8, 4), color).save(buffer, format="PNG")
    return Image(data=buffer.getvalue(), format="png")


@server.tool(structured_output=False)
def broken_picture() -> list[Any]:
    """A picture that cannot be decoded."""
    return ["before", Image(data=base64.b64decode("iVBORw0KGgo="), format="png")]


@server.tool()
async def work(steps: int, ctx: Context) -> str:
    """Work for 0.3 seconds per step, with progress."""
    import anyio

    for step in range(steps):
        await anyio.sleep(0.3)
        await ctx.report_progress(step + 1, steps, f"step {step + 1}")
    return "done"


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
