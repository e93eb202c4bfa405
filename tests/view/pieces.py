"""A small run with tool calls, failures and evaluations, for tests of the viewer."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from agentfly.runs import Alarm, EvalFigures, RunWriter, StepRecord
from agentfly.segment import Author, Segment
from agentfly.templates.tokenizer import load_tokenizer
from agentfly.trajectory import (
    CallRecord,
    CallStatus,
    Failure,
    FailureKind,
    Score,
    StopReason,
    TrainingTreatment,
    Trajectory,
    TurnRecord,
)
from agentfly.types import Completion, FinishReason, Message, Task, ToolCall

HOSTILE = (
    "<script>window.hacked = 1</script></script><img src=x onerror='window.hacked=1'>"
    "<svg onload=window.hacked=1>{{7*7}}${7*7}' onclick='window.hacked=1' \x1b[31m\x07\x00 \u202egnol\u202c --> ]]>"
)


def encode(text: str) -> list[int]:
    return load_tokenizer("bytes").backend_tokenizer.encode(text, add_special_tokens=False).ids


def make_chain(
    group: int,
    chain: int,
    reward: float | None,
    *,
    text: str = "",
    question: str = "",
    task: str = "",
    treatment: TrainingTreatment = TrainingTreatment.TRAIN,
) -> Trajectory:
    """A chain of two turns: a call of `search` and its observation, then an answer."""
    segment = Segment()
    question = question or f"Question {group} {text}"
    segment.append(
        Author.TASK, encode("sys Q?"), [Message("system", f"Be brief. {text}"), Message("user", question)], turn=0
    )
    call = ToolCall(f"search{text}", {"query": f"color of {group} {text}", f"other{text}": [1, text]}, "c1")
    reply = Completion(encode("call"), [-0.5, -0.25, -0.125, -0.0625], [3] * 4, FinishReason.STOP)
    segment.append_completion(reply, Message("assistant", f"I look. {text}", (call,), thinking=f"Hmm {text}"), turn=0)
    observation = Message("tool", f"It is blue. {text}", name=f"search{text}", tool_call_id="c1")
    segment.append(Author.TOOL, encode("blue"), [observation], turn=1)
    answer = f"blue{chain} {text}"
    reply = Completion(encode("ok"), [-1.0, -2.0], [3, 3], FinishReason.STOP)
    segment.append_completion(reply, Message("assistant", answer), turn=1)
    failed = reward is None
    record = CallRecord(f"search{text}", CallStatus.ERROR if failed else CallStatus.OK, 0.25, {"hits": text})
    return Trajectory(
        task=Task.of({"question": question, "answer": f"blue {text}"}, task or f"task-{group}"),
        segments=(segment.seal(),),
        turns=(TurnRecord(FinishReason.STOP, (record,), 1.5, 0.25), TurnRecord(FinishReason.STOP, (), 0.5, 0.0)),
        stop=StopReason.TOOL_FAULT if failed else StopReason.ANSWER,
        prediction=answer,
        group=group,
        chain=chain,
        score=None if failed else Score(reward, None, {f"exact{text}": reward, f"note{text}": text}),
        treatment=treatment,
        failures=(Failure(FailureKind.TOOL, f"the tool broke {text}", 0),) if failed else (),
        seconds=2.0 + group,
    )


def make_run(
    path: Path, *, text: str = "", steps: int = 2, config: Mapping[str, object] = MappingProxyType({})
) -> RunWriter:
    """Evaluations before and after the steps; of a step's groups, 0 is trained, 1 has no variance, 2 a masked chain."""
    run = RunWriter.create(path, {"model": "bytes", "recipe": f"colors{text}.py", "note": text, **config})
    run.append(StepRecord(0, steps, eval=EvalFigures(0.25, 0.1, 0.4, 2, {"greedy": 0.5})))
    question = f"Held-out question {text}"
    initial_evaluation = [make_chain(0, 0, 0.0, text=f"before {text}", question=question)]
    run.write_trajectories(0, initial_evaluation, held_out=True)
    for step in range(1, steps + 1):
        mask = TrainingTreatment.MASK
        chains = [
            make_chain(0, 0, 0.0, text=text), make_chain(0, 1, 1.0, text=text),
            make_chain(1, 0, 0.5), make_chain(1, 1, 0.5), make_chain(2, 0, None, text=text, treatment=mask),
            make_chain(2, 1, 1.0, text=text),
        ]  # fmt: skip
        signs = {"0/0": -1.0, "0/1": 1.0}
        advantages = {name: [sign * chains[0].segments[0].mask] for name, sign in signs.items()}
        run.write_trajectories(step, chains, advantages)
        run.write_learner_logprobs(step, {f"{name}#0": np.array([-0.5, -0.25, -0.1, 0, -1, -1.9]) for name in signs})
        metrics = {"reward/mean": step / 10, "chain/turns": 2.0, f"score/exact{text}": 0.5}
        alarm = Alarm("tool_errors", f"tools fail {text}", ("2/0",), step)
        run.append(StepRecord(step, steps, metrics, {"generate": 1.0}, alarms=(alarm,) if step == 1 else ()))
    final_evaluation = [make_chain(0, 0, 1.0, text=f"after {text}", question=question)]
    run.write_trajectories(steps, final_evaluation, held_out=True)
    return run
