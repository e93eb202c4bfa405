"""The exceptions AgentFly raises.

    AgentFlyError
    ├── ConfigError         invalid user input; the message says what was asked, what there is, what to do
    │   └── DataError       a row, message or file cannot be read; names the place
    ├── TemplateError       the chat template cannot do what the rollout needs; raised before the first token
    ├── NonFiniteError      non-finite logits or loss; names the layer or the samples, ends the run
    ├── WeightSyncError     the backend does not have the learner's weights; ends the run
    ├── RankError           another process of a distributed run failed; ends the run
    ├── RecordError         a trajectory would become inconsistent (a wrong append, a value JSON cannot keep)
    └── Fault               a component failed while a chain ran; the failure policy decides
        ├── EnvironmentFault    an environment died or hung; a new instance may work
        │   └── ToolTimeout     a call exceeded its tool's time limit; its environment is still busy
        ├── BackendFault        the engine or server failed
        └── RewardFault         a reward raised, or returned something that is not a reward

Mistakes of the model (an unknown tool, bad JSON, a wrong argument) are answered as observations, not raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

DISTRIBUTION = "agentfly-rl"
"""The name on PyPI."""


class AgentFlyError(Exception):
    """Base class of all exceptions AgentFly raises."""


class ConfigError(AgentFlyError):
    """Invalid user input."""


class DataError(ConfigError):
    """A row, a message or a file cannot be read."""


class TemplateError(AgentFlyError):
    """A chat template does not support what the rollout needs."""


class RecordError(AgentFlyError):
    """A trajectory would become inconsistent."""


class NonFiniteError(AgentFlyError):
    """Non-finite logits or loss."""


class WeightSyncError(AgentFlyError):
    """The backend does not sample from the learner's weights."""


class RankError(AgentFlyError):
    """Another process of a distributed run failed."""


class Fault(AgentFlyError):
    """A component other than the model failed while a chain ran."""


class EnvironmentFault(Fault):
    """An environment died, hung, or could not start or reset."""


class ToolTimeout(EnvironmentFault):
    """A call took longer than its tool may take, and its environment is still busy with it."""


class BackendFault(Fault):
    """The engine or server that samples tokens failed."""


class RewardFault(Fault):
    """A reward raised, or returned something that is not a reward."""

    metrics: Mapping[str, Any] = MappingProxyType({})
    """Metrics of an abstaining reward, or values and metrics of the chain's other rewards."""


def describe(error: BaseException) -> str:
    """Format an exception as `Type: message`, for records and observations."""
    try:
        message = str(error)
    except Exception:
        message = "(its own text cannot be read)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


_CONTROL = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters other than newline and tab, mapped to the replacement character."""


def sanitize(text: str) -> str:
    """Replace control characters other than newline and tab: model output must not control the terminal."""
    return text.translate(_CONTROL)


def install_command(extra: str) -> str:
    """The command that installs an extra, as error messages show it."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def require_extra(feature: str, extra: str, alternative: str = "") -> Iterator[None]:
    """Wrap imports of an optional dependency: a missing module becomes a ConfigError that says what to install.

    feature: what needs the extra. alternative: how to do without it, if there is a way.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        advice = f", or {alternative}" if alternative else ""
        raise ConfigError(
            f"{feature} needs {package}, which is not installed: {install_command(extra)}{advice}"
        ) from error
