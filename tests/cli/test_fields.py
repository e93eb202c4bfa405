"""The reference of configuration fields: complete, and found by the names that people type."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from agentfly.algorithms import ALGORITHMS
from agentfly.backends import BACKENDS
from agentfly.cli.app import app
from agentfly.cli.fields import find_fields, format_markdown, list_fields
from agentfly.environment import Pool
from agentfly.errors import ConfigError
from agentfly.integrations.verl.config import ClusterConfig
from agentfly.resources.runtimes.container import Container
from agentfly.resources.runtimes.ray import RayRuntime
from agentfly.rollout import RecoveryRule
from agentfly.rollout.config import RunOptions
from agentfly.rollout.limits import FailurePolicy
from agentfly.runs import AlarmThresholds
from agentfly.sandbox import Limits
from agentfly.training import TrainConfig, WarmStart
from agentfly.training.config import parse_overrides

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fields.md"
GROUPS = {name: hint for name, hint in get_type_hints(TrainConfig).items() if dataclasses.is_dataclass(hint)}
"""The fields of a training configuration that are records."""
del GROUPS["algorithm"]  # any of several records, each with a section of its own
RECORDS = [
    *(TrainConfig, *GROUPS.values(), *(cls for cls in ALGORITHMS.values() if dataclasses.fields(cls))),
    *(AlarmThresholds, ClusterConfig, Container, FailurePolicy, Limits, Pool, RayRuntime, RecoveryRule, RunOptions),
    WarmStart,
]


def find_undocumented(record: type) -> list[str]:
    """The fields of a class without a text underneath. Records inside of TrainConfig are documented by their fields."""
    [definition] = ast.parse(inspect.getsource(record)).body
    assert isinstance(definition, ast.ClassDef)
    following = [*definition.body[1:], None]
    return [
        statement.target.id
        for statement, text in zip(definition.body, following, strict=True)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if "ClassVar" not in ast.unparse(statement.annotation)
        if not (record is TrainConfig and statement.target.id in GROUPS)
        if not (
            isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        )
    ]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_is_documented(record: type) -> None:
    assert find_undocumented(record) == []


def test_a_field_without_a_text_is_found() -> None:
    assert find_undocumented(Undocumented) == ["second"]


class Undocumented:
    first: int = 0
    """It has a text."""
    second: int = 0


def test_every_field_of_a_training_is_on_the_page_of_fields() -> None:
    assert "<!-- fields -->" in PAGE.read_text()  # replaced by format_markdown() when the site is built
    rows = [line.removeprefix("| ").split(" | ") for line in format_markdown().splitlines() if line.startswith("| `")]
    texts = {cells[0].strip("`"): cells[-1].removesuffix(" |") for cells in rows}
    names = {field.name for field in dataclasses.fields(TrainConfig)} - GROUPS.keys() - {"run_options"}
    names |= {f"{group}.{field.name}" for group, record in GROUPS.items() for field in dataclasses.fields(record)}
    names |= {f"run_options.{name}" for name in RunOptions.__annotations__}
    # A training has one seed, and sets these options itself.
    names -= {"sampling.seed", "run_options.seed", "run_options.sampling", "run_options.observer"}
    assert [name for name in names if not texts.get(name)] == []
    assert [name for name, text in texts.items() if not text] == []


def test_every_field_is_listed_with_its_default() -> None:
    listed = {field.name: field for fields in list_fields().values() for field in fields}
    for name, value in TrainConfig().flat().items():
        if name in ("run_options", "sampling.seed"):  # its fields have a section; it is written as seed
            continue
        if name not in ("algorithm", "loggers"):
            assert json.loads(json.dumps(eval(listed[name].default))) == value


def test_algorithms_and_backends_with_settings_have_a_section() -> None:
    sections = list_fields()
    for name, algorithm in ALGORITHMS.items():
        fields = [field.name for field in sections.get(f"algorithm={name}", [])]
        assert fields == [f"algorithm.{field.name}" for field in dataclasses.fields(algorithm)]
    missing = {f"backend={name}" for name in BACKENDS} - sections.keys()
    assert missing == {"backend=async_vllm", "backend=scripted"}  # another name, and one that cannot be trained


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("optimizer.learning_rate", ["optimizer.learning_rate"]),
        ("weight_decay", ["optimizer.weight_decay"]),
        ("eval_every", ["evaluation.every"]),
        ("checkpoint", ["checkpoint.every", "checkpoint.keep"]),
        ("algorithm=gigpo", ["algorithm.weight", "algorithm.gamma", "algorithm.std"]),
    ],
)
def test_fields_are_found_by_name_and_group(query: str, names: list[str]) -> None:
    assert [field.name for fields in find_fields(query).values() for field in fields] == names


def test_unknown_field_names_close_ones() -> None:
    with pytest.raises(ConfigError, match=r"there is no field 'lerning_rate'; close ones: learning_rate"):
        find_fields("lerning_rate")


def test_help_fields_prints_and_ends() -> None:
    result = CliRunner().invoke(app, ["train", "--help-fields", "checkpoint.keep"])
    assert result.exit_code == 0
    assert "checkpoint.keep=2  (int)\n      Newest checkpoints to retain" in result.output
    assert "optimizer" not in result.output
    assert "## `backend=client`" in format_markdown()


def test_values_of_the_command_line_are_parsed() -> None:
    typed = ["loggers=console, console", "evaluation.every=none", "loss.clip=0.2,0.28", "gradient_checkpointing=TRUE"]
    config = TrainConfig().override(parse_overrides(typed))
    assert config.loggers == ("console", "console")
    assert config.evaluation.every is None
    assert config.loss.clip == (0.2, 0.28)
    assert config.gradient_checkpointing
