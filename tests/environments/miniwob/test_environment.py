"""MiniWoB++: tasks and files without a browser; experts, determinism and many browsers with one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from agentfly.agents import HFAgent
from agentfly.environments.miniwob import TASKS, MiniWoB
from agentfly.environments.miniwob.environment import find_html, miniwob_reward, serve_file
from agentfly.errors import ConfigError, DataError
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task
from tests.environments.browsers import needs_browser

pytest.importorskip("miniwob", reason="the extra gui is not installed: pip install miniwob")


SHOWN = ("click-checkboxes", "login-user", "click-dialog", "use-slider", "search-engine", "click-pie-nodelay")


async def reset(env: MiniWoB, name: str, seed: int = 1) -> None:
    await env.reset(Task.of({"question": "?", "task": name, "seed": seed}))


def test_tasks_are_drawn_without_a_browser() -> None:
    assert len(TASKS) >= 20
    rows = MiniWoB.draw_tasks("train", 200)
    assert {row["task"] for row in rows} == set(TASKS)
    assert {row["task"] for row in MiniWoB.draw_tasks("test", 5, tasks=["use-slider"])} == {"use-slider"}


@pytest.mark.parametrize("name", ["no-such-task", "../core/core", "", None])
async def test_unknown_tasks_are_rejected(name: Any) -> None:
    with pytest.raises(DataError, match=r"there is no MiniWoB\+\+ task"):
        MiniWoB.draw_tasks("train", 1, tasks=[name])
    with pytest.raises(DataError, match=r"there is no MiniWoB\+\+ task"):
        await reset(MiniWoB(), name)
    with pytest.raises(DataError, match="column 'seed'"):
        await MiniWoB().reset(Task.of({"question": "?", "task": "click-test"}))


def test_only_files_of_the_package_are_served() -> None:
    assert b"Click Test" in (serve_file("/miniwob/click-test.html", seed=1) or b"")
    assert (serve_file("/core/core.js", seed=7) or b"").endswith(b'Math.seedrandom("7");\n')
    assert (find_html() / "../__init__.py").is_file()
    for path in ("/../__init__.py", "/miniwob/none.html", "/miniwob", "/"):
        assert serve_file(path, seed=1) is None


class TestRunning:
    pytestmark = needs_browser

    @pytest.mark.full
    async def test_expert_of_every_task_earns_the_reward(self) -> None:
        env = MiniWoB()
        await env.start()
        try:
            for name in TASKS:
                await reset(env, name)
                for _ in range(20):
                    action = await env.expert()
                    if isinstance(action, str):
                        break
                    await getattr(env, action.name)(**action.arguments)
                assert env.score == 1, name
        finally:
            await env.close()

    @pytest.mark.full
    async def test_same_seed_shows_the_same_pixels_in_another_browser(self) -> None:
        screenshots = []
        for _ in range(2):
            env = MiniWoB()
            await env.start()
            images = []
            for name in SHOWN:
                await reset(env, name, seed=5)
                images += [await env.screenshot(), await env.click_at(500, 571)]
            screenshots.append(images)
            await env.close()
        assert screenshots[0] == screenshots[1]

    async def test_wrong_click_ends_with_a_negative_reward_that_stays(self) -> None:
        env = MiniWoB()
        await env.start()
        try:
            await reset(env, "click-test-2", seed=3)
            x, y = await env.browser.evaluate("(({x, y}) => [x + 20, y + 20])(subbtn2.getBoundingClientRect())")
            assert (await env.click_at(round(x * 1000 / 160), round(y * 1000 / 210)))["ends_chain"]
            assert miniwob_reward(env=env) == {"reward": -1, "success": 0.0, "actions": 1}
            assert await env.click_at(5, 5) == {"observation": "The task is over.", "ends_chain": True}
            assert env.score == -1
            await reset(env, "use-slider")
            assert env.score == 0
            with pytest.raises(ConfigError, match="no expert for use-slider"):
                await env.expert()
        finally:
            await env.close()

    @pytest.mark.full
    async def test_many_browsers_under_the_resource_manager(self) -> None:
        agent = HFAgent(
            tools=[MiniWoB],
            reward=miniwob_reward,
            template="chatml",
            backend="scripted",
            backend_config={"script": "-"},
        )
        demonstrations = await demonstrate(agent, MiniWoB.draw_tasks("test", 12), threshold=1, max_turns=12)
        await agent.close()
        assert len(demonstrations.accepted) == 12, demonstrations.reasons

    @pytest.mark.full
    def test_no_browser_is_left_when_the_host_is_killed(self) -> None:
        program = """
import asyncio, psutil
from agentfly.environments.miniwob import MiniWoB
from agentfly.resources import ResourceManager
from agentfly.types import Task

async def main():
    manager = ResourceManager()
    leases = [manager.leases(Task.of(row), [MiniWoB]) for row in MiniWoB.draw_tasks("train", 3)]
    await asyncio.gather(*(each.get(MiniWoB) for each in leases))
    print(*(each.pid for each in psutil.Process().children(recursive=True)), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
        host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert host.stdout is not None
        with host, host.stdout:
            started = [psutil.Process(int(pid)) for pid in host.stdout.readline().split()]
            assert sum("chromium" in process.name() for process in started) > 3
            host.kill()
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
