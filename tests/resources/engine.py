"""A real container engine for tests: podman's service with its own store, and an image built from this Python.

Nothing comes from a registry, nothing of the machine's own podman is touched, and nothing is left at the end.
"""

import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

IMAGE = "localhost/agentfly-python:latest"
BARE_IMAGE = "localhost/agentfly-bare:latest"
SKIPPED = {"__pycache__", "test", "tests", "site-packages", "idlelib", "tkinter", "ensurepip", "lib2to3"}
PROGRAMS = (
    *("cat", "chmod", "dash", "env", "grep", "head", "kill", "ls", "mkdir", "mv", "rm", "sed", "sh", "sleep", "tar"),
    *("touch", "true", "wc", "yes"),
)
SETTINGS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


class NoEngine(Exception):
    """No engine can be had here; says why."""


class Podman:
    """A running service, and the way to be rid of it."""

    def __init__(self, folder: Path) -> None:
        for program in ("podman", "runc", "conmon"):
            if not shutil.which(program):
                raise NoEngine(f"no {program} on PATH: apt-get install podman runc")
        if not find_spec("docker"):
            raise NoEngine("no docker package: pip install 'agentfly-rl[container]'")
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "containers.conf").write_text(SETTINGS)
        self.url = f"unix://{folder}/socket"
        self._env = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        self._line = ["podman", "--root", f"{folder}/store", "--runroot", f"{folder}/run", "--tmpdir", f"{folder}/tmp"]
        self._service: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the service and wait until it answers."""
        line = [*self._line, "system", "service", "--time=0", self.url]
        with open(self.folder / "log", "ab") as log:
            self._service = subprocess.Popen(line, env=self._env, cwd=self.folder, stdout=log, stderr=log)
        for _ in range(300):
            if self._service.poll() is not None:
                break
            with socket.socket(socket.AF_UNIX) as trial, contextlib.suppress(OSError):
                trial.connect(f"{self.folder}/socket")
                return
            time.sleep(0.1)
        raise NoEngine(f"podman does not start: {(self.folder / 'log').read_text()[-500:]}")

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """A plain client of the service."""
        import docker

        client = docker.APIClient(base_url=self.url, version="1.41", timeout=60)
        try:
            yield client
        finally:
            client.close()

    def stop(self) -> None:
        """Kill the service; the containers live on."""
        if self._service:
            self._service.kill()
            self._service.wait()

    def remove(self) -> None:
        """Be rid of containers, mounts, processes and files."""
        self.stop()
        subprocess.run([*self._line, "rm", "--all", "--force", "--time=0"], env=self._env, capture_output=True)
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((mount for mount in mounts if mount.startswith(str(self.folder))), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=True)
        # podman leaves its own groups, empty
        for group in sorted(Path("/sys/fs/cgroup").glob("**/libpod_parent/**"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()
        shutil.rmtree(self.folder)

    def containers(self) -> list[str]:
        """The names of all containers there are."""
        with self.client() as client:
            return sorted(container["Names"][0].lstrip("/") for container in client.containers(all=True))


def load_images(podman: Podman) -> None:
    """The image of this Python, and one without any; NoEngine where a container with limits does not run."""
    import docker

    with podman.client() as client:
        for image, files in ((IMAGE, _python_files()), (BARE_IMAGE, _programs("true"))):
            changes = ["ENV PATH=/usr/bin", 'ENTRYPOINT ["/usr/bin/true"]', 'CMD ["true"]', "VOLUME /data"]
            client.import_image_from_data(_tar({**files, **_libraries(files)}), repository=image, changes=changes)
        about = client.info()
        if about["CgroupVersion"] == "1" and any("rootless" in option for option in about["SecurityOptions"]):
            raise NoEngine("podman without root limits nothing with cgroup v1")
        limits = client.create_host_config(network_mode="none", mem_limit=64 << 20, pids_limit=10)
        try:
            trial = client.create_container(IMAGE, host_config=limits)["Id"]
            client.start(trial)
            client.wait(trial)
            client.remove_container(trial, force=True)
        except docker.errors.APIError as error:
            raise NoEngine(f"podman runs no container here: {error.explanation}") from error


def _programs(*names: str) -> dict[str, Path]:
    """Where programs go in an image, and where they are here."""
    return {f"/usr/bin/{name}": Path(program) for name in names if (program := shutil.which(name))}


def _python_files() -> dict[str, Path]:
    library, python = Path(sysconfig.get_path("stdlib")), Path(sys.executable).resolve()
    files = {str(python): python, **_programs(*PROGRAMS)}
    for path in library.rglob("*"):
        if path.is_file() and path.suffix != ".a" and not SKIPPED & set(path.relative_to(library).parts):
            files[str(path)] = path
    return files


def _libraries(files: dict[str, Path]) -> dict[str, Path]:
    linked = [path for path in files.values() if path.suffix in ("", ".so") or os.access(path, os.X_OK)]
    listing = subprocess.run(["ldd", *linked], capture_output=True, text=True).stdout
    return {path: Path(path) for path in re.findall(r"^\s.*?(/\S+) \(0x", listing, re.MULTILINE)}


def _tar(files: dict[str, Path]) -> bytes:
    """All files followed to what they are, and readable by everybody."""
    python = str(Path(sys.executable).resolve())
    links = {"bin": "usr/bin", **({"usr/bin/python3": python} if python in files else {})}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member, path in files.items():
            entry = tarfile.TarInfo(member.lstrip("/"))
            entry.size, entry.mode = path.stat().st_size, 0o755
            with open(path, "rb") as file:
                archive.addfile(entry, file)
        for member, target in links.items():
            link = tarfile.TarInfo(member)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return buffer.getvalue()
