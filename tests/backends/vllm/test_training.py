"""A recipe for the embedded engine trains with vLLM after changing two fields."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentfly.cli.recipes import Recipe
from agentfly.cli.train import train_recipe
from agentfly.runs import RunDirectory

pytestmark = pytest.mark.timeout(600)
RECIPE = Path(__file__).parents[2] / "training" / "recipe_vowels.py"


@pytest.fixture(scope="module")
def folder(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with heads as wide as vLLM wants them."""
    path, tokenizer = tmp_path_factory.mktemp("model"), AutoTokenizer.from_pretrained(small_model)
    tokenizer.save_pretrained(path)
    config = LlamaConfig.from_pretrained(
        small_model, hidden_size=64, num_hidden_layers=1, head_dim=32, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("changes", [[], ["lora_rank=4"]], ids=["all weights", "adapters"])
def test_recipe_trains_with_vllm(folder: Path, tmp_path: Path, changes: list[str]) -> None:
    """Every publish is checked by the canary, so a run that ends well was sampled with the weights it trained."""
    settings = ["backend.backend=vllm", f"backend.kv_memory={1 << 26}", f"model={folder}", "loggers=[]"]
    train_recipe(Recipe(RECIPE), [*settings, "steps=3", "num_chains=8", *changes], tmp_path / "run")
    records = RunDirectory(tmp_path / "run").records()
    assert [record.step for record in records] == [0, 1, 2, 3]
    steps = [record.metrics for record in records if record.metrics]
    assert all(step_metrics["policy/staleness_max"] == 0 for step_metrics in steps)
    assert all(step_metrics["policy/mismatch_max"] < 1e-3 for step_metrics in steps)
    assert steps[0]["policy/grad_norm"] > 0
