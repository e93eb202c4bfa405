"""`backend="vllm"`: samples with vLLM, whose processes start and end with the backend."""

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

from agentfly.backends.base import Backend, OnUpdate, Request, validate_prompt
from agentfly.backends.engine.kv_cache import default_cache_bytes
from agentfly.backends.engine.loading import resolve_dtype
from agentfly.backends.engine.sampler import is_plain
from agentfly.backends.vllm.engine import VLLMEngine
from agentfly.backends.weight_files import WeightFolder, load_lora_config
from agentfly.errors import BackendFault, ConfigError, DataError, NonFiniteError
from agentfly.models import resolve
from agentfly.templates.template import Template
from agentfly.types import Completion, FinishReason
from agentfly.validation import PositiveInt, validate_arguments
from agentfly.vision.images import open_image
from agentfly.vision.processor import ImageProcessor

MIN_TEMPERATURE = 0.01
"""vLLM replaces lower temperatures, except 0, by this one."""
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for max_lora_rank."""
_SETTINGS = {
    "model": "model",
    "dtype": "dtype",
    "max_model_len": "context_length",
    "max_num_seqs": "max_rows",
    "kv_cache_memory_bytes": "kv_memory",
    "enable_sleep_mode": "enable_sleep_mode",
    "enable_lora": "lora",
    "max_lora_rank": "lora",
}
"""Engine arguments that are set by a setting of the backend."""


class VLLMBackend(Backend):
    """A model that vLLM runs."""

    @validate_arguments
    def __init__(
        self,
        model: str,
        *,
        dtype: str | None = None,
        context_length: PositiveInt | None = None,
        kv_memory: PositiveInt | None = None,
        max_rows: PositiveInt | None = None,
        on_update: str | OnUpdate = OnUpdate.CONTINUE,
        lora: Any = None,
        enable_sleep_mode: bool = False,
        weights_dir: str | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the engine. None means a suitable default everywhere.

        Args:
            model: Folder, hub name, or a model of `agentfly models`.
            dtype: float32, bfloat16 or float16.
            context_length: Maximum number of tokens of prompt and completion together.
            kv_memory: Size of the KV cache in bytes.
            max_rows: Maximum number of sequences in a batch.
            on_update: What running requests do when the weights change: continue, finish or abort.
            lora: An adapter's folder, or its configuration (a peft.LoraConfig or a mapping of its fields) if
                `update_weights` brings the weights.
            enable_sleep_mode: Allow `sleep`.
            weights_dir: Folder for all weight updates, which vLLM's workers must be able to read; None passes weights
                on a GPU by CUDA IPC, which needs workers on this machine.
            engine: Further fields of vLLM's AsyncEngineArgs.
        """
        self._on_update = OnUpdate.of(on_update)
        if self._on_update is OnUpdate.CONTINUE and not VLLMEngine.reports_versions:
            raise ConfigError(
                f"vLLM {vllm.__version__} does not report which weights sampled which token: "
                "set on_update='finish' or 'abort', or install vLLM 0.32"
            )
        on_cpu = current_platform.is_cpu()
        if enable_sleep_mode and on_cpu:
            raise ConfigError("vLLM cannot sleep on a CPU, which has no GPU memory to free; omit enable_sleep_mode=")
        device = torch.device("cpu" if on_cpu else "cuda")
        lora_config, adapter = load_lora_config(lora)
        max_lora_rank = None
        if lora_config is not None:
            max_lora_rank = next((rank for rank in _LORA_RANKS if rank >= int(lora_config["r"])), None)
            if max_lora_rank is None:
                raise ConfigError(f"vLLM takes adapters of a rank up to {_LORA_RANKS[-1]}, not {lora_config['r']}")
        backend_arguments = {
            "dtype": str(resolve_dtype(dtype, device)).removeprefix("torch."),
            "max_model_len": context_length,
            "max_num_seqs": max_rows,
            "kv_cache_memory_bytes": kv_memory or (default_cache_bytes(device) if on_cpu else None),
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": enable_sleep_mode or None,
            "enable_lora": lora_config is not None or None,
            "max_lora_rank": max_lora_rank,
        }
        arguments = {
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "enforce_eager": on_cpu,  # on a CPU, compilation takes longer than it saves
            **_validate_engine_args(engine or {}),
            **{name: value for name, value in backend_arguments.items() if value is not None},
        }
        parent = None if weights_dir is None else Path(weights_dir).expanduser()
        self._engine = VLLMEngine(arguments, WeightFolder(resolve(model), lora_config, adapter, parent))
        self.can_sleep = enable_sleep_mode
        self.context_length = int(self._engine.config.model_config.max_model_len)
        self._vocab_size = int(self._engine.config.model_config.get_vocab_size())
        self._image_processor: ImageProcessor | None = None
        weakref.finalize(self, self._engine.stop)  # a backend that was not closed must not leave processes behind

    @property
    def weight_version(self) -> int:
        return self._engine.version

    def attach(self, template: Template) -> None:
        self._image_processor = (
            template.image_processor if self._engine.config.model_config.is_multimodal_model else None
        )
        self.supports_images = self._image_processor is not None

    async def generate(self, request: Request) -> Completion:
        """Sample one turn. An exception of `on_tokens` ends the turn and is raised."""
        assert self.context_length is not None
        prompt = validate_prompt(request.prompt, self._vocab_size, self.context_length)
        params = _sampling_params(request, self.context_length - len(prompt))
        ids = prompt.tolist()
        turn = await self._engine.sample(self._prompt(request, ids), params, request.on_tokens)
        if request.images and turn.prompt_ids != ids:
            raise BackendFault(
                f"vLLM made {len(turn.prompt_ids)} prompt tokens of the images, not the {len(ids)} of this model's "
                "processor: their versions of the processor differ"
            )
        if not all(map(math.isfinite, turn.logprobs)):
            raise NonFiniteError(f"the model's logits are not finite (weights of version {turn.versions[-1]})")
        if turn.finish not in _FINISH_REASONS:
            raise BackendFault(f"vLLM ended the turn with {turn.finish!r}")
        # The log-probabilities are those of the distribution sampled from; without filters it is the model's own.
        unfiltered = is_plain(request.sampling) and request.sampling.temperature in (0, 1)
        raw = turn.logprobs if unfiltered else None
        return Completion(turn.ids, turn.logprobs, turn.versions, _FINISH_REASONS[turn.finish], raw_logprobs=raw)

    def _prompt(self, request: Request, ids: list[int]) -> dict[str, Any]:
        """The prompt as vLLM takes it: with one placeholder per image, which vLLM replaces by the image's tokens."""
        if not request.images:
            return {"prompt_token_ids": ids}
        if self._image_processor is None:
            raise ConfigError("this model takes no images: it has no vision tower, or its folder has no processor")
        try:
            collapsed = self._image_processor.collapse(ids, request.image_positions, request.images)
        except DataError as error:
            raise BackendFault(str(error)) from error
        return {
            "prompt_token_ids": collapsed,
            "multi_modal_data": {"image": [open_image(image) for image in request.images]},
            "multi_modal_uuids": {
                "image": [self._image_processor.encode(image).digest.hex() for image in request.images]
            },
        }

    @classmethod
    def share_gpu(cls, settings: Mapping[str, Any], model: Any, ranks: int) -> dict[str, Any]:
        """vLLM's settings for the learner's GPU, where they are not given. ranks: that share the learner's memory.

        It sleeps during the update, whose activations then have the memory of its weights and cache. It leaves room for
        what the learner keeps all the time: gradients and AdamW's two moments in float32, for the weights that are
        trained.
        """
        kept = sum(weight.numel() * 12 for weight in model.parameters() if weight.requires_grad) // ranks
        free, total = torch.cuda.mem_get_info()
        share = round(max(0.9 * (free - kept) / total, 0.05), 3)
        return {
            "enable_sleep_mode": True,
            **settings,
            "engine": {"gpu_memory_utilization": share, **settings.get("engine", {})},
        }

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Load weights between two steps, given by their names in the checkpoint; the others stay unchanged.

        Weights on a GPU are passed to vLLM's workers by CUDA IPC, others through files. Weights of a LoRA adapter have
        peft's names, and are applied without merging. An engine that sleeps wakes up.
        """
        await self._engine.update(weights, version, self._on_update)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the GPU memory until `wake_up` or `update_weights`; running requests are handled as `on_update` says.

        keep_weights: keep them in host memory; otherwise `wake_up` loads them from their files, and weights that came
        from a GPU, which are in no file, have to be sent again by `update_weights`.
        """
        if not self.can_sleep:
            raise ConfigError("create the backend with enable_sleep_mode=True: vLLM needs its own memory allocator")
        await self._engine.sleep(1 if keep_weights else 2, self._on_update)

    async def wake_up(self) -> None:
        """Allocate the GPU memory again; requests that arrived while the engine slept are sampled."""
        await self._engine.wake_up()

    async def close(self) -> None:
        await self._engine.close()


