"""The Hugging Face hub, asked once and briefly whether it is there: its own client tries for minutes."""

from __future__ import annotations

from functools import cache

from agentfly.errors import ConfigError

_PATIENCE = 5.0
"""Seconds that the hub may take to answer."""


def hub_name(name: str, instead: str) -> str:
    """The name, where the hub can be asked for it; else the folder in which its client once kept that model.

    `instead` is what to tell a user who has neither.
    """
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        _reach(constants.ENDPOINT)
    except (httpx.HTTPError, OSError) as error:
        try:
            return snapshot_download(name, local_files_only=True)
        except HFValidationError:
            return name  # it can only be meant as a folder; whoever loads it says that there is none
        except LocalEntryNotFoundError:
            raise ConfigError(
                f"no model {name!r}: there is no such folder, the hub at {constants.ENDPOINT} is out of reach "
                f"({' '.join(str(error).split())[:200]}), and its cache {constants.HF_HUB_CACHE} does not hold it. "
                f"{instead}"
            ) from error
    return name


@cache
def _reach(address: str) -> None:
    """Raise unless somebody answers there. Only a success is remembered: a network may come back."""
    import httpx

    httpx.head(address, timeout=_PATIENCE)
