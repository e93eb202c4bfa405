"""The scripted backend: fixed and computed replies as real tokens, with latency, slots and weight versions."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.backends.base import Request
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn, _PrioritySemaphore
from agentfly.errors import BackendFault, ConfigError
from agentfly.templates import load_template
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import ByteTokenizer
from agentfly.types import FinishReason, Message, Sampling

TEMPLATE: Template = load_template("chatml", ByteTokenizer())
PROMPT = TEMPLATE.start([Message("user", "Hi")])


def make_backend(script: Any, **settings: Any) -> ScriptedBackend:
    backend = ScriptedBackend(script, **settings)
    backend.attach(TEMPLATE)
    return backend


def request(turn: int = 0, chain: str = "0/0", on_tokens: Any = None, **sampling: Any) -> Request:
    return Request(PROMPT, Sampling(**sampling), TEMPLATE.stop_ids, chain=chain, turn=turn, on_tokens=on_tokens)


async def test_reply_is_encoded_and_ends_with_the_end_of_turn_token() -> None:
    backend = make_backend(["one", "two"], logprob=-0.25)
    completion = await backend.generate(request(1))
    assert TEMPLATE.text(completion.token_ids) == "two"
    assert completion.token_ids[-1] == TEMPLATE.close_id
    assert set(completion.logprobs) == {-0.25}
    assert completion.finish is FinishReason.STOP


async def test_script_with_too_few_turns_raises() -> None:
    with pytest.raises(BackendFault, match="the script has 1 turns"):
        await make_backend(["one"]).generate(request(1))


async def test_single_text_is_the_reply_of_every_turn() -> None:
    assert TEMPLATE.text((await make_backend("again").generate(request(9))).token_ids) == "again"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_script_function_gets_prompt_turn_and_chain(asynchronous: bool) -> None:
    seen: list[tuple[str, int, str]] = []

    def speak(turn: ScriptedTurn) -> str:
        seen.append((turn.prompt, turn.turn, turn.chain))
        return "ok"

    async def later(turn: ScriptedTurn) -> str:
        return speak(turn)

    await make_backend(later if asynchronous else speak).generate(request(2, "3/1"))
    assert seen == [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 2, "3/1")]


async def test_seed_makes_random_numbers_repeatable() -> None:
    backend = make_backend(lambda turn: str(turn.random.random()))
    first, second, other = [(await backend.generate(request(seed=s))).token_ids for s in (1, 1, 2)]
    assert first == second != other


async def test_token_limit_cuts_the_reply_and_the_streamed_tokens() -> None:
    watched: list[int] = []
    completion = await make_backend("abcdef", chunk=2).generate(request(max_tokens=3, on_tokens=watched.extend))
    assert (TEMPLATE.text(completion.token_ids), completion.finish) == ("abc", FinishReason.LENGTH)
    assert watched == list(completion.token_ids)
    exact = await make_backend("abc").generate(request(max_tokens=4))
    assert (len(exact.token_ids), exact.finish) == (4, FinishReason.STOP)


async def test_stop_string_ends_the_turn_and_is_included() -> None:
    completion = await make_backend("one STOP two END three").generate(request(stop=("END", "STOP")))
    assert (TEMPLATE.text(completion.token_ids), completion.finish) == ("one STOP", FinishReason.STOP)
    assert completion.token_ids[-1] != TEMPLATE.close_id


async def test_tokens_are_streamed_in_chunks() -> None:
    chunks: list[list[int]] = []
    completion = await make_backend("abcdef", chunk=3).generate(request(on_tokens=chunks.append))
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]
    assert [i for chunk in chunks for i in chunk] == completion.token_ids


async def test_every_token_has_the_weight_version_it_was_sampled_with() -> None:
    backend = make_backend("abcdef", chunk=2, latency=0.001)
    chunks = 0

    def watch(ids: Any) -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 2:
            updates.append(asyncio.ensure_future(backend.update_weights([], version=5)))

    updates: list[asyncio.Future[None]] = []
    completion = await backend.generate(request(on_tokens=watch))
    assert completion.weight_versions[:4] == [0, 0, 0, 0]
    assert completion.weight_versions[-1] == 5
    assert backend.weight_version == 5
    assert set((await backend.generate(request())).weight_versions) == {5}


async def test_latency_may_depend_on_the_request() -> None:
    backend = make_backend("x", latency=lambda r: 60.0 if r.chain == "slow" else 0.0)
    waiting = asyncio.ensure_future(backend.generate(request(chain="slow")))
    await backend.generate(request(chain="fast"))
    assert not waiting.done()
    waiting.cancel()


class Gate:
    """Blocks every turn until it is opened, and records the chains in progress."""

    def __init__(self, **settings: Any) -> None:
        self.serving: list[str] = []
        self.doors: dict[str, asyncio.Event] = {}
        self.backend = make_backend(self._speak, **settings)

    async def _speak(self, turn: ScriptedTurn) -> str:
        self.serving.append(turn.chain)
        await self.doors.setdefault(turn.chain, asyncio.Event()).wait()
        return "x"

    def ask(self, chain: str, turn: int = 0) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.backend.generate(request(turn, chain)))

    def open(self, chain: str) -> None:
        self.doors.setdefault(chain, asyncio.Event()).set()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_slots_go_to_the_least_advanced_chain_then_first_come_first_served() -> None:
    gate = Gate(slots=1)
    tasks = [gate.ask("a", 5), gate.ask("b", 3), gate.ask("c", 1), gate.ask("d", 1)]
    await settle()
    assert gate.serving == ["a"]
    for chain in "acdb":
        gate.open(chain)
        await settle()
    assert gate.serving == ["a", "c", "d", "b"]
    await asyncio.gather(*tasks)


async def test_number_of_slots_is_never_exceeded() -> None:
    gate = Gate(slots=2)
    tasks = [gate.ask(chain) for chain in "abcde"]
    await settle()
    assert gate.serving == ["a", "b"]
    gate.open("b")
    await settle()
    assert gate.serving == ["a", "b", "c"]
    for chain in "acde":
        gate.open(chain)
    await asyncio.gather(*tasks)


async def test_cancellation_frees_the_slot_and_the_place_in_the_queue() -> None:
    gate = Gate(slots=1)
    served, waiting, last = gate.ask("a"), gate.ask("b"), gate.ask("c")
    await settle()
    waiting.cancel()
    await settle()
    served.cancel()
    await settle()
    assert gate.serving == ["a", "c"]
    last.cancel()  # and at the very moment the slot is granted
    next_one = gate.ask("d")
    handed = gate.ask("e")
    await settle()
    assert gate.serving == ["a", "c", "d"]
    gate.open("d")
    await next_one
    handed.cancel()
    await settle()
    free = gate.ask("f")
    await settle()
    assert gate.serving[-1] == "f"
    gate.open("f")
    await free


async def test_slot_granted_to_a_cancelled_waiter_goes_to_the_next() -> None:
    slots = _PrioritySemaphore(1)
    served: list[str] = []

    async def wait(name: str) -> None:
        async with slots.acquire(0):
            served.append(name)

    async with slots.acquire(0):
        waiting = asyncio.ensure_future(wait("cancelled"))
        await settle()
    waiting.cancel()  # it has the slot already, and has not run since
    await settle()
    await asyncio.wait_for(wait("next"), 60)
    assert served == ["next"]


@pytest.mark.parametrize(
    "settings", [{"slots": 0}, {"chunk": 0}, {"latency": -1}, {"logprob": 0.5}, {"script": []}, {"script": [1]}]
)
def test_invalid_settings_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"at least|at most|a list of texts"):
        ScriptedBackend(**{"script": "x", **settings})


async def test_generate_without_a_template_raises() -> None:
    with pytest.raises(ConfigError, match="template"):
        await ScriptedBackend("x").generate(request())


def test_second_tokenizer_is_rejected() -> None:
    other = SimpleNamespace(codec=SimpleNamespace(control={"<eos>": 0}))
    backend = make_backend("x")
    backend.attach(load_template("chatml", ByteTokenizer()))
    with pytest.raises(ConfigError, match="another tokenizer"):
        backend.attach(other)  # type: ignore[arg-type]
