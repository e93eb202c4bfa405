"""On-policy distillation: exact gradient, runs that approach the teacher, servers, and teachers that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

from starlette.requests import Request  # noqa: E402
from starlette.responses import JSONResponse, Response  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

from agentfly.algorithms.kl import teacher_advantages  # noqa: E402
from agentfly.cli.recipes import Recipe  # noqa: E402
from agentfly.cli.train import resume_run, train_recipe  # noqa: E402
from agentfly.errors import ConfigError  # noqa: E402
from agentfly.models.tiny import build_tokenizer  # noqa: E402
from agentfly.runs import RunDirectory  # noqa: E402
from agentfly.templates.tokenizer import load_tokenizer  # noqa: E402
from agentfly.training.config import TrainConfig  # noqa: E402
from agentfly.training.memory import count_teacher  # noqa: E402
from agentfly.training.teacher import TeacherServer, compare_vocabularies  # noqa: E402
from tests.backends.openai_server import OpenAIServer  # noqa: E402
from tests.training.pieces import piece  # noqa: E402

RECIPE = Path(__file__).with_name("recipe_vowels.py")


pytestmark = pytest.mark.usefixtures("vowels_model")


@pytest.fixture(scope="module")
def teacher(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another size with the tokenizer of the student."""
    path = tmp_path_factory.mktemp("teacher")
    load_tokenizer(str(small_model)).save_pretrained(path)
    config = {**json.loads((small_model / "config.json").read_text()), "hidden_size": 16, "num_hidden_layers": 1}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(path)
    return path


def run(folder: Path, *changes: str) -> RunDirectory:
    train_recipe(Recipe(RECIPE), ["loggers=[]", "evaluation.every=null", "precision=float32", *changes], folder)
    return RunDirectory(folder)


def metric(directory: RunDirectory, name: str) -> list[float]:
    return [record.metrics[name] for record in directory.records() if record.metrics]


def test_expected_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.1], requires_grad=True)
    target = torch.tensor([1.0, 0.5, -0.5, 0.0]).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - target)).sum(), logits, retain_graph=True)
    advantages = torch.from_numpy(teacher_advantages(logprobs.detach().numpy(), target.numpy(), 1.0))
    # Over all four tokens that may be sampled, each with its probability: the expectation of the plain policy loss.
    (expected,) = torch.autograd.grad((logprobs.exp().detach() * -advantages * logprobs).sum(), logits)
    torch.testing.assert_close(expected, exact)


@pytest.mark.parametrize("divergence", ["exact", "sampled"])
def test_student_approaches_its_teacher_and_resumes_with_the_same_result(
    tmp_path: Path, teacher: Path, divergence: str
) -> None:
    changes = [f"teacher.model={teacher}", "num_chains=1", "tasks_per_step=16", "optimizer.learning_rate=0.02"]
    changes.append(f"teacher.divergence={divergence}")
    whole = run(tmp_path / "whole", *changes, "steps=16")
    distance = metric(whole, "policy/teacher_kl")
    assert np.mean(distance[-4:]) < 0.75 * np.mean(distance[:4])
    assert metric(whole, "policy/tokens")[0] > 0  # one chain per task: there is no group to compare it with
    run(tmp_path / "run", *changes, "steps=8")
    resume_run(tmp_path / "run", None, ["steps=16"])
    assert metric(RunDirectory(tmp_path / "run"), "policy/teacher_kl") == distance


def test_advantages_are_those_of_the_teacher_plus_those_of_the_reward(tmp_path: Path, teacher: Path) -> None:
    plain = run(tmp_path / "plain", "steps=1", "zero_variance=keep")
    changes = ["steps=1", f"teacher.model={teacher}", "teacher.coef=2", "teacher.reward_coef=0.5"]
    mixed = run(tmp_path / "mixed", *changes, "teacher.divergence=sampled")
    exact = run(tmp_path / "exact", *changes)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    learned = mixed.learner_logprobs(1)
    compared = 0
    for one, other in zip(plain.trajectories(1), mixed.trajectories(1), strict=True):
        for number, segment in enumerate(other.trajectory.segments):
            ids = torch.from_numpy(segment.tokens).long()
            with torch.no_grad():
                scores = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
            mask = segment.mask[1:]
            student = np.asarray(learned[f"{other.trajectory.id}#{number}"])
            expected = 2 * (scores[mask] - student) + 0.5 * one.advantages[number][1:][mask]
            np.testing.assert_allclose(other.advantages[number][1:][mask], expected, atol=1e-3)
            compared += mask.sum()
    assert compared > 50
    for one, other in zip(plain.trajectories(1), exact.trajectories(1), strict=True):
        for reward, both in zip(one.advantages, other.advantages, strict=True):
            np.testing.assert_allclose(both, 0.5 * np.asarray(reward), atol=1e-6)
    terms = [metric(exact, f"policy/{name}")[0] for name in ("loss_teacher", "teacher_kl")]
    assert terms[0] == pytest.approx(2 * terms[1], rel=1e-3)


