"""Serves one environment instance where it runs: executes requests and answers with plain data.

Needs only the standard library and cloudpickle, so that it runs in any Python. A request is the pickled tuple
`(seen, operation, name, args, kwargs)`. An answer is `{"value" | "error", "version", "attributes"}`. `attributes` are
the public attributes that changed after version `seen`, so the next answer makes up for one that was lost or late.
"""

from __future__ import annotations

import asyncio
import copyreg
import json
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from agentfly.errors import describe
from agentfly.resources.rpc.codec import LIMIT, NotSerializable, TooBig, write
from agentfly.threads import call

MIRROR_LIMIT = 64 << 10
"""Size limit in bytes of the mirrored public attributes: every answer costs the time to inspect them."""
OWNER = "AGENTFLY_OWNER"
"""Environment variable with the name of the process that a worker belongs to. The host's environment never sets it."""
_MAX_TRACE = 8000
_GONE, _BIG = "{}", '{"too_big":true}'


class RpcServer:
    """Serves one instance: the first request creates it, all others use it. Requests may overlap."""

    def __init__(self) -> None:
        self._instance: Any = None
        self._mirror = Mirror()

    async def answer(self, request: bytes) -> bytes:
        """Execute a request. Exceptions become part of the answer; only a cancellation is raised."""
        seen = 0
        try:
            seen, operation, name, args, kwargs = pickle.loads(request)
            result = f'"value":{await self._execute(operation, name, args, kwargs)}'
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            result = f'"error":{_serialize_error(error)}'
        try:
            version, attributes = self._mirror.changes(self._instance, seen)
        except Exception as error:  # the attributes of this instance cannot even be listed
            result = f'"error":{_serialize_error(error)}'
            version, attributes = seen, "{}"
        return f'{{{result},"version":{version},"attributes":{attributes}}}'.encode("utf-8", "surrogatepass")

    async def _execute(self, operation: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Run `make` (create the instance), `get` (read an attribute) or `call`; the encoded value."""
        if operation == "make":
            host_state, pickled_class = args
            if host_state is not None:  # take over the host's import path, working directory and environment
                sys.path[:] = host_state["path"]
                os.chdir(host_state["folder"])
                environ = host_state["environ"]
                for name in set(os.environ) - set(environ) - {OWNER}:
                    del os.environ[name]
                os.environ.update({name: environ[name] for name in environ if name != OWNER})
            self._instance = pickle.loads(pickled_class)()
            return "null"
        if operation == "get":
            value = await call(getattr, self._instance, name)
        else:
            value = await call(getattr(self._instance, name), *args, **kwargs)
        try:
            return write(value)
        except NotSerializable as error:
            raise TypeError(
                f"{type(self._instance).__name__}.{name} returned {error}, which cannot leave its worker; "
                f"return text, numbers, lists, dicts, bytes or images, of at most {LIMIT >> 10} KB"
            ) from None


def _serialize_error(error: BaseException) -> str:
    """An exception as JSON. The names of its base classes tell the host which type to raise."""
    classes = [cls.__name__ for cls in type(error).__mro__]
    text = describe(error)[len(classes[0]) + len(": ") :]
    trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
    return json.dumps({"classes": classes, "text": text[:_MAX_TRACE], "trace": trace})


class Mirror:
    """The encoded public attributes of an instance, with the version in which each last changed."""

    def __init__(self) -> None:
        self._version = 0
        self._sent: dict[str, tuple[str, int]] = {}
        """Attribute name to its encoding and the version of its last change."""

    def changes(self, instance: Any, seen: int) -> tuple[int, str]:
        """The current version, and as JSON the attributes that changed after version `seen`."""
        self._version += 1
        current = dict(self._encode_attributes(instance))
        for name in self._sent.keys() | current.keys():
            form = current.get(name, _GONE)
            if self._sent.get(name, (_GONE,))[0] != form:
                self._sent[name] = form, self._version
        changed = {name: form for name, (form, since) in self._sent.items() if since > seen}
        self._sent = {name: sent for name, sent in self._sent.items() if sent[0] != _GONE or name in changed}
        return self._version, "{" + ",".join(f"{json.dumps(name)}:{form}" for name, form in changed.items()) + "}"

    def _encode_attributes(self, instance: Any) -> Iterator[tuple[str, str]]:
        slots = copyreg._slotnames(type(instance))  # type: ignore[attr-defined]
        attributes = {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
        attributes.update(getattr(instance, "__dict__", {}))  # copied: other threads may set attributes meanwhile
        left = MIRROR_LIMIT
        for name, value in attributes.items():
            if not name.isidentifier() or name.startswith("_"):
                continue
            try:
                form = f'{{"value":{write(value, left, images=False)}}}'
            except TooBig:
                form = _BIG
            except NotSerializable as error:
                form = json.dumps({"reason": f"it is {error}"})
            except RuntimeError:  # modified by another thread during the encoding: the next answer sends it
                form = self._sent.get(name, (_GONE,))[0]
            except Exception as error:  # raised by a subclass of a plain type
                form = json.dumps({"reason": f"looking at it raised {describe(error)}"})
            left = max(left - len(form), 0)
            yield name, form
