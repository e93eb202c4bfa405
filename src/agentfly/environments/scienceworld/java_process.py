"""A Java process with the simulator's classes, reached by py4j. Every command is sent at most once."""

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

    def call(self, function: Callable[[JavaProcess], T]) -> T:
        """Run `function` with this process. Raises ConnectionError if the process is lost."""
        try:
            return function(self)
        except Py4JJavaError as error:  # an exception of one simulator. The others in the process are unaffected
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
