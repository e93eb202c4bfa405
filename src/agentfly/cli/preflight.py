"""Work of `agentfly doctor RECIPE`: everything that a training run needs, checked before it starts.

Each check says what it found and, where it fails, what to do. A check that needs an earlier one is skipped after its
failure. The last ones build the run in a temporary folder, and sample and score one short chain; nothing is trained.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console

from agentfly.agent import BaseAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.cli.console import print_check
from agentfly.cli.recipes import Recipe
from agentfly.cli.run import require_torch
from agentfly.cli.train import plan_recipe
from agentfly.errors import AgentFlyError, describe
from agentfly.plugins import find_package_conflict
from agentfly.training.plan import TrainPlan

MAX_TOKENS = 16
"""Maximum number of tokens of a turn in the chain that is sampled."""


class Report(Protocol):
    """Takes the result of one check."""

    def __call__(self, check: str, ok: bool, finding: str, advice: str = "") -> None: ...


def run_preflight(recipe: Recipe, changes: Mapping[str, Any]) -> bool:
    """Check a recipe with config overrides, print the results, and return whether all checks passed."""
    console = Console()
    passed = True

    def report(check: str, ok: bool, finding: str, advice: str = "") -> None:
        nonlocal passed
        passed &= ok
        print_check(console, check, ok, finding, advice)

    with console.status("checking …"):
        asyncio.run(_check(recipe, changes, report))
    return passed


async def _check(recipe: Recipe, changes: Mapping[str, Any], report: Report) -> None:
    from agentfly.sandbox import probe_mechanisms

    working = [probe.mechanism for probe in await probe_mechanisms() if probe.ok]
    strong = [mechanism for mechanism in working if mechanism != "unsafe"]
    advice = "" if strong else "see `agentfly doctor`; tools that run code of the model need a sandbox"
    report("sandbox", bool(strong), f"{', '.join(working) or 'none'} work", advice)
    conflict = find_package_conflict()
    report("packages", not conflict, conflict or "no conflicting distribution")
    try:
        require_torch("doctor RECIPE")
        plan = plan_recipe(recipe, changes)
    except AgentFlyError as error:
        report("recipe", False, str(error), "correct the recipe, or install what it needs")
        return
    report("recipe", True, f"{len(plan.tasks)} tasks, {len(plan.eval_tasks)} held out; its extras are installed")
    from agentfly.backends.engine.loading import resolve_device
    from agentfly.models import resolve
    from agentfly.templates.check import CheckMark, check
    from agentfly.training.memory import GIB, device_memory, plan_run

    config = plan.config
    problem = "" if "model" in changes else recipe.explain_warm_start(plan.warm_start, config.model)
    report("model", not problem, problem or config.model)
    device = resolve_device(None)
    gpu = f"{device}, {device_memory(device) / GIB:.0f} GiB" if device.type == "cuda" else str(device)
    report("GPU", True, gpu if device.type != "cpu" else "none: it trains on the CPU")
    try:
        model = resolve(config.model)
        memory = plan_run(model, config, device)
    except AgentFlyError as error:
        report("memory", False, str(error), "`agentfly doctor --memory` plans other settings")
        return
    report("memory", True, str(memory).removeprefix("Memory "))
    try:
        unsampled = plan.make_agent(
            model_name_or_path=model, backend=ScriptedBackend("unused"), template=config.template
        )
        checked = (
            check(model, config.template, unsampled.schemas) if unsampled.schemas else check(model, config.template)
        )
    except AgentFlyError as error:
        report("template", False, str(error), "name another with template=")
        return
    problems = [
        f"{finding.property}: {finding.detail}" for finding in checked.findings if finding.mark is CheckMark.BAD
    ]
    advice = f"`agentfly template check {config.model}` has the details; name another with template="
    report("template", checked.ok, "; ".join(problems) or f"{checked.template}: exact", "" if checked.ok else advice)
    parser = next(finding for finding in checked.findings if finding.property == "parser")
    native = bool(unsampled.schemas)
    fails = native and parser.mark is CheckMark.BAD
    text = f"{parser.detail}: calls are parsed as they are written" if native else "the agent parses calls itself"
    report("parser", not fails, parser.detail if fails else text, advice if fails else "")
    if await _start_environments(unsampled, plan, report):
        await _sample_chain(plan, report)


async def _start_environments(agent: BaseAgent, plan: TrainPlan, report: Report) -> bool:
    """Reset one instance of each environment for the first task. Returns whether all started."""
    names = [env_class.__name__ for env_class in agent.toolbox.environments]
    try:
        async with agent.manager.leases(plan.tasks[0], agent.toolbox.environments) as leases:
            for env_class in agent.toolbox.environments:
                await leases.get(env_class)
    except Exception as error:
        report("environments", False, describe(error), "`agentfly env check` checks an environment alone")
        return False
    finally:
        await agent.close()
    report("environments", True, f"{', '.join(names)} started" if names else "the agent uses none")
    return True


async def _sample_chain(plan: TrainPlan, report: Report) -> None:
    """Build the run, send the weights, sample and score a short chain, and compare what the learner computes of it."""
    from agentfly.algorithms.base import SegmentArrays
    from agentfly.training.trainer import Trainer

    config = plan.config.override({"evaluation": {}, "loggers": ()})
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with Trainer.create(replace(plan, config=config, eval_tasks=()), Path(folder, "run")) as trainer:
                report("weight sync", True, "the sampler has the learner's weights")
                sampling = replace(config.sampling, max_tokens=MAX_TOKENS)
                options = config.agent_options(sampling=sampling, seed=0, max_turns=min(config.max_turns, 2))
                chain = (await trainer.agent.run([plan.tasks[0]], **options))[0]
                failure = chain.failures[-1].message if chain.failures else chain.stop.value
                hint = "`agentfly run RECIPE --row 0 --tokens` shows the chain"
                if chain.untrainable is not None or not chain.sampled_tokens:
                    report("chain", False, chain.untrainable or f"{failure}; nothing was sampled", hint)
                    return
                scored = chain.reward is not None
                cut = f"for a chain of at most {options['max_turns']} turns of {MAX_TOKENS} tokens"
                report("reward", scored, f"{chain.reward:g} {cut}" if scored else failure, "" if scored else hint)
                segments = [SegmentArrays.from_segment(segment) for segment in chain.segments]
                trained = sum(int(segment.mask.sum()) for segment in segments)
                text = (
                    f"{trained} of {sum(len(segment.tokens) for segment in segments)} tokens, those that were sampled"
                )
                report("mask", trained == chain.sampled_tokens, text)
                scores = trainer.learner.score(segments, sampling.temperature)
                gaps = [np.abs(s - segment.logprobs)[segment.mask] for s, segment in zip(scores, segments, strict=True)]
                gap = float(np.concatenate(gaps).mean())
                limit = trainer.canary_tolerance
                advice = (
                    "" if gap <= limit else "set loss.correction=token-truncate, or precision and backend.dtype alike"
                )
                text = f"sampler and learner differ by {gap:.2g} nats per token, at most {limit:g} are accepted"
                report("log-probabilities", gap <= limit, text, advice)
    except AgentFlyError as error:
        report("run", False, str(error), "the message says what to change")
