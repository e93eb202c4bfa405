"""Weight updates as checkpoint folders, which vLLM's workers load like any other checkpoint.

The workers may be other processes, on other GPUs, and hold parts of the model; vLLM's own loader handles that. Weights
are validated while they are written, so invalid ones never reach the engine. A folder is a complete checkpoint: an
engine can be restarted from it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentfly.backends.engine.loading import auto_class, check_weight, iterate_tensors, load_config
from agentfly.errors import ConfigError
from agentfly.models import resolve
from agentfly.resources.supervisor import get_supervisor
from agentfly.vision.processor import has_processor

SHARD_BYTES = 1 << 30
"""Bytes of weights that are collected before they are written to a file."""
SHARED_MEMORY = Path("/dev/shm")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The folders of one update."""

    model: Path | None
    """A complete checkpoint; None if the update has no weights of the model."""
    adapter: Path | None
    """A LoRA adapter; None if the update has none."""

    def release(self) -> None:
        """Delete the folders."""
        for folder in (self.model, self.adapter):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


class WeightFolder:
    """Writes the updates of one backend, and knows which files hold the weights in use."""

    def __init__(self, model: str, lora: Mapping[str, Any] | None, adapter: Path | None, parent: Path | None) -> None:
        """
        Args:
            model: Folder or hub name of the initial model.
            lora: Configuration of the adapter, as peft writes it; None if there is no adapter.
            adapter: Folder of the initial adapter, if there is one.
            parent: Where to create the folder; None: in shared memory if two models fit, else the temporary folder.
        """
        self.model = model
        """What a restarted engine loads: a folder or a hub name."""
        self.adapter = adapter
        self._initial_model = model
        self._lora = lora
        self.parent = parent
        self._folder: Path | None = None
        self._shapes: dict[str, list[int]] | None = None
        self._skeleton: Any = None
        """A model without weights, to map names to those in the checkpoint; built if they differ."""
        self._updates = 0

    def write(self, weights: Iterable[tuple[str, Any]]) -> WeightFiles:
        """Write weights to new folders. Raises ConfigError and leaves no files if they do not fit the model."""
        tensors = self.iterate(weights)
        first = next(tensors, None)
        if first is None:
            return WeightFiles(None, None)
        folder = self._folder or self._create_folder()
        self._updates += 1
        model = folder / f"model-{self._updates}"
        adapter = folder / f"adapter-{self._updates}"
        try:
            shards = _ShardWriter(model)
            lora: dict[str, torch.Tensor] = {}
            for name, value in chain([first], tensors):
                if ".lora_" in name:
                    # x.lora_A.default.weight: the adapter's name is left out in its file.
                    layer, _, suffix = name.rpartition(".lora_")
                    lora[f"base_model.model.{layer}.lora_{suffix.split('.')[0]}.weight"] = _copy_to_cpu(value)
                else:
                    shards.add(name, value)
            if shards.names:
                self._complete_checkpoint(shards)
            if lora:
                if self._lora is None:
                    raise ConfigError("these are the weights of a LoRA adapter; create the backend with lora=")
                adapter.mkdir()
                save_file(lora, adapter / "adapter_model.safetensors")
                config = json.dumps(dict(self._lora), default=lambda x: sorted(x) if isinstance(x, set) else str(x))
                (adapter / "adapter_config.json").write_text(config)
        except BaseException:
            WeightFiles(model, adapter).release()
            raise
        return WeightFiles(model if shards.names else None, adapter if lora else None)

    def iterate(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights by their names in the checkpoint. Raises ConfigError for one that does not fit the model."""
        for name, value in iterate_tensors(weights):
            name = name.removeprefix("base_model.model.")  # peft's wrapper of the model
            if ".lora_" in name:
                yield name, value
                continue
            name = self._checkpoint_name(name.replace(".base_layer.", "."))  # peft's wrapper of an adapted layer
            if self._validate(name, value):
                yield name, value

    def commit(self, files: WeightFiles) -> None:
        """Declare these files to be in use, and delete those they replace."""
        replaced = (Path(self.model) if files.model else None, self.adapter if files.adapter else None)
        unused = [path if path and path.parent == self._folder else None for path in replaced]
        self.model = str(files.model or self.model)
        self.adapter = files.adapter or self.adapter
        WeightFiles(*unused).release()

    def close(self) -> None:
        """Delete all files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            get_supervisor().unregister("folder", str(self._folder))
            self._folder = None

    def _create_folder(self) -> Path:
        parent = self.parent
        if parent is None:
            size = sum(file.stat().st_size for file in _checkpoint_files(self._initial_model))
            # Twice the model: the weights in use and the next ones.
            fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
            parent = SHARED_MEMORY if fits else Path(tempfile.gettempdir())
        if not parent.is_dir():
            raise ConfigError(f"weights_dir={str(parent)!r} is not a folder; name one that vLLM's workers can read too")
        self._folder = Path(tempfile.mkdtemp(prefix="agentfly-weights-", dir=parent))
        get_supervisor().register("folder", str(self._folder))
        return self._folder

    def _checkpoint_name(self, name: str) -> str:
        """The name of a weight in the checkpoint: for some vision models, such as Qwen2.5-VL, not that in memory."""
        if self._shapes is None:
            shapes: dict[str, list[int]] = {}
            for file in _checkpoint_files(self._initial_model):
                with safe_open(file, "pt") as tensors:
                    shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
            self._shapes = shapes
        if name in self._shapes or not has_processor(folder := str(_model_folder(self._initial_model))):
            return name
        from transformers.core_model_loading import revert_weight_conversion

        if self._skeleton is None:
            config = load_config(folder)
            with torch.device("meta"):
                self._skeleton = auto_class(config).from_config(config)
        (checkpoint_name,) = revert_weight_conversion(self._skeleton, {name: torch.empty(0, device="meta")})
        return str(checkpoint_name)

    def _validate(self, name: str, value: torch.Tensor) -> bool:
        """Check name and shape; return False for the output head of a model that shares it with the embeddings."""
        if not self._shapes:
            return True
        if name == "lm_head.weight" and name not in self._shapes:
            return False
        check_weight(name, value.shape, self._shapes)
        return True

    def _complete_checkpoint(self, shards: _ShardWriter) -> None:
        """Add the weights that are not updated, from the files in use, and the model's other files."""
        for file in _checkpoint_files(self.model):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 – not a dictionary
                    if name not in shards.names:
                        shards.add(name, tensors.get_tensor(name))
        shards.flush()
        for file in _model_folder(self._initial_model).iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(file, shards.folder / file.name)


class _ShardWriter:
    """Writes the files of a checkpoint one after the other, as the weights arrive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: set[str] = set()
        self._files = 0
        self._buffer: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        if name in self.names:
            raise ConfigError(f"the weight {name!r} came twice")
        self.names.add(name)
        self._buffer[name] = _copy_to_cpu(value)
        if sum(tensor.nbytes for tensor in self._buffer.values()) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        self.folder.mkdir(exist_ok=True)
        if self._buffer:
            self._files += 1
            save_file(self._buffer, self.folder / f"model-{self._files:05}.safetensors", {"format": "pt"})
            self._buffer.clear()


def load_lora_config(lora: Any) -> tuple[Mapping[str, Any] | None, Path | None]:
    """Return the configuration of an adapter and its folder, if it has one.

    lora: a folder, a peft.LoraConfig, a mapping of its fields, or None.
    """
    if lora is None:
        return None, None
    if isinstance(lora, str | Path):
        folder = Path(lora).expanduser()
        with contextlib.suppress(OSError, ValueError):
            return json.loads((folder / "adapter_config.json").read_text()), folder
        raise ConfigError(f"lora={str(lora)!r} is not the folder of an adapter: it has no adapter_config.json")
    config = lora.to_dict() if hasattr(lora, "to_dict") else lora
    if not isinstance(config, Mapping) or not {"r", "lora_alpha", "target_modules"} <= set(config):
        raise ConfigError(
            "lora= is an adapter's folder, a peft.LoraConfig, or a mapping with r, lora_alpha, target_modules"
        )
    return {"peft_type": "LORA", **config}, None


def _copy_to_cpu(value: torch.Tensor) -> torch.Tensor:
    """Copy: the learner goes on changing its weights, and safetensors rejects tensors that share memory."""
    return value.detach().to("cpu", copy=True).contiguous()


def _model_folder(model: str) -> Path:
    """The folder of a model that vLLM has loaded: its own, or the snapshot in the hub cache."""
    model = resolve(model)
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def _checkpoint_files(model: str) -> list[Path]:
    """The weight files of a checkpoint: those that its index names, else all."""
    folder = _model_folder(model)
    with contextlib.suppress(OSError):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return sorted({folder / file for file in index["weight_map"].values()})
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))
