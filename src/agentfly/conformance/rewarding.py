"""Properties of the reward that an environment names: its expert earns all of it, and who does nothing does not."""

from __future__ import annotations

from agentfly.conformance.report import Broken, NotApplicable
from agentfly.conformance.subject import Subject, told_of
from agentfly.environment import draws_tasks
from agentfly.errors import AgentFlyError, ConfigError
from agentfly.training.demonstrations import Demonstrations, demonstrate
from agentfly.trajectory import Trajectory

FULL = 1.0
"""What a chain that did everything right earns at least."""
MOST_TURNS = 300


async def expert_solves(subject: Subject) -> str:
    """The expert solves a sample of every split, through the tools, under the manager."""
    _refuse_unrewardable(subject)
    if not subject.has_expert:
        raise NotApplicable("it has no expert")
    agent = subject.agent()
    try:
        for split, tasks in subject.samples.items():
            shown = await demonstrate(agent, tasks, threshold=FULL, max_turns=MOST_TURNS)
            subject.demonstrated[split] = shown
            if shown.dropped:
                why = "; ".join(f"{count} × {reason:.120}" for reason, count in shown.reasons.items())
                raise Broken(f"{len(shown.dropped)} of {len(tasks)} tasks of {split} are not solved: {why}")
    except AgentFlyError as error:
        raise Broken(told_of(error)) from None
    finally:
        await agent.close()
    done = sum(map(len, subject.samples.values()))
    earned = f" and earns {subject.kind.scored_by} ≥ {FULL:g}" if subject.reward else ""
    return f"it solves {done} of {done} tasks of {', '.join(subject.samples)}{earned}"


async def reward_bounds(subject: Subject) -> str:
    """Who does nothing earns less than everything, and no more than the expert."""
    _refuse_unrewardable(subject)
    if subject.reward is None:
        raise NotApplicable("it names no reward (scored_by)")
    most, agent = 0.0, subject.agent()
    try:
        for split, tasks in subject.samples.items():
            most = max(most, *(_earned(chain) for chain in await agent.run(tasks)))
            least = _least(subject.demonstrated.get(split))
            if most >= FULL or (least is not None and most > least):
                beside = "" if least is None else f", the expert {least:g}"
                raise Broken(f"doing nothing earns {most:g} in {split}{beside}")
    except AgentFlyError as error:
        raise Broken(told_of(error)) from None
    finally:
        await agent.close()
    return f"doing nothing earns {most:g} at most"


def _earned(chain: Trajectory) -> float:
    if chain.reward is None:
        why = chain.failures[-1].message if chain.failures else chain.stop.value
        raise Broken(f"a chain that did nothing has no score: {why:.200}")
    return chain.reward


def _least(shown: Demonstrations | None) -> float | None:
    earned = [each.reward for each in shown.kept if each.reward is not None] if shown else []
    return min(earned, default=None)


def _refuse_unrewardable(subject: Subject) -> None:
    subject.refuse_without_tools()
    if not subject.given and not draws_tasks(subject.kind):
        raise NotApplicable("it has no tasks of its own, and none were given")
    try:
        _ = subject.reward
    except ConfigError as error:
        raise Broken(f"scored_by: {error}") from None
