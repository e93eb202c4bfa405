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
    top_level = [field for field in _read_class("training/config", "TrainConfig") if field.name not in _RECORDS]
    sections = {"TrainConfig": top_level}
    for name, source in _RECORDS.items():
        inner = _read_class(*source, prefix=f"{name}.")
        sections[name] = [field for field in inner if field.name not in _SET_ELSEWHERE]
    for name, (module, cls) in _ALGORITHMS.items():
        sections[f"algorithm={name}"] = list(_read_class(f"algorithms/{module}", cls, prefix="algorithm."))
    for name, (module, cls) in _BACKENDS.items():
        sections[f"backend={name}"] = list(_read_arguments(f"backends/{module}", cls))
    return sections


def find_fields(name: str) -> dict[str, list[Field]]:
    """The fields of this name, group or section, else those that contain it. Raises ConfigError with close names."""
    sections = list_fields()
    names = [field.name for fields in sections.values() for field in fields]
    if name in sections:
        return {name: sections[name]}
    for fits in (
        lambda field: field == name or field.startswith(f"{name}."),
        lambda field: field.rpartition(".")[2] == name,
        lambda field: name in field,
    ):
        matches = {title: [field for field in fields if fits(field.name)] for title, fields in sections.items()}
        if any(matches.values()):
            return {title: fields for title, fields in matches.items() if fields}
    from agentfly.training.config import find_field

    if (meant := find_field(name)) is not None:
        return find_fields(meant)
    close = difflib.get_close_matches(
        name, {*names, *sections, *(full_name.rpartition(".")[2] for full_name in names)}, 3
    )
    hint = f"close ones: {', '.join(close)}" if close else "`agentfly train --help-fields` lists all"
    raise ConfigError(f"there is no field {name!r}; {hint}")


def print_fields(name: str | None) -> None:
    """Print the fields of this name, or all: name, default and type, and below them the description."""
    for title, fields in (list_fields() if name is None else find_fields(name)).items():
        print(f"\n{title}")
        for field in fields:
            default = f"={field.default}" if field.default else ""
            print(f"  {field.name}{default}  ({field.type})")
            if field.text:
                print(f"      {field.text}")


def format_markdown() -> str:
    """The reference as Markdown, one table per section."""
    lines = []
    for title, fields in list_fields().items():
        rows = ["| field | type | default | |", "|---|---|---|---|"]
        for field in fields:
            cells = (f"`{field.name}`", f"`{field.type}`", f"`{field.default}`" if field.default else "", field.text)
            rows.append(f"| {' | '.join(cells)} |")  # the site shows `|` in code as it is, and a backslash, too
        lines.append(f"## `{title}`\n\n" + "\n".join(rows))
    return "\n\n".join(lines)


def _find_class(module: str, name: str) -> ast.ClassDef:
    tree = ast.parse((_PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _read_class(module: str, name: str, prefix: str = "") -> Iterator[Field]:
    """The annotated fields of a class, each with the text below it."""
    body = _find_class(module, name).body
    for at, statement in enumerate(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(statement.annotation):
            continue
        below = body[at + 1] if at + 1 < len(body) else None
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = " ".join(str(below.value.value).split())
        value = statement.value
        while isinstance(value, ast.Call) and ast.unparse(value.func) in ("number", "DefaultLimit"):
            value = value.args[0]  # users write the number
        default = "" if value is None else ast.unparse(value)
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "Field"):
            # The default, or a factory, whose inner fields have the defaults.
            defaults = [ast.unparse(keyword.value) for keyword in value.keywords if keyword.arg == "default"]
            default = "".join(defaults) or {"algorithm": "'grpo'"}.get(statement.target.id, "")
        yield Field(prefix + statement.target.id, ast.unparse(statement.annotation), default, text)


def _read_arguments(module: str, name: str) -> Iterator[Field]:
    """The arguments of a backend's constructor, described under `Args:` in its docstring."""
    init = next(
        statement for statement in _find_class(module, name).body if getattr(statement, "name", "") == "__init__"
    )
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
