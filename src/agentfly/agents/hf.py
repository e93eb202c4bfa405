"""Function calling in the model's own format."""

from agentfly.agent import BaseAgent


class HFAgent(BaseAgent):
    """The chat template shows the tools, its family's reader finds the calls. A reply without a call is the answer."""
