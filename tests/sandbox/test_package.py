"""The package on its own: the example in its docstring, what it imports, and what runs in a session."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentfly import sandbox
from agentfly.sandbox.mounts import INSIDE


def imported_modules(path: Path) -> set[str]:
    """Absolute imports of a source file."""
    imported = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imported


def test_example_of_the_docstring_runs() -> None:
    assert sandbox.__doc__
    example = textwrap.dedent(sandbox.__doc__.split("\n\n", 1)[1].split("`open_sandbox` raises")[0])
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120)
    if "SandboxUnavailable" in done.stderr:
        pytest.skip(f"no sandbox works here: {done.stderr}")
    assert done.stdout == "376 True\n2 0\nb'one two'\n", done.stderr


def test_importing_the_sandbox_loads_no_other_module_of_agentfly() -> None:
    code = "import sys, agentfly.sandbox; print(*(name for name in sys.modules if name.startswith('agentfly.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = {name.split(".")[1] for name in done.stdout.split()}
    assert loaded <= {"sandbox", "errors", "threads", "types"}


def test_programs_inside_use_the_standard_library_only() -> None:
    for path in INSIDE.glob("*.py"):
        names = {name.split(".")[0] for name in imported_modules(path)}
        assert names <= sys.stdlib_module_names, path


def test_host_imports_only_the_message_format_of_the_programs_inside() -> None:
    for path in INSIDE.parent.glob("*.py"):
        names = {name for name in imported_modules(path) if ".inside" in name}
        assert all(name.startswith("agentfly.sandbox.inside.frames") for name in names), path
