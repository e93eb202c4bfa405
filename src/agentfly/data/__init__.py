"""Data: dataset files as tasks, and files of saved trajectories."""

from agentfly.data.tasks import read_tasks, select
from agentfly.data.trajectories import load_trajectories, save_trajectories

__all__ = ["load_trajectories", "read_tasks", "save_trajectories", "select"]
