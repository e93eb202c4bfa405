"""Weights on their way to vLLM: a folder in memory, which its workers load as they would any checkpoint.

So they may be in other processes, on other GPUs, and split among them, and vLLM's own loader does the rest. All of it
is looked at while it is written: what does not fit never reaches the engine. The folder is complete, so that an engine
which has to be started anew starts from it.
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

from agentfly.errors import ConfigError, describe
from agentfly.models import resolve
from agentfly.resources.supervisor import get_supervisor

SHARD = 1 << 30
"""Bytes that are gathered before they are written."""
MEMORY = Path("/dev/shm")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """What an update brought."""

    model: Path | None
    """The folder of a whole model; None: its weights stay as they are."""
    adapter: Path | None
    """The folder of a LoRA adapter; None: it stays as it is."""


class WeightFolder:
    """The folders of one backend, and which of them hold the weights in use."""

    def __init__(self, model: str, lora: Mapping[str, Any] | None, adapter: Path | None, place: Path | None) -> None:
        """`lora`: the adapter's configuration as peft writes it; `place`: where the folders are made, None: memory."""
        self.model, self.adapter = model, adapter
        """What an engine that is started loads: a folder or a hub name; and a folder, or None."""
        self._original, self._lora, self._place = model, lora, place
        self._room: Path | None = None
        self._shapes: dict[str, list[int]] | None = None
        self._made = 0

    def write(self, weights: Iterable[tuple[str, Any]]) -> WeightFiles:
        """Write the weights down. What is wrong with them is raised, and nothing is kept of them."""
        given = _read(weights)
        first = next(given, None)
        if first is None:
            return WeightFiles(None, None)
        room = self._open()
        self._made += 1
        model, adapter = room / f"model-{self._made}", room / f"adapter-{self._made}"
        try:
            base, lora = _Shards(model), {}
            for name, value in chain([first], given):
                if ".lora_" in name:
                    lora[_adapter_name(name)] = _clone_tensor(value)
                elif self._fits(plain := _plain_name(name), value):
                    base.add(plain, value)
            if base.names:
                self._complete(model, base)
            if lora:
                self._write_adapter(adapter, lora)
        except BaseException:
            discard(WeightFiles(model, adapter))
            raise
        return WeightFiles(model if base.names else None, adapter if lora else None)

    def keep(self, handed: WeightFiles) -> None:
        """These are the weights in use; what was in use before is removed."""
        before = WeightFiles(*(Path(each) if each else None for each in (self.model, self.adapter)))
        self.model, self.adapter = str(handed.model or self.model), handed.adapter or self.adapter
        replaced = (before.model if handed.model else None, before.adapter if handed.adapter else None)
        discard(WeightFiles(*(each if each and each.parent == self._room else None for each in replaced)))

    def close(self) -> None:
        """Remove all folders."""
        if self._room is not None:
            shutil.rmtree(self._room, ignore_errors=True)
            get_supervisor().unregister("folder", str(self._room))
            self._room = None

    def _open(self) -> Path:
        if self._room is None:
            place = self._place or (MEMORY if MEMORY.is_dir() and self._fits_memory() else Path(tempfile.gettempdir()))
            if not place.is_dir():
                raise ConfigError(f"handover={str(place)!r} is no folder; name one that vLLM's workers can read too")
            self._room = Path(tempfile.mkdtemp(prefix="agentfly-weights-", dir=place))
            get_supervisor().register("folder", str(self._room))
        return self._room

    def _fits_memory(self) -> bool:
        """Whether memory holds the model twice: the weights in use, and those that come."""
        size = sum(file.stat().st_size for file in _files(self._original))
        return shutil.disk_usage(MEMORY).free > 2 * size

    def _fits(self, name: str, value: torch.Tensor) -> bool:
        """Whether a weight is one of the model's; False for the head of a model that shares it with the embeddings."""
        if self._shapes is None:
            self._shapes = {name: shape for file in _files(self._original) for name, shape in _shapes(file)}
        if not self._shapes:
            return True
        if name not in self._shapes:
            if name == "lm_head.weight":
                return False
            raise ConfigError(f"the model has no weight {name!r}; it has {', '.join(list(self._shapes)[:3])}, …")
        if list(value.shape) != self._shapes[name]:
            wrong = f"{tuple(value.shape)}, not {tuple(self._shapes[name])}"
            raise ConfigError(f"the weight {name!r} has the shape {wrong}")
        return True

    def _complete(self, model: Path, shards: _Shards) -> None:
        """Add what was left out, from the weights in use, and what makes a folder a model."""
        for file in _files(self.model):
            with safe_open(file, "pt") as kept:
                for name in kept.keys():  # noqa: SIM118, it is no dictionary
                    if name not in shards.names:
                        shards.add(name, kept.get_tensor(name))
        shards.flush()
        for file in folder_of(self._original).iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, model / file.name)

    def _write_adapter(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        if self._lora is None:
            raise ConfigError("these are the weights of a LoRA adapter; say lora= when the backend is made")
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(dict(self._lora), default=_to_list))


