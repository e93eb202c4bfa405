"""The algorithms by name."""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from typing import Any

from agentfly.algorithms.base import Algorithm
from agentfly.algorithms.gdpo import GDPO
from agentfly.algorithms.gigpo import GiGPO
from agentfly.algorithms.grpo import GRPO, RLOO, DrGRPO
from agentfly.algorithms.ppo import PPO
from agentfly.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from agentfly.algorithms.remax import ReMax
from agentfly.errors import ConfigError

ALGORITHMS: dict[str, type[Algorithm]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "remax": ReMax,
    "gigpo": GiGPO,
    "gdpo": GDPO,
}
"""The algorithms that `algorithm=` accepts by name."""


def build_algorithm(algorithm: str | Algorithm, **settings: Any) -> Algorithm:
    """Build the algorithm of this name, or copy the given one, with some settings changed."""
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            plain = algorithm.lower().replace("++", "_pp").replace("-", "_").replace(" ", "_").replace(".", "")
            close = [plain] if plain in ALGORITHMS else difflib.get_close_matches(plain, ALGORITHMS, 3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"no algorithm is named {algorithm!r}; there are {', '.join(ALGORITHMS)}.{hint}")
        algorithm = ALGORITHMS[algorithm]()
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"an algorithm is a name or an object such as PPO(lam=0.95), not {algorithm!r}")
    names = [field.name for field in fields(algorithm)]
    if unknown := [name for name in settings if name not in names]:
        has = f"has {', '.join(names)}" if names else "has no settings"
        raise ConfigError(f"{type(algorithm).__name__} has no setting {', '.join(map(repr, unknown))}; it {has}")
    return replace(algorithm, **settings)
