"""The simulators, and the Java processes that several of them share, reached by py4j.

Calls block until the process has answered; every command is sent at most once.

The simulator is not thread-safe: two concurrent calls interfere even between different simulators, so the calls of one
process are serialized by a lock. When a process dies or hangs, all its simulators raise EnvironmentFault and the next
reservation starts a new process. A process ends when its last slot is released, and when this program ends for any
reason.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, TypeVar, cast

from py4j.java_gateway import GatewayClient, GatewayParameters, JavaGateway, find_jar_path
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from scienceworld.constants import JAR_PATH

from agentfly.errors import ConfigError, DataError, EnvironmentFault, describe
from agentfly.extras import require_extra
from agentfly.sandbox.owner import process_name, remove_leftover_folders

T = TypeVar("T")

OPTIONS = ("-Xmx768m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData")
"""The simulator is single-threaded, so the serial collector suffices; perf data would leave files in /tmp."""
ANSWER_SECONDS = 300.0
"""Seconds without an answer after which a process counts as hung; solutions take a minute on a busy machine."""


class Gateway:
    """A Java process and the connection to it. Not thread-safe, except for `close`."""

    def __init__(self) -> None:
        home = os.environ.get("JAVA_HOME")
        java = shutil.which("java", path=f"{home}/bin" if home else None)
        if java is None:
            where = f"JAVA_HOME ({home})" if home else "PATH"
            raise ConfigError(
                f"ScienceWorld's simulator needs Java, and there is no `java` in {where}: "
                "apt-get install default-jre-headless, or another Java (tested with 17)"
            )
        class_path = os.pathsep.join(map(os.path.abspath, (find_jar_path(), JAR_PATH)))
        # The simulator writes object_type_ids.tsv into its working directory. A killed process leaves its folder.
        remove_leftover_folders()
        prefix = f"{process_name(os.getpid())}-scienceworld-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self._java: JavaGateway | None = None
        self._output: deque[bytes] = deque(maxlen=5)
        try:
            # The process exits when its stdin closes, that is, when this process ends for any reason.
            self._process = subprocess.Popen(
                [java, *OPTIONS, "-cp", class_path, "py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"],
                cwd=self._folder.name,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to this process only, which then closes the other
            )
        except BaseException:
            self._folder.cleanup()
            raise
        stdout = cast("IO[bytes]", self._process.stdout)
        port, token = (stdout.readline().decode(errors="replace").strip() for _ in range(2))
        threading.Thread(target=self._read_output, name="agentfly-java", daemon=True).start()
        try:
            if not port.isdigit():
                raise EnvironmentFault(f"Java did not start: {port} {token}")
            self._java = started = _SingleSendGateway(
                gateway_parameters=GatewayParameters(port=int(port), auth_token=token, read_timeout=ANSWER_SECONDS)
            )
            # The simulator prints pages per step. This must run before its first class is loaded.
            self.call(lambda _: started.jvm.java.lang.System.setOut(started.jvm.java.io.PrintStream(os.devnull)))
        except BaseException:
            self.close()
            raise

    def _read_output(self) -> None:
        """Drain stdout and stderr; the last lines usually explain a crash."""
        with cast("IO[bytes]", self._process.stdout) as stdout:
            self._output.extend(stdout)

    @property
    def last_output(self) -> str:
        """The last lines printed, at most 300 characters."""
        return b" ".join(self._output).decode(errors="replace").strip()[-300:] or "none"

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, function: Callable[[Gateway], T]) -> T:
        """Run `function` with this gateway. Raises ConnectionError if the process is lost."""
        try:
            return function(self)
        except Py4JJavaError as error:  # an exception of one simulator; the others in the process are unaffected
            raise EnvironmentFault(f"ScienceWorld failed: {error.java_exception}") from error
        except (Py4JError, OSError) as error:
            cause = describe(getattr(error, "cause", None) or error).partition("\n")[0]
            raise ConnectionError(f"{cause} (last output: {self.last_output})") from error

    def create_simulator(self) -> Any:
        """A new simulator in the process: an instance of the Java class `PythonInterface`."""
        assert self._java is not None
        return self._java.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def close(self) -> None:
        """Kill the process and remove its folder. Thread-safe."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._java is not None:
            self._java._gateway_client.is_connected = False
            self._java.close()
        self._folder.cleanup()


class _SingleSendGateway(JavaGateway):  # type: ignore[misc]
    def _create_gateway_client(self) -> GatewayClient:
        return _SingleSendClient(gateway_parameters=self.gateway_parameters)


class _SingleSendClient(GatewayClient):  # type: ignore[misc]
    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
        """Send once. py4j would resend an action that got no answer, and so carry it out twice."""
        connection = self._get_connection()
        try:
            answer = connection.send_command(command)
        except Py4JNetworkError:
            connection.close()
            raise
        self._give_back_connection(connection)
        return answer