class _Shards:
    """Files of a checkpoint, written one after the other as the weights come."""

    def __init__(self, folder: Path) -> None:
        self.names: set[str] = set()
        self._folder, self._files = folder, 0
        self._waiting: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        if name in self.names:
            raise ConfigError(f"the weight {name!r} came twice")
        self.names.add(name)
        self._waiting[name] = _clone_tensor(value)
        if sum(each.nbytes for each in self._waiting.values()) >= SHARD:
            self.flush()

    def flush(self) -> None:
        self._folder.mkdir(exist_ok=True)
        if self._waiting:
            self._files += 1
            save_file(self._waiting, self._folder / f"model-{self._files:05}.safetensors", {"format": "pt"})
            self._waiting.clear()


def discard(handed: WeightFiles) -> None:
    """Remove folders that nobody uses."""
    for folder in (handed.model, handed.adapter):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def folder_of(model: str) -> Path:
    """Where a model lies that vLLM has loaded: its own folder, or the one that the hub's client keeps."""
    model = resolve(model)
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def lora_of(given: Any) -> tuple[Mapping[str, Any] | None, Path | None]:
    """An adapter's configuration, and its folder where it has one: from a folder, a mapping or a peft.LoraConfig."""
    if given is None:
        return None, None
    if isinstance(given, str | Path):
        folder = Path(given).expanduser()
        with contextlib.suppress(OSError, ValueError):
            return json.loads((folder / "adapter_config.json").read_text()), folder
        raise ConfigError(f"lora={str(given)!r} is no folder of an adapter: it has no adapter_config.json")
    config = given.to_dict() if hasattr(given, "to_dict") else given
    if not isinstance(config, Mapping) or not {"r", "lora_alpha", "target_modules"} <= set(config):
        raise ConfigError(
            "lora= is an adapter's folder, a peft.LoraConfig, or a mapping with r, lora_alpha, target_modules"
        )
    return {"peft_type": "LORA", **config}, None


def _read(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    given: Iterator[tuple[str, Any]] | None = None
    while True:
        try:
            given = iter(weights) if given is None else given
            name, value = next(given)
        except StopIteration:
            return
        except Exception as error:
            raise ConfigError(f"the weights could not be read, none of them was taken: {describe(error)}") from error
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"the weight {name!r} is a {type(value).__name__}, not a tensor")
        yield str(name), value


def _clone_tensor(value: torch.Tensor) -> torch.Tensor:
    """A copy of its own: who sends weights goes on changing them, and safetensors takes no two that share memory."""
    return value.detach().to("cpu", copy=True).contiguous()


def _files(model: str) -> list[Path]:
    """The files of a checkpoint: those that its index names, or all."""
    folder = folder_of(model)
    with contextlib.suppress(OSError):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        return sorted({folder / each for each in index["weight_map"].values()})
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def _shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    with safe_open(file, "pt") as kept:
        for name in kept.keys():  # noqa: SIM118, it is no dictionary
            yield name, kept.get_slice(name).get_shape()


def _plain_name(name: str) -> str:
    """What a weight is called in the checkpoint; peft wraps the model and the layers it adapts."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _adapter_name(name: str) -> str:
    """What an adapter's weight is called in its file, where the adapter's own name is left out."""
    stem, _, rest = name.removeprefix("base_model.model.").rpartition(".lora_")
    return f"base_model.model.{stem}.lora_{rest.split('.')[0]}.weight"


def _to_list(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
