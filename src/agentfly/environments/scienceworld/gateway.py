"""The way into a Java process: how one is started, and what is sent to it once and once only."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Any, TypeVar, cast

from py4j.java_gateway import GatewayClient, GatewayParameters, JavaGateway, find_jar_path
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from scienceworld.constants import JAR_PATH

from agentfly.errors import ConfigError, EnvironmentFault, describe

T = TypeVar("T")

OPTIONS = ("-Xmx768m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData")
"""One thread does all the work, so one collector will do; and nothing is left in a temporary folder."""
ANSWER_SECONDS = 300.0
"""Seconds after which a process that does not answer is taken for hung; solutions take a minute on a busy machine."""


class Gateway:
    """A Java process with the simulator's classes in it, and the line to it. Not for two threads at once."""

    def __init__(self) -> None:
        self._process = _started()
        self._said: deque[bytes] = deque(maxlen=5)
        self._java: JavaGateway | None = None
        printed = cast("IO[bytes]", self._process.stdout)
        port, token = (printed.readline().decode(errors="replace").strip() for _ in range(2))
        threading.Thread(target=self._listen, name="agentfly-java", daemon=True).start()
        if not port.isdigit():
            self.close()
            raise EnvironmentFault(f"Java did not start: {port} {token}")
        self._java = _Java(
            gateway_parameters=GatewayParameters(port=int(port), auth_token=token, read_timeout=ANSWER_SECONDS)
        )
        try:
            self.ask(Gateway._hush)
        except BaseException:
            self.close()
            raise

    def _hush(self) -> None:
        """The simulator prints pages at every step. Said before its first class is loaded, this spares us them."""
        assert self._java is not None
        self._java.jvm.java.lang.System.setOut(self._java.jvm.java.io.PrintStream(os.devnull))

    def _listen(self) -> None:
        """Read what it prints, which is little, and often its last words."""
        with cast("IO[bytes]", self._process.stdout) as printed:
            self._said.extend(printed)

    @property
    def last_words(self) -> str:
        """The end of what it printed."""
        return b" ".join(self._said).decode(errors="replace").strip()[-300:] or "nothing"

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Callable[[Gateway], T]) -> T:
        """What comes of a question. ConnectionError: the process is lost."""
        try:
            return question(self)
        except Py4JJavaError as error:  # an exception in Java: one simulator's, the others are none the worse
            raise EnvironmentFault(f"ScienceWorld failed: {error.java_exception}") from error
        except (Py4JError, OSError) as error:
            told = describe(getattr(error, "cause", None) or error).partition("\n")[0]
            raise ConnectionError(f"{told} (it said: {self.last_words})") from error

    def interface(self) -> Any:
        """A simulator of its own."""
        assert self._java is not None
        return self._java.jvm.scienceworld.runtime.pythonapi.PythonInterface()

    def close(self) -> None:
        """End the process at once: there is nothing in it that anybody would want to keep. Any thread may do so."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._java is not None:
            self._java._gateway_client.is_connected = False
            self._java.close()


class _Java(JavaGateway):  # type: ignore[misc]
    def _create_gateway_client(self) -> GatewayClient:
        return _Client(gateway_parameters=self.gateway_parameters)


class _Client(GatewayClient):  # type: ignore[misc]
    def send_command(self, command: str, retry: bool = True, binary: bool = False) -> Any:
        """Send it once. The library would send an action a second time when the first got no answer."""
        connection = self._get_connection()
        try:
            answer = connection.send_command(command)
        except Py4JNetworkError:
            connection.close()
            raise
        self._give_back_connection(connection)
        return answer


def _started() -> subprocess.Popen[bytes]:
    """The process. It ends when its input is closed, so with this one, however this one ends."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else None)
    if java is None:
        where = f"JAVA_HOME ({home})" if home else "PATH"
        raise ConfigError(
            f"ScienceWorld's simulator needs Java, and there is no `java` in {where}: "
            "apt-get install default-jre-headless, or another Java (17 was tried)"
        )
    classes = os.pathsep.join((find_jar_path(), JAR_PATH))
    return subprocess.Popen(
        [java, *OPTIONS, "-cp", classes, "py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for this process; it closes the other in its own time
    )
