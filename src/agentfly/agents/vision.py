"""Agents for vision models: `VisionAgent` calls tools natively, `GUIAgent` writes the actions of GUI models.

Tools take coordinates in thousandths of the image: 0 is left or top, 1000 is right or bottom. A model that writes
pixels means those of the image that it was shown last, after any resizing. `GUIAgent.read` converts them, nothing else.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from agentfly.agent import BaseAgent
from agentfly.agents.gui_formats import GUI_FORMATS, SCREEN_TOOLS
from agentfly.agents.prebuilt import PromptedAgent
from agentfly.backends.base import Request
from agentfly.errors import ConfigError
from agentfly.rollout.limits import RecoveryRule
from agentfly.tooling import Toolbox
from agentfly.types import Completion, Content, Image, Message, Reply, ToolCall
from agentfly.vision.images import COORDINATE_MAX, encode_image, open_image

PIXEL_MULTIPLE = 28
"""Servers of models that write pixels resize images to multiples of this; such an image is not resized again."""


class VisionAgent(BaseAgent):
    """Native function calling for a vision model. Raises ConfigError if model or backend takes no images.

    Other agents run a text-only model too, with a note in place of every image.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.template is not None and not self.backend.supports_images:
            name = type(self).__name__
            reason = self.no_vision_reason or "its backend or its model takes no images"
            raise ConfigError(f"{name} needs a vision model, which {self.model_name_or_path!r} is not: {reason}")


class GUIAgent(PromptedAgent, VisionAgent):
    """Operates a screen in the action format that a GUI model was trained on.

    Actions become calls of the screen's tools (`click_at`, `type_text`, `press_key`, `scroll`, `screenshot`, …); other
    tools are offered under their own names. An action for which there is no tool is not offered.
    """

    def __init__(self, *args: Any, action_format: str, **kwargs: Any) -> None:
        """`action_format`: a name in `GUI_FORMATS`. The other arguments are those of every agent."""
        if action_format not in GUI_FORMATS:
            close = difflib.get_close_matches(str(action_format), GUI_FORMATS, 1)
            suggestion = f", did you mean {close[0]!r}?" if close else ";"
            names = ", ".join(GUI_FORMATS)
            raise ConfigError(f"there is no action format {action_format!r}{suggestion} there are {names}")
        format_class, coordinates = GUI_FORMATS[action_format]
        kwargs["tools"] = tuple(kwargs.get("tools", ()))
        toolbox = list(Toolbox(kwargs["tools"]))
        if not any(tool.name in SCREEN_TOOLS for tool in toolbox):
            tool_names = ", ".join(tool.name for tool in toolbox) or "none"
            raise ConfigError(
                f"GUIAgent needs a tool of a screen ({', '.join(SCREEN_TOOLS)}); its tools are {tool_names}"
            )
        self.format = format_class(toolbox, coordinates)
        self.default_system_prompt = self.format.prompt
        self.default_on_no_call = RecoveryRule(nudge=self.format.nudge, limit=2)
        super().__init__(*args, **kwargs)

    def describe_tools(self) -> str:
        return self.format.describe()

    def parse(self, text: str) -> Reply:
        """Parse a turn; points stay in the model's unit."""
        return self.format.parse(text)

    def read(self, request: Request, completion: Completion) -> Reply:
        """Parse a completion and convert its points to thousandths of the image that the model saw last."""
        reply = super().read(request, completion)
        if not any(call.name in SCREEN_TOOLS for call in reply.calls):
            return reply
        size = (COORDINATE_MAX, COORDINATE_MAX)
        if self.format.coordinates == "pixels":
            images = request.images or [image for message in request.messages for image in message.images]
            images = [image for image in images if image.url.startswith("data:")]
            if not images and any(set(self.format.measures) & set(call.arguments) for call in reply.calls):
                problem = "no screenshot has been shown yet, so a point has no meaning; look at the screen first"
                return Reply(replace(reply.message, tool_calls=()), problems=(*reply.problems, problem))
            size = open_image(images[-1]).size if images else size
        calls = tuple(self._convert_points(call, size) for call in reply.calls)
        return replace(reply, message=replace(reply.message, tool_calls=calls))

    def _convert_points(self, call: ToolCall, size: tuple[int, int]) -> ToolCall:
        """The call with its points in thousandths of an image of `size` pixels."""
        if call.name not in SCREEN_TOOLS:
            return call
        arguments: dict[str, Any] = {}
        for name, value in call.arguments.items():
            if name in self.format.measures:
                value = round(value * COORDINATE_MAX / size[0 if name in ("x", "to_x") else 1])
            elif name == "down":
                value = round(value)
            arguments[name] = value
        return replace(call, arguments=arguments)

    def write_reply(self, message: Message) -> Message:
        """Write calls, or the answer, as actions. Raises ConfigError for formats in pixels: the image is unknown."""
        if self.format.coordinates == "pixels":
            raise ConfigError("demonstrations need an action format in thousandths: ui-tars or qwen3-vl")
        return Message("assistant", "\n".join(map(self.format.write, message.tool_calls or (message.text,))))

    def visible(self, content: Content, *, strict: bool = False) -> Content:
        """The content as the model can take it.

        A server resizes images by itself. If the model writes pixels, it is sent images that need no resizing, so that
        its pixels are those of the image sent.
        """
        content = super().visible(content, strict=strict)
        if isinstance(content, str) or self.template is not None or self.format.coordinates != "pixels":
            return content
        return tuple(_align_size(piece) if isinstance(piece, Image) else piece for piece in content)


def _align_size(image: Image) -> Image:
    """Resize an image so that its sides are multiples of PIXEL_MULTIPLE; an address stays as it is."""
    if not image.url.startswith("data:"):
        return image
    pixels = open_image(image)
    size = tuple(max(round(side / PIXEL_MULTIPLE), 2) * PIXEL_MULTIPLE for side in pixels.size)
    return image if pixels.size == size else encode_image(pixels.resize(size))
