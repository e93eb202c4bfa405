"""A Java process with the simulators of several environments, reached by py4j. Every command is sent at most once.

The simulator is not thread-safe: two concurrent calls interfere even between different simulators, so the calls of one
process are serialized by a lock. When a process dies or hangs, all its simulators raise EnvironmentFault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Any, TypeVar, cast

from py4j.java_gateway import GatewayClient, GatewayParameters, JavaGateway, find_jar_path
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from scienceworld.constants import JAR_PATH

from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.sandbox.owner import process_name, remove_leftover_folders

T = TypeVar("T")

OPTIONS = ("-Xmx768m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData")
"""The simulator is single-threaded, so the serial collector suffices. Perf data would leave files in /tmp."""
ANSWER_SECONDS = 300.0
"""Seconds without an answer after which a process counts as hung. Solutions take a minute on a busy machine."""


class JavaProcess:
    """A Java process, started by the first call. All calls block and are thread-safe."""

    def __init__(self) -> None:
        self.slots = 0
        """Number of reserved slots."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._gateway: JavaGateway | None = None
        self._output: deque[bytes] = deque(maxlen=5)
        self._scratch: Any = None
        self._failure = ""
        """Why the process is unusable. Empty while it is usable."""

    @property
    def pid(self) -> int | None:
        """Process id. None before the first call."""
        return self._process.pid if self._process else None

    @property
    def usable(self) -> bool:
        return not self._failure and (self._process is None or self._process.poll() is None)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function`, which sends commands, one call at a time; start the process on the first one."""
        with self._lock:
            if self._process is None and not self._failure:
                self._start()
            self.check()
            return self._run(function)

    def create_simulator(self) -> Any:
        """A new simulator in the process: an instance of the Java class `PythonInterface`."""
        return self.call(self._create_simulator)

    def call_scratch(self, function: Callable[[Any], T]) -> T:
        """Run `function` with a spare simulator that belongs to no environment; its state is not kept between calls."""

        def run() -> T:
            if self._scratch is None:
                self._scratch = self._create_simulator()
            return function(self._scratch)

        return self.call(run)

    def check(self) -> None:
        """Raise EnvironmentFault if the process is unusable."""
        if self._process is not None and not self.usable:
            self.terminate(f"ScienceWorld's Java process has died (last output: {self._last_output})")
        if self._failure:
            raise EnvironmentFault(self._failure)

    def terminate(self, reason: str) -> None:
        """Kill the process; running and later calls raise EnvironmentFault with the first `reason` given."""
        self._failure = self._failure or reason
        self._end()

    def _create_simulator(self) -> Any:
        assert self._gateway is not None
        return self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def _run(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except Py4JJavaError as error:  # an exception of one simulator. The others in the process are unaffected
            raise EnvironmentFault(f"ScienceWorld failed: {error.java_exception}") from error
        except (Py4JError, OSError) as error:
            cause = describe(getattr(error, "cause", None) or error).partition("\n")[0]
            self.terminate(f"ScienceWorld's Java process is lost: {cause} (last output: {self._last_output})")
            raise EnvironmentFault(self._failure) from error

    def _start(self) -> None:
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
        try:
            # The process exits when its stdin closes, that is, when this process ends for any reason.
            self._process = process = subprocess.Popen(
                [java, *OPTIONS, "-cp", class_path, "py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"],
                cwd=self._folder.name,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to this process only, which then closes the other
            )
            stdout = cast("IO[bytes]", process.stdout)
            port, token = (stdout.readline().decode(errors="replace").strip() for _ in range(2))
            threading.Thread(target=self._read_output, args=(stdout,), name="agentfly-java", daemon=True).start()
            if not port.isdigit():
                raise EnvironmentFault(f"Java did not start: {port} {token}")
            parameters = GatewayParameters(port=int(port), auth_token=token, read_timeout=ANSWER_SECONDS)
            self._gateway = gateway = _SingleSendGateway(gateway_parameters=parameters)
            # The simulator prints pages per step. This must run before its first class is loaded.
            self._run(lambda: gateway.jvm.java.lang.System.setOut(gateway.jvm.java.io.PrintStream(os.devnull)))
        except BaseException:
            self._end()
            raise
        if self._failure:  # terminated by another thread during the start, which may have seen no process to kill
            self._end()

    def _read_output(self, stdout: IO[bytes]) -> None:
        """Drain stdout and stderr; the last lines usually explain a crash."""
        with stdout:
            self._output.extend(stdout)

    @property
    def _last_output(self) -> str:
        """The last lines printed, at most 300 characters."""
        return b" ".join(self._output).decode(errors="replace").strip()[-300:] or "none"

    def _end(self) -> None:
        """Kill the process and remove its folder. Thread-safe."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            cast("IO[bytes]", self._process.stdin).close()
        if self._gateway is not None:
            self._gateway._gateway_client.is_connected = False  # or it would write to the dead process
            self._gateway.close()
        if self._folder is not None:
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