def _sampling_params(request: Request, max_tokens: int) -> SamplingParams:
    sampling = request.sampling
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ConfigError(f"vLLM samples at {MIN_TEMPERATURE} and above, not at {sampling.temperature}; 0 is greedy")
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=int(sampling.top_k),
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=None if sampling.seed is None else sampling.seed % (1 << 63),
            max_tokens=min(int(sampling.max_tokens or max_tokens), max_tokens),
            stop=list(sampling.stop),
            stop_token_ids=sorted(request.stop_ids),
            ignore_eos=True,  # the template knows which tokens end a turn
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA if request.on_tokens else RequestOutputKind.FINAL_ONLY,
        )
    except Exception as error:  # some versions of vLLM raise their own class
        raise ConfigError(f"vLLM rejects these sampling settings: {error}") from error


def _validate_engine_args(engine: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `engine`; raises ConfigError for unknown arguments and those that the backend sets itself."""
    fields = AsyncEngineArgs.__dataclass_fields__
    for name in engine:
        if name in ("logprobs_mode", "worker_extension_cls"):
            raise ConfigError(f"engine[{name!r}] is set by the backend and cannot be changed")
        if name in _SETTINGS:
            raise ConfigError(f"engine[{name!r}] is set by the backend; use its setting {_SETTINGS[name]}=")
        if name not in fields:
            close = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"vLLM {vllm.__version__} has no engine argument {name!r}{hint}")
    return engine
