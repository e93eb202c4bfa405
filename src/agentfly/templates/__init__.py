"""Chat templates: messages to tokens and back. `load_template` loads one by name."""

from agentfly.templates.audit import Audit, audit
from agentfly.templates.chat_format import ChatFormat, Family
from agentfly.templates.loading import load_template, names, register_template
from agentfly.templates.parsers.registry import PARSERS

__all__ = ["PARSERS", "Audit", "ChatFormat", "Family", "audit", "load_template", "names", "register_template"]
