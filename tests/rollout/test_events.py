"""Events name their chain."""

from agentfly.rollout.events import ChainStarted
from agentfly.types import Task


def test_an_event_names_its_chain_as_the_trajectory_does() -> None:
    assert ChainStarted(3, 1, Task(())).chain_id == "3/1"
