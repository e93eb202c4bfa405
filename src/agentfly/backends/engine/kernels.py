"""Triton kernels for the GPU: attention of one token a sequence over the arena, and the drawing of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64
"""Keys that one pass of the attention kernel looks at."""


@triton.jit  # type: ignore[untyped-decorator]
def _attend_one(  # type: ignore[no-untyped-def]
    query, keys, values, out, starts, seen, scaling, window, token_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One program for each sequence and key head: its queries against all keys of the sequence."""
    sequence, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, count = tl.load(starts + sequence), tl.load(seen + sequence)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = ((sequence * heads + head) * GROUP + row)[:, None] * WIDTH + column[None]
    there = (row < GROUP)[:, None]
    q = tl.load(query + at, mask=there, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    first = 0
    if WINDOWED:
        first = tl.maximum(count - window, 0)
    for begin in range(first, count, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < count
        place = (start + token).to(tl.int64)[:, None] * token_stride + head * WIDTH + column[None]
        k = tl.load(keys + place, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)).to(tl.float32) * scaling
        scores = tl.where(inside[None], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(most - higher)
        v = tl.load(values + place, mask=inside[:, None], other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        most = higher
    tl.store(out + at, (sums / total[:, None]).to(q.dtype), mask=there)


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of the last token of every sequence. `query`: [sequence, head, width]; keys: [place, head, width]."""
    query = query.contiguous()
    sequences, heads, width = query.shape
    shared = keys.shape[1]
    group = heads // shared
    out = torch.empty_like(query)
    _attend_one[(sequences, shared)](
        query, keys, values, out, starts, seen, scaling, window or 0, keys.stride(0),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), WIDTH=width, BLOCK=BLOCK, WINDOWED=window is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, heat, uniforms, tokens, drawn, own, row_stride, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: the sums under both distributions, then the token at which the wanted share is reached."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(heat + row)
    greedy = temperature == 0.0
    cold = tl.where(greedy, 1.0, 1.0 / temperature)
    most, total, total_own, best, best_at = float("-inf"), 0.0, 0.0, float("-inf"), 0
    for begin in range(0, vocabulary, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        block_most = tl.max(x, 0)
        if block_most > best:
            best = block_most
            best_at = begin + tl.argmax(x, 0)
        higher = tl.maximum(most, block_most)
        total = total * tl.exp((most - higher) * cold) + tl.sum(tl.exp((x - higher) * cold), 0)
        total_own = total_own * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), 0)
        most = higher
    wanted = tl.load(uniforms + row) * total
    found, chosen, reached = False, best_at, 0.0
    if not greedy:
        for begin in range(0, vocabulary, BLOCK):
            if not found:
                at = begin + tl.arange(0, BLOCK)
                x = tl.load(base + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
                share = tl.exp((x - most) * cold)
                mass = tl.sum(share, 0)
                if reached + mass > wanted:
                    below = (reached + tl.cumsum(share, 0)) <= wanted
                    chosen = tl.minimum(begin + tl.sum(below.to(tl.int32), 0), vocabulary - 1)
                    found = True
                reached += mass
    x = tl.load(base + chosen).to(tl.float32)
    mine = x - most - tl.log(total_own)
    tl.store(tokens + row, chosen)
    tl.store(own + row, mine)
    tl.store(drawn + row, tl.where(greedy, mine, (x - most) * cold - tl.log(total)))


def draw_plain(
    logits: torch.Tensor, heat: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of rows that ask for a temperature only, and their log-probabilities: drawn with, and the model's own."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    drawn, own = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    _draw[(rows,)](logits, heat, uniforms, tokens, drawn, own, logits.stride(0), vocabulary, BLOCK=4096, num_warps=8)
    return tokens, drawn, own
