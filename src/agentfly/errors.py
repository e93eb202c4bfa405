"""Every error AgentFly raises on purpose.

    AgentFlyError
    ├── ConfigError         what you wrote cannot work; the message says what was asked, what there is, what to do
    │   └── DataError       a row, message or file cannot be read; names the place
    ├── TemplateError       this chat template cannot do what the rollout needs, found before the first token
    ├── ModelBroken         the model computes what is no number: training went wrong; names the layer, ends the run
    ├── WeightsAdrift       what samples does not have the weights that were trained; ends the run
    ├── RecordError         a trajectory would stop being true (a wrong append, a value JSON cannot keep)
    └── Fault               something outside the model's words broke while a chain ran; the failure policy decides
        ├── EnvironmentFault    the world died or hung: a fresh one may do
        ├── BackendFault        the engine or server failed
        └── RewardFault         a reward raised, or returned what is no reward

The model's mistakes (an unknown tool, bad JSON, a wrong argument) are no errors here: they are answered.
"""

from __future__ import annotations


class AgentFlyError(Exception):
    """Something AgentFly itself found wrong."""


class ConfigError(AgentFlyError):
    """What the user wrote cannot work."""


class DataError(ConfigError):
    """A row, a message or a file cannot be read."""


class TemplateError(AgentFlyError):
    """A chat template cannot do what is asked of it."""


class RecordError(AgentFlyError):
    """A record would stop being true."""


class ModelBroken(AgentFlyError):
    """The model computes what is no number."""


class WeightsAdrift(AgentFlyError):
    """The backend does not sample from the weights that the learner has."""


class Fault(AgentFlyError):
    """Something outside the model's words broke while a chain ran."""


class EnvironmentFault(Fault):
    """An environment died, hung, or could not start or reset."""


class BackendFault(Fault):
    """The engine or server that samples tokens failed."""


class RewardFault(Fault):
    """A reward raised, or returned what is no reward."""


def describe(error: BaseException) -> str:
    """An error in one line, for records and observations: its kind, and what it says if it says anything."""
    try:
        said = str(error)
    except Exception:
        said = "(its own text cannot be read)"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
