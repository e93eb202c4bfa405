"""The distribution on PyPI: its optional dependencies, and the unrelated package that shares its import name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentfly.errors import ConfigError

DISTRIBUTION = "agentfly-rl"


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
