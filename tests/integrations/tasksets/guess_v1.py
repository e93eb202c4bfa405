"""A multi-turn environment as users of verifiers write it: `run` is the user, the harness a loop in this process."""

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["GuessEnv", "GuessHarness", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return "give up" in trace.last_reply


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for number in range(100):
            yield GuessTask(GuessData(prompt="Guess my number.", number=number), self.config.task)


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        prompt = data.prompt
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
        )
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=60) as client:
            reply = await client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages})
        return ProgramResult(int(reply.is_error), "", reply.text if reply.is_error else "")


class GuessConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        reward = 0.0
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and interaction.trace.num_turns < 5:
                if segment.last_reply == str(task.data.number):
                    reward = 1.0
                    break
                segment = await interaction.turn("No. Guess again.")
        interaction.trace.record_reward("guessed", reward)
