"""The tiny model: tokenizer, template, training examples and trained behavior."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from agentfly import models
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.environments.lookup import Lookup
from agentfly.models import tiny
from agentfly.models.lookup import (
    ATTRIBUTES,
    NAMES,
    STRATEGIES,
    TOOL_SCHEMA,
    UNKNOWN,
    LookupDemonstration,
    demonstrations,
    draw,
    find_fact,
    format_call,
)
from agentfly.models.tiny import VOCABULARY, build_tokenizer
from agentfly.templates import load_template
from agentfly.templates.check import CheckMark
from agentfly.templates.check import check as check_template

SHOWN = list(demonstrations(600))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(text for demonstration in SHOWN for text in demonstration.texts)


def test_template_check_passes_all_properties(tokenizer: Any) -> None:
    report = check_template(tokenizer)
    assert report.ok
    assert all(finding.mark is CheckMark.GOOD for finding in report.findings if finding.property != "images")


@pytest.mark.parametrize("name", [None, "chatml"])
def test_templates_parse_formatted_call(tokenizer: Any, name: str | None) -> None:
    template = load_template(name, tokenizer, tools=[Lookup.lookup.schema])
    (call,) = template.parse_text(format_call("Fotem", "friend")).message.tool_calls
    assert (call.name, call.arguments) == ("lookup", {"who": "Fotem", "what": "friend"})


def test_name_tokens_do_not_depend_on_context(tokenizer: Any) -> None:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for name in NAMES[:50]:
        alone = ids(name)
        for before, after in ((" of ", "?"), ('": "', '", "'), ("\n", "\n")):
            assert ids(before + name + after) == ids(before) + alone + ids(after)


@pytest.mark.parametrize("text", ["", " ", "a  b\n\n c", "Köln 你好 😀", "x=1234;\t", "<|im_end|>", *NAMES[:3]])
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


async def test_examples_equal_recorded_chains(tokenizer: Any, tmp_path: Path) -> None:
    """The scripted backend replays the demonstration's replies, and the tool answers the calls."""
    tokenizer.save_pretrained(tmp_path)
    drawn = random.Random(3)
    for _ in range(5):
        row = draw(drawn)
        first, second = (row["who"], row["relation"]), (row["facts"][row["who"]][row["relation"]], row["attribute"])
        calls = tuple((format_call(*lookup), find_fact(row["facts"], *lookup)) for lookup in (first, second))
        demonstration = LookupDemonstration(row["question"], calls, row["answer"])
        script = [*(call for call, _ in calls), row["answer"]]
        agent = HFAgent(str(tmp_path), tools=[Lookup.lookup], backend=ScriptedBackend(script))
        (chain,) = (await agent.run(row)).trajectories
        await agent.close()
        (segment,) = chain.segments
        ((tokens, labels, _),) = tiny.build_examples(tokenizer, [demonstration])
        assert tokens == segment.tokens.tolist()
        assert [label != tiny.IGNORE_INDEX for label in labels] == segment.mask.tolist()
        assert all(label in (token, tiny.IGNORE_INDEX) for token, label in zip(tokens, labels, strict=True))


def test_schema_equals_the_schema_of_the_environments_tool() -> None:
    assert Lookup.lookup.schema == TOOL_SCHEMA


def test_demonstrations_exclude_held_out_names() -> None:
    text = json.dumps([demonstration.texts for demonstration in SHOWN])
    assert not [name for name in NAMES[-240:] if name in text]
    generator = random.Random(0)
    assert all(set(draw(generator, held_out=True)["facts"]) <= set(NAMES[-240:]) for _ in range(20))


def test_demonstrations_are_seeded_and_cover_all_strategies() -> None:
    assert SHOWN == list(demonstrations(600)) != list(demonstrations(600, seed=1))
    assert sum(STRATEGIES.values()) == 100
    assert {len(demonstration.calls) for demonstration in SHOWN} == {0, 1, 2, 3}
    values = {value for values in ATTRIBUTES.values() for value in values}
    assert {demonstration.answer for demonstration in SHOWN} > values


def test_build_is_deterministic_and_shows_its_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="the tiny model is made with torch")
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    models = []
    for name, seed, gradients in (("one", 0, True), ("same", 0, False), ("other", 1, True)):
        (tmp_path / name).mkdir()
        with torch.set_grad_enabled(gradients):
            tiny.build(tmp_path / name, tmp_path, steps=3, seed=seed)
        models.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert "training the tiny model: 1 of 3, loss" in capsys.readouterr().err
    assert models[0] == models[1]
    assert models[0]["model.safetensors"] != models[2]["model.safetensors"]
    assert torch.equal(state, torch.random.get_rng_state())  # the caller's random numbers are its own
    assert threads == torch.get_num_threads()


async def test_trained_model_writes_valid_calls() -> None:
    pytest.importorskip("torch", reason="the tiny model is made with torch")
    if models.find_fault(models.PREPARED["tiny"]):
        pytest.skip("the tiny model takes a minute to make: agentfly models prepare tiny")
    folder = models.resolve("tiny")
    settings = {
        "backend": "transformers",
        "backend_config": {"model": folder, "kv_memory": 1 << 26, "dtype": "float32"},
    }
    agent = HFAgent(folder, tools=[Lookup.lookup], **settings)
    drawn = random.Random(11)
    rows = [draw(drawn, held_out=True) for _ in range(40)]
    result = await agent.run(rows, max_turns=4, sampling={"temperature": 1.0, "max_tokens": 40}, seed=0)
    await agent.close()
    turns = [m for chain in result.trajectories for m in chain.messages if m.role == "assistant"]
    called = [bool(turn.tool_calls) for turn in turns if turn.tool_calls or "tool_call" in turn.text]
    assert len(called) >= 30
    assert sum(called) >= 0.9 * len(called)
    answers = [m.content for chain in result.trajectories for m in chain.messages if m.role == "tool"]
    assert sum(answer != UNKNOWN for answer in answers) >= 0.5 * len(answers)  # it copies the names it is given
