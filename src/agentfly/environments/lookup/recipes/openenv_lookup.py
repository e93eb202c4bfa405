"""An environment on an OpenEnv server, trained: every call and the answer go to the server, which sends the reward.

    agentfly train openenv

Every instance starts a server for itself, so that the recipe needs no other process. For a server that runs elsewhere
(`agentfly env serve Lookup --reward qa_em`, or any other with the OpenEnv protocol), omit `start` and set `address`.
"""

import json
from typing import Any

from agentfly import Task, reward, tool
from agentfly.agents import HFAgent
from agentfly.environment import Pool
from agentfly.environments.games.openenv_env import OpenEnvEnvironment
from agentfly.environments.lookup import Lookup, recipe
from agentfly.errors import require_extra

with require_extra("the recipe openenv", "openenv"):
    from agentfly.integrations.openenv import OpenEnvServer


class RemoteLookup(OpenEnvEnvironment):
    """Lookups on a server."""

    pool = Pool(max_instances=16)
    shows = "result"
    server: OpenEnvServer | None = None

    async def start(self) -> None:
        self.server = await OpenEnvServer(Lookup, reward="qa_em").start()
        self.address = self.server.url  # type: ignore[misc]  # that of this instance

    async def reset(self, task: Task) -> None:
        row = {"question": task.question, **task.columns}
        await super().reset(Task.of({"question": task.question, "reset": {"task": row}}))
        self.facts, self.columns, self.lookups = task.columns["facts"], task.columns, set[tuple[str, str]]()

    @tool
    async def lookup(self, who: str, what: str) -> dict[str, Any]:
        """Look up one fact about a person.

        Args:
            who: The person's name.
            what: A relation or a property.
        """
        self.lookups.add((who, what))
        return await self.play(json.dumps({"tool_name": "lookup", "arguments": {"who": who, "what": what}}))

    expert = Lookup.expert  # it reads columns, facts and lookups

    async def close(self) -> None:
        await super().close()
        if self.server is not None:
            await self.server.close()


@reward
async def served_reward(prediction: str, env: RemoteLookup) -> float:
    """Give the answer to the server; returns its reward."""
    await env.play(json.dumps({"type": "answer", "answer": prediction}))
    return env.score


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[RemoteLookup.lookup], reward=served_reward)


tasks = Lookup.draw_tasks("train", 1600)
eval_tasks = Lookup.draw_tasks("validation", 100)
requires = ("train", "openenv")
config = recipe.config
