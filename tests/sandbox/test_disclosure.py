"""What a session could learn about the host from its own files and from /proc."""
# ruff: noqa: ASYNC240

import os
from dataclasses import replace
from pathlib import Path

import pytest

import agentfly
from agentfly.sandbox import SandboxUnavailable, mechanisms
from agentfly.sandbox.mounts import plan_mounts

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOTH = pytest.mark.parametrize("mechanism", ["zygote", "namespaces"])
CHECKOUT = "/srv/checkout-on-the-host"


@BOTH
async def test_no_pid_of_the_host_is_visible(open_session, mechanism: str) -> None:
    session = await open_session(mechanism)
    groups = (await session.shell("cat /proc/self/cgroup /proc/1/cgroup")).output.splitlines()
    assert {line.split(":", 2)[2] for line in groups} <= {"/"}
    mounts = (await session.shell("cat /proc/self/mountinfo")).output
    assert str(1_900_000_000 + os.getpid()) not in mounts, "the sandbox's own user is named after the process"
    assert f"-{os.getpid()}-" not in mounts


@BOTH
async def test_no_command_line_shows_where_packages_are_on_the_host(open_session, mechanism: str) -> None:
    session = await open_session(mechanism)
    program = (
        await session.shell("cat /proc/self/cmdline /proc/1/cmdline /proc/2/cmdline 2>/dev/null | tr '\\0' ' '")
    ).output
    assert "python" in program
    assert "site-packages" not in program


@BOTH
async def test_no_path_of_an_editable_install_is_visible(tmp_path: Path, mechanism: str) -> None:
    """As pip, setuptools, hatchling and `setup.py develop` record them."""
    tmp_path.chmod(0o755)
    for name, content in {
        "_editable_impl_one.pth": CHECKOUT + "/src\n",
        "__editable__.two-1.0.pth": "import __editable___two_1_0_finder; __editable___two_1_0_finder.install()\n",
        "__editable___two_1_0_finder.py": f"MAPPING = {{'two': '{CHECKOUT}/two'}}\n",
        "__pycache__/__editable___two_1_0_finder.cpython-311.pyc": CHECKOUT,
        "three.egg-link": CHECKOUT + "\n.\n",
        "four-1.0.dist-info/direct_url.json": f'{{"dir_info": {{"editable": true}}, "url": "file://{CHECKOUT}"}}',
        "four-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: four\nVersion: 1.0\n",
        "harmless.pth": "import sys\n",
        "five-1.0.dist-info/direct_url.json": '{"url": "https://example.org/five.tar.gz"}',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    try:
        plan = mechanisms.make_plan(mechanism, None)
        installed = replace(plan.python, sites=(*plan.python.sites, str(tmp_path)))
        plan = replace(plan, python=installed, mounts=plan_mounts(installed), stage=os.getuid() == 0)
        sandbox, _ = mechanisms.make_sandbox(plan, ())
        await mechanisms.verify_sandbox(sandbox)
    except SandboxUnavailable as error:
        pytest.skip(f"{mechanism} does not work here: {error}")
    async with sandbox:
        session = await sandbox.open_session()
        site = plan.mounts.sites[-1]
        assert (await session.shell(f"ls {site} | wc -l")).output.strip() == "8"
        assert (await session.shell(f"grep -rl {CHECKOUT} {site} 2>/dev/null")).output == ""
        assert (await session.shell(f"cat {site}/harmless.pth")).output == "import sys\n"
        code = """
from importlib.metadata import distribution
distribution("four").version, distribution("four").read_text("direct_url.json"), \
distribution("five").read_text("direct_url.json")
"""
        assert (await session.run(code)).value == """('1.0', None, '{"url": "https://example.org/five.tar.gz"}')"""


@BOTH
async def test_source_folder_of_agentfly_is_not_visible(open_session, mechanism: str) -> None:
    source = str(Path(agentfly.__file__).parents[1])
    if "site-packages" in source:
        pytest.skip("AgentFly is not an editable install here")
    session = await open_session(mechanism)
    outcome = await session.shell(
        f"grep -l -e {source} -e file://{Path(source).parent} "
        "/proc/self/mountinfo /opt/site/*/*.pth /opt/site/*/*.dist-info/* /opt/agentfly/inside/* 2>/dev/null"
    )
    assert outcome.output == ""
