"""`agentfly treasure`: Print a map."""

import typer

app = typer.Typer()


@app.command()
def show() -> None:
    """Print a map."""
    print("X marks the spot")
