"""One page that says how a run went. It needs no network, and nothing that a model wrote can act in it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import escape
from rich.text import Text

from agentfly.errors import ConfigError
from agentfly.runs.curve import draw
from agentfly.runs.directory import RunDirectory, Stored
from agentfly.runs.files import replace
from agentfly.runs.record import PHASES, StepRecord
from agentfly.runs.words import ALL_FIGURES, duration, sanitize, written
from agentfly.segment import Author
from agentfly.trajectory import COLOURS, Trajectory

Decode = Callable[[Sequence[int]], str]
LONGEST = 6000
"""Most characters of a stretch that are shown; the rest is in the run's folder."""
PROMPT = 240
"""Most characters of a prompt that are shown."""
TASKS = 3
"""Held-out tasks that are shown before and after."""
CHAINS = 12
"""Most chains shown for alarms."""
ENDS = 5
"""Steps at the beginning and the end that the figures are means of."""
_AUTHORS = {colour: author.value for author, colour in COLOURS.items()}


def write_report(directory: RunDirectory, decode: Decode | None = None) -> None:
    """Write the page into the run's folder. With `decode`, chains are shown token for token, else as messages."""
    source = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    text = sanitize(page.render(_facts(directory, decode)))
    replace(directory.report, text.encode("utf-8", "backslashreplace"))


@dataclass(frozen=True, slots=True)
class Shown:
    """A chain as the page shows it."""

    name: str
    anchor: str
    stretches: list[tuple[str, str, str]]
    """Of each: its style, its author, and its text."""


def _facts(directory: RunDirectory, decode: Decode | None) -> dict[str, Any]:
    records, config = directory.records(), directory.config
    trained = [record for record in records if record.metrics]
    seconds = {phase: math.fsum(r.seconds.get(phase, 0.0) for r in records) for phase in _phases(records)}
    total = sum(seconds.values())
    alarms = directory.alarms()
    chains = _alarmed(directory, decode)
    return {
        "name": directory.name,
        "config": json.dumps(config, indent=2, ensure_ascii=False),
        "steps": trained[-1].step if trained else 0,
        "asked": records[-1].steps if records else 0,
        "chains": int(math.fsum(r.metrics.get("chains", 0.0) for r in trained)),
        "took": duration(total),
        "shares": [(phase, spent / total, duration(spent)) for phase, spent in seconds.items() if total > 0],
        "curve": _curve(records),
        "figures": list(_figures(trained)),
        "evals": [(record.step, record.eval) for record in records if record.eval is not None],
        "alarms": alarms,
        "alarmed": chains,
        "anchor": anchor,
        "anchors": {chain.anchor for chain in chains},
        "pairs": list(_pairs(directory, [r.step for r in records if r.eval is not None], decode)),
        "authors": {author.value: colour for author, colour in COLOURS.items()},
        "isnan": math.isnan,
    }


def _phases(records: Sequence[StepRecord]) -> list[str]:
    seen = {phase for record in records for phase in record.seconds}
    return [*(phase for phase in PHASES if phase in seen), *sorted(seen - set(PHASES))]


def _curve(records: Sequence[StepRecord]) -> str:
    """The curve as an SVG element, or why there is none."""
    buffer = io.StringIO()
    try:
        draw(records).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    except ConfigError as error:
        return str(escape(str(error)))
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _figures(trained: Sequence[StepRecord]) -> Iterator[tuple[str, str, str]]:
    """What was measured: in the first steps, and in the last."""
    for word, name, how in ALL_FIGURES:
        values = [v for v in (r.metrics.get(name, math.nan) for r in trained) if math.isfinite(v)]
        if values:
            count = min(ENDS, max(len(values) // 2, 1))
            ends = (values[:count], values[-count:])
            first, last = (written(sum(each) / len(each), how) for each in ends)
            yield word, first, last


def _pairs(directory: RunDirectory, steps: Sequence[int], decode: Decode | None) -> Iterator[tuple[str, Shown, Shown]]:
    """The same held-out tasks before and after: those that gained most, and last the one that gained least."""
    if len(steps) < 2:
        return
    before, after = (
        {each.trajectory.id: each for each in directory.trajectories(step, held_out=True)}
        for step in (steps[0], steps[-1])
    )
    same = [name for name in before if name in after and before[name].trajectory.task == after[name].trajectory.task]
    one_a_task = list({before[name].trajectory.group: name for name in reversed(same)}.values())
    ranked = sorted(one_a_task, key=lambda name: _earned(after[name]) - _earned(before[name]), reverse=True)
    for name in ranked if len(ranked) <= TASKS else [*ranked[: TASKS - 1], ranked[-1]]:
        first, last = before[name].trajectory, after[name].trajectory
        yield first.task.question, _shown(first, steps[0], decode), _shown(last, steps[-1], decode)


def _earned(stored: Stored) -> float:
    return stored.trajectory.reward or 0.0


def _alarmed(directory: RunDirectory, decode: Decode | None) -> list[Shown]:
    """The chains that alarms name, as far as they were kept."""
    wanted = dict.fromkeys((alarm.step, name) for alarm in directory.alarms() for name in alarm.chains)
    kept = {
        (step, each.trajectory.id): each.trajectory
        for step in {step for step, _ in list(wanted)[:CHAINS]}
        for each in directory.trajectories(step)
    }
    return [_shown(kept[key], key[0], decode) for key in list(wanted)[:CHAINS] if key in kept]


def _shown(trajectory: Trajectory, step: int, decode: Decode | None) -> Shown:
    name = f"step {step}, chain {trajectory.id}{_end(trajectory)}"
    return Shown(name, anchor(step, trajectory.id), list(_stretches(trajectory.render(decode))))


def _end(trajectory: Trajectory) -> str:
    earned = "" if trajectory.reward is None else f", reward {trajectory.reward:g}"
    return f": {trajectory.stop.value.replace('_', ' ')} after {len(trajectory.turns)} turns{earned}"


def anchor(step: int, chain: str) -> str:
    """Where on the page a chain is."""
    return f"chain-{step}-{chain}"


def _stretches(text: Text) -> Iterator[tuple[str, str, str]]:
    """What each author wrote, in order, with the author's style and name."""
    at = 0
    for span in text.spans:
        yield "", "", text.plain[at : span.start]
        author = _AUTHORS.get(str(span.style), "")
        yield str(span.style), author, _readable(text.plain[span.start : span.end], author)
        at = span.end


def _readable(said: str, author: str) -> str:
    """Cut where it is long: a prompt at its front, since its question is at its end."""
    if author == Author.TASK.value and len(said) > PROMPT:
        return f"({len(said) - PROMPT} characters) …{said[-PROMPT:]}"
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}… ({len(said) - LONGEST} characters)"
