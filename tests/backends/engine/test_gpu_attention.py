"""Attention on GPUs: the plan of its tiles, and the kernels without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.backends.engine.tiles import MIN_PART, plan_tiles

SPANS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40_000)), min_size=1, max_size=20)


@given(SPANS, st.integers(1, 16), st.integers(1, 300))
def test_parts_cover_every_key_of_every_token_once(spans, tokens_of_tile: int, max_parts: int) -> None:
    counts = np.array([count for count, _ in spans])
    pasts = np.array([past for _, past in spans])
    firsts = np.cumsum(counts) - counts
    plan = plan_tiles(firsts, counts, pasts, tokens_of_tile=tokens_of_tile, max_parts=max_parts)
    expected = {}
    for first, count, past in zip(firsts.tolist(), counts.tolist(), pasts.tolist(), strict=True):
        for skipped in range(0, count, tokens_of_tile):
            tokens = min(count - skipped, tokens_of_tile)
            expected[first + skipped, tokens] = past + skipped + tokens
    parts = list(zip(*(column.tolist() for column in plan), strict=True))
    covered: dict[tuple[int, int], int] = {}
    rows = []
    for first, tokens, begin, end, row, base, number in parts:
        assert begin == covered.get((first, tokens), 0) < end
        covered[first, tokens] = end
        if number > 1:
            rows.append(row)
            assert end - begin >= min(MIN_PART / 2, expected[first, tokens] - begin)
            assert base <= row < base + number
    assert covered == expected
    assert rows == list(range(len(rows)))
    assert len(rows) <= 2 * max_parts
    assert len(parts) <= len(expected) + max_parts


def test_parts_of_one_long_sequence_fill_a_gpu() -> None:
    plan = plan_tiles(np.array([0]), np.array([1]), np.array([16_000]), tokens_of_tile=2, max_parts=264)
    assert len(plan.first) == 63
    assert (plan.end - plan.begin)[:-1].tolist() == [256] * 62
    short = plan_tiles(np.arange(512), np.ones(512, int), np.full(512, 1000), tokens_of_tile=2, max_parts=264)
    assert (short.parts == 1).all()


def run_kernels(*arguments: str, **variables: str) -> str:
    """In another process: Triton decides at its import whether kernels are interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the GPU's kernels need triton: pip install triton")
    command = [sys.executable, "-m", "tests.backends.engine.gpu_kernels", *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_interpreted_kernels_equal_plain_implementations() -> None:
    assert run_kernels("interpret", "12", TRITON_INTERPRET="1") == "most parts 11\n"


def test_attention_compiles_for_gpus(tmp_path: Path) -> None:
    run_kernels("compile", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow_smoke
def test_engine_samples_the_same_with_the_kernels_for_gpus() -> None:
    run_kernels("engine", TRITON_INTERPRET="1")
