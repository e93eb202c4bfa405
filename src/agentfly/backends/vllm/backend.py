"""`backend="vllm"`: tokens from vLLM, whose processes are started and ended with the backend."""

from __future__ import annotations

import difflib
import math
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import AsyncEngineArgs, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from agentfly.backends.base import Backend, OnUpdate, Request
from agentfly.backends.engine.loading import resolve_dtype
from agentfly.backends.engine.memory import cache_bytes
from agentfly.backends.engine.sampler import is_plain
from agentfly.backends.prompt import validate_prompt
from agentfly.backends.vllm.engine import VLLMEngine
from agentfly.backends.weight_files import WeightFolder, lora_of
from agentfly.errors import BackendFault, ConfigError, NonFiniteError
from agentfly.models import resolve
from agentfly.types import Completion, FinishReason, Sampling

COLDEST = 0.01
"""vLLM samples at this temperature where a lower one is asked for."""
_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM makes room for."""


class VLLMBackend(Backend):
    """A model that vLLM runs."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str | None = None,
        context_length: int | None = None,
        kv_memory: int | None = None,
        max_rows: int | None = None,
        on_update: str | OnUpdate = OnUpdate.CONTINUE,
        lora: Any = None,
        sleeps: bool = False,
        handover: str | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        """`model`: a folder or a hub name, or one of `agentfly models`.

        `kv_memory`: bytes for keys and values. `max_rows`: most turns sampled at once. `on_update`: what becomes of
        turns under way when the weights change: continue, finish, abort. `lora`: an adapter's folder, or its
        configuration (a peft.LoraConfig, or a mapping of its fields), for an adapter that `update_weights` brings.
        `sleeps`: whether `sleep` may be called. `handover`: a folder for weights on their way, which vLLM's workers
        must see too. `engine`: further fields of vLLM's AsyncEngineArgs. None, everywhere, takes what suits.
        """
        self._on_update = _on_update(on_update)
        if sleeps and current_platform.is_cpu():
            raise ConfigError("vLLM cannot sleep on a CPU: there is no other memory to go to; leave sleeps= out")
        at = torch.device("cpu" if current_platform.is_cpu() else "cuda")
        config, adapter = lora_of(lora)
        own = {
            "dtype": str(resolve_dtype(dtype, at)).removeprefix("torch."),
            "max_model_len": context_length,
            "max_num_seqs": max_rows,
            "kv_cache_memory_bytes": cache_bytes(kv_memory, at) if kv_memory or at.type == "cpu" else None,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": sleeps or None,
            "enable_lora": config is not None or None,
            "max_lora_rank": None if config is None else _rank(int(config["r"])),
        }
        given = {name: value for name, value in own.items() if value is not None}
        arguments = {**_quiet(at), **_validate_engine_fields(engine or {}, own), **given}
        place = None if handover is None else Path(handover).expanduser()
        self._engine = VLLMEngine(arguments, WeightFolder(resolve(model), config, adapter, place))
        self._sleeps = sleeps
        self.context_length = int(self._engine.config.model_config.max_model_len)
        self._vocabulary = int(self._engine.config.model_config.get_vocab_size())
        weakref.finalize(self, self._engine.stop)  # a backend that nobody closed must not leave its processes behind

    @property
    def weight_version(self) -> int:
        return self._engine.version

    async def generate(self, request: Request) -> Completion:
        """Sample one turn in the batch with all others. What `on_tokens` raises is raised here, and ends the turn."""
        assert self.context_length is not None
        if request.images:
            raise ConfigError("this backend shows a model text only")
        prompt = validate_prompt(request.prompt, self._vocabulary, self.context_length)
        params = _params(request, self.context_length - len(prompt))
        said = await self._engine.sample(prompt.tolist(), params, request.on_tokens)
        if not all(map(math.isfinite, said.logprobs)):
            raise NonFiniteError(f"the model's logits are not finite (weights of version {said.versions[-1]})")
        if said.finish not in _FINISHES:
            raise BackendFault(f"vLLM ended the turn with {said.finish!r}")
        raw = said.logprobs if is_plain(request.sampling) and request.sampling.temperature in (0, 1) else None
        return Completion(said.ids, said.logprobs, said.versions, _FINISHES[said.finish], raw_logprobs=raw)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Load weights, by their names in the checkpoint, between two steps. What is left out stays as it is.

        The weights of a LoRA adapter go by peft's names, and are applied without merging.
        """
        await self._engine.update(weights, version, self._on_update)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Give the GPU's memory back until `wake_up`; turns under way end, or are ended, as `on_update` says.

        `keep_weights`: hold them in the host's memory; otherwise they are loaded from the folder again.
        """
        if not self._sleeps:
            raise ConfigError("say sleeps=True when the backend is made: vLLM has to manage its memory from the start")
        await self._engine.sleep(1 if keep_weights else 2, self._on_update)

    async def wake_up(self) -> None:
        """Take the memory again. Turns that were asked for meanwhile have waited, and are sampled."""
        await self._engine.wake_up()

    async def close(self) -> None:
        await self._engine.close()


