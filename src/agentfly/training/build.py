"""Builds what a run trains and samples with: the learner, and the agent with its backend."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Any

import torch

from agentfly.agent import BaseAgent
from agentfly.backends import find_backend, open_backend
from agentfly.backends.base import Backend
from agentfly.backends.engine.loading import load_config, load_model, max_positions, resolve_device, resolve_dtype
from agentfly.errors import ConfigError
from agentfly.models import resolve
from agentfly.threads import release_helpers, wait_for
from agentfly.training.config import TrainConfig
from agentfly.training.learner import Learner
from agentfly.training.local_learner import LocalLearner
from agentfly.training.lora import add_lora
from agentfly.training.memory import MemoryPlan, fit_cache, frozen_weight_dtype, plan_run
from agentfly.training.optimizer import warn_of_unusual_rate
from agentfly.training.plan import TrainPlan
from agentfly.training.sharded_learner import ShardedLearner
from agentfly.training.sharding import Ranks
from agentfly.training.teacher import load_teacher
from agentfly.types import DefaultLimit

_LOG = logging.getLogger(__name__)


def build_learner_and_agent(
    plan: TrainPlan, undo: ExitStack, *, sharded: bool
) -> tuple[Learner, BaseAgent, MemoryPlan]:
    """Load the model once; the learner trains it, and the embedded engine samples from it.

    The memory plan is checked before the model is loaded, and when the update has been measured.
    sharded: whether this process is one of several ranks.
    undo: gets what closes learner and agent; where something after them fails, other ranks end without an error.
    """
    config = plan.config
    settings = config.backend_settings
    backend: Any = settings.pop("backend")
    backend_class = find_backend(backend)  # raises where it is missing, before a model is built or loaded
    path = resolve(config.model)
    _check_fields_of_model(config, load_config(path))
    device = resolve_device(settings.get("device") if config.embeds_engine else None)
    ranks = Ranks(device) if sharded else None
    num_ranks = 1 if ranks is None else ranks.size
    memory = plan_run(path, config, device, ranks=num_ranks)
    if config.embeds_engine and device.type == "cpu" and config.async_training.max_staleness:
        # The engine and the learner compute at the same time: half of the cores each.
        torch.set_num_threads(max(min(torch.get_num_threads(), (os.cpu_count() or 2) // 2), 1))
    learner = build_learner(config, device, ranks)
    undo.callback(learner.close)
    warn_of_unusual_rate(learner.model, config.optimizer.learning_rate, lora=config.lora_rank is not None)
    if config.embeds_engine and device.type == "cuda":
        longest, kv_memory = config.run_options.get("context_length"), settings.get("kv_memory")
        memory = fit_cache(memory, learner, longest=longest, kv_memory=kv_memory)
        memory.require_fit()
        settings["kv_memory"] = memory.parts["kv_cache"]
    _LOG.info("%s", memory)
    if config.embeds_engine:
        agent_settings: dict[str, Any] = {"backend": _open_engine(learner, config, {"model": path, **settings})}
    else:
        if device.type == "cuda":
            settings = backend_class.share_gpu(settings, learner.model, num_ranks)
        agent_settings = {"backend": backend, "backend_config": settings}
    agent = plan.make_agent(model_name_or_path=path, template=config.template, **agent_settings)
    undo.callback(lambda: wait_for(agent.close()))
    plan.check_agent(agent)
    release_helpers()  # the OpenMP threads that loading started
    return learner, agent, memory


def _check_fields_of_model(config: TrainConfig, model_config: Any) -> None:
    """Raise ConfigError where fields do not fit the model, whose weights are not loaded yet."""
    if config.vision.train_tower and not hasattr(model_config, "vision_config"):
        raise ConfigError(f"vision.train_tower=true, but {config.model!r} has no vision tower; leave it out")
    positions = max_positions(model_config.get_text_config())
    lengths = {"run_options.context_length": config.run_options.get("context_length")}
    if not isinstance(config.sampling.max_tokens, DefaultLimit):  # the default ends where the context does
        lengths["sampling.max_tokens"] = config.sampling.max_tokens
    for name, length in lengths.items():
        if length is not None and length > positions:
            raise ConfigError(f"{name}={length}, but {config.model!r} has {positions} positions")


def _open_engine(learner: LocalLearner, config: TrainConfig, settings: dict[str, Any]) -> Backend:
    """The embedded engine: with the learner's own weights, or with a copy of them.

    A copy where it samples in lower precision, which is faster, and in asynchronous and distributed training: an update
    would change shared weights in the middle of a forward pass.
    """
    if isinstance(learner, ShardedLearner):
        return learner.open_engines(settings)
    dtype = resolve_dtype(settings.get("dtype"), learner.device)
    if config.async_training.max_staleness or dtype is not torch.float32:
        return open_backend("transformers", **settings)
    shared = {name: value for name, value in settings.items() if name not in ("device", "dtype")}
    return open_backend("transformers", **{**shared, "model": learner.model})


def build_learner(config: TrainConfig, device: torch.device, ranks: Ranks | None) -> LocalLearner:
    """Load the model of a run and make its learner; with `ranks`, this rank's part of it."""
    loaded_on = device if ranks is None else torch.device("cpu")
    model = load_model(resolve(config.model), loaded_on, frozen_weight_dtype(config, on_gpu=device.type == "cuda"))
    if config.lora_rank is not None:
        model = add_lora(model, config.lora_rank, seed=config.seed)
    teacher = load_teacher(config, model, loaded_on, on_gpu=device.type == "cuda")
    if ranks is None:
        return LocalLearner.from_config(model, config, teacher=teacher)
    return ShardedLearner.from_config(model, config, teacher=teacher, ranks=ranks)
