"""Several backends as one: routing by chain, members that fail, and weights for all."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from agentfly.backends import open_backend
from agentfly.backends.base import Backend, Request
from agentfly.backends.fleet import MAX_FAILURES, FleetBackend
from agentfly.backends.scripted import ScriptedBackend
from agentfly.errors import BackendFault, ConfigError
from agentfly.types import Completion, FinishReason, Sampling


class Member(Backend):
    """Answers with its number, when it is let."""

    def __init__(self, number: int, context_length: int | None = None) -> None:
        self.number = number
        self.context_length = context_length
        self.version = 0
        self.broken = False
        self.closed = False
        self.loaded_weights: dict[str, int] = {}
        self.chains: list[str] = []
        self.go = asyncio.Event()

    @property
    def weight_version(self) -> int:
        return self.version

    async def generate(self, request: Request) -> Completion:
        self.chains.append(request.chain)
        await self.go.wait()
        if self.broken:
            raise BackendFault(f"member {self.number} is down")
        return Completion([self.number], [0.0], [self.version], FinishReason.STOP)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        await self.go.wait()
        if self.broken:
            raise BackendFault(f"member {self.number} is down")
        self.loaded_weights = dict(weights)
        self.version = version

    async def close(self) -> None:
        self.closed = True


def turn(chain: str, turn: int = 0) -> Request:
    return Request([1], Sampling(), chain=chain, turn=turn)


async def test_new_chains_go_to_the_least_busy_member_and_stay_there() -> None:
    members = [Member(0, 100), Member(1, 80), Member(2)]
    fleet = FleetBackend(members)
    assert fleet.context_length == 80
    running = [asyncio.create_task(fleet.generate(turn(f"chain-{number}"))) for number in range(9)]
    await asyncio.sleep(0)
    assert [len(member.chains) for member in members] == [3, 3, 3]
    for member in members:
        member.go.set()
    first = [completion.token_ids[0] for completion in await asyncio.gather(*running)]
    for later in (1, 2):
        requests = [fleet.generate(turn(f"chain-{number}", later)) for number in reversed(range(9))]
        assert [completion.token_ids[0] for completion in await asyncio.gather(*requests)] == first[::-1]


async def test_member_that_fails_gets_no_chains_until_the_next_weights() -> None:
    members = [Member(0), Member(1)]
    fleet = FleetBackend(members)
    for member in members:
        member.go.set()
    members[0].broken = True
    for _ in range(MAX_FAILURES):
        with pytest.raises(BackendFault, match="member 0 is down"):
            await fleet.generate(turn("a"))
    assert [(await fleet.generate(turn(chain, number))).token_ids[0] for chain, number in (("a", 0), ("a", 1))] == [
        1,
        1,
    ]
    members[1].broken = True
    for _ in range(MAX_FAILURES):
        with pytest.raises(BackendFault, match="member 1 is down"):
            await fleet.generate(turn("b"))
    with pytest.raises(BackendFault, match="all 2 members of the fleet have failed"):
        await fleet.generate(turn("b"))
    members[0].broken = members[1].broken = False
    await fleet.update_weights([("w", 5)], 3)
    assert fleet.weight_version == 3
    assert [member.loaded_weights for member in members] == [{"w": 5}, {"w": 5}]
    assert (await fleet.generate(turn("c"))).weight_versions == [3]
    await fleet.close()
    assert all(member.closed for member in members)


async def test_weights_reach_the_other_members_before_an_error_is_raised() -> None:
    members = [Member(0), Member(1)]
    members[0].broken = True
    members[0].go.set()
    update = asyncio.create_task(FleetBackend(members).update_weights([("w", 5)], 3))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not update.done()
    members[1].go.set()
    with pytest.raises(BackendFault, match="member 0 is down"):
        await update
    assert members[1].loaded_weights == {"w": 5}


async def test_opened_members_are_closed_if_another_one_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Backend] = []

    async def close(self: Backend) -> None:
        closed.append(self)

    monkeypatch.setattr(ScriptedBackend, "close", close)
    with pytest.raises(ConfigError, match="there is no backend 'missing'"):
        FleetBackend([{"backend": "scripted", "script": "hello"}, {"backend": "missing"}])
    assert len(closed) == 1


async def test_fleet_is_opened_by_name() -> None:
    scripted = {"backend": "scripted", "script": "hello"}
    fleet = open_backend("fleet", members=[scripted, scripted])
    assert isinstance(fleet, FleetBackend)
    assert len(fleet.members) == 2
    with pytest.raises(ConfigError, match="a fleet needs at least one member"):
        open_backend("fleet", members=[])


async def test_images_are_supported_if_all_members_support_them_with_the_template() -> None:
    """Engines know only when they get the template."""

    class Engine(Member):
        def attach(self, template: Any) -> None:
            self.supports_images = template == "with images" or self.number == 0

    fleet = FleetBackend([Engine(0), Engine(1)])
    fleet.attach("text only")  # type: ignore[arg-type]
    assert not fleet.supports_images
    fleet.attach("with images")  # type: ignore[arg-type]
    assert fleet.supports_images
