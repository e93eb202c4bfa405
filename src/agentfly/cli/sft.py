"""Work of `agentfly sft`: collect demonstrations from a file or an expert, train on them, write the model."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agentfly.agent import BaseAgent
from agentfly.cli.console import print_text
from agentfly.cli.recipes import Recipe
from agentfly.cli.run import AgentRun, load_recipe
from agentfly.data.huggingface import is_dataset
from agentfly.errors import ConfigError
from agentfly.models import resolve, tiny
from agentfly.runs.progress import ProgressSteps
from agentfly.sft.demonstrations import demonstrate, demonstration_template, read_demonstrations
from agentfly.templates.tokenizer import load_tokenizer, save_tokenizer
from agentfly.training.config_records import LEARNING_RATE_TOO_HIGH, MAX_LEARNING_RATE
from agentfly.trajectory import Trajectory

if TYPE_CHECKING:
    from agentfly.sft.training import SftStep
    from agentfly.training.learner import Learner


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Settings of one fine-tuning on demonstrations."""

    out: Path
    demos: Path | None = None
    """File or dataset of conversations; None uses the environment's expert."""
    expert: int | None = None
    """Number of tasks that the expert demonstrates, from the recipe's first on; None reads a file."""
    threshold: float = 1.0
    """Minimum reward of an expert's chain to be used."""
    steps: int = 100
    batch_size: int = 8
    learning_rate: float = 1e-5
    validation_fraction: float = 0.1
    """Fraction of demonstrations held out for validation."""
    prompt_loss_weight: float = 0.0
    """Loss weight of prompt and observation tokens (0 to 1)."""
    train_tower: bool = False
    """Whether the vision tower and its connector are trained."""
    save_every: int | None = None
    """Interval in steps at which the model is also written, to `OUT-STEP`; None writes it only at the end."""
    seed: int = 0
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Options of `read_tasks`, for the demonstrations or else the expert's tasks."""

    def __post_init__(self) -> None:
        if (self.demos is None) == (self.expert is None):
            raise ConfigError("give --demos with a file of conversations, or --expert with a number of tasks")
        if self.demos is not None and self.demos.is_dir() and not is_dataset(self.demos):
            raise ConfigError(
                f"--demos: {self.demos} is a folder that save_to_disk did not write; give a file of conversations"
            )
        if self.demos is not None and not (self.demos.is_file() or is_dataset(self.demos)):
            raise ConfigError(f"--demos: there is no file or dataset {self.demos}")
        if self.expert is not None and self.expert < 1:
            raise ConfigError(f"--expert is a number of tasks, at least 1, not {self.expert}")
        if self.learning_rate > MAX_LEARNING_RATE:
            raise ConfigError(LEARNING_RATE_TOO_HIGH.format(name="--learning-rate", rate=self.learning_rate))
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"--validation-fraction is from 0 to below 1, not {self.validation_fraction}")
        if not 0 <= self.prompt_loss_weight <= 1:
            raise ConfigError(f"--prompt-loss-weight is from 0 to 1, not {self.prompt_loss_weight}")
        for out in (self.out, *self.checkpoints.values()):
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise ConfigError(f"--out {out} exists already; give a new or an empty folder")

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Folders of the models that are written before the last step, by step."""
        steps = range(self.save_every, self.steps, self.save_every) if self.save_every else ()
        return {step: self.out.with_name(f"{self.out.name}-{step}") for step in steps}


@contextmanager
def report_interrupt(config: SftConfig) -> Iterator[None]:
    """Print which model was written last when the block is interrupted, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        models = {**config.checkpoints, config.steps: config.out}
        kept = "no model was written"
        if config.save_every is None:
            kept += ": --save-every N writes one every N steps"
        for step, folder in models.items():
            if (folder / "config.json").exists():
                kept = f"the model of step {step} of {config.steps} is in {folder}"
        print_text(Console(), f"stopped; {kept}")
        raise SystemExit(130) from None


NEW = "new"
"""The name of an untrained model that is built for this run."""
_TOKENIZER_DEMOS = 200
"""Maximum number of demonstrations that its tokenizer is trained on."""


@contextmanager
def new_model(recipe: Recipe, data: Path | None, config: SftConfig) -> Iterator[str]:
    """Build an untrained tiny model with a tokenizer trained on the recipe's demonstrations, in a temporary folder."""
    if config.train_tower:
        raise ConfigError("--train-tower with --model new: a new model has no vision tower; leave --train-tower out")
    sample = replace(config, expert=min(config.expert, _TOKENIZER_DEMOS)) if config.expert else config
    with tempfile.TemporaryDirectory() as folder:
        # Reading demonstrations needs some tokenizer: the first model's has no vocabulary but bytes.
        byte_model = Path(folder, "bytes")
        model = Path(folder, "new")
        tiny.build_new(byte_model, (), context=1 << 20)
        run = load_recipe(recipe, {"model_name_or_path": str(byte_model)}, without_model=True)
        if data is not None:
            run = run.override(data=data, reading=config.reading if config.demos is None else None)
        demos = asyncio.run(_collect_demonstrations(run, sample, lambda _: None))
        decode = demonstration_template(run.agent).codec.decode
        spans = [span for chain in demos for segment in chain.segments for span in segment.spans]
        tiny.build_new(model, [decode(span.ids.tolist()) for span in spans], seed=config.seed)
        yield str(model)


