"""A package that adds an environment to AgentFly."""
