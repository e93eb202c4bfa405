"""SFT: a small model is trained on demonstrations, and then reproduces them."""

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a model learns with torch")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from agentfly import reward  # noqa: E402
from agentfly.agents import HFAgent  # noqa: E402
from agentfly.algorithms.base import SegmentArrays  # noqa: E402
from agentfly.algorithms.loss import Loss  # noqa: E402
from agentfly.backends.scripted import ScriptedBackend  # noqa: E402
from agentfly.environments.lookup import Lookup  # noqa: E402
from agentfly.errors import ConfigError, DataError  # noqa: E402
from agentfly.evaluation import evaluate  # noqa: E402
from agentfly.models.lookup import draw  # noqa: E402
from agentfly.sft.demonstrations import demonstrate, record_conversation  # noqa: E402
from agentfly.sft.training import SftStep, build_sft_learner, demonstration_segments, measure_fit, train_sft  # noqa: E402
from agentfly.training.local_learner import LocalLearner  # noqa: E402
from agentfly.trajectory import Trajectory  # noqa: E402
from agentfly.types import Message, Task  # noqa: E402
from tests.training.pieces import make_learner  # noqa: E402

torch.set_num_threads(1)


@reward
def correct(prediction: str, answer: str) -> float:
    return float(prediction == answer)


def rows(count: int) -> list[dict[str, Any]]:
    drawn = random.Random(3)
    return [draw(drawn) for _ in range(count)]


def learner_of(folder: Path, **settings: Any) -> LocalLearner:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return make_learner(model, **{"loss": Loss("plain"), **settings})


async def demonstrate_rows(folder: Path, count: int) -> list[Trajectory]:
    agent = HFAgent(str(folder), tools=[Lookup.lookup], reward=correct, backend=ScriptedBackend("unheard"))
    demonstrations = await demonstrate(agent, rows(count))
    await agent.close()
    assert not demonstrations.rejected
    return list(demonstrations.accepted)


async def test_fine_tuned_model_acts_like_the_expert(small_model: Path, tmp_path: Path) -> None:
    chains = await demonstrate_rows(small_model, 3)
    learner = learner_of(small_model, schedule="linear", total_steps=90)
    seen: list[SftStep] = []
    steps = train_sft(
        learner, chains[:2], steps=90, batch_size=2, validation=chains[:2], validate_every=30, on_step=seen.append
    )
    assert steps == seen
    assert [step.step for step in steps if step.validation is not None] == [30, 60, 90]
    assert steps[-1].validation is not None
    assert steps[-1].validation.accuracy == 1.0
    assert steps[-1].loss < 0.1 < 2 < steps[0].loss
    learner.save(tmp_path)
    AutoTokenizer.from_pretrained(small_model).save_pretrained(tmp_path)
    settings = {"kv_memory": 1 << 24, "dtype": "float32"}
    agent = HFAgent(str(tmp_path), tools=[Lookup.lookup], reward=correct, backend_config=settings)
    evaluation = await evaluate(agent, rows(2), sampling={"temperature": 0.0, "max_tokens": 60}, max_turns=4)
    assert (evaluation.reward.mean, evaluation.calls) == (1.0, 2.0)
    (chain,) = await agent.run(rows(1), sampling={"temperature": 0.0, "max_tokens": 60})
    await agent.close()
    assert chain.segments[0].tokens.tolist() == chains[0].segments[0].tokens.tolist()


async def test_loss_is_the_negative_log_likelihood_of_the_models_tokens(small_model: Path) -> None:
    chains = await demonstrate_rows(small_model, 3)
    learner = learner_of(small_model)
    pieces = demonstration_segments(learner.model, chains)
    total, right, tokens = 0.0, 0, 0
    for chain in chains:
        (segment,) = chain.segments
        ids, mask = torch.tensor(segment.tokens).long()[None], torch.tensor(segment.mask)
        with torch.no_grad():
            logits = learner.model(ids).logits[0, :-1].float()
        kept, targets = logits[mask[1:]], ids[0, 1:][mask[1:]]
        total += float(torch.nn.functional.cross_entropy(kept, targets, reduction="sum"))
        right += int((kept.argmax(-1) == targets).sum())
        tokens += len(targets)
    measured = measure_fit(learner.model, pieces)
    assert measured.tokens == tokens == sum(chain.sampled_tokens for chain in chains)
    assert measured.loss == pytest.approx(total / tokens, rel=1e-5)
    assert measured.accuracy == pytest.approx(right / tokens)
    (first,) = train_sft(learner, chains, steps=1, batch_size=3)
    assert first.loss == pytest.approx(measured.loss, rel=1e-5)