def run_sft(run: AgentRun, config: SftConfig, console: Console | None = None) -> SftStep:
    """Collect demonstrations, train on them and write the model; return the last step."""
    from agentfly.sft.training import build_sft_learner, demonstration_segments, measure_fit, select_fitting, train_sft

    console = console or Console()
    report = partial(print_text, console)
    if config.train_tower and demonstration_template(run.agent).image_processor is None:
        reason = run.agent.no_vision_reason or "it has no vision tower; leave --train-tower out"
        raise ConfigError(f"--train-tower with the model {run.agent.model_name_or_path!r}: {reason}")
    try:  # now, not when the model is trained
        config.out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=config.out.parent).cleanup()
    except OSError as error:
        raise ConfigError(f"--out {config.out} cannot be written: {error}") from error
    chains = asyncio.run(_collect_demonstrations(run, config, report))
    learner = build_sft_learner(
        run.agent.model_name_or_path,
        steps=config.steps,
        learning_rate=config.learning_rate,
        train_tower=config.train_tower,
        seed=config.seed,
    )
    chains = select_fitting(learner.model, chains)
    chains = Random(config.seed).sample(chains, len(chains))
    held_out = min(round(config.validation_fraction * len(chains)), len(chains) - 1)
    training, validation = chains[held_out:], chains[:held_out]
    report(f"{len(training)} demonstrations to imitate, {len(validation)} held out")
    if validation:
        initial_fit = measure_fit(learner.model, demonstration_segments(learner.model, validation))
        report(f"held out, before: loss {initial_fit.loss:.3f}, accuracy {initial_fit.accuracy:.1%}")
    with ProgressSteps(console, "steps", config.steps) as steps:

        def watch(step: SftStep) -> None:
            steps.advance(f"loss {step.loss:.3f}")
            if step.step in config.checkpoints:
                _write_model(run.agent, learner, config.checkpoints[step.step])

        last = train_sft(
            learner, training, steps=config.steps, batch_size=config.batch_size, validation=validation,
            prompt_loss_weight=config.prompt_loss_weight, seed=config.seed, on_step=watch,
        )[-1]  # fmt: skip
    if last.validation is not None:
        report(f"held out, after: loss {last.validation.loss:.3f}, accuracy {last.validation.accuracy:.1%}")
    _write_model(run.agent, learner, config.out)
    report(f"written to {config.out}")
    return last


async def _collect_demonstrations(
    run: AgentRun, config: SftConfig, report: Callable[[str], None]
) -> Sequence[Trajectory]:
    """Return the demonstrations. Closes the agent: training needs the memory of its engine."""
    try:
        if config.demos is not None:
            return read_demonstrations(run.agent, config.demos, **config.reading)
        assert config.expert is not None
        if len(run.tasks) < config.expert:
            raise ConfigError(f"--expert {config.expert}, but there are {len(run.tasks)} tasks; give --data or fewer")
        turns = {"max_turns": run.options["max_turns"]} if "max_turns" in run.options else {}
        demonstrations = await demonstrate(run.agent, run.tasks[: config.expert], threshold=config.threshold, **turns)
    finally:
        await run.agent.close()
    reasons = "; ".join(f"{count} × {reason}" for reason, count in list(demonstrations.reasons.items())[:3])
    if not demonstrations.accepted:
        raise ConfigError(
            f"none of the expert's {config.expert} chains earned {config.threshold:g}: nothing to imitate ({reasons})"
        )
    if demonstrations.rejected:
        report(f"{len(demonstrations.rejected)} of {config.expert} demonstrations dropped: {reasons}")
    return demonstrations.accepted


def _write_model(agent: BaseAgent, learner: Learner, out: Path) -> None:
    """Write to a draft folder and rename it, so that a killed process leaves no incomplete model."""
    draft = out.with_name(f".{out.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        learner.save(draft)
        tokenizer = load_tokenizer(resolve(agent.model_name_or_path))
        save_tokenizer(tokenizer, draft, demonstration_template(agent).source)
        if out.exists():
            out.rmdir()
        draft.rename(out)
    except OSError as error:
        raise ConfigError(f"--out {out} could not be written: {error}; the learned weights are lost") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
