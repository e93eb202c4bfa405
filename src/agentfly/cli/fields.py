"""Reference of the fields that `agentfly train RECIPE FIELD=VALUE` sets, parsed from the source, not imported."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import agentfly
from agentfly.errors import ConfigError

_PACKAGE = Path(agentfly.__file__).parent
_ALGORITHMS = {"ppo": ("ppo", "PPO"), "reinforce_pp": ("reinforce_pp", "ReinforcePP"), "gigpo": ("gigpo", "GiGPO")}
"""The algorithms with settings, by name: module and class."""
_BACKENDS = {
    "transformers": ("engine/backend", "EngineBackend"),
    "vllm": ("vllm/backend", "VLLMBackend"),
    "client": ("client", "ClientBackend"),
    "fleet": ("fleet", "FleetBackend"),
}
_RECORDS = {
    "sampling": ("types", "Sampling"),
    "run_options": ("rollout/config", "RunOptions"),
    "loss": ("training/config_records", "LossConfig"),
    "kl": ("training/config_records", "KLConfig"),
    "teacher": ("training/config_records", "TeacherConfig"),
    "optimizer": ("training/config_records", "OptimizerConfig"),
    "async_training": ("training/config_records", "AsyncTrainingConfig"),
    "checkpoint": ("training/config_records", "CheckpointConfig"),
    "evaluation": ("training/config_records", "EvaluationConfig"),
    "vision": ("training/config_records", "VisionConfig"),
}
"""The groups of fields in TrainConfig: module and class."""
_SET_ELSEWHERE = ("sampling.seed", "run_options.sampling", "run_options.seed", "run_options.observer")
"""Fields of the records that a training configuration does not take."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a training configuration."""

    name: str
    """Dotted name, as on the command line."""
    type: str
    default: str
    """Empty: it has none."""
    text: str


def list_fields() -> dict[str, list[Field]]:
    """All fields by section; a section is `TrainConfig`, one of its groups, an algorithm or a backend."""
    own = [each for each in _read_class("training/config", "TrainConfig") if each.name not in _RECORDS]
    sections = {"TrainConfig": own}
    for name, source in _RECORDS.items():
        inner = _read_class(*source, prefix=f"{name}.")
        sections[name] = [each for each in inner if each.name not in _SET_ELSEWHERE]
    for name, (module, cls) in _ALGORITHMS.items():
        sections[f"algorithm={name}"] = list(_read_class(f"algorithms/{module}", cls, prefix="algorithm."))
    for name, (module, cls) in _BACKENDS.items():
        sections[f"backend={name}"] = list(_read_arguments(f"backends/{module}", cls))
    return sections


def find_fields(name: str) -> dict[str, list[Field]]:
    """The fields of this name, group or section, else those that contain it. Raises ConfigError with close names."""
    sections = list_fields()
    known = [each.name for fields in sections.values() for each in fields]
    if name in sections:
        return {name: sections[name]}
    for fits in (
        lambda field: field == name or field.startswith(f"{name}."),
        lambda field: field.rpartition(".")[2] == name,
        lambda field: name in field,
    ):
        found = {title: [each for each in fields if fits(each.name)] for title, fields in sections.items()}
        if any(found.values()):
            return {title: fields for title, fields in found.items() if fields}
    from agentfly.training.config import find_field

    if (meant := find_field(name)) is not None:
        return find_fields(meant)
    close = difflib.get_close_matches(name, {*known, *sections, *(each.rpartition(".")[2] for each in known)}, 3)
    hint = f"close ones: {', '.join(close)}" if close else "`agentfly train --help-fields` lists all"
    raise ConfigError(f"there is no field {name!r}; {hint}")


def print_fields(name: str | None) -> None:
    """Print the fields of this name, or all: name, default and type, and below them the description."""
    for title, fields in (list_fields() if name is None else find_fields(name)).items():
        print(f"\n{title}")
        for each in fields:
            default = f"={each.default}" if each.default else ""
            print(f"  {each.name}{default}  ({each.type})")
            if each.text:
                print(f"      {each.text}")


def format_markdown() -> str:
    """The reference as Markdown, one table per section."""
    parts = []
    for title, fields in list_fields().items():
        rows = ["| field | type | default | |", "|---|---|---|---|"]
        for each in fields:
            cells = (f"`{each.name}`", f"`{each.type}`", f"`{each.default}`" if each.default else "", each.text)
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append(f"## `{title}`\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _find_class(module: str, name: str) -> ast.ClassDef:
    tree = ast.parse((_PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)


def _read_class(module: str, name: str, prefix: str = "") -> Iterator[Field]:
    """The annotated fields of a class, each with the text below it."""
    body = _find_class(module, name).body
    for at, each in enumerate(body):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(each.annotation):
            continue
        below = body[at + 1] if at + 1 < len(body) else None
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = " ".join(str(below.value.value).split())
        value = each.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "DefaultLimit":
            value = value.args[0]  # users write the number
        default = "" if value is None else ast.unparse(value)
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "Field"):
            # The default, or a factory, whose inner fields have the defaults.
            defaults = [ast.unparse(keyword.value) for keyword in value.keywords if keyword.arg == "default"]
            default = "".join(defaults) or {"algorithm": "'grpo'"}.get(each.target.id, "")
        yield Field(prefix + each.target.id, ast.unparse(each.annotation), default, text)


def _read_arguments(module: str, name: str) -> Iterator[Field]:
    """The arguments of a backend's constructor, described under `Args:` in its docstring."""
    init = next(each for each in _find_class(module, name).body if getattr(each, "name", "") == "__init__")
    assert isinstance(init, ast.FunctionDef)
    described = (ast.get_docstring(init) or "").partition("Args:")[2]
    texts = {
        match[1]: " ".join(match[2].split())
        for match in re.finditer(r"^    (\w+): (.*(?:\n {8,}.*)*)", described, re.MULTILINE)
    }
    arguments = [*init.args.args[1:], *init.args.kwonlyargs]
    missing = [None] * (len(init.args.args) - 1 - len(init.args.defaults))
    for argument, default in zip(arguments, [*missing, *init.args.defaults, *init.args.kw_defaults], strict=True):
        if argument.arg == "model":  # the field `model` of the configuration
            continue
        kind = "" if argument.annotation is None else ast.unparse(argument.annotation)
        value = "" if default is None else ast.unparse(default)
        yield Field(f"backend.{argument.arg}", kind, value, texts.get(argument.arg, ""))
