"""Native function calling."""

from agentfly.agent import BaseAgent


class HFAgent(BaseAgent):
    """The chat template renders the tools and its parser finds the calls. A reply without a call is the answer."""
