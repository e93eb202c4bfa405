"""Puts a run together: model, learner, backend, agent, folder. What cannot work is found before weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from agentfly.agent import BaseAgent, wait_for
from agentfly.algorithm import Needs
from agentfly.algorithms.loss import Loss
from agentfly.backend import Backend
from agentfly.backends import open_backend
from agentfly.backends.transformers.loading import device_of, dtype_of, load_model, positions_of
from agentfly.encoding.tokenizer import load_tokenizer
from agentfly.errors import ConfigError
from agentfly.models import resolve
from agentfly.rollout.scheduling import refuse_what_cannot_start
from agentfly.runs import RunDirectory, RunWriter, open_sinks
from agentfly.template import History
from agentfly.threads import release_helpers
from agentfly.training.checkpoint import Checkpoints
from agentfly.training.config import TrainConfig
from agentfly.training.learner import Learner
from agentfly.training.lora import with_lora
from agentfly.training.trainer import Plan, Trainer


def new_run(plan: Plan, folder: Path, about: Mapping[str, Any] | None = None) -> Trainer:
    """A run that begins, in a folder that has none; `about` is kept in it beside the configuration."""
    learner, agent = _made(plan)
    with ExitStack() as undo:
        undo.callback(lambda: wait_for(agent.close()))
        writer = undo.enter_context(RunWriter.create(folder, {**plan.config.to_json(), **(about or {})}, plan.recipe))
        trainer = _assembled(plan, learner, agent, writer)
        undo.pop_all()
    return trainer


def resumed_run(plan: Plan, folder: Path, from_step: int | None = None) -> Trainer:
    """A run that goes on after its newest checkpoint, or after that of a step; from the start where it has none yet."""
    _refuse_another(plan.config, RunDirectory(folder))
    checkpoints = Checkpoints(folder / "checkpoints", plan.config.keep)
    state, model = checkpoints.load(from_step) if checkpoints.candidates() or from_step is not None else (None, None)
    with ExitStack() as undo:
        writer = undo.enter_context(RunWriter.resume(folder, -1 if state is None else state.step))
        learner, agent = _made(plan)
        undo.callback(lambda: wait_for(agent.close()))
        if state is not None and model is not None:
            checkpoints.remove_after(state.step)
            learner.load(model)
        trainer = _assembled(plan, learner, agent, writer)
        if state is not None:
            trainer.resume(state)
        undo.pop_all()
    return trainer


def _refuse_another(config: TrainConfig, run: RunDirectory) -> None:
    """A run that goes on otherwise than it began would be two runs in one folder."""
    kept = run.config
    for name, value in json.loads(json.dumps(config.to_json())).items():
        if kept.get(name) != value:
            raise ConfigError(
                f"the run in {run.path} was started with {name}={kept.get(name)!r}, and is to go on with {value!r}: "
                "set it back, or start another run"
            )


def _assembled(plan: Plan, learner: Learner, agent: BaseAgent, writer: RunWriter) -> Trainer:
    checkpoints = Checkpoints(writer.checkpoints, plan.config.keep)
    tokenizer: Any = load_tokenizer(resolve(plan.config.model))
    sinks = open_sinks(plan.config.sinks, writer)
    return Trainer(plan, learner, agent, writer, sinks, checkpoints, tokenizer.save_pretrained)


def _made(plan: Plan) -> tuple[Learner, BaseAgent]:
    config, path = plan.config, resolve(plan.config.model)
    _refuse_what_does_not_fit(config, path)
    settings = {"backend": config.backend} if isinstance(config.backend, str) else dict(config.backend)
    name = settings.pop("backend", "transformers")
    embedded = name == "transformers"
    device = device_of(settings.get("device") if embedded else None)
    model = load_model(path, device, torch.float32)
    if config.lora_rank is not None:
        model = with_lora(model, config.lora_rank, seed=config.seed)
    backend: Any = _embedded(model, path, device, settings) if embedded else name
    agent = plan.make_agent(
        model_name_or_path=path,
        backend=backend,
        template=config.template,
        **({} if embedded else {"backend_config": settings}),
    )
    if agent.scorer is None:
        raise ConfigError("this agent has no reward, so there is nothing to learn from; give it reward=…")
    if config.segment_reward != "broadcast" and not _has_segments(agent, config):
        raise ConfigError(
            f"segment_reward={config.segment_reward!r} would have no effect: no history is rewritten here, so every "
            "chain is one segment; say run_options.strategy='step', or give a folding rule"
        )
    refuse_what_cannot_start(agent, [*plan.tasks, *plan.eval_tasks])
    learner = _learner(model, config)
    release_helpers()  # those that loading and trying wanted
    return learner, agent


def _has_segments(agent: BaseAgent, config: TrainConfig) -> bool:
    rewritten = agent.template is not None and agent.template.history is not History.APPEND
    return rewritten or "folding" in config.run_options or config.run_options.get("strategy") == "step"


def _embedded(model: Any, path: str, device: torch.device, settings: dict[str, Any]) -> Backend:
    """A backend that samples from the learner's own weights, or from a copy where those are in a finer precision."""
    if dtype_of(settings.get("dtype"), device) is not torch.float32:
        return open_backend("transformers", model=path, **settings)
    shared = {name: value for name, value in settings.items() if name not in ("device", "dtype")}
    return open_backend("transformers", model=model, **shared)


def _learner(model: Any, config: TrainConfig) -> Learner:
    needs = config.algorithm.needs
    loss = Loss(
        surrogate=config.loss,
        clip=config.clip,  # type: ignore[arg-type]
        kl=config.kl if config.kl_in == "loss" else 0.0,
        kl_estimator=config.kl_estimator,
        entropy=config.entropy,
        correction=config.correction,  # type: ignore[arg-type]
        correction_cap=config.correction_cap,
    )
    same = ("critic_learning_rate" if Needs.VALUES in needs else "", "aggregation", "learning_rate", "weight_decay",
            "warmup_steps", "schedule", "max_grad_norm", "epochs", "mini_batches", "micro_batch_tokens", "recompute",
            "precision", "seed")  # fmt: skip
    return Learner(
        model,
        loss=loss,
        constant=config.longest_chain,
        total_steps=config.steps,
        reference=config.kl > 0,
        critic=Needs.VALUES in needs,
        **{name: getattr(config, name) for name in same if name},
    )


def _refuse_what_does_not_fit(config: TrainConfig, path: str) -> None:
    """What the model's own configuration tells, before its weights are loaded."""
    from transformers import AutoConfig

    try:
        positions = positions_of(AutoConfig.from_pretrained(path).get_text_config())
    except (OSError, ValueError):
        return  # loading the model says what is wrong
    for name, asked in (
        ("run_options.context_length", config.run_options.get("context_length")),
        ("sampling.max_tokens", config.sampling.max_tokens),
    ):
        if asked is not None and asked > positions:
            raise ConfigError(f"{name}={asked}, but {config.model!r} knows {positions} places for tokens")
