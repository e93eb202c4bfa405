"""Triton kernels for a GPU: writing the paged key-value cache, attention over it, and sampling.

Attention works on tiles: some consecutive tokens of one sequence. A tile's queries are its tokens times the heads that
share a key head, so that a tile of a few prompt tokens costs hardly more than a single token being decoded. The keys of
a tile may be split into parts (`tiles.py`), for one program each: the last one to finish combines them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _store_kv(  # type: ignore[no-untyped-def]
    key, value, keys, values, table, rows, positions,
    key_head, key_token, value_head, value_token, slot_stride, table_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program per token: copy its keys and values of all heads to its slot."""
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(table + row * table_stride + position).to(tl.int64)  # 32 bits overflow in slot * stride
    at = tl.arange(0, SIZE)  # a power of two, as Triton requires: `inside` masks what is beyond all heads
    head = at // WIDTH
    column = at % WIDTH
    inside = at < HEADS * WIDTH
    k = tl.load(key + head * key_head + token * key_token + column, mask=inside)
    v = tl.load(value + head * value_head + token * value_token + column, mask=inside)
    tl.store(keys + slot * slot_stride + at, k, mask=inside)
    tl.store(values + slot * slot_stride + at, v, mask=inside)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write the batch's keys and values, [head, token, width], into the cache, [slot, head, width].

    `table`: [row, position] to slot. `rows`, `positions`: of every token.
    """
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    heads, tokens, width = key.shape
    _store_kv[(tokens,)](
        key, value, keys, values, table, rows, positions,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), keys.stride(0), table.stride(0),
        HEADS=heads, WIDTH=width, SIZE=triton.next_power_of_2(heads * width), num_warps=2,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, out, table, rows, positions,
    part_first, part_tokens, part_begin, part_end, part_row, part_base, part_parts,
    partial_sums, partial_highest, partial_total, finished, scale, window,
    query_head, query_token, slot_stride, out_token, table_stride,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """One program per part of a tile and key head: online softmax over the part's keys, `KEYS` at a time."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    key_heads = tl.num_programs(1)
    count = tl.load(part_tokens + part)
    if count == 0:
        return
    first = tl.load(part_first + part)
    begin = tl.load(part_begin + part)
    end = tl.load(part_end + part)
    parts = tl.load(part_parts + part)
    row = tl.load(rows + first).to(tl.int64)
    past = tl.load(positions + first)
    index = tl.arange(0, QUERIES)  # queries of the tile: its tokens times the GROUP heads of this key head
    token = index // GROUP
    query_at = head * GROUP + index % GROUP
    column = tl.arange(0, WIDTH)
    present = token < count
    q = tl.load(
        query + query_at[:, None] * query_head + (first + token)[:, None] * query_token + column[None],
        mask=present[:, None], other=0.0,
    )  # fmt: skip
    position = past + token
    # Of each query: highest score so far, sum of the weights, sum of the weighted values.
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    if WINDOWED:
        begin = tl.maximum(begin, past - window + 1)
    for at in range(begin, end, KEYS):
        seen = at + tl.arange(0, KEYS)
        inside = seen < end
        slot = tl.load(table + row * table_stride + seen, mask=inside, other=0).to(tl.int64)
        offset = slot[:, None] * slot_stride + head * WIDTH + column[None]
        k = tl.load(keys + offset, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)).to(tl.float32) * scale
        visible = seen[None] <= position[:, None]
        if WINDOWED:
            visible = visible & (seen[None] > position[:, None] - window)
        scores = tl.where(visible & inside[None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # nothing visible so far: -inf - -inf would be NaN
        weights = tl.exp2(scores - finite[:, None])  # `scale` holds log2(e), so that this is e to the scores
        shrink = tl.exp2(highest - finite)
        v = tl.load(values + offset, mask=inside[:, None], other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    is_last = parts == 1
    if parts > 1:
        base = tl.load(part_base + part)
        result_at = (tl.load(part_row + part) * key_heads + head) * QUERIES + index
        tl.store(partial_highest + result_at, highest)
        tl.store(partial_total + result_at, total)
        tl.store(partial_sums + result_at[:, None] * WIDTH + column[None], sums)
        # All threads have stored before one of them counts the part as finished: the last program reads the others'.
        tl.debug_barrier()
        counter = finished + base * key_heads + head
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
        if is_last:
            tl.store(counter, 0)  # for the next layer
            highest = tl.full([QUERIES], float("-inf"), tl.float32)
            total = tl.zeros([QUERIES], tl.float32)
            sums = tl.zeros([QUERIES, WIDTH], tl.float32)
            # In the order of the parts, whichever finished last: the same bits every time. Read from the second-level
            # cache (.cg): the first level may hold what an earlier layer left at these addresses.
            for other in range(base, base + parts):
                other_at = (other * key_heads + head) * QUERIES + index
                other_highest = tl.load(partial_highest + other_at, cache_modifier=".cg")
                other_total = tl.load(partial_total + other_at, cache_modifier=".cg")
                other_sums = tl.load(partial_sums + other_at[:, None] * WIDTH + column[None], cache_modifier=".cg")
                higher = tl.maximum(highest, other_highest)
                finite = tl.where(higher == float("-inf"), 0.0, higher)
                shrink = tl.exp2(highest - finite)
                weight = tl.exp2(other_highest - finite)
                sums = sums * shrink[:, None] + other_sums * weight[:, None]
                total = total * shrink + other_total * weight
                highest = higher
    if is_last:
        total = tl.where(total == 0.0, 1.0, total)  # queries beyond the tile's tokens: 0 / 0 would be NaN
        tl.store(
            out + (first + token)[:, None] * out_token + query_at[:, None] * WIDTH + column[None],
            (sums / total[:, None]).to(q.dtype), mask=present[:, None],
        )  # fmt: skip


def padded_queries(queries: int, group: int) -> int:
    """Queries that a program computes: those of a tile, or of one token if it has more (`group` heads a key head)."""
    return max(queries, int(triton.next_power_of_2(group)))


class PartialResults:
    """Where the parts of tiles meet: their sums, and how many are finished. One for all layers and steps of a runner,
    which run one after another."""

    def __init__(self, rows: int, key_heads: int, queries: int, width: int, device: torch.device) -> None:
        """`rows`: parts of split tiles at most; `queries`: of a tile at most."""
        self.sums = torch.zeros(rows * key_heads * queries * width, device=device)
        self.highest = torch.zeros(rows * key_heads * queries, device=device)
        self.total = torch.zeros(rows * key_heads * queries, device=device)
        self.finished = torch.zeros(rows * key_heads, dtype=torch.int32, device=device)


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    parts: torch.Tensor,
    partial_results: PartialResults,
    *,
    queries: int,
    scaling: float,
    keys_at_once: int = 64,
    window: int | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """Attention of every token to its own past and itself, which the cache holds. [head, token, width] in,
    [token, head, width] out.

    `parts`: the fields of `TilePlan`, [field, part], of tiles of at most `tile_tokens` of `queries`; a part without
    tokens is empty. Tokens of no tile are not written.
    """
    query = query if query.stride(2) == 1 else query.contiguous()
    heads, tokens, width = query.shape
    key_heads = keys.shape[1]
    group = heads // key_heads
    out = torch.empty(tokens, heads, width, dtype=query.dtype, device=query.device)
    _paged_attention_kernel[(parts.shape[1], key_heads)](
        query, keys, values, out, table, rows, positions, *parts.unbind(),
        partial_results.sums, partial_results.highest, partial_results.total, partial_results.finished,
        scaling * 1.4426950408889634, window or 0,  # log2(e)
        query.stride(0), query.stride(1), keys.stride(0), out.stride(0), table.stride(0),
        GROUP=group, QUERIES=padded_queries(queries, group), WIDTH=width, KEYS=keys_at_once,
        WINDOWED=window is not None, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _sample_plain(  # type: ignore[no-untyped-def]
    logits, temperatures, uniforms, tokens, logprobs, raw_logprobs, row_stride, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: the sums of both distributions, then the token at which the cumulative share is reached."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    cold = tl.where(greedy, 1.0, 1.0 / temperature)
    highest, total, total_raw, best, best_at = float("-inf"), 0.0, 0.0, float("-inf"), 0
    for begin in range(0, vocabulary, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        block_highest = tl.max(x, 0)
        if block_highest > best:  # strictly: of equal logits, greedy sampling takes the first, as argmax does
            best = block_highest
            best_at = begin + tl.argmax(x, 0)
        # Online softmax: sums are relative to the highest logit so far, since exp of a logit itself may overflow.
        higher = tl.maximum(highest, block_highest)
        total = total * tl.exp((highest - higher) * cold) + tl.sum(tl.exp((x - higher) * cold), 0)
        total_raw = total_raw * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    target = tl.load(uniforms + row) * total
    is_drawn, chosen, reached = False, best_at, 0.0
    if not greedy:
        for begin in range(0, vocabulary, BLOCK):
            if not is_drawn:
                at = begin + tl.arange(0, BLOCK)
                x = tl.load(base + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
                share = tl.exp((x - highest) * cold)
                mass = tl.sum(share, 0)
                if reached + mass > target:
                    below = (reached + tl.cumsum(share, 0)) <= target
                    # The rounded sum of a block may reach the target where its cumulative sum does not.
                    chosen = tl.minimum(begin + tl.sum(below.to(tl.int32), 0), vocabulary - 1)
                    is_drawn = True
                reached += mass
    x = tl.load(base + chosen).to(tl.float32)
    raw = x - highest - tl.log(total_raw)
    tl.store(tokens + row, chosen)
    tl.store(raw_logprobs + row, raw)
    tl.store(logprobs + row, tl.where(greedy, raw, (x - highest) * cold - tl.log(total)))


def sample_plain(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, out: torch.Tensor) -> None:
    """Sample rows that ask for a temperature only. `out`, [3, row] of 4 bytes each: the tokens as int32, their
    log-probabilities under the distribution that was sampled from, and under the model's own."""
    rows, vocabulary = logits.shape
    _sample_plain[(rows,)](
        logits, temperatures, uniforms, out[0].view(torch.int32), out[1], out[2], logits.stride(0), vocabulary,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
