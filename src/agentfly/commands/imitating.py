"""What `agentfly sft` does: demonstrations of a file or of an expert, imitated; the model, saved."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agentfly.agent import BaseAgent
from agentfly.commands.progress import Steps
from agentfly.commands.running import Run, recipe
from agentfly.encoding.tokenizer import load_tokenizer
from agentfly.errors import ConfigError
from agentfly.models import resolve, tiny
from agentfly.runs.words import sanitize
from agentfly.training.demonstrations import demonstrate, read_demonstrations, template_of
from agentfly.trajectory import Trajectory

if TYPE_CHECKING:
    from agentfly.training.learner import Learner
    from agentfly.training.warm_start import Imitated


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is imitated, and how."""

    out: Path
    demos: Path | None = None
    """A file of conversations; None: the environment's expert is asked."""
    expert: int | None = None
    """Tasks that the expert demonstrates, the recipe's first; None: a file is read."""
    threshold: float = 1.0
    steps: int = 100
    batch_size: int = 8
    learning_rate: float = 1e-5
    held_out: float = 0.1
    """The share of demonstrations that is only looked at."""
    reading: float = 0.0
    """What a token counts that the model reads, against one that it says."""
    save_every: int | None = None
    """Steps after which the model so far is written as well, beside `out`, with the number of the step in its name."""
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.demos is None) == (self.expert is None):
            raise ConfigError("give --demos with a file of conversations, or --expert with a number of tasks")
        if self.expert is not None and self.expert < 1:
            raise ConfigError(f"--expert is a number of tasks, at least 1, not {self.expert}")
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"--held-out is a share from 0 to below 1, not {self.held_out}")
        if not 0 <= self.reading <= 1:
            raise ConfigError(f"--reading is from 0 to 1, what the model says counts 1; not {self.reading}")
        for out in (self.out, *self.stages.values()):
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ConfigError(f"--out {out} is there already; give a folder that is not, or is empty")

    @property
    def stages(self) -> dict[int, Path]:
        """Where the model goes after which steps, but for the last."""
        steps = range(self.save_every, self.steps, self.save_every) if self.save_every else ()
        return {step: self.out.with_name(f"{self.out.name}-{step}") for step in steps}


NEW = "new"
"""The name of a model that is not there yet."""
_WORDS = 200
"""Demonstrations whose words its tokenizer is made of."""


@contextmanager
def new_model(path: Path, data: Path | None, lesson: Lesson) -> Iterator[str]:
    """A tiny model that knows nothing but the words of the recipe's demonstrations, for as long as it is wanted."""
    few = replace(lesson, expert=min(lesson.expert, _WORDS)) if lesson.expert else lesson
    with tempfile.TemporaryDirectory() as folder:
        wordless, model = Path(folder, "wordless"), Path(folder, "new")
        tiny.build_new(wordless, (), context=1 << 20)
        run = recipe(path, {"model_name_or_path": str(wordless)}, unheard=True)
        run = run.overridden(None, data, None, {}, {}) if data is not None else run
        shown = asyncio.run(_gathered(run, few, lambda _: None))
        tiny.build_new(model, _texts(run.agent, shown), seed=lesson.seed)
        yield str(model)


def _texts(agent: BaseAgent, shown: Sequence[Trajectory]) -> list[str]:
    """What stands in the chains, piece by piece."""
    read = template_of(agent).codec.decode
    return [read(span.ids.tolist()) for chain in shown for segment in chain.segments for span in segment.spans]


def taught(run: Run, lesson: Lesson, console: Console | None = None) -> Imitated:
    """Gather demonstrations, imitate them, write the model; the last step."""
    from agentfly.training.warm_start import fit, imitate, imitator, pieces_of

    console = console or Console()

    def say(text: str) -> None:
        console.print(sanitize(text), highlight=False, markup=False)

    learned, unseen = _split(asyncio.run(_gathered(run, lesson, say)), lesson)
    say(f"{len(learned)} demonstrations to imitate, {len(unseen)} held out")
    learner = imitator(
        run.agent.model_name_or_path, steps=lesson.steps, learning_rate=lesson.learning_rate, seed=lesson.seed
    )
    if unseen:
        before = fit(learner.model, pieces_of(learner.model, unseen))
        say(f"held out, before: loss {before.loss:.3f}, accuracy {before.accuracy:.1%}")
    with Steps(console, "steps", lesson.steps) as steps:

        def watch(step: Imitated) -> None:
            steps.advance(f"loss {step.loss:.3f}")
            if step.step in lesson.stages:
                _write(run.agent, learner, lesson.stages[step.step])

        last = imitate(
            learner, learned, steps=lesson.steps, batch_size=lesson.batch_size, held_out=unseen,
            reading=lesson.reading, seed=lesson.seed, watcher=watch,
        )[-1]  # fmt: skip
    if last.held_out is not None:
        say(f"held out, after: loss {last.held_out.loss:.3f}, accuracy {last.held_out.accuracy:.1%}")
    _write(run.agent, learner, lesson.out)
    say(f"written to {lesson.out}")
    return last


async def _gathered(run: Run, lesson: Lesson, say: Any) -> Sequence[Trajectory]:
    """The demonstrations. The agent is closed after them: its engine's memory is wanted for learning."""
    try:
        if lesson.demos is not None:
            return read_demonstrations(run.agent, lesson.demos)
        assert lesson.expert is not None
        if len(run.tasks) < lesson.expert:
            raise ConfigError(f"--expert {lesson.expert}, but there are {len(run.tasks)} tasks; give --data or fewer")
        turns = {"max_turns": run.options["max_turns"]} if "max_turns" in run.options else {}
        found = await demonstrate(run.agent, run.tasks[: lesson.expert], threshold=lesson.threshold, **turns)
    finally:
        await run.agent.close()
    why = "; ".join(f"{count} × {reason}" for reason, count in list(found.reasons.items())[:3])
    if not found.kept:
        raise ConfigError(
            f"none of the expert's {lesson.expert} chains earned {lesson.threshold:g}: nothing to imitate ({why})"
        )
    if found.dropped:
        say(f"{len(found.dropped)} of {lesson.expert} demonstrations dropped: {why}")
    return found.kept


def _split(chains: Sequence[Trajectory], lesson: Lesson) -> tuple[list[Trajectory], list[Trajectory]]:
    mixed = Random(lesson.seed).sample(chains, len(chains))
    count = min(round(lesson.held_out * len(mixed)), len(mixed) - 1)
    return mixed[count:], mixed[:count]


def _write(agent: BaseAgent, learner: Learner, out: Path) -> None:
    """Beside its place first, so that a kill leaves no folder that looks like a model."""
    draft = out.with_name(f".{out.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        learner.save(draft)
        tokenizer: Any = load_tokenizer(resolve(agent.model_name_or_path))
        tokenizer.save_pretrained(draft)
        if out.exists():
            out.rmdir()
        draft.rename(out)
    except OSError as error:
        raise ConfigError(f"--out {out} could not be written: {error}; the learned weights are lost") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
