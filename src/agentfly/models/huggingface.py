"""Hugging Face libraries: hub names when the hub is unreachable, and progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from agentfly.errors import ConfigError

_CONNECT_TIMEOUT = 5.0
"""Seconds to wait for the hub. Its own client retries for minutes."""


def resolve_hub_name(name: str, hint: str) -> str:
    """Return `name` if the hub is reachable, else the folder in the hub cache that holds the model.

    `hint` ends the message of the ConfigError that is raised if neither works.
    """
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        _connect(constants.ENDPOINT)
    except (httpx.HTTPError, OSError) as error:
        try:
            return snapshot_download(name, local_files_only=True)
        except HFValidationError:
            return name  # not a valid hub name, so it means a folder; loading it reports that it does not exist
        except LocalEntryNotFoundError:
            raise ConfigError(
                f"no model {name!r}: there is no such folder, the hub at {constants.ENDPOINT} is out of reach "
                f"({' '.join(str(error).split())[:200]}), and its cache {constants.HF_HUB_CACHE} does not hold it. "
                f"{hint}"
            ) from None  # the message has the reason; the traceback of the HTTP client has 80 lines
    return name


@cache
def _connect(address: str) -> None:
    """Raise httpx.HTTPError if the server does not answer. Only success is cached: the network may come back."""
    import httpx

    httpx.head(address, timeout=_CONNECT_TIMEOUT)


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers, which would overwrite the live console."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