class JVM:
    """A Java process, started by the first call. All calls block and are thread-safe."""

    def __init__(self) -> None:
        self.slots = 0
        """Number of reserved slots."""
        self._lock = threading.Lock()
        self._gateway: Gateway | None = None
        self._scratch: Any = None
        self._failure = ""
        """Why the process is unusable; empty while it is usable."""

    @property
    def pid(self) -> int | None:
        """Process id; None before the first call."""
        return self._gateway.pid if self._gateway else None

    @property
    def usable(self) -> bool:
        return not self._failure and (self._gateway is None or self._gateway.alive)

    def call(self, function: Callable[[Gateway], T]) -> T:
        """Run `function` with the gateway, one call at a time; start the process on the first one."""
        with self._lock:
            if self._gateway is None and not self._failure:
                with require_extra("ScienceWorld", "scienceworld"):
                    from agentfly.environments.scienceworld.jvm import Gateway
                self._gateway = Gateway()
                if self._failure:  # terminated by another thread during the start
                    self._gateway.close()
            self.check()
            assert self._gateway is not None
            try:
                return self._gateway.call(function)
            except ConnectionError as error:
                self.terminate(f"ScienceWorld's Java process is lost: {error}")
                raise EnvironmentFault(self._failure) from error

    def call_scratch(self, function: Callable[[Any], T]) -> T:
        """Run `function` with a spare simulator that belongs to no environment; its state is not kept between calls."""

        def run(gateway: Gateway) -> T:
            if self._scratch is None:
                self._scratch = gateway.create_simulator()
            return function(self._scratch)

        return self.call(run)

    def check(self) -> None:
        """Raise EnvironmentFault if the process is unusable."""
        if self._gateway is not None and not self._failure and not self._gateway.alive:
            self.terminate(f"ScienceWorld's Java process has died (last output: {self._gateway.last_output})")
        if self._failure:
            raise EnvironmentFault(self._failure)

    def terminate(self, reason: str) -> None:
        """Kill the process; running and later calls raise EnvironmentFault with the first `reason` given."""
        self._failure = self._failure or reason
        if self._gateway is not None:
            self._gateway.close()


_JVMS: list[JVM] = []
_LOCK = threading.Lock()


def reserve(max_slots: float = math.inf) -> JVM:
    """Reserve a slot in the fullest process with fewer than `max_slots` taken, so that emptier ones can end."""
    with _LOCK:
        _JVMS[:] = [jvm for jvm in _JVMS if jvm.usable]
        free = [jvm for jvm in _JVMS if jvm.slots < max_slots]
        jvm = max(free, key=lambda jvm: jvm.slots, default=None)
        if jvm is None:
            jvm = JVM()
            _JVMS.append(jvm)
        jvm.slots += 1
        return jvm


def release(jvm: JVM) -> None:
    """Release a slot. The process ends with its last one."""
    with _LOCK:
        jvm.slots -= 1
        if jvm.slots:
            return
        if jvm in _JVMS:
            _JVMS.remove(jvm)
    jvm.terminate("this ScienceWorld is closed")


def list_pids() -> list[int]:
    """Ids of the running Java processes."""
    with _LOCK:
        return [jvm.pid for jvm in _JVMS if jvm.usable and jvm.pid is not None]


@dataclass(frozen=True, slots=True)
class Variation:
    """A variation of a task, as the simulator loads it."""

    task: str
    """One of the thirty task names, such as `boil`."""
    number: int
    """Index of the variation."""
    simplification: str = "easy"
    """Comma-separated simplifications; empty for none."""

    def load(self, interface: Any, gold: bool = False) -> None:
        """Load it into a simulator; with `gold`, compute the solution first, which takes up to some seconds."""
        count = interface.getTaskMaxVariations(self.task)
        if not 0 <= self.number < count:
            raise DataError(f"{self.task} has variations 0 to {count - 1}; there is no {self.number}")
        if wrong := interface.load(self.task, self.number, self.simplification, gold):
            raise DataError(f"ScienceWorld cannot load {self}: {wrong}")

    def find_gold_path(self, interface: Any) -> list[str]:
        """Actions that solve it from its start. Changes the state of the simulator."""
        self.load(interface, gold=True)
        return list(interface.getGoldActionSequence())


def take_step(interface: Any, action: str) -> tuple[str, int, bool]:
    """Carry out an action: the observation, the score (0 to 100; -100 if the task has failed for good), and whether
    the task is completed."""
    observation = str(interface.step(action))
    return observation, round(100 * interface.getScore()), bool(interface.getCompleted())
