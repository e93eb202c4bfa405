"""Models by name: those that are prepared on this machine and need no hub, local folders, and what the hub has."""

from __future__ import annotations

import difflib
from pathlib import Path

from agentfly.encoding.tokenizer import BYTES
from agentfly.errors import ConfigError
from agentfly.models import smollm2, tiny
from agentfly.models.cache import Prepared, fault, ready
from agentfly.models.hub import hub_name

__all__ = ["PREPARED", "Prepared", "fault", "prepared_model", "ready", "resolve"]

PREPARED = {
    model.name: model
    for model in (
        Prepared(
            "smollm2-135m",
            "0.1.2-1",  # of the package, and of its conversion
            "SmolLM2-135M-Instruct, 4-bit, from a PyPI package (93 MB)",
            "Apache-2.0",
            134_515_008,
            541_600_000,
            smollm2.build,
        ),
        Prepared(
            "tiny",
            tiny.version(),
            "made and trained on the spot, about two minutes",
            "Apache-2.0",
            1_025_120,
            4_100_000,
            tiny.build,
        ),
    )
}
"""The models that can be had without a hub, by name."""


def resolve(name: str) -> str:
    """What to load for a name: the folder of a prepared model, made on first use; a folder itself; or a hub name.

    A folder that is called like a prepared model is meant by `./tiny`. Raises ConfigError where nothing can be had.
    """
    if name == BYTES:
        return name
    if name in PREPARED:
        return str(ready(PREPARED[name]))
    if (folder := Path(name).expanduser()).exists():
        return str(folder)
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), PREPARED, 1, cutoff=0.4)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return hub_name(name, f"{meant}`agentfly models` lists what can be had without it; or pass a folder with the model")


def prepared_model(name: str) -> Prepared:
    """The prepared model of that name."""
    if name not in PREPARED:
        raise ConfigError(f"{name!r} is no model to prepare; there are {', '.join(PREPARED)}")
    return PREPARED[name]
