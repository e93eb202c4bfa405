"""The distribution on PyPI: its optional dependencies, and the unrelated package that shares its import name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentfly.errors import ConfigError

DISTRIBUTION = "agentfly-rl"
_JAX = ("jax", "jax.lax")
_IMPORT_LOCK = threading.Lock()


def install_command(extra: str) -> str:
    """The command that installs an extra, as error messages show it."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def require_extra(feature: str, extra: str, alternative: str = "") -> Iterator[None]:
    """Wrap imports of an optional dependency: a missing module becomes a ConfigError that says what to install.

    feature: what needs the extra. alternative: how to do without it, if there is a way.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        advice = f", or {alternative}" if alternative else ""
        raise ConfigError(
            f"{feature} needs {package}, which is not installed: {install_command(extra)}{advice}"
        ) from error


def find_package_conflict() -> str:
    """Describe a conflict with the unrelated distribution `agentfly`; empty if it is not installed.

    Both distributions install a package named `agentfly`, so whichever was installed last has overwritten files of the
    other.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        other = version("agentfly")
    except PackageNotFoundError:
        return ""
    return (
        f"The distribution `agentfly` {other} is installed. It is unrelated to this one and overwrites its files: "
        f"pip uninstall -y agentfly {DISTRIBUTION} && pip install {DISTRIBUTION}"
    )


def import_bm25s(feature: str, extra: str) -> Any:
    """Import bm25s while JAX is hidden from it.

    Where JAX is installed, `bm25s.selection` calls `jax.lax.top_k` at import time, and JAX then reserves 75 % of the
    GPU memory. Without JAX, bm25s uses NumPy.
    """
    modules: dict[str, Any] = sys.modules
    with _IMPORT_LOCK, require_extra(feature, extra):
        if "bm25s" not in modules:
            hidden = {name: modules[name] for name in _JAX if name in modules}
            modules.update(dict.fromkeys(_JAX))  # None makes `import jax.lax` raise ModuleNotFoundError
            try:
                import bm25s
            finally:
                for name in _JAX:
                    del modules[name]
                modules.update(hidden)
        import bm25s
    return bm25s
