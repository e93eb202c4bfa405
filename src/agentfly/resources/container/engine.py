"""The container engine, through the Docker API. Its methods block: they are called in threads.

What the user can mend is a SandboxUnavailable that says how; what else fails is an EnvironmentFault.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import docker
import requests

from agentfly.errors import EnvironmentFault
from agentfly.resources.container import owner
from agentfly.resources.sandbox.contract import SandboxUnavailable

_SECONDS, _END_SECONDS = 60, 10
_CONNECTIONS, _REMOVALS = 64, 20


@dataclass(frozen=True)
class Ending:
    """How a container ended."""

    status: int | None = None
    """Its first process's wait status; None where it was ended here."""
    out_of_memory: bool = False


class Engine:
    """The engine that DOCKER_HOST names."""

    def __init__(self, where: str, api: Any, about: dict[str, Any], podman: bool) -> None:
        self.where = where
        """Its address."""
        self._api = api
        self._about = about
        self.podman = podman

    @classmethod
    def connect(cls) -> Engine:
        """Reach the engine, see that it can do what is asked, and remove what processes that are gone left behind."""
        where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        api = None
        try:
            settings = docker.utils.kwargs_from_env()
            if where.startswith("ssh://") or "tls" in settings:
                raise SandboxUnavailable(
                    f"DOCKER_HOST={where} is reached through ssh or TLS, which sessions cannot use; forward its socket "
                    "(ssh -N -L /tmp/engine.sock:/var/run/docker.sock HOST) and set DOCKER_HOST=unix:///tmp/engine.sock"
                )
            api = docker.APIClient(version="auto", timeout=_SECONDS, max_pool_size=_CONNECTIONS, **settings)
            parts = api.version().get("Components") or []
            engine = cls(where, api, api.info(), podman=any("podman" in part["Name"].lower() for part in parts))
            engine._must_limit()
            engine._sweep()
        except BaseException as error:
            if api:
                api.close()
            if not isinstance(error, docker.errors.DockerException | requests.RequestException):
                raise
            raise SandboxUnavailable(
                f"no container engine answers at {where} ({_said(error)}); install and start Docker, or podman "
                "(podman system service --time=0 unix:///tmp/engine.sock) and set DOCKER_HOST to its socket"
            ) from error
        return engine

    @property
    def runtime(self) -> str:
        """What runs containers where nothing else is asked for."""
        return str(self._about.get("DefaultRuntime", "an unknown runtime"))

    @property
    def cgroup(self) -> str:
        """What holds the limits, in words."""
        return f"cgroup v{self._about.get('CgroupVersion', '1')}"

    def _must_limit(self) -> None:
        lacking = [name for name in ("MemoryLimit", "PidsLimit") if not self._about.get(name)]
        # Such an engine takes the limits and ignores them.
        rootless = any("rootless" in each for each in self._about.get("SecurityOptions") or ())
        if lacking or (rootless and self._about.get("CgroupVersion") == "1"):
            raise SandboxUnavailable(
                f"this container engine cannot hold a container to its limits ({', '.join(lacking) or 'rootless'}, "
                f"{self.cgroup}); run it as root, or on a machine with cgroup v2"
            )

    def _sweep(self) -> None:
        for each in self._api.containers(all=True, filters={"label": [owner.PROCESS]}):
            if owner.is_gone(each["Labels"], stopped=each["State"] in ("exited", "dead")):
                self.remove(each["Id"])

    def launch(self, name: str, settings: dict[str, Any], host_settings: dict[str, Any]) -> socket.socket:
        """Create and start a container; the socket on which its first process's stdin, stdout and stderr come."""
        image, program = settings["image"], settings["entrypoint"][0]
        self._create(name, settings, host_settings)
        end = None
        try:
            with self._asking(f"start a container of {image!r}"):
                self._must_be_runtime(name, host_settings.get("runtime"))
                end = self._attach(name)
                self._api.start(name)
        except BaseException as error:
            if end:
                end.close()
            if _is_missing(program, str(error)):
                raise SandboxUnavailable(
                    f"image {image!r} has no {program}: take one with Python 3.9 or later, or name its interpreter "
                    f"with Container(python=…). {error}"
                ) from error
            raise
        return end

    def _create(self, name: str, settings: dict[str, Any], host_settings: dict[str, Any]) -> None:
        image = settings["image"]
        try:
            self._limit_volumes(image, host_settings["tmpfs"])
            host_config = self._api.create_host_config(log_config=docker.types.LogConfig(type="none"), **host_settings)
            labels = owner.labels()
            self._api.create_container(name=name, labels=labels, host_config=host_config, stdin_open=True, **settings)
        except docker.errors.ImageNotFound as error:
            raise SandboxUnavailable(
                f"the container engine has no image {image!r}: docker pull {image} (or podman pull), or build it"
            ) from error
        except docker.errors.DockerException as error:
            raise SandboxUnavailable(f"the engine refuses a container of {image!r}: {_said(error)}") from error
        except requests.RequestException as error:
            raise EnvironmentFault(f"the container engine is gone: {_said(error)}") from error

    def _limit_volumes(self, image: str, tmpfs: dict[str, str]) -> None:
        """A volume that an image declares would be writable without a limit."""
        declared = (self._api.inspect_image(image).get("Config") or {}).get("Volumes") or ()
        tmpfs.update(dict.fromkeys(declared, next(iter(tmpfs.values()))))

    def _must_be_runtime(self, name: str, runtime: str | None) -> None:
        """An engine that passes over the wish for a stronger runtime must not go unnoticed."""
        found = self._api.inspect_container(name)["HostConfig"].get("Runtime") if runtime else None
        if found != runtime:
            raise SandboxUnavailable(
                f"the engine took runtime {found!r} where {runtime!r} was asked for; it knows "
                f"{', '.join(self._about.get('Runtimes') or ())}. podman takes it from containers.conf only"
            )

    def _attach(self, name: str) -> socket.socket:
        """A socket of our own. Nothing runs yet, so no byte can be lost in the buffers of the HTTP library."""
        theirs = self._api.attach_socket(name, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        try:
            return socket.socket(fileno=os.dup(theirs.fileno()))
        finally:
            theirs._response.close()
            theirs.close()

    def pause(self, name: str, paused: bool) -> None:
        """Freeze all processes, or let them go on."""
        with self._asking("pause a container" if paused else "wake a container"):
            (self._api.pause if paused else self._api.unpause)(name)

    def memory(self, name: str) -> int | None:
        """Bytes that it holds; None where the engine does not tell."""
        with self._asking("tell a container's memory"):
            used = self._api.stats(name, stream=False, one_shot=True).get("memory_stats", {}).get("usage")
        return None if used is None else int(used)

    def bury(self, name: str) -> Ending:
        """Remove a container that has ended by itself, or is about to; how it ended."""
        try:
            with self._asking("tell how a container ended"):
                code = int(self._api.wait(name, timeout=_END_SECONDS)["StatusCode"])
                state = self._api.inspect_container(name)["State"]
        except EnvironmentFault:
            return self.remove(name)
        self.remove(name)
        return Ending(code - 128 if 128 < code < 192 else code << 8, bool(state.get("OOMKilled")))

    def remove(self, name: str) -> Ending:
        """Kill a container and remove it; one that is not there is fine."""
        with self._asking("remove a container"):
            for again in reversed(range(_REMOVALS)):
                try:
                    self._api.remove_container(name, v=True, force=True)
                    break
                except docker.errors.NotFound:
                    break
                except docker.errors.APIError:  # it is ending by itself, or somebody else is removing it
                    if not again:
                        raise
                time.sleep(0.1)
        return Ending()

    def close(self) -> None:
        """Let go of the engine."""
        self._api.close()

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise EnvironmentFault(f"the container engine could not {what}: {_said(error)}") from error


def _said(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error).strip()


def _is_missing(program: str, words: str) -> bool:
    return program in words and any(each in words for each in ("not found", "no such file", "No such file"))
