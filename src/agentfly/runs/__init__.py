"""Training runs: run directory, metrics, alarms, report and loggers."""

from agentfly.runs.alarms import AlarmMonitor, AlarmThresholds
from agentfly.runs.directory import RunDirectory, RunWriter, StoredTrajectory
from agentfly.runs.loggers import RunLogger, RunLoggers, open_loggers
from agentfly.runs.metrics import chain_metrics
from agentfly.runs.record import Alarm, EvalFigures, Progress, StepRecord

__all__ = [
    "Alarm",
    "AlarmMonitor",
    "AlarmThresholds",
    "EvalFigures",
    "Progress",
    "RunDirectory",
    "RunLogger",
    "RunLoggers",
    "RunWriter",
    "StepRecord",
    "StoredTrajectory",
    "chain_metrics",
    "open_loggers",
]
