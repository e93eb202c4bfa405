"""Record how harbor 0.25 reads task.toml, with Python 3.12: `python make_harbor_cases.py > harbor_cases.json`."""

import json
import tomllib
import warnings

from harbor.models.task.config import TaskConfig  # type: ignore[import-not-found]
from harbor.models.task.verifier_mode import resolve_task_verifier_mode  # type: ignore[import-not-found]

CASES = {
    "empty": "",
    "old version": 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512m"\nallow_internet = false',
    "internet allowed": "[environment]\nallow_internet = true",
    "two policies": '[environment]\nallow_internet = true\nnetwork_mode = "public"',
    "whole": """schema_version = "1.4"
[task]
name = "org/name"
[metadata]
difficulty = "hard"
[agent]
timeout_sec = 900
user = "agent"
[verifier]
timeout_sec = 30.5
env = {KEY = "${KEY}"}
[environment]
docker_image = "python:3.12"
build_timeout_sec = 60
cpus = 2.0
memory_mb = 512
storage_mb = 1024
os = "Linux"
workdir = "/work"
network_mode = "no-network"
env = {A = "1"}
[solution]
env = {B = "2"}
""",
    "separate by its environment": "[verifier.environment]\ncpus = 1",
    "separate": '[verifier]\nenvironment_mode = "separate"',
    "user id": "[agent]\nuser = 1000",
    "unknown keys": "[environment]\nsomething = 1\n[agent]\nother = 2",
    "half a processor": "[environment]\ncpus = 0.5",
    "text as timeout": '[agent]\ntimeout_sec = "soon"',
    "unknown mode": '[verifier]\nenvironment_mode = "both"',
    "unknown network": '[environment]\nnetwork_mode = "some"',
    "list as environment": "environment = [1]",
    "number as variable": "[environment.env]\nA = 1",
    "size without unit": '[environment]\nmemory = "12"',
    "infinite processors": "[environment]\ncpus = inf",
}


def describe(config):
    environment, verifier = config.environment, config.verifier
    return {
        "schema_version": config.schema_version,
        "name": config.task.name if config.task else None,
        "agent_timeout": config.agent.timeout_sec,
        "agent_user": config.agent.user,
        "verifier_timeout": verifier.timeout_sec,
        "verifier_mode": resolve_task_verifier_mode(config).value,
        "network": environment.network_mode.value,
        "image": environment.docker_image,
        "build_timeout": environment.build_timeout_sec,
        "cpus": environment.cpus,
        "memory": environment.memory_mb,
        "storage": environment.storage_mb,
        "os": environment.os.value,
        "workdir": environment.workdir,
        "env": [environment.env, verifier.env, config.solution.env],
    }


warnings.simplefilter("ignore")
cases = []
for name, text in CASES.items():
    try:
        config = describe(TaskConfig.model_validate(tomllib.loads(text)))
    except ValueError:
        config = None
    cases.append({"id": name, "toml": text, "config": config})
print(json.dumps(cases, indent=1))
