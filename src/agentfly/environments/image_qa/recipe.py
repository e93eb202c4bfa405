"""ImageQA: read a number in a chart, a table, a map or a document, after zooming into the right part.

    pip install 'agentfly-rl[train,vision]'
    agentfly train image_qa model=HuggingFaceTB/SmolVLM2-500M-Video-Instruct
    agentfly train image_qa model=Qwen/Qwen2.5-VL-3B-Instruct backend=vllm

Images are drawn from seeds, so there are as many tasks as are asked for, each with one exact answer. The first image is
an overview whose text is too small to read with certainty; `zoom` shows a part of it in full resolution. These commands
need a pretrained vision model and have not been measured.
"""

from typing import Any

from agentfly.agents import HFAgent
from agentfly.environments.image_qa import ImageQA
from agentfly.rewards import image_qa_match
from agentfly.training import TrainConfig

PROMPT = "Zoom into the part of the image that shows the answer, then reply with the answer only."


def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[ImageQA], reward=image_qa_match, system_prompt=PROMPT)


tasks = ImageQA.draw_tasks("train", 128)
eval_tasks = ImageQA.draw_tasks("validation", 40)
config = TrainConfig(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    tasks_per_step=16,
    max_turns=4,
    sampling={"max_tokens": 256},
    evaluation={"every": 10},
    checkpoint={"every": 20},
)
