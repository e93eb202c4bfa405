"""A counting server with the OpenEnv protocol: openenv-core's own, or a minimal fake.

    python openenv_server.py genuine|stand-in

prints its port. It counts up by what the action says; at ten the episode is over, with a reward of one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


class Counter:
    """What both servers serve."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> tuple[str, float, bool]:
        if number > 100:
            raise ValueError("that is too much")
        self.count += number
        return f"It shows {self.count}.", float(self.count == 10), self.count >= 10


def genuine() -> None:
    import socket

    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Add(Action):
        number: int

    class Shown(Observation):
        text: str

    class Counting(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.counter = Counter()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Shown:
            self.counter = Counter()
            self.counter.count = seed or 0
            return Shown(text=f"It shows {self.counter.count}.")

        def step(self, action: Add, timeout_s: float | None = None, **_: Any) -> Shown:
            text, reward, done = self.counter.add(action.number)
            return Shown(text=text, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State(step_count=self.counter.count)

    app = create_fastapi_app(Counting, Add, Shown, max_concurrent_envs=8)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listener])


def stand_in() -> None:
    from websockets.asyncio.server import serve

    def respond(counter: Counter, message: dict[str, Any]) -> dict[str, Any]:
        data = message.get("data", {})
        if message["type"] == "state":
            return {"type": "state", "data": {"step_count": counter.count}}
        if message["type"] == "reset":
            counter.count = data.get("seed", 0)
            text, reward, done = f"It shows {counter.count}.", None, False
        elif not isinstance(data.get("number"), int):
            problem = {"loc": ["number"], "msg": "Input should be a valid integer"}
            return {"type": "error", "data": {"message": "Invalid message", "errors": [problem]}}
        else:
            try:
                text, reward, done = counter.add(data["number"])
            except ValueError as error:
                return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
        return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}

    async def session(socket: Any) -> None:
        counter = Counter()
        async for message in socket:
            await socket.send(json.dumps(respond(counter, json.loads(message))))

    async def main() -> None:
        async with serve(session, "127.0.0.1", 0) as server:
            print(next(iter(server.sockets)).getsockname()[1], flush=True)
            await server.serve_forever()

    asyncio.run(main())


if __name__ == "__main__":
    {"genuine": genuine, "stand-in": stand_in}[sys.argv[1]]()
