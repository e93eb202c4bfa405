"""A taskset as users of verifiers write it: a single turn, two weighted rewards, a metric, a system prompt."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordsConfig(vf.TasksetConfig):
    count: int = 400


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("answer.txt", self.data.answer.encode())

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.info["answer"] = (await runtime.read("answer.txt")).decode()

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == trace.info["answer"])

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class WordsTaskset(vf.Taskset[WordTask, WordsConfig]):
    def load(self) -> Iterator[WordTask]:
        for number in range(self.config.count):
            word = f"word{number}"
            data = WordData(prompt=f"Reverse {word}.", system_prompt="Reply with a word.", answer=word[::-1])
            yield WordTask(data, self.config.task)
