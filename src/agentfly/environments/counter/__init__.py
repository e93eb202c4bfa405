"""A counter: one file with environment, reward, tasks and scripted agent, as an example (`agentfly run counter`)."""
