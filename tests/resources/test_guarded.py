"""Programs below a guardian: how they end, and that nothing of them is left."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence

import psutil
import pytest

from agentfly.resources.guarded import GuardedProcess
from agentfly.resources.supervisor import Supervisor

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreaper"),
]


async def start(program: str) -> GuardedProcess:
    command: Sequence[str] = (sys.executable, "-S", "-c", program)
    return await GuardedProcess.start(command, env={"NAME": "value"})


async def test_a_program_has_exactly_its_environment_and_its_exit_code() -> None:
    process = await start("import os, sys; print(sys.stdin.read(), os.environ['NAME'], len(os.environ)); sys.exit(7)")
    process.stdin.write(b"input")
    process.stdin.close()
    words = (await process.stdout.read()).decode().split()
    assert words[:2] == ["input", "value"]
    assert int(words[2]) <= 3  # with AGENTFLY_OWNER; Python may add LC_CTYPE
    assert await process.wait() == 7
    await process.end()


async def test_the_start_of_a_supervisor_does_not_end_running_programs() -> None:
    """It ends the workers that an earlier supervisor of the same process has left."""
    process = await start("import time; print(1, flush=True); time.sleep(99)")
    await process.stdout.readline()
    supervisor = Supervisor()
    worker = supervisor.open()
    while worker.guardian is None:
        await asyncio.sleep(0.01)
    assert process.returncode is None
    worker.drop()
    worker.socket.close()
    supervisor.close()
    await process.end()


async def test_a_signal_is_128_and_its_number() -> None:
    process = await start("import os; os.kill(os.getpid(), 9)")
    assert await process.wait() == 137
    await process.end()


async def test_the_end_of_a_program_is_seen_while_another_process_holds_its_output() -> None:
    process = await start("import time; print('x', flush=True); time.sleep(1)")
    assert await process.stdout.readline() == b"x\n"
    (program,) = psutil.Process(process.pid).children()
    held = os.open(f"/proc/{program.pid}/fd/1", os.O_WRONLY)
    try:
        async with asyncio.timeout(30):
            assert await process.wait() == 0
            await process.end()
    finally:
        os.close(held)


async def test_ending_a_program_kills_its_descendants_even_if_it_ignores_signals() -> None:
    process = await start(
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)'\n"
        "subprocess.Popen([sys.executable, '-c', code], start_new_session=True); time.sleep(99)"
    )
    await process.stdout.readline()
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) == 2
    started = time.monotonic()
    await process.end()
    assert time.monotonic() - started < 30
    assert all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in below)
