"""The templates of one model, by the tools that requests bring."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from agentfly.templates.template import Template
from agentfly.threads import call

LoadTemplate = Callable[..., Template]
"""Called with `tools=` in OpenAI format."""
MAX_TEMPLATES = 64


class TemplateCache:
    """The template of a model for each set of tools that requests bring."""

    def __init__(self, load: LoadTemplate) -> None:
        self._load = load
        self._templates: OrderedDict[str, Template] = OrderedDict()
        self._lock = asyncio.Lock()
        self._numbers = 0
        self._prefix = secrets.token_hex(4)

    @cached_property
    def base(self) -> Template:
        """The template without tools."""
        return self._load(tools=())

    async def get(self, tools: Sequence[Mapping[str, Any]]) -> Template:
        """The template with these tools. Loading one takes a moment; it happens in a thread."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._templates:
            async with self._lock:
                if key not in self._templates:
                    self._templates[key] = await call(self._load, tools=tools)
                    if len(self._templates) > MAX_TEMPLATES:
                        self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        return self._templates[key]

    def new_id(self) -> str:
        """An id for a reply."""
        self._numbers += 1
        return f"{self._prefix}{self._numbers:08x}"
