"""Image parts of messages, sent to a server that runs a real vision model."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

torch = pytest.importorskip("torch", reason="the server runs a model: pip install 'agentfly-rl[train]'")

from agentfly import tool  # noqa: E402
from agentfly.agents import HFAgent  # noqa: E402
from agentfly.backends.base import Request  # noqa: E402
from agentfly.backends.engine import EngineBackend  # noqa: E402
from agentfly.rollout.history import Transcript  # noqa: E402
from agentfly.segment import Author  # noqa: E402
from agentfly.templates import load_template  # noqa: E402
from agentfly.templates.template import Template  # noqa: E402
from agentfly.templates.tokenizer import load_tokenizer  # noqa: E402
from agentfly.trajectory import StopReason  # noqa: E402
from agentfly.types import Image, Message, Sampling  # noqa: E402
from agentfly.vision.processor import load_image_processor  # noqa: E402
from tests.backends.openai_server import OpenAIServer  # noqa: E402
from tests.vision_models import build_vision_model, picture  # noqa: E402


@dataclass
class VisionServer:
    """A chat server in this process."""

    http: OpenAIServer
    backend: EngineBackend
    template: Template

    async def chat(self, request: HTTPRequest) -> Response:
        """Render the messages with their images and sample a reply; the second request ends the chain."""
        body = await request.json()
        completion = await self.sample([read_message(row) for row in body["messages"]])
        text = self.template.codec.decode(completion.token_ids)
        calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
        is_first = len(body["messages"]) == 1
        message = {"role": "assistant", "content": text, **({"tool_calls": calls} if is_first else {})}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if is_first else "stop"}
        return JSONResponse({"id": "1", "object": "chat.completion", "model": "m", "choices": [choice]})

    async def sample(self, messages: list[Message]) -> Any:
        transcript = Transcript(self.template)
        transcript.begin(messages, Author.TASK, turn=0)
        segment = transcript.segment
        return await self.backend.generate(
            Request(
                segment.prompt, Sampling(temperature=0.0, max_tokens=6), stop_ids=self.template.stop_ids,
                images=segment.images, image_positions=segment.image_positions,
            )
        )  # fmt: skip


def read_message(row: dict[str, Any]) -> Message:
    content = row["content"] or ""
    if not isinstance(content, str):
        content = tuple(
            block["text"] if block["type"] == "text" else Image(block["image_url"]["url"]) for block in content
        )
    return Message("user" if row["role"] == "tool" else row["role"], content)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[VisionServer]:
    folder = str(build_vision_model("smolvlm", tmp_path))
    template = load_template(None, load_tokenizer(folder), image_processor=load_image_processor(folder))
    backend = EngineBackend(folder, dtype="float32", kv_memory=1 << 24)
    backend.attach(template)
    http = OpenAIServer()
    http.start()
    yield VisionServer(http, backend, template)
    http.stop()
    await backend.close()


@tool
def look() -> dict[str, Any]:
    """Show the next image."""
    return {"observation": "zoomed", "image": picture(40, 30, seed=2).url}


async def test_server_sees_the_images_of_task_and_tool(server: VisionServer) -> None:
    server.http.answers("/chat/completions", server.chat)
    agent = HFAgent("m", backend="client", backend_config={"base_url": server.http.url, "exact": False}, tools=[look])
    screenshot = picture(56, 40, seed=1)
    (chain,) = await agent.run({"question": "What is it?", "image": screenshot.url}, max_turns=3)
    assert chain.stop is StopReason.ANSWER
    _, second = server.http.bodies("/chat/completions")
    urls = [block["image_url"]["url"] for block in second["messages"][0]["content"] if block["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    assert "image_url" in json.dumps(second["messages"][-1])
    expected = await server.sample([read_message(row) for row in second["messages"]])
    assert chain.prediction == server.template.codec.decode(expected.token_ids).strip()
    seen = [await server.sample([Message("user", ("What is it?", picture(56, 40, seed)))]) for seed in (1, 2)]
    assert not np.allclose(seen[0].logprobs[0], seen[1].logprobs[0], atol=1e-3)  # the server looks at the image
    assert "images whose tokens are unknown" in str(chain.untrainable)
    await agent.close()
