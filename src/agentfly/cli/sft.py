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
from agentfly.cli.progress import ProgressSteps
from agentfly.cli.run import AgentRun, load_recipe
from agentfly.demonstrations import demonstrate, demonstration_template, read_demonstrations
from agentfly.errors import ConfigError
from agentfly.models import resolve, tiny
from agentfly.runs.formatting import sanitize
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.trajectory import Trajectory

if TYPE_CHECKING:
    from agentfly.sft import SftStep
    from agentfly.training.learner import Learner


@dataclass(frozen=True, slots=True)
class SftConfig:
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
    validation_fraction: float = 0.1
    """Fraction of demonstrations held out for validation."""
    prompt_loss_weight: float = 0.0
    """Loss weight of prompt and observation tokens (0 to 1)."""
    save_every: int | None = None
    """Steps after which the model so far is written as well, beside `out`, with the number of the step in its name."""
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.demos is None) == (self.expert is None):
            raise ConfigError("give --demos with a file of conversations, or --expert with a number of tasks")
        if self.expert is not None and self.expert < 1:
            raise ConfigError(f"--expert is a number of tasks, at least 1, not {self.expert}")
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"--validation-fraction is from 0 to below 1, not {self.validation_fraction}")
        if not 0 <= self.prompt_loss_weight <= 1:
            raise ConfigError(f"--prompt-loss-weight is from 0 to 1, not {self.prompt_loss_weight}")
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
def new_model(path: Path, data: Path | None, lesson: SftConfig) -> Iterator[str]:
    """A tiny model that knows nothing but the words of the recipe's demonstrations, for as long as it is wanted."""
    few = replace(lesson, expert=min(lesson.expert, _WORDS)) if lesson.expert else lesson
    with tempfile.TemporaryDirectory() as folder:
        wordless, model = Path(folder, "wordless"), Path(folder, "new")
        tiny.build_new(wordless, (), context=1 << 20)
        run = load_recipe(path, {"model_name_or_path": str(wordless)}, without_model=True)
        run = run.override(data=data) if data is not None else run
        shown = asyncio.run(_collect_demonstrations(run, few, lambda _: None))
        tiny.build_new(model, _texts(run.agent, shown), seed=lesson.seed)
        yield str(model)


def _texts(agent: BaseAgent, shown: Sequence[Trajectory]) -> list[str]:
    """What stands in the chains, piece by piece."""
    read = demonstration_template(agent).codec.decode
    return [read(span.ids.tolist()) for chain in shown for segment in chain.segments for span in segment.spans]


def run_sft(run: AgentRun, lesson: SftConfig, console: Console | None = None) -> SftStep:
    """Gather demonstrations, imitate them, write the model; the last step."""
    from agentfly.sft import build_sft_learner, demonstration_segments, measure_fit, train_sft

    console = console or Console()

    def say(text: str) -> None:
        console.print(sanitize(text), highlight=False, markup=False)

    learned, unseen = _split(asyncio.run(_collect_demonstrations(run, lesson, say)), lesson)
    say(f"{len(learned)} demonstrations to imitate, {len(unseen)} held out")
    learner = build_sft_learner(
        run.agent.model_name_or_path, steps=lesson.steps, learning_rate=lesson.learning_rate, seed=lesson.seed
    )
    if unseen:
        before = measure_fit(learner.model, demonstration_segments(learner.model, unseen))
        say(f"held out, before: loss {before.loss:.3f}, accuracy {before.accuracy:.1%}")
    with ProgressSteps(console, "steps", lesson.steps) as steps:

        def watch(step: SftStep) -> None:
            steps.advance(f"loss {step.loss:.3f}")
            if step.step in lesson.stages:
                _write(run.agent, learner, lesson.stages[step.step])

        last = train_sft(
            learner, learned, steps=lesson.steps, batch_size=lesson.batch_size, validation=unseen,
            prompt_loss_weight=lesson.prompt_loss_weight, seed=lesson.seed, on_step=watch,
        )[-1]  # fmt: skip
    if last.validation is not None:
        say(f"held out, after: loss {last.validation.loss:.3f}, accuracy {last.validation.accuracy:.1%}")
    _write(run.agent, learner, lesson.out)
    say(f"written to {lesson.out}")
    return last


async def _collect_demonstrations(run: AgentRun, lesson: SftConfig, say: Any) -> Sequence[Trajectory]:
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
    if not found.accepted:
        raise ConfigError(
            f"none of the expert's {lesson.expert} chains earned {lesson.threshold:g}: nothing to imitate ({why})"
        )
    if found.rejected:
        say(f"{len(found.rejected)} of {lesson.expert} demonstrations dropped: {why}")
    return found.accepted


def _split(chains: Sequence[Trajectory], lesson: SftConfig) -> tuple[list[Trajectory], list[Trajectory]]:
    mixed = Random(lesson.seed).sample(chains, len(chains))
    count = min(round(lesson.validation_fraction * len(mixed)), len(mixed) - 1)
    return mixed[count:], mixed[:count]


def _write(agent: BaseAgent, learner: Learner, out: Path) -> None:
    """Beside its place first, so that a kill leaves no folder that looks like a model."""
    draft = out.with_name(f".{out.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        learner.save(draft)
        load_tokenizer(resolve(agent.model_name_or_path)).save_pretrained(draft)
        if out.exists():
            out.rmdir()
        draft.rename(out)
    except OSError as error:
        raise ConfigError(f"--out {out} could not be written: {error}; the learned weights are lost") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
