"""What a turn came to: whether the chain ends with it, and what the model is told besides the answers to its calls."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.outcome import CallStatus, StopReason
from agentfly.rollout.policy import Control, Reaction, Then
from agentfly.tooling import ToolResult
from agentfly.types import Message, Reply

Verdict = tuple[StopReason | None, Sequence[str]]
"""Why the chain ends here, or None; and what the model is told to go on with."""


def prediction(reply: Reply, results: Sequence[ToolResult]) -> str:
    """The answer, should the chain end here: that of the tool that ends it, else the marked one, else all was said."""
    for result in results:
        if result.ends_chain:
            return Message("tool", result.observation).text
    return reply.message.text if reply.answer is None else reply.answer


class Judge:
    """Judges the turns of one chain, one after another."""

    __slots__ = ("_control", "_slips")

    def __init__(self, control: Control) -> None:
        self._control = control
        self._slips: dict[StopReason, int] = {}
        """Turns since the last good one that did not move the chain on, by the end they lead to."""

    def verdict(self, reply: Reply, results: Sequence[ToolResult], cut: StopReason | None) -> Verdict:
        """`cut` is the limit that cut the turn off; None when it came to its own end."""
        statuses = {result.status for result in results}
        if any(result.ends_chain for result in results):
            return StopReason.TOOL_END, ()
        if cut is not None and CallStatus.OK not in statuses:
            return cut, ()
        if reply.answer is not None:
            return StopReason.ANSWER, ()
        if CallStatus.ERROR in statuses:
            return self._slip(self._control.on_tool_error, StopReason.TOOL_FAULT)
        if results and not reply.problems and statuses <= _WENT_WELL:
            if self._slips:
                self._slips.clear()
            return None, ()
        if results:
            return self._slip(self._control.on_invalid_call, StopReason.INVALID_CALL)
        if reply.problems:
            stop, nudge = self._slip(self._control.on_invalid_call, StopReason.INVALID_CALL)
            wrong = "; ".join(reply.problems)
            return stop, (f"Error: your reply could not be read: {wrong}.", *nudge)
        ends = self._control.on_no_call.then is Then.END
        return self._slip(self._control.on_no_call, StopReason.ANSWER if ends else StopReason.NO_CALL)

    def _slip(self, reaction: Reaction, over: StopReason) -> Verdict:
        slips = self._slips[over] = self._slips.get(over, 0) + 1
        if reaction.then is Then.END or (reaction.limit is not None and slips > reaction.limit):
            return over, ()
        return None, () if reaction.nudge is None else (reaction.nudge,)


_WENT_WELL = {CallStatus.OK, CallStatus.SKIPPED}
