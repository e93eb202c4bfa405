"""The supervisor: a small helper process that outlives this one long enough to clean up after it."""

from agentfly.resources.supervisor.handle import Supervisor, Worker, get_supervisor

__all__ = ["Supervisor", "Worker", "get_supervisor"]