def _on_update(asked: str | OnUpdate) -> OnUpdate:
    chosen = OnUpdate.of(asked)
    if chosen is OnUpdate.CONTINUE and not VLLMEngine.stamps:
        raise ConfigError(
            f"vLLM {vllm.__version__} does not tell which weights sampled which token: "
            "say on_update='finish' or 'abort', or install vLLM 0.32"
        )
    return chosen


def _params(request: Request, room: int) -> SamplingParams:
    sampling: Sampling = request.sampling
    if 0 < sampling.temperature < COLDEST:
        raise ConfigError(f"vLLM samples at {COLDEST} and above, not at {sampling.temperature}; 0 is greedy")
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=int(sampling.top_k),
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=None if sampling.seed is None else sampling.seed % (1 << 63),
            max_tokens=min(int(sampling.max_tokens or room), room),
            stop=list(sampling.stop),
            stop_token_ids=sorted(request.stop_ids),
            ignore_eos=True,  # the template knows what ends a turn
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA if request.on_tokens else RequestOutputKind.FINAL_ONLY,
        )
    except Exception as error:  # vLLM's own kind of it, in versions that have one
        raise ConfigError(f"vLLM refuses this sampling: {error}") from error


def _quiet(at: torch.device) -> dict[str, Any]:
    """What a run wants of vLLM unless it says otherwise. On a CPU, compiling takes longer than it saves."""
    return {"disable_log_stats": True, "use_tqdm_on_load": False, "enforce_eager": at.type == "cpu"}


def _validate_engine_fields(engine: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The engine's further fields, none of which may be one that has a setting, or that there is not."""
    settings = {"max_model_len": "context_length", "kv_cache_memory_bytes": "kv_memory", "max_num_seqs": "max_rows",
                "enable_sleep_mode": "sleeps", "enable_lora": "lora", "max_lora_rank": "lora"}  # fmt: skip
    for name in engine:
        if name in own or name == "model":
            instead = f"; say {settings.get(name, name)}=" if name != "logprobs_mode" else ", and must be as it is"
            raise ConfigError(f"engine[{name!r}] is the backend's own{instead}")
        if name not in AsyncEngineArgs.__dataclass_fields__:
            close = difflib.get_close_matches(name, AsyncEngineArgs.__dataclass_fields__, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"vLLM {vllm.__version__} has no engine argument {name!r}{hint}")
    return engine


def _rank(rank: int) -> int:
    """The least rank that vLLM makes room for and that an adapter of this rank fits."""
    fitting = [each for each in _RANKS if each >= rank]
    if not fitting:
        raise ConfigError(f"vLLM takes adapters of a rank up to {_RANKS[-1]}, not {rank}")
    return fitting[0]
