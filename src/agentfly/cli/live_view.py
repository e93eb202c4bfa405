"""Live display of chains: sampled text, tool answers and rewards."""

from __future__ import annotations

import json
import math

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentfly.cli.console import safe_text
from agentfly.rollout import RunResult, events
from agentfly.runs.console import ECHO_WIDTH
from agentfly.runs.thumbnails import describe_image
from agentfly.segment import AUTHOR_COLORS, Author
from agentfly.trajectory import CallStatus, FailureKind, Trajectory
from agentfly.types import Content, ToolCall

PANELS = 6
"""Maximum number of chains shown; further ones are only counted."""
HEIGHT = 12
"""Maximum number of lines per panel."""


class ChainView:
    """Display state of one chain."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = 0
        self.ended = False
        self.lines = Text()
        self._partial = ""
        self.reward: float | None = None

    def handle(self, event: events.Event) -> Text | None:
        """Update from an event; return the line to print if panels cannot be drawn."""
        match event:
            case events.TokensSampled(turn=turn, text=text):
                self.turn, self._partial = turn, text
                return None
            case events.ChainStarted(task=task):
                self.lines, self.ended = Text(), False
                return self._append(describe_content(task.messages[-1].content), Author.TASK)
            case events.ReplyReceived(turn=turn, message=message):
                self.turn, self._partial = turn, ""
                return self._append(message.text, Author.MODEL) if message.text else None
            case events.ToolCalled(call=call):
                return self._append(f"→ {format_call_line(call)}", Author.MODEL)
            case events.ToolReturned(result=result):
                mark = "←" if result.status is CallStatus.OK else "✗"
                return self._append(f"{mark} {describe_content(result.observation)}", Author.TOOL)
            case events.ChainRetried(failure=failure):
                return self._append(f"retried: {failure.message}", Author.TEMPLATE)
            case events.ChainScored(score=score):
                self.reward = score.total
                return None
            case events.ChainEnded(trajectory=trajectory):
                self.ended = True
                return self._append(format_end_line(trajectory), Author.TEMPLATE)
        return None

    def _append(self, text: str, author: Author) -> Text:
        line = safe_text(text.strip() + "\n", AUTHOR_COLORS[author])
        self.lines.append_text(line)
        return line

    def panel(self, width: int, height: int) -> Panel:
        """The end of the chain."""
        text = self.lines.copy()
        text.append_text(safe_text(self._partial, AUTHOR_COLORS[Author.MODEL]))
        room = 2 * width * height  # wrap only the end: wrapping is slow; the cut moves in steps, not per token
        text = text[max(len(text) // room - 1, 0) * room :]
        wrapped = text.wrap(Console(width=width - 4, force_terminal=True), width - 4)
        visible_lines = Text("\n").join(wrapped[-height:])
        border = "dim" if self.ended and not self.reward else "green" if self.ended else "bright_blue"
        title = f"chain {self.name} · turn {self.turn + 1}"
        return Panel(visible_lines, title=title, width=width, height=height + 2, border_style=border)


class LiveView:
    """An observer that shows a run live: panels in a terminal, otherwise lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self.draws_panels = self._console.is_terminal and not self._console.is_dumb_terminal
        self._chains: dict[str, ChainView] = {}
        self._live = Live(console=self._console, refresh_per_second=12, get_renderable=self._render, transient=True)

    def __enter__(self) -> LiveView:
        if self.draws_panels:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.draws_panels:
            self._live.stop()

    @property
    def num_ended(self) -> int:
        """Number of chains that have ended."""
        return sum(chain.ended for chain in self._chains.values())

    def __call__(self, event: events.Event) -> None:
        chain = self._chains.setdefault(event.chain_id, ChainView(event.chain_id))
        line = chain.handle(event)
        if line is not None and not self.draws_panels:
            for text_line in line.split("\n"):
                self._console.print(Text(f"{event.chain_id} ", "dim") + text_line, soft_wrap=True)

    def _render(self) -> RenderableType:
        chains = sorted(self._chains.values(), key=lambda chain: chain.ended)[:PANELS]
        total_width = max(self._console.width - ECHO_WIDTH, 1)
        across = min(len(chains), max(total_width // 44, 1)) or 1
        width = max(total_width // across, 1)
        height = max(min(HEIGHT, (self._console.height - 2) // math.ceil(len(chains) / across or 1) - 2), 1)
        panels = [chain.panel(width, height) for chain in chains]
        drawn: list[RenderableType] = [Columns(panels, padding=(0, 0))]
        if len(self._chains) > PANELS:
            running = sum(not chain.ended for chain in self._chains.values())
            drawn.append(Text(f"{running} of {len(self._chains)} chains running", "dim"))
        return Constrain(Group(*drawn), total_width)


def describe_content(content: Content) -> str:
    """Format content as text, with a label for each image."""
    if isinstance(content, str):
        return content
    return "\n".join(piece if isinstance(piece, str) else describe_image(piece) for piece in content if piece)


def format_call_line(call: ToolCall) -> str:
    """Format a call as `add(a=1, b=2)`."""
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name or '?'}({arguments or call.raw.strip()})"


def describe_failure(trajectory: Trajectory) -> str:
    """Return the message of the failure that ended a chain or its scoring; empty if there is none."""
    last = trajectory.failures[-1] if trajectory.failures else None
    unscored = trajectory.score is None and last is not None and last.kind is FailureKind.REWARD
    return last.message if last is not None and (trajectory.stop.failure or unscored) else ""


def format_end_line(trajectory: Trajectory) -> str:
    """Describe in one line how a chain ended."""
    reward = "" if trajectory.score is None else f", reward {trajectory.score.total:g}"
    failed = f": {message}" if (message := describe_failure(trajectory)) else ""
    return f"■ {trajectory.stop.value.replace('_', ' ')}{failed}{reward}"


def summary_table(result: RunResult) -> Table:
    """Create a table with a row per chain and the run's metrics in the footer."""
    table = Table(
        box=None, header_style="dim", footer_style="bold", show_footer=True, expand=True, padding=(0, 1, 0, 0)
    )
    metrics = result.metrics
    reward = f"{metrics['reward/mean']:.2f}" if "reward/mean" in metrics else "–"
    unknown = f"{metrics['calls/unknown_rate']:.0%} of calls to unknown tools" if metrics["calls/unknown_rate"] else ""
    table.add_column("chain", str(len(result)), min_width=5)
    table.add_column("question", "chains", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("answer", unknown, ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("end", min_width=8, no_wrap=True)
    for title, total in (
        ("turns", f"{metrics['chain/turns']:.1f}"),
        ("calls", f"{metrics['calls/chain']:.1f}"),
        ("tokens", f"{metrics['chain/sampled_tokens']:.0f}"),
        ("reward", reward),
    ):
        table.add_column(title, total, justify="right", min_width=len(title))
    for trajectory in result:
        table.add_row(
            trajectory.id,
            safe_text(" ".join(trajectory.task.question.split()), AUTHOR_COLORS[Author.TASK]),
            safe_text(" ".join(trajectory.prediction.split()), AUTHOR_COLORS[Author.MODEL]),
            Text(trajectory.stop.value.replace("_", " "), "red" if trajectory.stop.failure else ""),
            str(len(trajectory.turns)),
            str(sum(1 for _ in trajectory.calls)),
            str(trajectory.sampled_tokens),
            "–" if trajectory.reward is None else f"{trajectory.reward:g}",
        )
    return table