@pytest.mark.parametrize("reading", [0.0, 1.0])
async def test_step_equals_plain_supervised_learning(small_model: Path, reading: float) -> None:
    """The gradient of a step is that of cross-entropy over the model's own tokens, labels of all others ignored; over
    all tokens where those that are read count as much."""
    chains = await demonstrate_rows(small_model, 1)
    learner, plain = learner_of(small_model, learning_rate=1e-3, max_grad_norm=1e9), learner_of(small_model).model
    train_sft(learner, chains, steps=1, batch_size=1, prompt_loss_weight=reading)
    (segment,) = chains[0].segments
    learned = torch.tensor(segment.mask) | bool(reading)
    labels = torch.where(learned, torch.tensor(segment.tokens).long(), -100)
    plain(torch.tensor(segment.tokens).long()[None], labels=labels[None]).loss.backward()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3, weight_decay=0.0)
    optimizer.step()
    for (name, weight), expected in zip(learner.model.named_parameters(), plain.parameters(), strict=True):
        moved = (
            (expected.grad.abs() > 1e-4) if expected.grad is not None else torch.zeros_like(expected, dtype=torch.bool)
        )
        assert torch.allclose(weight[moved], expected[moved], atol=2e-5), name


async def test_the_same_seed_gives_the_same_weights(small_model: Path) -> None:
    chains = await demonstrate_rows(small_model, 4)
    weights = []
    for seed in (0, 0, 1):
        learner = learner_of(small_model)
        train_sft(learner, chains, steps=3, batch_size=2, seed=seed)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


async def test_every_demonstration_is_seen_before_one_is_seen_again(small_model: Path) -> None:
    chains = await demonstrate_rows(small_model, 4)
    learner, batches = learner_of(small_model), []

    def update(samples: Any) -> dict[str, float]:
        batches.append([id(sample) for sample in samples])
        return {"policy/loss": 0.0}

    learner.update = update  # type: ignore[method-assign]
    train_sft(learner, chains, steps=4, batch_size=2)
    assert len({*batches[0], *batches[1]}) == len({*batches[2], *batches[3]}) == 4


async def test_unusable_demonstrations_are_rejected(small_model: Path) -> None:
    chains = await demonstrate_rows(small_model, 1)
    with pytest.raises(ConfigError, match="plain loss, and this learner has 'clip'"):
        train_sft(learner_of(small_model, loss=Loss()), chains, steps=1)
    with pytest.raises(DataError, match="nothing to imitate"):
        train_sft(learner_of(small_model), [], steps=1)
    with pytest.raises(ConfigError, match="steps must be a whole number of at least 1, not"):
        train_sft(learner_of(small_model), chains, steps=0)
    assert all(
        isinstance(piece, SegmentArrays) for piece in demonstration_segments(learner_of(small_model).model, chains)
    )


def test_overlong_demonstrations_are_left_out_and_named(small_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = HFAgent(str(small_model), backend=ScriptedBackend("unheard"))
    chains = [
        record_conversation(agent, Task.of([Message("user", "red " * words), Message("assistant", "blue")]), row)
        for row, words in enumerate([2, 200, 1, 100])
    ]
    lengths = [len(chain.segments[0].tokens) for chain in chains]
    learner = learner_of(small_model)
    learner.model.config.max_position_embeddings = 100
    train_sft(learner, chains, steps=1, validation=[chains[0]])
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 4 demonstrations are longer than the 100 positions of the model and are left out: "
        f"rows (tokens) 1 ({lengths[1]}), 3 ({lengths[3]})"
    ]
    with pytest.raises(DataError, match=rf"1 of 1 demonstrations .* rows \(tokens\) 3 \({lengths[3]}\); shorten"):
        train_sft(learner, chains[3:], steps=1)


def test_unusual_learning_rate_is_reported(small_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_sft_learner(str(small_model), steps=2, learning_rate=0.5)
    assert "learning rate 0.5: the model may be destroyed" in caplog.text
