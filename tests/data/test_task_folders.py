"""Task folders as data: task.toml as Harbor reads it, what is refused, and rows for datasets."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentfly.data import read_tasks
from agentfly.data.task_folders import TaskConfig, TaskFiles
from agentfly.environments import TaskFolder
from agentfly.environments.task_folders.environment import to_rewards
from agentfly.errors import DataError
from tests.environments.task_folders.folders import write_task

CASES = json.loads((Path(__file__).parent / "harbor_cases.json").read_text())


def describe_config(config: TaskConfig) -> dict[str, Any]:
    """The values that make_harbor_cases.py records of Harbor's models."""
    environment, verifier = config.environment, config.verifier
    return {
        "schema_version": config.schema_version,
        "name": config.task.name,
        "agent_timeout": config.agent.timeout_sec,
        "agent_user": config.agent.user,
        "verifier_timeout": verifier.timeout_sec,
        "verifier_mode": verifier.mode.value,
        "network": environment.network.value,
        "image": environment.docker_image,
        "build_timeout": environment.build_timeout_sec,
        "cpus": environment.cpus,
        "memory": environment.memory_mb,
        "storage": environment.storage_mb,
        "os": environment.os.lower(),
        "workdir": environment.workdir,
        "env": [environment.env, verifier.env, config.solution.env],
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_configurations_are_read_as_harbor_reads_them(case: dict[str, Any]) -> None:
    if case["config"] is None:
        with pytest.raises(ValidationError):
            TaskConfig.model_validate(tomllib.loads(case["toml"]))
    else:
        assert describe_config(TaskConfig.model_validate(tomllib.loads(case["toml"]))) == case["config"]


def test_a_folder_of_task_folders_is_a_dataset(tmp_path: Path) -> None:
    write_task(tmp_path, "b", config='[task]\nname = "me/second"\n')
    write_task(tmp_path, "a")
    first, second = read_tasks(tmp_path)
    assert [first.id, second.id] == ["a", "me/second"]
    assert first.question == "Make the file `done`.\n"
    assert first.columns["task_folder"] == str(tmp_path / "a")
    assert [task.id for task in read_tasks(tmp_path / "b")] == ["me/second"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tests": None}, "has no tests/test.sh, which decides the reward"),
        ({"files": {"instruction.md": " \n"}}, "instruction.md is empty"),
        ({"config": "agent = 3"}, "task.toml: agent"),
        ({"config": "[environment]\ncpus = -1"}, "environment.cpus"),
        ({"config": "[environment"}, "task.toml cannot be read"),
        ({"config": '[environment]\nos = "windows"'}, "is for windows (environment.os); only linux is supported"),
        ({"config": "[environment]\ngpus = 1"}, "needs an accelerator (environment)"),
        ({"config": '[environment]\nnetwork_mode = "allowlist"'}, "allows a list of hosts (environment.network_mode)"),
        ({"config": '[agent]\nnetwork_mode = "no-network"'}, "gives its agent and its verifier another network_mode"),
        ({"config": '[[steps]]\nname = "one"'}, "has several steps, which are not supported"),
        ({"config": '[environment.healthcheck]\ncommand = "true"'}, "declares environment.healthcheck"),
        ({"files": {"environment/docker-compose.yaml": ""}}, "only tasks of one container are supported"),
        ({"config": '[environment]\nmemory = "infG"'}, "a size is finite"),
        ({"config": "x = " + "[" * 5000}, "task.toml cannot be read"),
        (
            {"config": '[environment]\nworkdir = "app"'},
            "works in 'app' (environment.workdir)",
        ),
        ({"config": "artifacts = [{}]"}, "task.toml: artifacts"),
        ({"config": "[[verifier.collect]]"}, "verifier.collect"),
        ({"config": '[verifier]\nuser = "root"'}, "runs its verifier as user 'root' and its agent as another"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_task(tmp_path, **changes)
    with pytest.raises(DataError) as error:
        read_tasks(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["instruction.md", "tests/data.txt", "environment/data"])
def test_links_to_files_of_the_host_are_refused(tmp_path: Path, name: str) -> None:
    """The agent would see them in its session, or in its prompt."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    folder = write_task(tmp_path / "tasks", files={"environment/here.txt": "x"})
    (folder / "environment" / "inside").symlink_to("../tests/test.sh")
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    assert TaskFiles.read(linked).files_in("environment")["inside"].startswith(b"#!")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secrets" if name == "environment/data" else tmp_path / "secrets" / "key")
    with pytest.raises(DataError, match=f"has the link {name} to a file outside of it"):
        TaskFiles.read(folder)


def test_keys_without_effect_are_listed(tmp_path: Path) -> None:
    config = '[environment]\nskills_dir = "/skills"\n[agent]\nmax_turns = 3\n[metadata]\ndifficulty = "easy"\n'
    files = TaskFiles.read(write_task(tmp_path, config=config))
    assert files.ignored_keys() == ["agent.max_turns", "environment.skills_dir"]


def test_the_working_folder_is_that_of_the_dockerfile(tmp_path: Path) -> None:
    folder = write_task(tmp_path, files={"environment/Dockerfile": "FROM x\nWORKDIR /a\nworkdir b/c\n"})
    assert TaskFiles.read(folder).workdir == "/a/b/c"
    assert "Dockerfile" not in TaskFiles.read(folder).files_in("environment")


def test_rewards_are_finite_numbers() -> None:
    assert to_rewards(0.25) == {"reward": 0.25}
    assert to_rewards({"a": 1, "b": 0}) == {"reward": 0.5, "a": 1.0, "b": 0.0}
    for value in ({}, [1], "1", None, {"reward": "1"}, {"reward": 1, "x": float("inf")}, float("nan"), 10**400):
        with pytest.raises(ValueError, match=r".+"):
            to_rewards(value)


def test_shipped_tasks_are_drawn_by_split() -> None:
    counts = {"train": 48, "validation": 24, "test": 24}
    ids = [row["id"] for split, count in counts.items() for row in TaskFolder.draw_tasks(split, count)]
    assert len(set(ids)) == 96
    assert TaskFolder.draw_tasks("train", 5, seed=3) == TaskFolder.draw_tasks("train", 5, seed=3)
    with pytest.raises(DataError, match="train has 48 shipped task folders, not 49"):
        TaskFolder.draw_tasks("train", 49)