def test_teacher_with_another_vocabulary_is_refused_with_both(tmp_path: Path, teacher: Path, small_model: Path) -> None:
    other = tmp_path / "other"
    tokenizer = build_tokenizer(["completely different texts"] * 40)
    tokenizer.save_pretrained(other)
    AutoModelForCausalLM.from_pretrained(teacher).save_pretrained(other)
    compare_vocabularies(str(small_model), str(teacher))
    size = load_tokenizer(str(small_model)).backend_tokenizer.get_vocab_size()
    sizes = f"a vocabulary of {len(tokenizer)} tokens, .* one of {size}"
    with pytest.raises(ConfigError, match=sizes):
        run(tmp_path / "run", f"teacher.model={other}", "steps=1")
    assert not (tmp_path / "run").exists()


def test_teacher_with_too_few_positions_is_refused(tmp_path: Path, teacher: Path) -> None:
    short = tmp_path / "short"
    load_tokenizer(str(teacher)).save_pretrained(short)
    config = {**json.loads((teacher / "config.json").read_text()), "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(short)
    with pytest.raises(ConfigError, match=r"has 64 positions, .* write run_options.context_length=64"):
        run(tmp_path / "run", f"teacher.model={short}", "steps=1")


@pytest.mark.parametrize("divergence", ["exact", "sampled"])
def test_teacher_without_embeddings_of_all_tokens_is_refused(tmp_path: Path, teacher: Path, divergence: str) -> None:
    load_tokenizer(str(teacher)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    size = model.config.vocab_size
    model.resize_token_embeddings(size - 8)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"has embeddings of {size - 8} tokens, and its tokenizer has ids up to"):
        run(tmp_path / "run", f"teacher.model={tmp_path}", f"teacher.divergence={divergence}", "steps=1")


def serve(server: OpenAIServer, folder: Path) -> None:
    """Score prompts as vLLM does, with a model and the tokenizer in a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder)).backend_tokenizer

    async def reply(request: Request) -> Response:
        body = await request.json()
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        if isinstance(body["prompt"], str):
            choice["prompt_token_ids"] = tokenizer.encode(body["prompt"], add_special_tokens=False).ids
        else:
            ids = torch.tensor(body["prompt"])
            with torch.no_grad():
                scores = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
            entries = [{str(token): {"logprob": score}} for token, score in zip(ids[1:].tolist(), scores, strict=True)]
            choice["prompt_logprobs"] = [None, *entries]
        return JSONResponse({"choices": [choice]})

    server.answers("/completions", reply)


def test_server_scores_like_the_model_it_serves(openai_server: OpenAIServer, tmp_path: Path, teacher: Path) -> None:
    serve(openai_server, teacher)
    changes = ["steps=1", "num_chains=1", "tasks_per_step=4"]
    served = run(tmp_path / "served", "teacher.model=any", f"teacher.base_url={openai_server.url}", *changes)
    loaded = run(tmp_path / "loaded", f"teacher.model={teacher}", "teacher.divergence=sampled", *changes)
    expected = metric(loaded, "policy/teacher_kl")
    np.testing.assert_allclose(metric(served, "policy/teacher_kl"), expected, rtol=1e-3)


def test_server_with_another_vocabulary_or_without_scores_is_refused(
    openai_server: OpenAIServer, tmp_path: Path, teacher: Path, small_model: Path
) -> None:
    other = tmp_path / "other"
    build_tokenizer(["completely different texts"] * 40).save_pretrained(other)
    AutoModelForCausalLM.from_pretrained(teacher).save_pretrained(other)
    serve(openai_server, other)
    config = TrainConfig(model=str(small_model), teacher={"model": "any", "base_url": openai_server.url})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"has another vocabulary than .*: a text of \d+ tokens has \d+ there"):
        TeacherServer(config)
    serve(openai_server, teacher)
    server = TeacherServer(config)

    async def reply(request: Request) -> Response:
        return JSONResponse({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})

    openai_server.answers("/completions", reply)
    with pytest.raises(Exception, match="must know `prompt_logprobs`"):
        server.score_teacher([piece(8)], 1.0)


def test_memory_of_a_teacher_is_planned(teacher: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert count_teacher(TrainConfig(teacher={"model": str(teacher)})) == expected  # type: ignore[arg-type]
    assert count_teacher(TrainConfig()) == 0
