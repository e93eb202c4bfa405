"""LoRA adapters, engines that are killed and restarted, and clean-up on close."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

import torch

from agentfly.backends.vllm import VLLMBackend
from agentfly.backends.weight_files import SHARED_MEMORY
from agentfly.errors import BackendFault
from tests.backends.engine.tiny import make_request, score_completion
from tests.backends.vllm.small import backend_of, command_line, descendants, model_of, save_model, until

peft = pytest.importorskip("peft", reason="LoRA needs peft: pip install 'agentfly-rl[train]'")
LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])


def make_adapted_model(seed: int) -> Any:
    """A model with an adapter that does something."""
    model = peft.get_peft_model(model_of(), LORA)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return model.eval()


def trainable_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: Any) -> Iterator[VLLMBackend]:
    backend = backend_of(save_model(model_of(), tmp_path_factory.mktemp("model")), lora=LORA)
    yield backend
    asyncio.run(backend.close())


REQUEST = make_request([7, 8, 9] * 50, 12, seed=1)


async def test_adapter_is_applied_without_merging_and_updates_discard_the_cache(backend: VLLMBackend) -> None:
    got = await backend.generate(REQUEST)
    close(got, score_completion(model_of(), REQUEST, got))
    for version in (1, 2):
        model = make_adapted_model(version)
        await backend.update_weights(trainable_parameters(model), version)
        got = await backend.generate(REQUEST)
        assert set(got.weight_versions) == {version}
        close(got, score_completion(model, REQUEST, got))
        with model.disable_adapter():
            assert (torch.tensor(got.logprobs) - score_completion(model, REQUEST, got)).abs().max() > 1e-3


async def test_update_of_the_base_model_keeps_the_adapter(backend: VLLMBackend) -> None:
    model = make_adapted_model(2)
    await backend.update_weights(trainable_parameters(model), 2)
    base = [(name, parameter * 1.1) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    with torch.no_grad():
        for name, parameter in base:
            model.get_parameter(name).copy_(parameter)
    await backend.update_weights(base, 3)
    got = await backend.generate(REQUEST)
    close(got, score_completion(model, REQUEST, got))
    await backend.update_weights(model_of().named_parameters(), 4)


async def test_killed_engine_fails_its_turns_and_restarts_with_the_last_weights(backend: VLLMBackend) -> None:
    model = make_adapted_model(5)
    await backend.update_weights(trainable_parameters(model), 5)
    first_token = asyncio.Event()
    running = asyncio.create_task(backend.generate(make_request([5, 6], 500, on_tokens=lambda _: first_token.set())))
    await first_token.wait()
    (core,) = [pid for pid in descendants() if "EngineCore" in command_line(pid)]
    os.kill(core, signal.SIGKILL)
    with pytest.raises(BackendFault, match="engine died"):
        await running
    first, second = await asyncio.gather(backend.generate(REQUEST), backend.generate(REQUEST))
    assert first.token_ids == second.token_ids
    assert set(first.weight_versions) == {5}
    close(first, score_completion(model, REQUEST, first))


async def test_engine_is_restarted_at_most_three_times_in_a_row(
    backend: VLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    async def failing() -> Any:
        starts.append(1)
        raise BackendFault("no memory left")

    monkeypatch.setattr(backend._engine, "_start", failing)
    (worker,) = [pid for pid in descendants() if "Worker" in command_line(pid)]
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(BackendFault, match=r"engine died|no memory left"):
        await backend.generate(make_request([5, 6], 500))
    for _ in range(5):
        with pytest.raises(BackendFault, match=r"no memory left|died 4 times in a row"):
            await backend.generate(REQUEST)
    assert len(starts) == 3


async def test_close_deletes_files_and_ends_processes(backend: VLLMBackend) -> None:
    weight_folder = backend._engine._weight_folder._folder
    assert weight_folder is not None
    assert weight_folder.is_dir()
    await asyncio.gather(backend.close(), backend.close())
    await backend.close()
    assert not weight_folder.exists()
    assert not descendants()
    with pytest.raises(BackendFault, match="the engine is closed"):
        await backend.generate(REQUEST)
    with pytest.raises(BackendFault, match="the engine is closed"):
        await backend.update_weights((), 9)


PROGRAM = """
import asyncio, sys
import torch
from agentfly.backends.base import Request
from agentfly.backends import open_backend
from agentfly.types import Sampling

async def main():
    backend = open_backend("async_vllm", model=sys.argv[1], dtype="float32", kv_memory=1 << 26)
    await backend.update_weights([("model.norm.weight", torch.ones(128))], 1)
    print("begun", flush=True)
    await backend.generate(Request([5, 6], Sampling(max_tokens=500), on_tokens=print))
    if sys.argv[2] == "end":
        return
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["kill", "end"])
def test_killed_or_unclosed_process_leaves_no_processes_and_files(how: str, tmp_path: Path) -> None:
    program, earlier_folders = tmp_path / "program.py", set(SHARED_MEMORY.glob("agentfly-weights-*"))
    program.write_text(textwrap.dedent(PROGRAM))
    folder = save_model(model_of(), tmp_path / "model")
    with subprocess.Popen([sys.executable, program, folder, how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("begun"):
                break
        processes, folders = descendants(), set(SHARED_MEMORY.glob("agentfly-weights-*")) - earlier_folders
        assert (len(processes), len(folders)) == (2, 1)
        if how == "kill":
            process.kill()
        process.wait(120)
    asyncio.run(until(lambda: not any("VLLM" in command_line(pid) for pid in processes)))
    asyncio.run(until(lambda: not any(folder.exists() for folder in folders)))
