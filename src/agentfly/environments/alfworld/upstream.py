"""The official engine: TextWorld with ALFWorld's domain and grammar. `Household` is tested against it."""

from __future__ import annotations

from typing import Any

from agentfly.environments.alfworld.game import ALFWorldGame
from agentfly.environments.alfworld.pddl import write_problem
from agentfly.extras import require_extra


class UpstreamGame:
    """A game played by TextWorld: same interface and results as `Household`, about a thousand times slower."""

    def __init__(self, game: ALFWorldGame, **texts: str) -> None:
        """`texts` override `pddl_problem`, `pddl_domain` or `grammar`, as in game files."""
        with require_extra("ALFWorld's own engine", "alfworld", "use the environment ALFWorld, which needs nothing"):
            import textworld
            from alfworld import info
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
            from textworld.envs.pddl import PddlEnv
        with open(info.ALFRED_PDDL_PATH) as domain, open(info.ALFRED_TWL2_PATH) as grammar:
            defaults = {"pddl_domain": domain.read(), "grammar": grammar.read().replace("UNKNOWN GOAL.", game.task)}
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._engine: Any = AlfredDemangler(PddlEnv(infos))
        self._engine.load({**defaults, "pddl_problem": write_problem(game), **texts})
        self._state = self._engine.reset()

    def introduction(self) -> str:
        """Observation before the first command."""
        return str(self._state.feedback)

    def step(self, command: str) -> str:
        """Carry out a command and return the observation."""
        self._state, _, _ = self._engine.step(command)
        # The package's grammar adds a blank line before the help text; the official games do not.
        return str(self._state.feedback).removeprefix("\n")

    @property
    def commands(self) -> list[str]:
        """All admissible commands."""
        return list(self._state["admissible_commands"])

    @property
    def won(self) -> bool:
        """Whether the goal currently holds."""
        return bool(self._state["won"])

    def close(self) -> None:
        """Unload the planner's shared library."""
        library = getattr(self._engine, "downward_lib", None)
        if library is not None:
            import fast_downward

            fast_downward.close_lib(library)
