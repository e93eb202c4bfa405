"""What a training run leaves and shows: its folder, its figures, its alarms, its report, and the sinks that watch."""

from agentfly.runs.alarms import Limits, Watch
from agentfly.runs.directory import RunDirectory, Stored
from agentfly.runs.metrics import chain_metrics
from agentfly.runs.record import Alarm, EvalFigures, Progress, StepRecord
from agentfly.runs.sinks import Sink, Sinks, open_sinks
from agentfly.runs.writer import RunWriter

__all__ = [
    "Alarm",
    "EvalFigures",
    "Limits",
    "Progress",
    "RunDirectory",
    "RunWriter",
    "Sink",
    "Sinks",
    "StepRecord",
    "Stored",
    "Watch",
    "chain_metrics",
    "open_sinks",
]
