"""GRPO without a trainer: sample chains, compute advantages, update the model, sample again.

    python examples/grpo_loop.py            # about five minutes on two cores, no GPU; builds the model on first use

Everything that AgentFly does for you elsewhere is visible here, in one function: what is sampled, which tokens are
trained, and how the sampler gets the new weights. Copy it to try an idea that no option covers; for longer runs, the
trainer (`agentfly train lookup`) adds checkpoints, failure policies, metrics and memory planning.
"""

import argparse
import asyncio
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentfly.agents import HFAgent
from agentfly.algorithms import GRPO
from agentfly.backends import open_backend
from agentfly.environments.lookup import Lookup
from agentfly.environments.lookup.recipe import exact_answer
from agentfly.models import resolve
from agentfly.segment import Segment
from agentfly.trajectory import Trajectory

TASKS_PER_STEP, CHAINS_PER_TASK, CLIP = 16, 8, 0.2


def sampled_logprobs(model: torch.nn.Module, segments: list[Segment]) -> list[Tensor]:
    """For each segment, the log-probability of every sampled token under the current weights: [sampled]."""
    length = max(len(segment) for segment in segments)
    tokens = torch.zeros(len(segments), length, dtype=torch.long)
    for row, segment in enumerate(segments):
        tokens[row, : len(segment)] = torch.tensor(segment.tokens)
    # Padding is on the right: attention is causal, so no real token sees it.
    logits = model(input_ids=tokens).logits[:, :-1]  # [rows, length - 1, vocabulary]; position t predicts token t + 1
    logprobs = F.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return [
        logprobs[row, : len(segment) - 1][torch.from_numpy(segment.mask[1:])] for row, segment in enumerate(segments)
    ]


def compute_advantages(chains: list[Trajectory]) -> list[tuple[Segment, float]]:
    """The segments to train, each with the advantage of its chain; the other chains of its task are the baseline."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for chain in chains:
        if chain.reward is not None:  # a chain whose reward failed carries no information
            groups[chain.group].append(chain)
    group_rewards = [[chain.reward or 0.0 for chain in group] for group in groups.values()]
    pairs = []
    for group, advantages in zip(groups.values(), GRPO().advantages(group_rewards), strict=True):
        for chain, advantage in zip(group, advantages, strict=True):
            # A group whose chains all got the same reward has advantage 0: nothing can be learned from it.
            pairs += [(segment, advantage) for segment in chain.segments if advantage and segment.mask.any()]
    return pairs


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, pairs: list[tuple[Segment, float]]) -> float:
    """One step on the clipped surrogate, averaged over all sampled tokens; returns the loss."""
    total_tokens = sum(int(segment.mask.sum()) for segment, _ in pairs)
    pairs.sort(key=lambda pair: len(pair[0]))  # rows of equal length waste no computation on padding
    loss_sum = 0.0
    for start in range(0, len(pairs), 32):
        rows = pairs[start : start + 32]
        new_logprobs = sampled_logprobs(model, [segment for segment, _ in rows])
        loss = torch.zeros(())
        for logprobs, (segment, advantage) in zip(new_logprobs, rows, strict=True):
            # The record has the log-probability with which each token was sampled; no second pass is needed for it.
            old_logprobs = torch.from_numpy(segment.logprobs[segment.mask])
            ratio = (logprobs - old_logprobs).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            loss = loss - surrogate.sum() / total_tokens
        loss.backward()
        loss_sum += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum


async def train(model_name: str, steps: int, learning_rate: float) -> None:
    path = resolve(model_name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    # The engine samples from the very tensors that the optimizer changes.
    backend = open_backend("transformers", model=model)
    agent = HFAgent(path, tools=[Lookup], reward=exact_answer, backend=backend)
    tasks = Lookup.draw_tasks("train", steps * TASKS_PER_STEP)
    held_out = Lookup.draw_tasks("validation", 100)
    sampling = {"temperature": 1.0, "max_tokens": 32}
    try:
        for step in range(steps + 1):
            if step % 10 == 0:
                result = await agent.run(held_out, max_turns=4, sampling=sampling, seed=0)
                print(f"step {step:3}  held-out success {sum(chain.reward or 0 for chain in result) / len(result):.2f}")
            if step == steps:
                break
            step_tasks = tasks[step * TASKS_PER_STEP : (step + 1) * TASKS_PER_STEP]
            result = await agent.run(
                step_tasks, max_turns=4, num_chains=CHAINS_PER_TASK, sampling=sampling, seed=step + 1
            )
            pairs = compute_advantages(list(result))
            rewards = [chain.reward for chain in result if chain.reward is not None]
            if pairs:
                loss = update(model, optimizer, pairs)
                # The tensors are shared, so none is sent. The engine forgets the prefixes cached under the old weights.
                await backend.update_weights((), version=step + 1)
                print(f"step {step:3}  reward {sum(rewards) / len(rewards):.2f}  loss {loss:+.4f}")
    finally:
        await agent.close()
        await backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    arguments = parser.parse_args()
    asyncio.run(train(arguments.model, arguments.steps, arguments.learning_rate))
