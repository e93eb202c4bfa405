"""The container engine, through the Docker API. All methods block: call them in threads.

Raises SandboxUnavailable for what the user can fix, with instructions, and EnvironmentFault for everything else.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docker
import requests
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from agentfly.errors import EnvironmentFault
from agentfly.sandbox.base import SandboxUnavailable
from agentfly.sandbox.owner import is_leftover, process_name

OWNER_LABEL = "agentfly.owner"
"""Label with the name of the process that created a container."""
BOOT_LABEL = "agentfly.boot"
"""Label with the boot id of the machine that the process runs on."""
_API_SECONDS, _EXIT_SECONDS = 60, 10
_MAX_CONNECTIONS, _REMOVE_ATTEMPTS = 64, 20


class ContainerEngine:
    """The engine at DOCKER_HOST."""

    def __init__(self, address: str, api: Any, info: dict[str, Any], podman: bool) -> None:
        self.address = address
        self._api = api
        self._info = info
        self.podman = podman

    @classmethod
    def connect(cls) -> ContainerEngine:
        """Connect, check that the engine enforces limits, and remove the containers of processes that are gone."""
        address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        api = None
        try:
            settings = docker.utils.kwargs_from_env()
            if address.startswith("ssh://") or "tls" in settings:
                raise SandboxUnavailable(
                    f"DOCKER_HOST={address} is reached through ssh or TLS, which sessions cannot use; forward its "
                    "socket (ssh -N -L /tmp/engine.sock:/var/run/docker.sock HOST) and set DOCKER_HOST=unix:///tmp/engine.sock"
                )
            api = docker.APIClient(version="auto", timeout=_API_SECONDS, max_pool_size=_MAX_CONNECTIONS, **settings)
            components = api.version().get("Components") or []
            podman = any("podman" in component["Name"].lower() for component in components)
            engine = cls(address, api, api.info(), podman=podman)
            missing = [name for name in ("MemoryLimit", "PidsLimit") if not engine._info.get(name)]
            # A rootless engine with cgroup v1 accepts the limits and ignores them.
            rootless = any("rootless" in option for option in engine._info.get("SecurityOptions") or ())
            if missing or (rootless and engine._info.get("CgroupVersion") == "1"):
                raise SandboxUnavailable(
                    f"this container engine cannot hold a container to its limits ({', '.join(missing) or 'rootless'}, "
                    f"{engine.cgroup}); run it as root, or on a machine with cgroup v2"
                )
            for container in api.containers(all=True, filters={"label": [OWNER_LABEL]}):
                if is_orphan(container["Labels"], stopped=container["State"] in ("exited", "dead")):
                    engine.remove(container["Id"])
        except BaseException as error:
            if api:
                api.close()
            if not isinstance(error, docker.errors.DockerException | requests.RequestException):
                raise
            raise SandboxUnavailable(
                f"no container engine answers at {address} ({_error_text(error)}); install and start Docker, or podman "
                "(podman system service --time=0 unix:///tmp/engine.sock) and set DOCKER_HOST to its socket"
            ) from error
        return engine

    @property
    def runtime(self) -> str:
        """The default OCI runtime."""
        return str(self._info.get("DefaultRuntime", "an unknown runtime"))

    @property
    def cgroup(self) -> str:
        """The mechanism that enforces the limits."""
        return f"cgroup v{self._info.get('CgroupVersion', '1')}"

    def build(self, folder: Path, tag: str, seconds: float) -> None:
        """Build the image `tag` from the Dockerfile in a folder, unless there is one of this name."""
        lines: list[str] = []
        try:
            if self._api.images(name=tag):
                return
            for event in self._api.build(
                path=str(folder), tag=tag, rm=True, forcerm=True, decode=True, timeout=seconds
            ):
                lines.append(str(event.get("stream") or event.get("error") or "").strip())
                if "error" in event:
                    text = " | ".join(line for line in lines[-4:] if line)
                    raise SandboxUnavailable(f"the image of {folder} cannot be built: {text}")
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise SandboxUnavailable(
                f"the image of {folder} was not built within {seconds:g} seconds: {_error_text(error)}"
            ) from error

    def working_folder(self, image: str) -> str:
        """The folder in which the image's commands start. Empty if it names none."""
        return str((self._inspect_image(image).get("Config") or {}).get("WorkingDir") or "")

    def _inspect_image(self, image: str) -> dict[str, Any]:
        try:
            return dict(self._api.inspect_image(image))
        except docker.errors.ImageNotFound as error:
            raise SandboxUnavailable(
                f"the container engine has no image {image!r}: docker pull {image} (or podman pull), or build it"
            ) from error

    def launch(self, name: str, settings: dict[str, Any], host_settings: dict[str, Any]) -> socket.socket:
        """Create and start a container; the socket attached to the stdin, stdout and stderr of its first process."""
        image, program = settings["image"], settings["entrypoint"][0]
        self._create(name, settings, host_settings)
        attached = None
        try:
            with self._translate_errors(f"start a container of {image!r}"):
                # An engine may ignore the requested runtime, which may be a stronger boundary than its default.
                runtime = host_settings.get("runtime")
                used_runtime = self._api.inspect_container(name)["HostConfig"].get("Runtime") if runtime else None
                if used_runtime != runtime:
                    raise SandboxUnavailable(
                        f"the engine took runtime {used_runtime!r} where {runtime!r} was asked for; it knows "
                        f"{', '.join(self._info.get('Runtimes') or ())}. podman takes it from containers.conf only"
                    )
                response = self._api.attach_socket(name, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
                try:  # nothing runs yet, so the HTTP library has buffered no data
                    attached = socket.socket(fileno=os.dup(response.fileno()))
                finally:
                    response._response.close()
                    response.close()
                self._api.start(name)
        except BaseException as error:
            if attached:
                attached.close()
            not_found = any(phrase in str(error) for phrase in ("not found", "no such file", "No such file"))
            if program in str(error) and not_found:
                raise SandboxUnavailable(
                    f"image {image!r} has no {program}: take one with Python 3.9 or later, or name its interpreter "
                    f"with Container(python=…). {error}"
                ) from error
            raise
        return attached

    def _create(self, name: str, settings: dict[str, Any], host_settings: dict[str, Any]) -> None:
        image = settings["image"]
        try:
            # Replace volumes that the image declares by limited tmpfs mounts: they would be writable without a limit.
            declared = (self._inspect_image(image).get("Config") or {}).get("Volumes") or ()
            tmpfs = host_settings["tmpfs"]
            tmpfs.update(dict.fromkeys(declared, next(iter(tmpfs.values()))))
            host_config = self._api.create_host_config(log_config=docker.types.LogConfig(type="none"), **host_settings)
            self._api.create_container(
                name=name, labels=owner_labels(), host_config=host_config, stdin_open=True, **settings
            )
        except docker.errors.DockerException as error:
            raise SandboxUnavailable(f"the engine refuses a container of {image!r}: {_error_text(error)}") from error
        except requests.RequestException as error:
            raise EnvironmentFault(f"the container engine is gone: {_error_text(error)}") from error

    def pause(self, name: str, paused: bool) -> None:
        """Freeze or resume all processes."""
        with self._translate_errors("pause a container" if paused else "resume a container"):
            (self._api.pause if paused else self._api.unpause)(name)

    def memory(self, name: str) -> int | None:
        """Memory usage in bytes. None if the engine does not report it."""
        with self._translate_errors("report a container's memory"):
            used = self._api.stats(name, stream=False, one_shot=True).get("memory_stats", {}).get("usage")
        return None if used is None else int(used)

    def wait_and_remove(self, name: str) -> tuple[int | None, bool]:
        """Remove a container that has exited or is about to.

        Returns the wait status of its first process (None if unknown), and whether it ran out of memory.
        """
        status, out_of_memory = None, False
        with contextlib.suppress(EnvironmentFault), self._translate_errors("report how a container ended"):
            code = int(self._api.wait(name, timeout=_EXIT_SECONDS)["StatusCode"])
            out_of_memory = bool(self._api.inspect_container(name)["State"].get("OOMKilled"))
            status = code - 128 if 128 < code < 192 else code << 8
        self.remove(name)
        return status, out_of_memory

    def remove(self, name: str) -> None:
        """Kill and remove a container; a missing one is ignored."""
        with self._translate_errors("remove a container"):
            attempts = Retrying(  # it may be exiting, or another process may be removing it
                retry=retry_if_exception_type(docker.errors.APIError),
                wait=wait_fixed(0.1),
                stop=stop_after_attempt(_REMOVE_ATTEMPTS),
                reraise=True,
            )
            for attempt in attempts:
                with attempt, contextlib.suppress(docker.errors.NotFound):
                    self._api.remove_container(name, v=True, force=True)

    def close(self) -> None:
        """Close the connections to the engine."""
        self._api.close()

    @contextlib.contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise EnvironmentFault(f"the container engine could not {what}: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error).strip()


def owner_labels() -> dict[str, str]:
    """Labels for a container of this process."""
    return {OWNER_LABEL: process_name(os.getpid()) or "", BOOT_LABEL: _boot_id()}


def is_orphan(labels: Mapping[str, str], stopped: bool) -> bool:
    """Whether the process that created a container is gone.

    For a process of another machine, boot or pid namespace this is unknown. Its container counts as abandoned once it
    has `stopped`.
    """
    process = labels[OWNER_LABEL]
    if labels.get(BOOT_LABEL) == _boot_id() and process:
        pid = process.split("-")[1:2]
        if pid and pid[0].isdigit() and process_name(int(pid[0])) == process:
            return False
        return stopped or is_leftover(process)
    return stopped


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
