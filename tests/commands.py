"""The `agentfly` command in new processes, forked from one that has imported torch and the trainer.

A new interpreter takes half a second to start a command, and seconds to start a training; a forked process does not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from agentfly.cli.app import main

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        "agentfly.cli.run", "agentfly.training.trainer", "agentfly.backends.engine", "matplotlib.figure", "peft",
        "transformers.models.llama.modeling_llama",
    ]
)  # fmt: skip


def run_command(
    *arguments: str | Path, typed: str = "", cwd: Path | None = None, packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, and return what it printed and its exit status.

    typed: its standard input. packages: a folder of installed packages, beside those of this environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(typed)
        with fork(run_main, [*map(str, arguments)], files, cwd or Path.cwd(), packages) as process:
            process.join(170)
            assert process.exitcode is not None, f"{arguments} hangs"
            return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in files[1:]))


@contextmanager
def fork(target: Callable[..., None], *arguments: Any) -> Iterator[ForkServerProcess]:
    """Call a function in a new process with the environment variables of this one; the process is killed at the end."""
    process = FORKSERVER.Process(target=_call, args=(dict(os.environ), target, *arguments))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def _call(variables: Mapping[str, str], target: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # it may have been determined before TMPDIR was set
    torch.set_num_threads(1)
    target(*arguments)


def run_main(arguments: list[str], files: Sequence[Path], cwd: Path, packages: Path | None = None) -> None:
    """Run a command in this process. files: its standard input, which exists, output and error."""
    for descriptor, (path, mode) in enumerate(zip(files, ("rb", "wb", "wb"), strict=True)):
        with path.open(mode) as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has replaced it
    os.chdir(cwd)
    if packages is not None:
        sys.path.insert(0, str(packages))
    sys.argv = ["agentfly", *arguments]
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:  # as the interpreter does; multiprocessing would print a traceback of its own
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def run_without_sigint(*arguments: Any) -> None:
    """Run a command as a shell without job control runs it in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_main(*arguments)
