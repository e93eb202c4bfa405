"""The official engine: TextWorld with ALFWorld's domain and grammar. Slow, and what ours is measured against."""

from __future__ import annotations

from typing import Any

from agentfly.environments.alfworld.game import Game
from agentfly.environments.alfworld.pddl_writing import write_problem
from agentfly.extras import needed


class UpstreamGame:
    """A game played by TextWorld. It says and does what a Household does, about a thousand times as slowly."""

    def __init__(self, game: Game, **texts: str) -> None:
        """`texts` replace what is played: `pddl_problem`, `pddl_domain` or `grammar`, as game files have them."""
        textworld, pddl, demangler, info = _modules()
        with open(info.ALFRED_PDDL_PATH) as domain, open(info.ALFRED_TWL2_PATH) as grammar:
            usual = {"pddl_domain": domain.read(), "grammar": grammar.read().replace("UNKNOWN GOAL.", game.task)}
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._engine = demangler(pddl(infos))
        self._engine.load({**usual, "pddl_problem": write_problem(game), **texts})
        self._state = self._engine.reset()

    def introduction(self) -> str:
        """What is said before the first command."""
        return str(self._state.feedback)

    def step(self, command: str) -> str:
        """Carry out a command, and say what the player reads."""
        self._state, _, _ = self._engine.step(command)
        # The package's grammar has a blank line before the help that the official games do not have.
        return str(self._state.feedback).removeprefix("\n")

    @property
    def commands(self) -> list[str]:
        """Every command that does something now."""
        return list(self._state["admissible_commands"])

    @property
    def won(self) -> bool:
        """Whether the goal is reached as things stand now."""
        return bool(self._state["won"])

    def close(self) -> None:
        """Let the planner's library go."""
        library = getattr(self._engine, "downward_lib", None)
        if library is not None:
            import fast_downward

            fast_downward.close_lib(library)


def _modules() -> tuple[Any, Any, Any, Any]:
    with needed("ALFWorld's own engine", "alfworld", "use the environment ALFWorld, which needs nothing"):
        import textworld
        from alfworld import info
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl import PddlEnv
    return textworld, PddlEnv, AlfredDemangler, info
