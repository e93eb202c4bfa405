"""The supervisor: a small helper process that outlives this one long enough to clean up after it.

    this process ── supervisor ── guardian ── worker ── whatever an environment starts
                              └── guardian ── worker

The supervisor forks workers quickly because it has already imported what they need. Each worker has a guardian, which
adopts the worker's orphans and kills all of them when the worker ends. When this process ends for any reason, the
supervisor kills everything below it, removes the folders and containers registered with it, and exits.
"""

from agentfly.resources.supervisor.handle import Supervisor, Worker, get_supervisor

__all__ = ["Supervisor", "Worker", "get_supervisor"]
