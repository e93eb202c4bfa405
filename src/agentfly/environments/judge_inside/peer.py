"""Questions and answers between the tests and the solution, one at a time; each may ask back before it answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from agentfly.sandbox.inside.frames import DATA, BrokenFrame, pack, receive

from .plain import Reader, Writer

_MOST = 16 << 20


class Broken(BaseException):
    """The other side can no longer be asked. Not an Exception: no test may take it for one the solution raised."""


class Peer:
    """One end of the line. What is lent to the other side is kept here under a number."""

    def __init__(
        self,
        channel: socket.socket,
        borrow: Callable[[int], Any],
        lendable: Callable[[Any], bool],
        told: type[BaseException],
    ) -> None:
        """`borrow` makes something of a number the other side lent; `lendable` says what may be lent to it; what is
        raised here in answer to a question is `told` to the other side."""
        self._channel = channel
        self._told = told
        self._make_borrowed = borrow
        self._lendable = lendable
        self._lent: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.operations: dict[str, Callable[..., Any]] = {}
        """What the other side may ask for."""
        self.broken = ""
        """Why nothing more can be asked; empty while all is well."""

    def ask(self, do: str, /, *args: Any, **kwargs: Any) -> Any:
        """The other side's answer; what it raised is raised here."""
        if self.broken:
            raise Broken(self.broken)
        writer = Writer(self._lend)
        question = [do, [writer.write(each) for each in args], {name: writer.write(v) for name, v in kwargs.items()}]
        try:
            said = self._exchange(question)
            reader = Reader(self._borrow, writer.met)
            value = reader.read(said["value"])
            if said["raised"] and not isinstance(value, BaseException):
                raise Broken("it raised what is no exception")
            for container, content in zip(list(writer.met), said["after"]):  # noqa: B905  (Python 3.9 has no strict)
                reader.fill(container, content)
        except BaseException as error:  # whatever it was, question and answer no longer fit together
            self.broken = self.broken or str(error) if isinstance(error, Broken) else f"no answer: {error!r:.200}"
            raise
        if said["raised"]:
            value._of_solution = True
            raise value
        return value

    def _exchange(self, question: list[Any]) -> dict[str, Any]:
        self._send(question)
        while True:
            said = self._receive()
            if isinstance(said, dict):
                return said
            self._answer(*said)

    def serve(self) -> None:
        """Answer until the other side is gone (Broken)."""
        while True:
            self._answer(*self._receive())

    def _answer(self, do: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        reader = Reader(self._borrow)
        given = [reader.read(each) for each in args]
        named = {name: reader.read(each) for name, each in kwargs.items()}
        raised = False
        try:
            value = self.operations[do](*given, **named)
        except Broken:
            raise
        except self._told as error:
            raised, value = True, error
        writer = Writer(self._lend, reader.met)
        try:
            written = writer.write(value)
        except Exception as error:
            raised, written = True, writer.write(TypeError(f"what was returned cannot be sent: {error}"))
        # Only the containers that came with the question: what the answer itself holds is in it.
        after = [writer.parts(container) for container in reader.met]
        self._send({"value": written, "raised": raised, "after": after})

    # Objects that are not plain

    def _lend(self, value: Any) -> Any:
        if isinstance(value, Borrowed):
            return {"yours": value._number}
        if not self._lendable(value):
            raise TypeError(
                f"a {type(value).__name__} cannot be given to the solution; give it plain data or a function"
            )
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._lent)
            self._lent.append(value)  # kept for good: the number must go on meaning this very object
        return {"mine": self._numbers[id(value)]}

    def _borrow(self, name: str, number: Any) -> Any:
        if name == "yours":
            return self._lent[number]
        if name != "mine" or type(number) is not int:
            raise ValueError(f"{name!r:.60} is no value")
        return self._make_borrowed(number)

    # Bytes

    def _send(self, message: Any) -> None:
        try:
            self._channel.sendall(pack(DATA, json.dumps(message).encode()))
        except OSError as error:
            raise Broken("the solution's process has ended") from error

    def _receive(self) -> Any:
        try:
            return json.loads(receive(self._channel, _MOST)[1])
        except BrokenFrame as error:
            raise Broken(f"the solution returned too much: {error}") from error
        except (EOFError, OSError) as error:
            raise Broken("the solution's process has ended") from error


class Borrowed:
    """An object that lives on the other side, which knows it by its number."""

    __slots__ = ()
    _number: int
