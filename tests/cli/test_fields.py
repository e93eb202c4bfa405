"""The reference of configuration fields: complete, and found by the names that people type."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from agentfly.algorithms import ALGORITHMS
from agentfly.backends import BACKENDS
from agentfly.cli.app import app
from agentfly.cli.fields import find_fields, format_markdown, list_fields
from agentfly.errors import ConfigError
from agentfly.training import TrainConfig
from agentfly.training.config import parse_overrides


def test_every_field_is_documented() -> None:
    undocumented = [field.name for fields in list_fields().values() for field in fields if not field.text]
    assert undocumented == []


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
