"""The package on a system that is not Linux: what only Linux has is imported where it is used."""

import subprocess
import sys

import pytest

NOT_LINUX = """
import asyncio, builtins, importlib, mmap, os, pkgutil, re, signal, socket, sys
import agentfly, httpx, psutil, tokenizers  # these need what this system has
from huggingface_hub import snapshot_download
{imports}

UNIX_MODULES = {{"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}}
import_module = builtins.__import__

def import_portable(name, globals=None, locals=None, fromlist=(), level=0):
    # The standard library of this interpreter does need them.
    if name in UNIX_MODULES and str((globals or {{}}).get("__name__")).startswith("agentfly"):
        raise ImportError(f"No module named {{name!r}}")
    return import_module(name, globals, locals, fromlist, level)

builtins.__import__ = import_portable
for module, names in {{
    os: "fork geteuid getuid killpg memfd_create pidfd_open register_at_fork sched_getaffinity setsid O_PATH",
    signal: "SIGHUP SIGKILL pthread_sigmask",
    socket: "SCM_CREDENTIALS SOCK_SEQPACKET SO_PASSCRED",
    mmap: "MAP_ANONYMOUS MAP_PRIVATE",
}}.items():
    for name in names.split():
        delattr(module, name)
"""
"""Takes away what Linux or Unix adds to Python's standard library."""


def run_elsewhere(program: str, imports: str = "") -> str:
    """Run a program where Python has what every system has; returns its output."""
    code = NOT_LINUX.format(imports=imports) + program
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.integration
def test_every_module_outside_the_sandbox_is_imported() -> None:
    output = run_elsewhere(
        r"""
inside = re.compile(r"\.sandbox\.inside|judge_inside|supervisor\.process|runtimes\.ray|\.recipes?\b|vllm|verl")
modules = [m.name for m in pkgutil.walk_packages(agentfly.__path__, "agentfly.") if not inside.search(m.name)]
for module in modules:
    importlib.import_module(module)
print(len(modules))
""",
        "import torch._dynamo, transformers.generation.continuous_batching",
    )
    assert int(output) > 200


@pytest.mark.integration
def test_agents_run_a_chain_with_a_tool() -> None:
    output = run_elsewhere(
        """
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from agentfly.agents import HFAgent
from agentfly.tools import calculate

class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"choices": [{"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

async def main():
    server = HTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call>'
    url = f"http://127.0.0.1:{server.server_port}/v1"
    scripted = {"template": "chatml", "backend": "scripted", "backend_config": {"script": [call, "It is 42."]}}
    client = {"model_name_or_path": "m", "backend": "client", "backend_config": {"base_url": url, "api_key": "key"}}
    for settings in (scripted, client):
        agent = HFAgent(tools=[calculate], **settings)
        chain = (await agent.run("6 * 7?", max_turns=3)).trajectories[0]
        print(f"{chain.prediction} ({chain.stop.value} after {len(chain.turns)} turns)")
        await agent.close()

asyncio.run(main())
"""
    )
    assert output.splitlines() == ["It is 42. (answer after 2 turns)", "42 (answer after 1 turns)"]


@pytest.mark.integration
def test_what_needs_linux_says_so() -> None:
    output = run_elsewhere(
        """
from agentfly.errors import ConfigError
from agentfly.runs.files import lock_file
from agentfly.sandbox import SandboxUnavailable, open_sandbox

sys.platform = "win32"
try:
    asyncio.run(open_sandbox())
except SandboxUnavailable as error:
    print(error)
try:
    lock_file(open(os.devnull))
except ConfigError as error:
    print(error)
"""
    )
    assert "sessions need Linux, this is win32" in output
    assert "cannot be locked: win32 has no fcntl" in output
